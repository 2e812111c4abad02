"""Each decode kernel from one body: interpreter, lowering for CUDA, GPU; and mutations that must fail."""

import dataclasses
import pathlib

import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import lowering
from sparse_jax import Config
from tests.attention_cases import CASES, COMMON, CORNER, OPS, call, make_inputs, poisoned, reference
from tests.compare import assert_close, assert_same_bits

CONFIGS = {
    "default": None,
    "split3_block16": Config(splits=3, block_tokens=16),
    "exact": Config(exact=True),
    "block128": Config(block_tokens=128, num_warps=8, num_stages=2, splits=2),
}


def precision_of(case):
    return case.cache_dtype if case.cache_dtype and case.dtype != "float32" else case.dtype


def check(op, case, implementation, config=None, change=lambda x: x):
    """The kernel (first, so that no reused memory can hold the answer) against the plain-jnp meaning."""
    x = poisoned(op, case, make_inputs(case))
    weights = {} if op == "paged" else {"return_weights": True}
    actual = call(op, case, change(x), implementation=implementation, config=config, **weights)
    expected = reference(op, case, x, **weights)
    assert actual.out.dtype == x["q"].dtype
    assert_close(actual.out, expected.out, precision_of(case))
    assert_close(actual.lse, expected.lse, precision_of(case), name="lse")
    if weights:
        assert_close(actual.weights, expected.weights, precision_of(case), name="weights")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", COMMON + CORNER, ids=str)
def test_interpret(op, case):
    check(op, case, "interpret")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("config", ["split3_block16", "exact", "block128"])
def test_interpret_configs(op, config):
    check(op, CASES["draft4"], "interpret", CONFIGS[config])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", COMMON + CORNER, ids=str)
def test_lowers_for_cuda(op, case):
    x = make_inputs(case)
    lowered = lowering.lower_for_cuda(lambda x: call(op, case, x, implementation="triton"), x)
    assert f"{op}_decode" in lowered.as_text()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lowers_for_cuda_in_every_config(op, config, dtype):
    case = dataclasses.replace(CASES["draft4"], dtype=dtype)
    x = make_inputs(case)
    weights = {} if op == "paged" else {"return_weights": True}
    lowering.lower_for_cuda(lambda x: call(op, case, x, implementation="triton", config=CONFIGS[config], **weights), x)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("op", OPS)
def test_e4m3_takes_queries_of_any_size(op, implementation):
    """The products are taken in float16, which bfloat16 queries may exceed in both directions."""
    case = dataclasses.replace(CASES["e4m3_token"], scale=0.125)
    x = make_inputs(case)
    expected = call(op, case, x, implementation=implementation)
    for exponent in (100, -60):
        moved = {**x, "q": x["q"] * jnp.asarray(2.0**exponent, x["q"].dtype)}
        actual = call(op, dataclasses.replace(case, scale=0.125 * 2.0**-exponent), moved, implementation=implementation)
        assert_same_bits(actual.out, expected.out)
        assert_same_bits(actual.lse, expected.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", COMMON + CORNER, ids=str)
def test_gpu(op, case):
    check(op, case, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", ["draft4", "gqa4_bf16"])
def test_gpu_configs(op, config, case):
    check(op, CASES[case], "triton", CONFIGS[config])


MUTATIONS = {
    "v_of_the_wrong_head": lambda x: {**x, "v_pages": jnp.roll(x["v_pages"], 1, axis=1)},
    "k_of_the_wrong_head": lambda x: {**x, "k_pages": jnp.roll(x["k_pages"], 1, axis=1)},
    "ids_shifted": lambda x: {**x, "page_table": x["page_table"] + 1, "slots": x["slots"] + 1},
    "list_shifted": lambda x: {
        **x,
        "page_indices": x["page_indices"] + 1,
        "lengths": x["lengths"] - 1,
        "slots": x["slots"] - 1,
    },
    "mask_dropped": lambda x: {**x, "lengths": x["lengths"] + 1000, "slots": jnp.maximum(x["slots"], 0)},
    "scale_missing": lambda x: {**x, "k_scale": None},
    "v_scale_missing": lambda x: {**x, "v_scale": None},
    "sinks_dropped": lambda x: {**x, "sinks": None},
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_fails(op, mutation):
    """A comparison that forgives a wrong input is no test."""
    name = {"scale_missing": "e4m3_token", "v_scale_missing": "e4m3_scalar", "sinks_dropped": "window_softcap_sinks"}
    case = CASES[name.get(mutation, "gqa4")]
    with pytest.raises(AssertionError):
        check(op, case, "interpret", change=MUTATIONS[mutation])


def test_grid_size_is_not_asked_for_inside_a_kernel():
    """jax#40847: JAX 0.11.0 to 0.11.2 may answer with the value of an earlier trace."""
    for path in pathlib.Path(pallas_kernels.__file__).parent.glob("*.py"):
        assert "num_programs(" not in path.read_text(), path
