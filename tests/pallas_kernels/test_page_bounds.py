"""Scores of whole pages: interpreter and GPU against float64 NumPy, lowering for CUDA, mutations that must fail."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Config, lowering
from sparse_jax import xla
from tests.compare import assert_close

KERNELS = ["interpret", pytest.param("triton", marks=pytest.mark.gpu)]
SHAPES = [  # B, Hkv, rows, D, N, W, heads of the table, dtype of the summaries
    (2, 2, 4, 64, 40, 33, 1, "bfloat16"),
    (1, 3, 1, 80, 9, 7, 3, "float32"),
    (2, 1, 7, 7, 200, 150, 1, "float16"),
    (1, 2, 19, 200, 12, 10, 1, "bfloat16"),  # more rows than a tile has
    (1, 1, 2, 576, 5, 5, 1, "float32"),
    (1, 2, 1, 64, 40, 33, 1, "bfloat16"),  # the parts of one row are a tile
]
FORMS = ["box", "vector"]


def make(shape, form="box", seed=0):
    batch, kv_heads, rows, width, pages, table_width, table_heads, dtype = shape
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, kv_heads, rows, width))
    q[..., 0] = 0
    lo = rng.standard_normal((pages, kv_heads, width))
    hi = jnp.asarray(lo + rng.exponential(size=lo.shape), dtype)
    ids = rng.integers(0, pages, (batch, table_heads, table_width))
    return (
        jnp.asarray(q, jnp.float32),
        jnp.asarray(lo, dtype),
        hi if form == "box" else None,
        jnp.asarray(ids, jnp.int32),
    )


def oracle(q, lo, hi, ids):
    q, lo, hi = (np.asarray(x, np.float64) for x in (q, lo, lo if hi is None else hi))
    ids = np.asarray(ids)
    out = np.zeros((*q.shape[:3], ids.shape[-1]))
    for b, h, r, w in np.ndindex(out.shape):
        page = ids[b, min(h, ids.shape[1] - 1), w]
        out[b, h, r, w] = np.maximum(q[b, h, r] * lo[page, h], q[b, h, r] * hi[page, h]).sum()
    return out


@functools.partial(jax.jit, static_argnums=(1, 2))
def run(x, implementation, config=None):
    return pallas_kernels.page_bounds(*x, config=config, interpret=implementation == "interpret")


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(shape, form, implementation):
    x = make(shape, form)
    assert_close(run(x, implementation), oracle(*x), "float32")  # 16-bit summaries are exact in float32
    assert_close(jax.jit(xla.page_bounds)(*x), oracle(*x), "float32")


@pytest.mark.parametrize("implementation", KERNELS)
def test_tuning_values_change_no_result(implementation):
    x = make(SHAPES[0])
    assert_close(run(x, implementation, Config(block_tokens=16, splits=2, num_warps=2)), oracle(*x), "float32")


@pytest.mark.parametrize("implementation", KERNELS)
def test_ids_out_of_range_are_finite_and_read_nothing_else(implementation):
    """Absent pages get the value of page 0; the summaries of other pages may hold anything."""
    q, lo, hi, ids = make(SHAPES[0])
    wild = ids.at[:, :, ::3].set(jnp.asarray([-1, 40, 2**31 - 1, -(2**31)] * 3)[:11])
    unused = jnp.asarray([n not in np.asarray(ids) and n != 0 for n in range(40)])
    lo, hi = (jnp.where(unused[:, None, None], jnp.nan, x) for x in (lo, hi))
    expected = oracle(q, lo, hi, jnp.where((wild < 0) | (wild >= 40), 0, wild))
    assert_close(run((q, lo, hi, wild), implementation), expected, "float32")
    assert_close(jax.jit(xla.page_bounds)(q, lo, hi, wild), expected, "float32")


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    "mutation", ["swapped", "maxima alone", "shifted ids", "another head", "vector: shifted ids", "vector: maxima"]
)
def test_mutations_fail(mutation, implementation):
    form = "vector" if mutation.startswith("vector") else "box"
    q, lo, hi, ids = make(SHAPES[0], form)
    changed = {
        "swapped": (q, hi, lo, ids),
        "maxima alone": (q, hi, hi, ids),
        "shifted ids": (q, lo, hi, (ids + 1) % 40),
        "another head": (q, lo[:, ::-1], hi, ids),
        "vector: shifted ids": (q, lo, None, (ids + 1) % 40),
        "vector: maxima": make(SHAPES[0]),
    }[mutation]
    with pytest.raises(AssertionError, match="off"):
        assert_close(run(changed, implementation), oracle(q, lo, hi, ids), "float32")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape",
    [*SHAPES, *((64, 8, rows, 128, 4096, 512, 1, dtype) for rows in (1, 4) for dtype in ("bfloat16", "float32"))],
    ids=str,
)
def test_lowers_for_cuda(shape, form):
    arguments = [
        x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make((1, *shape[1:4], 2, *shape[5:]), form)
    ]
    arguments[0] = jax.ShapeDtypeStruct((shape[0], *arguments[0].shape[1:]), jnp.float32)
    lowered = lowering.lower_for_cuda(functools.partial(pallas_kernels.page_bounds, interpret=False), *arguments)
    assert "page_bounds" in lowered.as_text()
