"""Paged state: appending, sharing, running out, and everything that must not happen to other requests."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paging, slot_pool

# Compiled once for all tests of one shape: operation by operation, each test would compile dozens of small programs.
append, gather = jax.jit(paging.append), jax.jit(paging.gather)
reserve = jax.jit(paging.reserve, static_argnums=2)
share, release, view, write = map(jax.jit, (paging.share, paging.release, paging.view, paging.write))

WIDTH = 9  # of every append here: the counts differ, the compiled program does not
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn]


def make(pages=8, page_size=4, requests=3, pages_per_request=4, planes=2, dtype=jnp.float32, **sizes):
    sizes = {"kv_heads": 2, "key_width": 3, "value_width": 2} | sizes
    return paging.create(
        planes=planes, pages=pages, page_size=page_size, requests=requests, pages_per_request=pages_per_request,
        dtype=dtype, **sizes,
    )  # fmt: skip


def counts_of(*counts):
    return jnp.array(counts, jnp.int32)


def tokens(state, width, seed=0):
    """Random k, v for `append`, exact in every type."""
    kv, requests, rng = state.kv, state.table.lengths.shape[0], np.random.default_rng(seed)
    draw = lambda pool: jnp.asarray(  # noqa: E731
        rng.integers(1, 16, (kv.planes, requests, width, kv.kv_heads, pool.shape[-1])), jnp.float32
    )
    return draw(kv.k), draw(kv.v)


def extend(state, *counts, seed=0):
    """Append counts[b] tokens, and return them as k, v [planes, B, max(counts), Hkv, D]."""
    k, v = tokens(state, WIDTH, seed)
    state, _ = append(state, k, v, counts_of(*counts))
    return state, k[:, :, : max(counts)], v[:, :, : max(counts)]


def same(a, b):
    chex.assert_trees_all_equal(a, b)


def reads(state, request, expected, plane=0):
    """The keys of a request are `expected` [S, Hkv, D], and then zeros."""
    k, _ = gather(state, plane, request)
    np.testing.assert_array_equal(k[: len(expected)], expected)
    assert not np.asarray(k[len(expected) :]).any()


def statuses(state):
    return np.asarray(state.table.status).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompt_then_single_tokens_read_back_in_every_plane(dtype):
    state = make(dtype=dtype)
    state, k0, v0 = extend(state, 5, 0, 3)
    state, k1, v1 = extend(state, 1, 1, 1, seed=1)
    np.testing.assert_array_equal(state.table.lengths, [6, 1, 4])
    for plane in range(2):
        for request, n in enumerate((5, 0, 3)):
            k, v = gather(state, plane, request)
            assert k.dtype == v.dtype == dtype
            for got, old, new in ((k, k0, k1), (v, v0, v1)):
                expected = jnp.concatenate([old[plane, request, :n], new[plane, request]])
                np.testing.assert_array_equal(got[: n + 1].astype(jnp.float32), expected)
                assert not got[n + 1 :].astype(jnp.float32).any()


def test_write_fills_one_plane_of_what_reserve_gave_and_view_shows_it():
    state, k, v = make(), *tokens(make(), 5)
    state, reservation = reserve(state, counts_of(5, 0, 2), 5)
    np.testing.assert_array_equal(reservation.slots, [[0, 1, 2, 3, 4], [-1] * 5, [8, 9, -1, -1, -1]])
    state, stale = write(state, 1, reservation, k[1], v[1])
    assert int(stale) == 0
    reads(state, 0, k[1, 0], plane=1)
    reads(state, 0, np.zeros((5, 2, 3)), plane=0)
    seen = view(state, 1)
    np.testing.assert_array_equal(seen.page_table, [[8, 9, -1, -1], [-1] * 4, [10, -1, -1, -1]])
    np.testing.assert_array_equal(paging.flat_slots(state, 1, reservation)[0], [32, 33, 34, 35, 36])
    k_pages, _ = paging.flat(state.kv)
    np.testing.assert_array_equal(k_pages[9, :, 0], k[1, 0, 4])


@pytest.mark.parametrize("bad", [-1, 2, 2**31 - 1, -(2**31)])
def test_contract_1_planes_and_requests_out_of_range_are_absent(bad):
    state, k, v = extend(make(), 3, 3, 3)
    reserved, reservation = reserve(state, counts_of(1, 1, 1), 1)
    written, stale = write(reserved, bad, reservation, k[0, :, :1], v[0, :, :1])
    same(written, reserved)
    assert int(stale) == 3
    assert (view(state, bad).page_table == -1).all()
    assert (paging.flat_slots(reserved, bad, reservation) == -1).all()
    assert not gather(state, bad, 0)[0].any()
    assert not gather(state, 0, bad if bad != 2 else 3)[0].any()


def test_out_of_pages_keeps_the_request_and_lets_a_smaller_one_in():
    state, k, _ = extend(make(pages=4, page_size=2), 3, 1, 0)
    after, more, _ = extend(state, 4, 3, 1, seed=1)  # 1 page is free; asked for are 2, 1 and 1
    assert statuses(after) == [paging.OUT_OF_PAGES, paging.OK, paging.OUT_OF_PAGES]
    np.testing.assert_array_equal(after.table.lengths, [3, 4, 0])
    same(jax.tree.map(lambda x: x[0], after.table.pages), state.table.pages[0])
    reads(after, 0, k[0, 0])
    reads(after, 1, jnp.concatenate([k[0, 1, :1], more[0, 1, :3]]))
    assert int(after.pool.free_count) == 0
    with pytest.raises(
        paging.OutOfPages, match=r"requests \[0, 2\] with lengths \[3, 0\] found .* \(0 of 4 are free"
    ) as e:
        paging.check(after)
    assert e.value.requests == (0, 2)
    released, _ = release(after, jnp.array([False, True, True]))
    assert statuses(released) == [paging.OUT_OF_PAGES, paging.OK, paging.OK], "a release clears its own status"
    granted, _, _ = extend(released, 4, 0, 0)
    assert statuses(granted) == [paging.OK] * 3, "a success clears it, too"
    paging.check(granted)


def test_table_full_keeps_the_request_as_it_was():
    state, _, _ = extend(make(pages=12, page_size=2, pages_per_request=2), 3, 4, 0)
    after, reservation = reserve(state, counts_of(2, 1, 4), 4)
    assert statuses(after) == [paging.TABLE_FULL, paging.TABLE_FULL, paging.OK]
    np.testing.assert_array_equal(after.table.lengths, [3, 4, 4])
    assert (reservation.slots[:2] == -1).all()
    with pytest.raises(paging.OutOfPages, match=r"requests \[0, 1\] with lengths \[3, 4\] .*2 pages of 2 tokens"):
        paging.check(after)


def test_counts_outside_the_width_are_refused_and_zero_says_nothing():
    state, _, _ = extend(make(), 1, 1, 1)
    after, _ = reserve(state, counts_of(3, -1, 1), 2)
    assert statuses(after) == [paging.BAD_COUNT, paging.BAD_COUNT, paging.OK]
    np.testing.assert_array_equal(after.table.lengths, [1, 1, 2])
    idle, _ = reserve(after, counts_of(0, 0, 0), 2)
    same(idle, after)


def test_contract_10_stale_reservation_writes_nothing_of_the_new_owner():
    state, k, v = make(pages=2, requests=2), *tokens(make(requests=2), 4)
    state, old = reserve(state, counts_of(4, 0), 4)
    state, _ = release(state, jnp.array([True, False]))
    state, mine, _ = extend(state, 0, 4, seed=1)
    assert int(state.table.pages[1, 0]) == int(old.slots[0, 0]) // 4, "the page is reused"
    after, stale = write(state, 0, old, k[0], v[0])
    same(after, state)
    assert int(stale) == 4
    reads(after, 1, mine[0, 1])


def test_contract_10_stale_table_reads_nothing_and_releases_nothing():
    state, _, _ = extend(make(), 5, 2, 0)
    old = state.table
    state, _ = release(state, jnp.array([True, True, False]))
    state, _, _ = extend(state, 0, 0, 9, seed=1)
    stale = dataclasses.replace(state, table=old)
    assert (view(stale, 0).page_table == -1).all()
    assert int(view(stale, 0).stale) == 3
    reads(stale, 0, np.zeros((0, 2, 3)))
    released, count = release(stale, jnp.array([True, True, True]))
    same(released.pool, state.pool)
    assert int(count) == 3


def test_contract_10_a_request_that_lost_its_last_page_cannot_go_on():
    state, _, _ = extend(make(), 5, 4, 0)
    old = state.table
    state, _ = release(state, jnp.array([True, True, False]))
    after, reservation = reserve(dataclasses.replace(state, table=old), counts_of(1, 1, 1), 1)
    assert statuses(after) == [paging.STALE, paging.OK, paging.OK], "request 1 goes on in a page of its own"
    assert (reservation.slots >= 0).ravel().tolist() == [False, True, True]
    with pytest.raises(paging.OutOfPages, match=r"requests \[0\] .* older than the pool"):
        paging.check(after)


def test_contract_10_double_release_through_the_state_is_harmless():
    state, k, _ = extend(make(), 5, 0, 0)
    state, _ = share(state, 0, 1, 5)
    once, _ = release(state, jnp.array([True, False, False]))
    twice, stale = release(once, jnp.array([True, False, False]))
    same(twice, once)
    assert int(stale) == 0
    reads(twice, 1, k[0, 0])


def test_contract_10_a_shared_page_is_copied_before_it_is_written():
    state, k, _ = extend(make(), 6, 0, 0)
    state, stale = share(state, 0, 1, 5)
    assert (int(stale), int(state.pool.free_count)) == (0, 6)
    np.testing.assert_array_equal(state.pool.holders[:2], [2, 2])
    k1, v1 = tokens(state, 1, seed=1)
    after, reservation = append(state, k1, v1, counts_of(1, 1, 0))
    # Request 0 gets the copy; request 1 is the last holder then and keeps the page. The full page stays shared.
    np.testing.assert_array_equal(reservation.copied_from, [1, -1, -1])
    np.testing.assert_array_equal(reservation.copied_to, [2, -1, -1])
    np.testing.assert_array_equal(after.table.pages[:2, :2], [[0, 2], [0, 1]])
    np.testing.assert_array_equal(after.pool.holders[:3], [2, 1, 1])
    for plane in range(2):
        reads(after, 0, jnp.concatenate([k[plane, 0], k1[plane, 0]]), plane)
        reads(after, 1, jnp.concatenate([k[plane, 0, :5], k1[plane, 1]]), plane)


def test_contract_10_a_shared_page_is_never_written_through_an_old_reservation():
    state, k, v = make(), *tokens(make(), 4)
    state, reservation = reserve(state, counts_of(4, 0, 0), 4)
    state, _ = write(state, 0, reservation, k[0], v[0])
    state, _ = share(state, 0, 1, 3)
    after, stale = write(state, 0, reservation, k[1], v[1])
    same(after, state)
    assert int(stale) == 4


def test_the_last_free_page_serves_all_holders_but_one():
    state, _, _ = extend(make(pages=3), 2, 0, 0)
    for target in (1, 2):
        state, _ = share(state, 0, target, 2)
    after, reservation = reserve(state, counts_of(1, 1, 1), 1)
    assert statuses(after) == [paging.OK] * 3
    np.testing.assert_array_equal(reservation.copied_to, [1, 2, -1])
    np.testing.assert_array_equal(after.pool.holders, [1, 1, 1])


def test_share_is_ignored_where_it_cannot_be():
    state, _, _ = extend(make(), 5, 2, 0)
    for source, target in ((0, 1), (0, 0), (0, 3), (3, 2), (-2, 2), (0, -(2**31))):
        after, stale = share(state, source, target, 3)
        same(after, state)
        assert int(stale) == 1, (source, target)
    for source, target, count in ((-1, 2, 3), (0, -1, 3), (0, 2, 0), (0, 2, -5)):
        after, stale = share(state, source, target, count)
        same(after, state)
        assert int(stale) == 0, (source, target)
    back = dataclasses.replace(state, table=dataclasses.replace(state.table, lengths=counts_of(5, 0, 0)))
    after, stale = share(back, 0, 1, 3)
    same(after, back)
    assert int(stale) == 1, "no tokens, but a page that would be lost"
    after, _ = share(state, 0, 2, 2**31 - 1)
    assert int(after.table.lengths[2]) == 5, "cut to the source"


def test_lengths_that_are_set_back_reuse_their_pages():
    state, k, _ = extend(make(page_size=2), 7, 0, 0)
    state, _ = share(state, 0, 1, 7)
    table = dataclasses.replace(state.table, lengths=counts_of(3, 7, 0))
    back = dataclasses.replace(state, table=table)
    after, more, _ = extend(back, 4, 0, 0, seed=1)
    reads(after, 0, jnp.concatenate([k[0, 0, :3], more[0, 0]]))
    reads(after, 1, k[0, 0])
    empty, stale = release(after, jnp.array([True, True, True]))
    assert (int(empty.pool.free_count), int(stale)) == (8, 0), "no page is lost"


def test_contract_4_bytes_of_other_requests_and_old_owners_are_never_seen():
    state, _, _ = extend(make(pages=2, requests=2), 8, 0)
    nan = paging.PagedKV(jnp.full_like(state.kv.k, jnp.nan), jnp.full_like(state.kv.v, jnp.nan))
    state, _ = release(dataclasses.replace(state, kv=nan), jnp.array([True, False]))
    state, k, _ = extend(state, 0, 3)
    reads(state, 1, k[0, 1])


def test_garbage_lengths_and_ids_in_a_table_do_no_harm():
    state, _, _ = extend(make(pages=3, planes=1), 4, 4, 4)
    pages = jnp.array([[0, 3, -7, 2**31 - 1], [-1, 1, -1, -1], [2, -(2**31), 0, 1]], jnp.int32)
    table = paging.PageTable(pages, jnp.ones((3, 4), jnp.int32), counts_of(2**31 - 1, -5, 16), counts_of(0, 0, 0))
    wild = dataclasses.replace(state, table=table)
    seen = view(wild, 0)
    np.testing.assert_array_equal(seen.page_table, [[0, -1, -1, -1], [-1, 1, -1, -1], [2, -1, 0, 1]])
    assert int(seen.stale) == 4
    after, reservation = reserve(wild, counts_of(1, 1, 1), 1)
    assert statuses(after) == [paging.TABLE_FULL, paging.OUT_OF_PAGES, paging.TABLE_FULL]
    assert (reservation.slots == -1).all()
    same(after.kv, state.kv)


@pytest.mark.parametrize(
    ("x64", "dtype"), [(False, jnp.float32), (True, jnp.float32), (True, jnp.bfloat16), (True, jnp.float8_e4m3fn)]
)
def test_contract_9_state_dtypes_and_weak_types_are_the_same_in_and_out(x64, dtype):
    with jax.enable_x64(x64):
        state = make(dtype=dtype)
        k, v = tokens(state, 1)

        def step(state, _):
            state, reservation = append(state, k, v, counts_of(1, 0, 1))
            state, written = write(state, 0, reservation, k[0], v[0])
            state, shared = share(state, 0, 1, 3)
            state, released = release(state, jnp.array([False, True, False]))
            return state, (reservation, written, shared, released, view(state, 0))

        after, outputs = jax.lax.scan(step, state, None, length=3)
        for leaf in jax.tree.leaves((after.pool, after.table, outputs)):
            assert leaf.dtype == jnp.int32
            assert not leaf.weak_type
        assert after.kv.k.dtype == after.kv.v.dtype == dtype


def test_states_can_be_batched_by_vmap():
    states = jax.tree.map(lambda x: jnp.stack([x, x]), extend(make(), 2, 0, 0)[0])
    k, v = tokens(make(), 3)
    many = jnp.array([[3, 0, 1], [0, 9, 2]], jnp.int32)
    states, _ = jax.vmap(lambda s: share(s, 0, 1, 1))(states)
    together, _ = jax.vmap(lambda s, c: append(s, k, v, c))(states, many)
    for i in range(2):
        alone, _ = append(jax.tree.map(lambda x: x[i], states), k, v, many[i])  # noqa: B023
        same(jax.tree.map(lambda x: x[i], together), alone)  # noqa: B023


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"page_size": 3}, "power of two, got 3"),
        ({"page_size": 0}, "'page_size': 0"),
        ({"pages": 2.5}, "'pages': 2.5"),
        ({"kv_heads": -1}, "'kv_heads': -1"),
        ({"dtype": jnp.int8}, "got int8"),
        ({"pages": 2**28, "page_size": 4}, f"= {2**31} is above"),
        ({"pages_per_request": 2**29}, f"= {2**31} is above"),
    ],
)
def test_contract_8_create_shows_the_values_it_refuses(sizes, message):
    with pytest.raises(ValueError, match=message):
        make(**sizes)


def test_contract_8_calls_show_the_shapes_they_refuse():
    state, k, v = make(), *tokens(make(), 2)
    state, reservation = reserve(state, counts_of(1, 1, 1), 2)
    for call, message in (
        (lambda: reserve(state, counts_of(1, 1), 2), r"i32\[3\] .* got \[2\] and 2"),
        (lambda: reserve(state, jnp.ones(3), 2), r"counts must hold integers, got float32 \(3,\)"),
        (
            lambda: write(state, 0, reservation, k[0, :, :1], v[0]),
            r"k must be \[3, 2, 2, 3\], got \[3, 1, 2, 3\]",
        ),
        (lambda: append(state, k[0], v[0], counts_of(1, 1, 1)), r"2 planes"),
        (lambda: append(state, k, k, counts_of(1, 1, 1)), r"v must be \[2, 3, 2, 2, 2\]"),
        (lambda: release(state, counts_of(1, 0, 0)), r"bool\[3\], got int32\[3\]"),
        (lambda: view(state, counts_of(0, 1)), r"plane is one number"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_contract_10_one_liveness_check_serves_every_operation(monkeypatch):
    """With the shared check switched off nothing is read, written, shared, released or continued."""
    state, k, v = extend(make(), 5, 0, 0, seed=2)
    reserved, reservation = reserve(state, counts_of(1, 0, 0), 1)
    monkeypatch.setattr(slot_pool, "live", lambda pool, ids, incarnations: jnp.zeros(jnp.shape(ids), bool))
    fresh = lambda f, *args: jax.jit(lambda *args: f(*args))(*args)  # noqa: E731  (what was traced before keeps the check)
    assert (fresh(paging.view, state, 0).page_table == -1).all()
    assert not fresh(paging.gather, state, 0, 0)[0].any()
    same(fresh(paging.write, reserved, 0, reservation, k[0, :, :1], v[0, :, :1])[0], reserved)
    assert (fresh(paging.flat_slots, reserved, 0, reservation) == -1).all()
    same(fresh(paging.share, state, 0, 1, 5)[0].pool, state.pool)
    same(fresh(paging.release, state, jnp.array([True, True, True]))[0].pool, state.pool)
    after, _ = fresh(lambda s: paging.reserve(s, counts_of(1, 0, 0), 1), state)
    assert statuses(after)[0] == paging.STALE
