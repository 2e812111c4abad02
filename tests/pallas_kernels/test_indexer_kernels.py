"""The indexer's kernel from one body: interpreter, lowering for CUDA, GPU; and mutations that must fail."""

import dataclasses
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lowering
from sparse_jax import Config, IndexKeys, indexer_scores, top_k
from tests.compare import assert_close, assert_same_bits
from tests.indexer_cases import (
    CASES,
    COMMON,
    CORNER,
    QUANTISED,
    IndexerCase,
    call,
    make_inputs,
    poisoned,
    reference,
    seen_by_rows,
)

GPU = pytest.param("triton", marks=pytest.mark.gpu)
CONFIGS = {
    "block16": Config(block_tokens=16, num_warps=2),
    "block32": Config(block_tokens=32, num_stages=1),
    "block128": Config(block_tokens=128, num_warps=8),
}


def check(case, implementation, config=None, change=None):
    """The kernel (first, so that no reused memory can hold the answer) against the plain-jnp meaning.

    Products of 16-bit numbers are exact in float32, so the tolerance is that of float32 whatever the dtypes. change: a
    mutation, which finds ordinary numbers in all keys; otherwise those that nobody needs are NaN.
    """
    x = make_inputs(case)
    actual = call(change(x) if change else poisoned(case, x), implementation=implementation, config=config, k=case.k)
    expected = reference(case, x)
    assert actual.dtype == jnp.float32
    assert_close(actual, expected, name="scores")
    return actual, expected


@pytest.mark.parametrize("case", COMMON + CORNER, ids=str)
def test_interpret(case):
    check(case, "interpret")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["fp8_draft5_k", "lengths"])
def test_interpret_configs(name, config):
    check(CASES[name], "interpret", CONFIGS[config])


@pytest.mark.parametrize("case", COMMON + CORNER, ids=str)
def test_lowers_for_cuda(case):
    x = make_inputs(case)
    lowered = lowering.lower_for_cuda(lambda x: call(x, implementation="triton", k=case.k), x)
    assert "indexer_scores" in lowered.as_text()


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "index_keys"])
def test_lowers_for_cuda_in_every_config(stored):
    """At the full geometry, 64 heads of 128: pages smaller and larger than a block, few and many rows and programs."""
    struct = jax.ShapeDtypeStruct
    shapes = [(1, 1, 512, 64), (8, 2, 2048, 16), (64, 3, 512, 64), (64, 1, 256, 128)]
    for config, (batch, rows, width, page_size) in zip([None, *CONFIGS.values()], shapes, strict=True):
        if stored == "index_keys":
            keys, dtype = IndexKeys(struct((9000, page_size * 132), jnp.uint8), page_size), jnp.bfloat16
        else:
            keys, dtype = struct((9000, page_size, 128), stored), stored
        args = (
            struct((batch, rows, 64, 128), dtype),
            struct((batch, rows, 64), jnp.float32),
            keys,
            struct((batch, width), jnp.int32),
            struct((batch,), jnp.int32),
        )
        for k in (None, 2048):
            run = functools.partial(indexer_scores, implementation="triton", config=config, k=k)
            assert lowering.names_kernel(lowering.lower_for_cuda(run, *args).as_text())


@pytest.mark.parametrize("implementation", ["xla", "interpret", GPU])
@pytest.mark.parametrize("name", ["positions_k", "fp8_draft5_k", "fp8_lengths"])
def test_rows_that_see_at_most_k_score_zero_and_read_nothing(name, implementation):
    """Some rows of each case do; both kinds of poison in what nobody reads change no bit."""
    case = CASES[name]
    x, held = make_inputs(case), np.repeat(pages_held(case), case.P, axis=1)
    seen = seen_by_rows(case, x)
    assert (seen[seen > 0] <= case.k).any()
    assert (seen > case.k).any()
    clean = call(x, implementation=implementation, k=case.k)
    for byte in (0x7F, 0xFF):
        assert_same_bits(call(poisoned(case, x, byte), implementation=implementation, k=case.k), clean)
    place = np.arange(case.W * case.P)
    for b, t in np.ndindex(case.B, case.T):
        visible = held[b] & (place < seen[b, t])
        assert (np.isneginf(clean[b, t]) == ~visible).all()
        if seen[b, t] <= case.k:
            assert (clean[b, t][visible] == 0).all()


def pages_held(case):
    table = np.asarray(make_inputs(case)["page_table"])
    return (table >= 0) & (table < case.B * case.W + 2)


