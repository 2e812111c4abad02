"""Bounds of page scores: interpreter and GPU against float64 NumPy, lowering for CUDA, mutations that must fail."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import lowering
from sparse_jax import xla
from tests.compare import assert_close

KERNELS = ["interpret", pytest.param("triton", marks=pytest.mark.gpu)]
SHAPES = [  # B, Hkv, rows, D, N, W, heads of the table
    (2, 2, 4, 64, 40, 33, 1),
    (1, 3, 1, 80, 9, 7, 3),
    (2, 1, 7, 7, 200, 150, 1),
    (1, 1, 2, 576, 5, 5, 1),
]


def make(shape, seed=0):
    batch, kv_heads, rows, width, pages, table_width, table_heads = shape
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, kv_heads, rows, width))
    q[..., 0] = 0
    lo = rng.standard_normal((pages, kv_heads, width))
    hi = lo + rng.exponential(size=lo.shape)
    ids = rng.integers(0, pages, (batch, table_heads, table_width))
    return [jnp.asarray(x, jnp.float32) for x in (q, lo, hi)] + [jnp.asarray(ids, jnp.int32)]


def oracle(q, lo, hi, ids):
    q, lo, hi, ids = (np.asarray(x, np.float64 if x.dtype == jnp.float32 else np.int64) for x in (q, lo, hi, ids))
    out = np.zeros((*q.shape[:3], ids.shape[-1]))
    for b, h, r, w in np.ndindex(out.shape):
        page = ids[b, min(h, ids.shape[1] - 1), w]
        out[b, h, r, w] = np.maximum(q[b, h, r] * lo[page, h], q[b, h, r] * hi[page, h]).sum()
    return out


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(shape, implementation):
    x = make(shape)
    actual = pallas_kernels.page_bounds(*x, interpret=implementation == "interpret")
    assert_close(actual, oracle(*x), "float32")
    assert_close(xla.page_bounds(*x), oracle(*x), "float32")


@pytest.mark.parametrize("implementation", KERNELS)
def test_ids_out_of_range_are_finite_and_read_nothing_else(implementation):
    """Absent pages get the value of page 0; the boxes of other pages may hold anything."""
    q, lo, hi, ids = make(SHAPES[0])
    wild = ids.at[:, :, ::3].set(jnp.asarray([-1, 40, 2**31 - 1, -(2**31)] * 3)[:11])
    unused = jnp.asarray([n not in np.asarray(ids) and n != 0 for n in range(40)])
    lo, hi = (jnp.where(unused[:, None, None], jnp.nan, x) for x in (lo, hi))
    actual = pallas_kernels.page_bounds(q, lo, hi, wild, interpret=implementation == "interpret")
    assert_close(actual, oracle(q, lo, hi, jnp.where((wild < 0) | (wild >= 40), 0, wild)), "float32")


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("mutation", ["swapped", "shifted ids", "another head"])
def test_mutations_fail(mutation, implementation):
    q, lo, hi, ids = make(SHAPES[0])
    changed = {
        "swapped": (q, hi, lo, ids),
        "shifted ids": (q, lo, hi, (ids + 1) % 40),
        "another head": (q, lo[:, ::-1], hi, ids),
    }[mutation]
    actual = pallas_kernels.page_bounds(*changed, interpret=implementation == "interpret")
    with pytest.raises(AssertionError, match="off"):
        assert_close(actual, oracle(q, lo, hi, ids), "float32")


@pytest.mark.parametrize("shape", [*SHAPES, (64, 8, 4, 128, 4096, 512, 1)], ids=str)
def test_lowers_for_cuda(shape):
    lowered = lowering.lower_for_cuda(functools.partial(pallas_kernels.page_bounds, interpret=False), *make(shape))
    assert "page_bounds" in lowered.as_text()
