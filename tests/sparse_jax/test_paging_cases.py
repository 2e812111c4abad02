"""Reported cases of other systems that speak of page tables, allocation and cache writes."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paged_kv, paging
from tests.sparse_jax.test_paging import (
    append,
    counts_of,
    extend,
    gather,
    make,
    reads,
    release,
    reserve,
    same,
    share,
    tokens,
    view,
    write,
)  # fmt: skip


def test_case_PAD_2_and_OOB_1_an_absent_slot_is_never_written():
    state = make(pages=2, planes=1, requests=2, kv_heads=1, key_width=1, value_width=1)
    state, _ = reserve(state, counts_of(4, 4), 4)
    slots = jnp.array([[5], [-1]], jnp.int32)
    reservation = paging.Reservation(slots, jnp.ones((2, 1), jnp.int32), counts_of(-1, -1), counts_of(-1, -1))
    new = jnp.array([7.0, 9.0]).reshape(2, 1, 1, 1)
    state, stale = write(state, 0, reservation, new, new)
    assert int(stale) == 0
    np.testing.assert_array_equal(state.kv.k.ravel(), [0, 0, 0, 0, 0, 7, 0, 0])
    wild = dataclasses.replace(reservation, slots=jnp.array([[8], [-(2**31)]], jnp.int32))
    after, stale = write(state, 0, wild, new, new)
    same(after, state)
    assert int(stale) == 2


@pytest.mark.parametrize("put", [paged_kv._put_loop, paged_kv._put_scatter])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_case_OOB_1_both_forms_of_a_write_drop_absent_tokens(put, dtype):
    pool = jnp.ones((3, 4, 2, 8, 5), dtype)
    new = jnp.arange(1 * 3 * 2 * 5).reshape(1, 3, 2, 5).astype(dtype)
    page, offset = jnp.array([3, -1, 0], jnp.int32), jnp.array([7, 0, 2], jnp.int32)
    expected = np.array(pool)
    expected[1, 3, :, 7], expected[1, 0, :, 2] = np.asarray(new[0, 0]), np.asarray(new[0, 2])
    np.testing.assert_array_equal(jax.jit(put)(pool, jnp.int32(1), page, offset, new), expected)


def test_case_BOUNDS_1_an_id_out_of_range_is_absent():
    state, k, _ = extend(make(pages=3, page_size=2, planes=1), 2, 2, 2)
    table = dataclasses.replace(
        state.table, pages=state.table.pages.at[0].set(counts_of(1, 99, -1, -1)), lengths=counts_of(4, 2, 2)
    )
    wild = dataclasses.replace(state, table=dataclasses.replace(table, incarnations=jnp.ones((3, 4), jnp.int32)))
    np.testing.assert_array_equal(view(wild, 0).page_table[0], [1, -1, -1, -1])
    reads(wild, 0, k[0, 1])


def test_case_BOUNDS_3_page_0_is_an_ordinary_page():
    state, k, _ = extend(make(planes=1), 2, 0, 0)
    assert int(view(state, 0).page_table[0, 0]) == 0
    reads(state, 0, k[0, 0])


def test_case_BOUNDS_4_a_batch_of_two_equals_two_batches_of_one():
    state, k, v = make(), *tokens(make(), 5)
    together, reservation = append(state, k, v, counts_of(5, 3, 0))
    assert int(reservation.slots[1, 0]) == 8
    first, _ = append(state, k, v, counts_of(5, 0, 0))
    second, _ = append(first, k, v, counts_of(0, 3, 0))
    same(together, second)


def test_case_PREFIX_1_reserve_names_the_pages_whose_side_data_must_move():
    state, _, _ = extend(make(), 5, 0, 0)
    state, _ = share(state, 0, 1, 5)
    state, reservation = reserve(state, counts_of(1, 0, 0), 1)
    sources, targets = paging.flat_copies(state, reservation)
    np.testing.assert_array_equal(sources, [1, -1, -1, 9, -1, -1])
    np.testing.assert_array_equal(targets, [2, -1, -1, 10, -1, -1])
    k_pages, _ = paging.flat(state.kv)
    np.testing.assert_array_equal(k_pages[sources[jnp.array([0, 3])]], k_pages[targets[jnp.array([0, 3])]])


def test_case_PREFIX_2_sharing_changes_nothing_for_the_other_owner():
    alone, _, _ = extend(make(), 5, 0, 0)
    shared, _ = share(alone, 0, 1, 5)
    for seed in range(3):  # request 0 writes into its own copy, and again
        shared, _, _ = extend(shared, 1, 0, 0, seed=seed)
    jax.tree.map(np.testing.assert_array_equal, gather(shared, 1, 1), gather(alone, 1, 0))


def test_case_COMPILE_1_a_growing_cache_compiles_once():
    step = jax.jit(lambda *args: paging.append(*args), donate_argnums=0)  # a cache of its own to count in
    state, k, v = make(pages=30, pages_per_request=25, requests=1), *tokens(make(requests=1), 1)
    for _ in range(100):
        state, _ = step(state, k, v, counts_of(1))
    assert step._cache_size() == 1
    assert int(state.table.lengths[0]) == 100


def test_case_COMPILE_2_lengths_are_no_constants_of_the_compiled_step():
    gather = jax.jit(lambda *args: paging.gather(*args))
    for n in (3, 7):
        state, k, _ = extend(make(), n, 0, 0)
        np.testing.assert_array_equal(gather(state, 0, 0)[0][:n], k[0, 0, :n])
        assert not gather(state, 0, 0)[0][n:].any()
    assert gather._cache_size() == 1


def test_case_DTYPE_1_a_scan_may_start_from_a_fresh_state():
    state, k, v = make(dtype=jnp.bfloat16), *tokens(make(), 1)
    step = lambda state, _: (append(state, k.astype(jnp.bfloat16), v, counts_of(1, 1, 1))[0], None)  # noqa: E731
    after, _ = jax.lax.scan(step, state, None, length=5)
    np.testing.assert_array_equal(after.table.lengths, [5, 5, 5])


def test_case_DONATE_1_a_state_used_twice_names_what_is_gone():
    state, k, v = make(), *tokens(make(), 1)
    jax.jit(paging.append, donate_argnums=0)(state, k, v, counts_of(1, 1, 1))
    for use in (
        lambda: paging.reserve(state, counts_of(1, 1, 1), 1),
        lambda: paging.view(state, 0),
        lambda: paging.gather(state, 0, 0),
        lambda: paging.share(state, 0, 1, 1),
        lambda: paging.release(state, jnp.array([True, True, True])),
        lambda: paging.check(state),
    ):
        with pytest.raises(ValueError, match=r"state\.pool\.free was donated to an earlier call: go on with what"):
            use()


def test_case_DONATE_2_the_whole_state_can_be_donated_without_a_warning():
    state, k, v = make(), *tokens(make(), 1)
    for step in (
        lambda s: append(s, k, v, counts_of(1, 1, 1))[0],
        lambda s: share(s, 0, 1, 1)[0],
        lambda s: release(s, jnp.array([True, True, True]))[0],
    ):
        state = jax.jit(step, donate_argnums=0)(state)  # warnings are errors here


def test_case_HOST_1_numpy_arguments_may_be_reused_at_once():
    state = make(requests=64, pages=64)
    counts, gone = np.ones(64, np.int32), np.zeros(64, bool)
    state, _ = paging.reserve(state, counts, 1)
    counts[:] = 0
    state, _ = paging.release(state, gone)
    gone[:] = True
    np.testing.assert_array_equal(state.table.lengths, np.ones(64))


def test_case_LOOP_1_planes_have_histories_of_their_own():
    state = make(requests=1, kv_heads=1, key_width=1, value_width=1)
    state, reservation = reserve(state, counts_of(1), 1)
    for plane in range(2):
        new = jnp.full((1, 1, 1, 1), plane + 1.0)
        state, _ = write(state, plane, reservation, new, new)
    assert [float(gather(state, plane, 0)[0][0, 0, 0]) for plane in range(2)] == [1.0, 2.0]


def test_case_QUANT_2_eight_bit_writes_saturate():
    state = make(planes=1, requests=1, kv_heads=1, key_width=6, value_width=6, dtype=jnp.float8_e4m3fn)
    new = jnp.array([448, 464, 465, 1000, -1000, jnp.nan]).reshape(1, 1, 1, 1, 6)
    state, _ = append(state, new, new, counts_of(1))
    expected = [448, 448, 448, 448, -448, np.nan]
    np.testing.assert_array_equal(gather(state, 0, 0)[0][0, 0].astype(jnp.float32), expected)


def big_pool_reads_back():
    """A pool of 2**31 + 2**22 keys: planes far past 2**31 elements must not be mistaken for others."""
    state = paging.create(
        planes=513, pages=4, page_size=16, kv_heads=1, key_width=2**16, value_width=1,
        requests=2, pages_per_request=2, dtype=jnp.float8_e4m3fn,
    )  # fmt: skip
    assert state.kv.k.size > 2**31
    step = jax.jit(paging.write, donate_argnums=0)
    state, reservation = jax.jit(paging.reserve, donate_argnums=0, static_argnums=2)(state, counts_of(17, 1), 17)
    for plane in (0, 1, 511, 512):
        new = jnp.full((2, 17, 1, 2**16), plane % 7 + 1.0)
        state, stale = step(state, plane, reservation, new, new[..., :1])
        assert int(stale) == 0
    for plane in (0, 1, 2, 510, 511, 512):
        expected = plane % 7 + 1 if plane in (0, 1, 511, 512) else 0
        k, v = jax.jit(paging.gather)(state, plane, 0)
        assert (k[:17].astype(jnp.float32) == expected).all(), plane
        assert (v[:17].astype(jnp.float32) == expected).all(), plane
    state, _ = jax.jit(paging.share, donate_argnums=0)(state, 0, 1, 17)  # ignored: 1 is not empty
    state, _ = jax.jit(paging.release, donate_argnums=0)(state, jnp.array([False, True]))
    state, _ = jax.jit(paging.share, donate_argnums=0)(state, 0, 1, 17)
    state, moved = jax.jit(paging.reserve, donate_argnums=0, static_argnums=2)(state, counts_of(0, 1), 1)
    assert int(moved.copied_to[1]) >= 0
    k, _ = jax.jit(paging.gather)(state, 512, 1)
    assert (k[:17].astype(jnp.float32) == 512 % 7 + 1).all()


def test_case_INT32_2_no_axis_of_a_write_is_indexed_flat():
    """By shapes alone, the pool is too large to make: every index stays within its own axis."""
    shape = jax.eval_shape(
        lambda: make(planes=64, pages=4096, kv_heads=8, page_size=64, key_width=576, value_width=512)
    )
    assert shape.kv.k.size > 2**36
    jaxpr = str(jax.make_jaxpr(paged_kv.put)(
        shape.kv, jnp.int32(0), counts_of(0, 1), jnp.ones((1, 2, 8, 576)), jnp.ones((1, 2, 8, 512))
    ))  # fmt: skip
    assert "scatter_dims_to_operand_dims=(0, 1, 2, 3)" in jaxpr
    assert "i64" not in jaxpr


@pytest.mark.gpu
def test_case_INT32_2_pools_above_2_to_the_31_elements():
    big_pool_reads_back()
    gc.collect()
