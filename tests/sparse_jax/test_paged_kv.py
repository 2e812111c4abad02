"""Writing tokens whose heads have places of their own: both ways to write, and in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paged_kv, paging
from sparse_jax.paged_kv import PagedKV
from tests.sparse_jax.test_paging_memory import DTYPES, PLATFORMS, check_temporary, sized

PLANES, PAGES, HEADS, SIZE, WIDTH = 2, 3, 3, 4, 5
SLOTS = [[5, 0, -1], [-1, 11, 2], [7, -1, 3], [-1, -1, -1]]


def pools(dtype, seed=0):
    rng = np.random.default_rng(seed)
    shape = (PLANES, PAGES, HEADS, SIZE)
    return PagedKV(*(jnp.asarray(rng.standard_normal((*shape, width)), dtype) for width in (WIDTH, 2)))


def written(pool, new, slots, plane):
    """The same with loops in NumPy."""
    pool, new = np.array(pool), np.asarray(new)
    for i, head in np.ndindex(slots.shape):
        if slots[i, head] >= 0:
            page, offset = divmod(int(slots[i, head]), SIZE)
            pool[plane : plane + len(new), page, head, offset] = new[:, i, head]
    return pool


@pytest.mark.parametrize("put", [paged_kv._put_loop, paged_kv._put_scatter])
@pytest.mark.parametrize(("dtype", "plane", "count"), [(jnp.float32, 0, 2), (jnp.bfloat16, 1, 1)])
def test_each_head_may_have_a_place_of_its_own(put, dtype, plane, count):
    kv, slots = pools(dtype), jnp.array(SLOTS, jnp.int32)
    new = jnp.asarray(np.random.default_rng(1).standard_normal((count, len(SLOTS), HEADS, WIDTH)), dtype)
    page, offset = jnp.where(slots >= 0, slots // SIZE, -1), jnp.where(slots >= 0, slots % SIZE, 0)
    found = put(kv.k, jnp.int32(plane), page, offset, new)
    np.testing.assert_array_equal(found, written(kv.k, new, np.array(SLOTS), plane))


def test_one_place_for_all_heads_is_the_same_as_that_place_for_each():
    kv, slots = pools(jnp.float8_e4m3fn), jnp.array([5, -1, 10], jnp.int32)
    new = pools(jnp.float32, seed=1)
    new = tuple(x.reshape(PLANES, -1, HEADS, x.shape[-1])[:, :3] * 400 for x in (new.k, new.v))  # some saturate
    shared = paged_kv.put(kv, jnp.int32(0), slots, *new)
    apart = paged_kv.put(kv, jnp.int32(0), jnp.broadcast_to(slots[:, None], (3, HEADS)), *new)
    for one, other in zip(jax.tree.leaves(shared), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))
    assert np.isfinite(np.asarray(shared.k, np.float32)).all()


def decode(state, k, v, slots):
    def write(kv, plane):
        return paged_kv.put(kv, plane, slots, k[None], v[None]), None

    def step(kv, _):
        return jax.lax.scan(write, kv, jnp.arange(kv.planes, dtype=jnp.int32))

    kv, _ = jax.lax.scan(step, state.kv, None, length=5)
    return paging.PagedState(state.pool, state.table, kv)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_9_writing_by_head_does_not_copy_the_pool(dtype, platform):
    state = sized(dtype)
    k = jnp.ones((3, 2, 64))
    check_temporary(decode, state, k, k, jnp.array([[5, 70], [-1, 3], [900, -1]], jnp.int32), platform=platform)
