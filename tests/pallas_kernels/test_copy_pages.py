"""The kernel that copies pages equals the loop in plain jnp: interpreter, lowering for CUDA, GPU; and mutations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.copy_pages import copy_pages
from pallas_kernels.lowering import lower_for_cuda
from sparse_jax import paged_kv

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn"]
# Hkv, P, D, Dv: single elements, an odd number of one-byte ones, several blocks with a part of one at the end.
PAGES = [(1, 1, 1, 1), (1, 1, 3, 2), (2, 4, 3, 2), (3, 16, 176, 64)]
PLANES, POOL = 2, 6  # pages
SOURCES = [4, -1, 4, 2, 2, 1, 1, 5, POOL, 2**31 - 1, -(2**31)]
TARGETS = [1, -1, 3, -1, -2, POOL, 2**31 - 1, -(2**31), 2, 2, 2]
COPIED = {1: 4, 3: 4}  # target: source

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def make_pools(page, dtype):
    """k [PLANES, POOL, Hkv, P, D] and v [..., Dv] of random bits, with one kind of NaN: CPUs may change others."""
    heads, page_size, *widths = page
    rng, dtype = np.random.default_rng(0), jnp.dtype(dtype)
    unsigned = UNSIGNED[dtype.itemsize]

    def draw(width):
        shape = (PLANES, POOL, heads, page_size, width)
        pool = jnp.asarray(rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True).view(dtype))
        return jnp.where(jnp.isnan(pool), jnp.nan, pool).astype(dtype)

    return tuple(map(draw, widths))


def bits_of(pools):
    return [np.asarray(pool).view(UNSIGNED[pool.dtype.itemsize]) for pool in pools]


def pairs(sources=SOURCES, targets=TARGETS):
    return jnp.array(sources, jnp.int32), jnp.array(targets, jnp.int32)


def check(page, dtype, *, copied=COPIED, interpret=True, change=lambda sources, targets: (sources, targets)):
    pools = make_pools(page, dtype)
    source_of = np.array([copied.get(page, page) for page in range(POOL)])
    expected = [pool[:, source_of] for pool in bits_of(pools)]
    new = jax.jit(functools.partial(copy_pages, interpret=interpret))(pools, *change(*pairs()))
    for got, want in zip(bits_of(new), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpret(page, dtype):
    check(page, dtype)


def test_nothing_to_copy():
    check(PAGES[2], "bfloat16", copied={}, change=lambda sources, targets: (sources, jnp.full_like(targets, -1)))


MUTATIONS = {
    "another_source": lambda sources, targets: (jnp.where(sources == 4, 2, sources), targets),
    "another_target": lambda sources, targets: (sources, jnp.where(targets == 1, 2, targets)),
    "absent_is_page_0": lambda sources, targets: (sources, jnp.where(targets == -1, 0, targets)),
    "absent_is_the_last_page": lambda sources, targets: (sources, jnp.where(targets == -1, POOL - 1, targets)),
    "source_clamped": lambda sources, targets: (jnp.clip(sources, 0, POOL - 1), targets),
    "target_clamped": lambda sources, targets: (sources, jnp.clip(targets, 0, POOL - 1)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_fails(mutation):
    with pytest.raises(AssertionError):
        check(PAGES[2], "bfloat16", change=MUTATIONS[mutation])


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_jnp_copies_the_same_bits(dtype):
    kv = paged_kv.PagedKV(*make_pools(PAGES[2], dtype))
    sources, targets = pairs([4, -1, 4, 0], [1, -1, 3, -1])
    new = jax.jit(paged_kv.copy_pages)(kv, sources, targets)
    kernel = copy_pages((kv.k, kv.v), sources, targets, interpret=True)
    for got, want in zip(bits_of([new.k, new.v]), bits_of(kernel), strict=True):
        np.testing.assert_array_equal(got, want)


def test_pools_can_be_batched_by_vmap():
    pools = make_pools(PAGES[2], "float32")
    many = tuple(jnp.stack([pool, pool[:, ::-1]]) for pool in pools)
    ids = tuple(jnp.stack([x, x[::-1]]) for x in pairs([4, -1], [1, -1]))
    copy = functools.partial(copy_pages, interpret=True)
    together = jax.vmap(copy)(many, *ids)
    for i in range(2):
        alone = copy(tuple(pool[i] for pool in many), *(x[i] for x in ids))
        for got, want in zip(bits_of(tuple(pool[i] for pool in together)), bits_of(alone), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("page", [*PAGES, (8, 64, 128, 128), (8, 512, 256, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lowers_for_cuda(page, dtype, x64):
    heads, page_size, *widths = page
    with jax.enable_x64(x64):
        pools = tuple(jax.ShapeDtypeStruct((PLANES, POOL, heads, page_size, width), dtype) for width in widths)
        text = lower_for_cuda(functools.partial(copy_pages, interpret=False), pools, *pairs()).as_text()
    assert "copy_pages" in text
    assert "output_operand_alias" in text


@pytest.mark.gpu
@pytest.mark.parametrize("page", [*PAGES, (8, 64, 128, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu(page, dtype):
    check(page, dtype, interpret=False)