@pytest.mark.parametrize("implementation", ["interpret", GPU])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "index_keys"])
def test_top_k_of_whole_numbers_is_that_of_plain_scores(stored, implementation):
    """Nothing is rounded, so the scores have the same bits, and the last one chosen has equals that are not."""
    shape = {"B": 3, "T": 3, "heads": 2, "dim": 16, "P": 16, "W": 7, "k": 50, "lengths": (112, 51, 77)}
    dtype = "float32" if stored == "float32" else "bfloat16"
    case = IndexerCase(name="whole", whole=True, dtype=dtype, stored=stored, **shape)
    x = make_inputs(case)
    actual, expected = (call(x, implementation=i, k=case.k) for i in (implementation, "xla"))
    assert_same_bits(actual, expected)
    ranked = -np.sort(-np.asarray(expected), axis=-1)
    assert (ranked[..., case.k - 1] == ranked[..., case.k])[np.isfinite(ranked[..., case.k])].mean() > 0.4
    assert_same_bits(top_k(actual, case.k), top_k(expected, case.k))


@pytest.mark.parametrize("implementation", ["interpret", GPU])
def test_index_keys_take_queries_of_any_size(implementation):
    """The products are taken in float16, which bfloat16 queries may exceed in both directions."""
    x = make_inputs(CASES["fp8"])
    expected = call(x, implementation=implementation)
    for exponent in (100, -60):
        q, weights = x["q"] * jnp.asarray(2.0**exponent, "bfloat16"), x["weights"] * 2.0**-exponent
        assert_same_bits(call({**x, "q": q, "weights": weights}, implementation=implementation), expected)


def test_contract_12_same_bits_whatever_stands_in_other_rows():
    x = make_inputs(CASES["draft3_bf16"])
    first = call(x, implementation="interpret")
    assert_same_bits(call(x, implementation="interpret"), first)
    other = {name: value if name in ("keys", "q_positions") else value.at[1].multiply(-1) for name, value in x.items()}
    assert_same_bits(call(other, implementation="interpret")[0], first[0])
    other = {**x, "q": x["q"].at[:, 1].set(jnp.nan), "weights": x["weights"].at[:, 1].set(jnp.inf)}
    assert_same_bits(call(other, implementation="interpret")[:, 0], first[:, 0])


MUTATIONS = {
    "nothing": ("fp8", lambda x: x),
    "heads_shifted": ("small", lambda x: {**x, "q": jnp.roll(x["q"], 1, axis=2)}),
    "columns_shifted": ("small", lambda x: {**x, "q": jnp.roll(x["q"], 1, axis=3)}),
    "negative_weights_dropped": ("small", lambda x: {**x, "weights": jnp.abs(x["weights"])}),
    "one_head_dropped": ("draft3_bf16", lambda x: {**x, "weights": x["weights"].at[:, :, 63].set(0)}),
    "rows_swapped": ("draft3_bf16", lambda x: {**x, "q": x["q"][:, ::-1], "weights": x["weights"][:, ::-1]}),
    "keys_shifted": ("small", lambda x: {**x, "keys": jnp.roll(x["keys"], 1, axis=1)}),
    "pages_shifted": ("small", lambda x: {**x, "page_table": (x["page_table"] + 1) % 12}),
    "wild_pages_clamped": ("small", lambda x: {**x, "page_table": jnp.clip(x["page_table"], 0, 11)}),
    "one_more_is_seen": ("draft3_bf16", lambda x: {**x, "lengths": x["lengths"] + 1}),
    "positions_dropped": ("positions_k", lambda x: {**x, "q_positions": None}),
    "scales_missing": ("fp8", lambda x: with_bytes(x, slice(8192, 8448), lambda b: jnp.tile(ONE, 64))),
    "scales_of_the_next_key": ("fp8", lambda x: with_bytes(x, slice(8192, 8448), lambda b: jnp.roll(b, 4, axis=1))),
    "bytes_of_a_pair_swapped": ("fp8", lambda x: with_bytes(x, slice(0, 8192), lambda b: b[:, np.arange(8192) ^ 1])),
}
ONE = jnp.array([0, 0, 128, 63], jnp.uint8)  # 1.0 as float32


def with_bytes(x, columns, change):
    data = x["keys"].data
    return {**x, "keys": dataclasses.replace(x["keys"], data=data.at[:, columns].set(change(data[:, columns])))}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_fails(mutation):
    """A comparison that forgives a wrong input is no test."""
    name, change = MUTATIONS[mutation]
    if mutation == "nothing":
        check(CASES[name], "interpret", change=change)
        return
    with pytest.raises(AssertionError, match=r"^scores: "):
        check(CASES[name], "interpret", change=change)


@pytest.mark.parametrize("k", [None, 39])
def test_mutation_of_k_fails(k):
    case = CASES["positions_k"]
    x = make_inputs(case)
    with pytest.raises(AssertionError, match=r"^scores: .* expected"):
        assert_close(call(x, implementation="interpret", k=k), reference(case, x), name="scores")


FULL = {"heads": 64, "dim": 128, "P": 64, "dtype": "bfloat16"}
LARGE = [
    IndexerCase(name=f"{stored}_b{batch}_t{rows}", B=batch, T=rows, W=width, stored=stored, **FULL)
    for stored in ("bfloat16", "index_keys")
    for batch, rows, width in ((1, 1, 1024), (8, 2, 521), (32, 1, 128))
] + [
    IndexerCase(name="float32", B=3, T=3, W=77, **{**FULL, "dtype": "float32"}),
    IndexerCase(name="glm", B=8, W=256, k=2048, **{**FULL, "heads": 32}, stored="index_keys"),
    IndexerCase(name="k", B=4, T=3, W=128, k=2048, lengths=(2049, 2050, 8192, 100), **FULL, stored="index_keys"),
    IndexerCase(name="p16", B=4, T=5, W=300, **{**FULL, "P": 16}, stored="index_keys"),
    IndexerCase(name="p128", B=4, T=5, W=31, **{**FULL, "P": 128}, stored="index_keys"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMMON + CORNER + LARGE, ids=str)
def test_gpu(case):
    check(case, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["draft3_bf16", "fp8", "fp8_draft5_k", "lengths"])
@pytest.mark.parametrize("config", CONFIGS)
def test_gpu_configs(name, config):
    check(CASES[name], "triton", CONFIGS[config])


@pytest.mark.gpu
def test_gpu_same_bits_and_rows_do_not_depend_on_the_batch():
    for stored, rows in itertools.product(("bfloat16", "index_keys"), (1, 2)):
        case = IndexerCase(name="bits", B=32, T=rows, W=128, **{**FULL, "stored": stored})
        x = make_inputs(case)
        first, second = (call(x, implementation="triton") for _ in range(2))
        assert_same_bits(first, second)
        alone = {name: value if name == "keys" or value is None else value[5:6] for name, value in x.items()}
        assert_same_bits(call(alone, implementation="triton")[0], first[5])


@pytest.mark.gpu
def test_gpu_top_k_of_scores():
    """2,048 of 32,768 whole-numbered scores, many of them equal: the ids of plain scores."""
    case = IndexerCase(name="select", B=4, T=2, W=512, whole=True, **{**FULL, **QUANTISED}, k=2048)
    x = make_inputs(case)
    actual, expected = (call(x, implementation=i, k=case.k) for i in ("triton", "xla"))
    assert_same_bits(top_k(actual, case.k, implementation="triton"), top_k(expected, case.k, implementation="xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [3.9e9, 4.5e9])
def test_gpu_pools_beside_2_to_the_32_bytes(size):
    """Of one between 2^31 and 2^32 bytes the offsets have 32 bits, and they count words. tests/sparse_jax has more."""
    case = IndexerCase(name="large", B=1, W=1, lengths=(64,), **{**FULL, **QUANTISED})
    x = make_inputs(case)
    page = x["keys"].data[x["page_table"][0, 0]]
    last = int(size) // page.size - 1
    data = jnp.full((last + 1, page.size), 0x7F, jnp.uint8)
    data = jax.jit(lambda data: data.at[last].set(page), donate_argnums=0)(data)
    large = {**x, "keys": IndexKeys(data, 64), "page_table": jnp.full((1, 1), last, jnp.int32)}
    assert_same_bits(call(large, implementation="triton"), call(x, implementation="triton"))


@pytest.mark.parametrize("at_once", [2, 5])
@pytest.mark.parametrize("stored", ["bfloat16", "index_keys"])
def test_interpret_programs_of_several_steps(stored, at_once, monkeypatch):
    """With many keys a program takes several blocks in turn, the last one fewer; a short request ends in between."""
    # `pallas_kernels.indexer_scores` is the function there, so the module is found by its name.
    monkeypatch.setattr(sys.modules["pallas_kernels.indexer_scores"], "AT_ONCE", at_once)
    shape = {"B": 2, "T": 1, "heads": 2, "dim": 16, "P": 16, "W": 36 + at_once, "k": 40, "lengths": (570, 131)}
    case = IndexerCase(name="steps", dtype="bfloat16", stored=stored, **shape)
    check(case, "interpret")
