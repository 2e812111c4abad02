"""KV compaction: what each head keeps, where it goes, and everything that must not happen to other requests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import sparse_jax
from sparse_jax import compaction, paging
from tests.sparse_jax.test_paging import counts_of, gather, make, same, tokens, view

# Compiled once for all tests of one shape.
reserve_prompt = jax.jit(compaction.reserve_prompt, static_argnums=3)
reserve = jax.jit(compaction.reserve, static_argnums=2)
write_prompt, write, compact = map(jax.jit, (compaction.write_prompt, compaction.write, compaction.compact))
share, release, track = map(jax.jit, (compaction.share, compaction.release, compaction.track))
PLANES, REQUESTS, HEADS = 2, 3, 2
KEPT = 6  # width of every selection here
PROMPT = 9  # width of every prompt and every append


def tracked(**sizes):
    return track(make(**{"pages": 9, "requests": REQUESTS, "planes": PLANES, "kv_heads": HEADS} | sizes))


def prompt(state, seed=0):
    """Random k, v [planes, B, PROMPT, Hkv, D], exact in every type."""
    return tokens(state.paged, PROMPT, seed)


def chosen(*requests):
    """Token ids i32[B, Hkv, KEPT] from lists for each request and head, padded with -1."""
    ids = np.full((len(requests), HEADS, KEPT), -1)
    for b, heads in enumerate(requests):
        for h, row in enumerate(heads):
            ids[b, h, : len(row)] = row
    return jnp.asarray(ids, jnp.int32)


def append(state, count, seed=0):
    """Appends counts[b] tokens; returns their k, v as well."""
    k, v = prompt(state, seed)
    state, reservation = reserve(state, counts_of(*count), PROMPT)
    for plane in range(PLANES):
        state, stale = write(state, plane, reservation, k[plane], v[plane])
        assert int(stale) == 0
    return state, k, v


def prefill(state, lengths, kept, ids, k, v):
    state, room = reserve_prompt(state, counts_of(*lengths), counts_of(*kept), KEPT)
    for plane in range(PLANES):
        state, stale = write_prompt(state, plane, room, ids, k[plane], v[plane])
        assert int(stale) == 0
    return state


def held(state, request, plane, head):
    """[(position, key, value)] of one head's places in the cache; None where it is nobody's."""
    length = int(state.paged.table.lengths[request])
    k, v = (np.asarray(x, np.float32) for x in gather(state.paged, plane, request))
    table, positions = np.asarray(view(state.paged, plane).page_table[request]), np.asarray(state.key_positions)
    size, found = state.paged.kv.page_size, []
    for place in range(length):
        position = int(positions[table[place // size], head, place % size])
        key, value = (x[place, head].tolist() for x in (k, v))
        found.append(None if position < 0 else (position, key, value))
    return found


def row(position, k, v, plane, request, head, place):
    at = (plane, request, place, head)
    return (position, np.asarray(k[at], np.float32).tolist(), np.asarray(v[at], np.float32).tolist())


IDS = ([[0, 3, 4, 8], [1, 2, 7, 8]], [[0], [4]], [[], []])


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("prompt", jnp.float32),
        ("pages", jnp.float32),
        ("prompt", jnp.float8_e4m3fn),
        ("pages", jnp.bfloat16),
    ],
)
def test_each_head_keeps_its_tokens_at_their_positions(way, dtype):
    """Written compacted, or compacted in pages: the same cache, and later tokens continue at the full length."""
    state = tracked(dtype=dtype)
    k, v = prompt(state)
    if way == "prompt":
        state = prefill(state, (9, 5, 0), (4, 1, 0), chosen(*IDS), k, v)
    else:
        state, k, v = append(state, (9, 5, 0))
        state, stale = compact(state, chosen(*IDS))
        assert int(stale) == 0
    np.testing.assert_array_equal(state.paged.table.lengths, [4, 1, 0])
    np.testing.assert_array_equal(state.full_lengths, [9, 5, 0])
    assert int(state.paged.pool.free_count) == 9 - 2, "ceil(4 / 4) and ceil(1 / 4) pages are held"
    state, k1, v1 = append(state, (1, 2, 1), seed=1)
    np.testing.assert_array_equal(state.full_lengths, [10, 7, 1])
    np.testing.assert_array_equal(compaction.query_positions(state, 2), [[8, 9], [5, 6], [-1, 0]])
    for plane, request, head in np.ndindex(PLANES, REQUESTS, HEADS):
        expected = [row(i, k, v, plane, request, head, i) for i in IDS[request][head]]
        start, new = (9, 5, 0)[request], (1, 2, 1)[request]
        expected += [row(start + i, k1, v1, plane, request, head, i) for i in range(new)]
        assert held(state, request, plane, head) == expected
    paging.check(state.paged)


def test_heads_and_planes_may_keep_different_numbers():
    state, k, v = append(tracked(), (9, 0, 0))
    ids = jnp.stack([chosen([[5], [0, 1, 2]], [[], []], [[], []]), chosen([[], [8]], [[], []], [[], []])])
    state, _ = compact(state, ids)
    assert int(state.paged.table.lengths[0]) == 3
    assert held(state, 0, 0, 0) == [row(5, k, v, 0, 0, 0, 5), None, None]
    assert held(state, 0, 0, 1) == [row(i, k, v, 0, 0, 1, i) for i in range(3)]
    assert held(state, 0, 1, 0) == [None] * 3
    assert held(state, 0, 1, 1) == [row(8, k, v, 1, 0, 1, 8), None, None]
    state, k1, v1 = append(state, (1, 0, 0), seed=1)
    assert held(state, 0, 1, 0) == [None] * 3 + [row(9, k1, v1, 1, 0, 0, 0)]


WILD = [[-1, 3, 2**31 - 1, 9, -(2**31), 8], [8, -1, -1, -1, -7, 10]]


@pytest.mark.parametrize("way", ["prompt", "pages"])
def test_contract_1_absent_ids_leave_no_gap(way):
    """-1 and ids out of range anywhere: what is present moves to the front, in its order."""
    state = tracked()
    k, v = prompt(state)
    ids = chosen(WILD, [[], []], [[], []])
    if way == "prompt":
        state = prefill(state, (9, 0, 0), (2, 0, 0), ids, k, v)
    else:
        state, k, v = append(state, (9, 0, 0))
        state, _ = compact(state, ids)
    for plane in range(PLANES):
        assert held(state, 0, plane, 0) == [row(i, k, v, plane, 0, 0, i) for i in (3, 8)]
        assert held(state, 0, plane, 1) == [row(8, k, v, plane, 0, 1, 8), None]


def test_contract_1_checked_raises():
    state = tracked()
    k, v = prompt(state)
    state, room = reserve_prompt(state, counts_of(9, 0, 0), counts_of(2, 0, 0), KEPT)
    run = sparse_jax.checked(write_prompt)
    run(state, 0, room, chosen([[0, 8], [1, 2]], [[], []], [[], []]), k[0], v[0])
    with pytest.raises(checkify.JaxRuntimeError, match=r"token_ids.*got 9"):
        run(state, 0, room, chosen([[0, 9], [1, 2]], [[], []], [[], []]), k[0], v[0])
    with pytest.raises(checkify.JaxRuntimeError, match=r"token_ids.*got 16"):
        sparse_jax.checked(compact)(state, chosen([[0, 16], [1, 2]], [[], []], [[], []]))


def test_more_ids_than_room_are_not_written_and_fewer_are_nobodys():
    state = tracked()
    k, v = prompt(state)
    ids = chosen([[0, 1, 2], [4]], [[0, 1], [5, 6]], [[], []])
    state = prefill(state, (9, 9, 0), (2, 0, 0), ids, k, v)  # request 1 takes no part
    assert held(state, 0, 1, 0) == [row(i, k, v, 1, 0, 0, i) for i in (0, 1)]
    assert held(state, 0, 1, 1) == [row(4, k, v, 1, 0, 1, 4), None]
    np.testing.assert_array_equal(state.full_lengths, [9, 0, 0])


def test_a_prompt_may_come_in_chunks():
    state = tracked()
    k, v = prompt(state)
    state = prefill(state, (9, 0, 0), (2, 0, 0), chosen([[0, 8], [1, 8]], [[], []], [[], []]), k, v)
    k1, v1 = prompt(state, seed=1)
    state = prefill(state, (7, 0, 0), (1, 0, 0), chosen([[6], [3]], [[], []], [[], []]), k1, v1)
    assert held(state, 0, 0, 0) == [row(i, k, v, 0, 0, 0, i) for i in (0, 8)] + [row(15, k1, v1, 0, 0, 0, 6)]
    np.testing.assert_array_equal(state.full_lengths, [16, 0, 0])


def test_compacting_again_keeps_the_true_positions():
    state, k, v = append(tracked(), (9, 0, 0))
    state, _ = compact(state, chosen([[0, 3, 4, 8], [1, 2, 7]], [[], []], [[], []]))
    state, k1, v1 = append(state, (1, 0, 0), seed=1)
    # Places now: head 0 holds 0 3 4 8 9, head 1 holds 1 2 7 - 9. Its place 3 is nobody's, so it is absent.
    state, _ = compact(state, chosen([[1, 4], [2, 3, 4]], [[], []], [[], []]))
    assert held(state, 0, 1, 0) == [row(3, k, v, 1, 0, 0, 3), row(9, k1, v1, 1, 0, 0, 0)]
    assert held(state, 0, 1, 1) == [row(7, k, v, 1, 0, 1, 7), row(9, k1, v1, 1, 0, 1, 0)]
    np.testing.assert_array_equal(state.full_lengths, [10, 0, 0])


def test_contract_10_old_pages_are_returned_and_their_leases_end():
    state, _, _ = append(tracked(), (9, 4, 0))
    state, old = reserve(state, counts_of(1, 0, 0), PROMPT)
    before = state.paged
    state, _ = compact(state, chosen([[0, 1], [7, 8]], [[], []], [[], []]))
    pool = state.paged.pool
    assert int(pool.free_count) == int(before.pool.free_count) + 2
    assert int((pool.incarnation - before.pool.incarnation).sum()) == 1, "one page was handed out"
    after, stale = write(state, 0, old, jnp.ones((3, 9, 2, 3)), jnp.ones((3, 9, 2, 2)))
    same(after, state)
    assert int(stale) == 1
    # The old table, kept by somebody: everything of request 0 reads as absent.
    kept = dataclasses.replace(state.paged, table=before.table)
    seen = view(kept, 0)
    assert (seen.page_table[0] == -1).all()
    assert int(seen.stale) == 3
    np.testing.assert_array_equal(seen.page_table[1], view(before, 0).page_table[1])


def test_contract_10_stale_entries_are_absent_and_counted():
    state, _, _ = append(tracked(), (9, 0, 0))
    table = state.paged.table
    gone = table.pages[0, 1]
    pool = dataclasses.replace(state.paged.pool, incarnation=state.paged.pool.incarnation.at[gone].add(1))
    state = dataclasses.replace(state, paged=dataclasses.replace(state.paged, pool=pool))
    after, stale = compact(state, chosen([[0, 4, 8], [5, 6, 7]], [[], []], [[], []]))
    assert int(stale) == 1
    assert [x and x[0] for x in held(after, 0, 0, 0)] == [0, 8], "tokens 4 to 7 lay on the page that is lost"
    assert [x and x[0] for x in held(after, 0, 0, 1)] == [None, None]


def test_contract_10_shared_pages_of_other_holders_do_not_change():
    state, k, v = append(tracked(), (9, 0, 0))
    state, _ = share(state, 0, 1, 9)
    everything = [[row(i, k, v, p, 0, h, i) for i in range(9)] for p, h in np.ndindex(PLANES, HEADS)]
    state, _ = compact(state, chosen([[0, 8], [1, 2]], [[], []], [[], []]))
    assert [held(state, 1, p, h) for p, h in np.ndindex(PLANES, HEADS)] == everything
    assert int(state.paged.pool.free_count) == 9 - 3 - 1
    np.testing.assert_array_equal(state.full_lengths, [9, 9, 0])
    state, _ = compact(state, chosen([[], []], [[0], [0]], [[], []]))
    assert int(state.paged.pool.free_count) == 9 - 1 - 1, "the last holder lets them go"


def test_a_compacted_cache_can_be_shared_and_is_copied_before_it_is_written():
    state, k, v = append(tracked(), (9, 0, 0))
    state, _ = compact(state, chosen([[0, 8], [1, 2]], [[], []], [[], []]))
    state, _ = share(state, 0, 1, 2)
    np.testing.assert_array_equal(state.full_lengths, [9, 9, 0])
    state, k1, v1 = append(state, (1, 1, 0), seed=1)
    for request in (0, 1):
        kept = [row(i, k, v, 1, 0, 1, i) for i in (1, 2)]
        assert held(state, request, 1, 1) == [*kept, row(9, k1, v1, 1, request, 1, 0)]


def test_out_of_pages_is_all_or_nothing_for_each_request():
    """Request 0 shares all its pages, so letting go frees none; request 2, later, gets what it lets go itself."""
    state, _, _ = append(tracked(), (4, 0, 7), seed=1)
    state, k, v = append(state, (9, 0, 9))
    state, _ = share(state, 0, 1, 13)
    assert int(state.paged.pool.free_count) == 1
    ids = [[range(6), range(1, 7)], [[], []], [[12], [13]]]
    after, _ = compact(state, chosen(*ids))
    assert np.asarray(after.paged.table.status).tolist() == [paging.OUT_OF_PAGES, paging.OK, paging.OK]
    np.testing.assert_array_equal(after.paged.table.lengths, [13, 13, 1])
    np.testing.assert_array_equal(after.full_lengths, [13, 13, 16])
    for request in (0, 1):
        assert held(after, request, 0, 1)[4:] == [row(4 + i, k, v, 0, 0, 1, i) for i in range(9)]
    assert held(after, 2, 0, 1) == [row(13, k, v, 0, 2, 1, 6)]
    with pytest.raises(paging.OutOfPages, match=r"requests \[0\] with lengths \[13\]"):
        paging.check(after.paged)
    again, _ = compact(after, chosen(*ids[:2], [[], []]))
    assert np.asarray(again.paged.table.status).tolist() == [paging.OK] * 3, "there are free pages now"


def test_a_full_pool_is_compacted_in_its_own_pages():
    state, k, v = append(tracked(), (9, 9, 9))
    assert int(state.paged.pool.free_count) == 0
    state, _ = compact(state, chosen(*[[[0, 8], [1, 2]]] * 3))
    assert int(state.paged.pool.free_count) == 6
    for request in range(3):
        assert held(state, request, 1, 0) == [row(i, k, v, 1, request, 0, i) for i in (0, 8)]
    paging.check(state.paged)


def test_a_prompt_without_room_keeps_everything():
    state, _, _ = append(append(tracked(), (9, 0, 9))[0], (7, 0, 7))
    after, room = reserve_prompt(state, counts_of(0, 9, 0), counts_of(0, 5, 0), KEPT)  # of two pages, one is free
    assert np.asarray(after.paged.table.status).tolist() == [paging.OK, paging.OUT_OF_PAGES, paging.OK]
    np.testing.assert_array_equal(after.full_lengths, [16, 0, 16])
    k, v = prompt(after)
    written, stale = write_prompt(after, 0, room, chosen([[], []], [[0, 1], [0, 1]], [[], []]), k[0], v[0])
    same(written, after)
    assert int(stale) == 0


def test_more_tokens_than_the_table_holds():
    """Duplicates count as often as they appear, so there can be more ids than places."""
    state, _, _ = append(tracked(page_size=1, pages_per_request=4), (3, 0, 0))
    after, _ = compact(state, chosen([[0, 0, 1, 1, 2], [0]], [[], []], [[], []]))
    assert np.asarray(after.paged.table.status).tolist() == [paging.TABLE_FULL, paging.OK, paging.OK]
    same(dataclasses.replace(after.paged, table=state.paged.table), state.paged)
    fits, _ = compact(state, chosen([[0, 0, 1, 2], [0]], [[], []], [[], []]))
    assert [x and x[0] for x in held(fits, 0, 0, 0)] == [0, 0, 1, 2]


def test_release_forgets_what_was_left_out():
    state, _, _ = append(tracked(), (9, 9, 0))
    state, _ = compact(state, chosen([[0], [1]], [[2], [3]], [[], []]))
    state, _ = release(state, jnp.array([True, False, False]))
    np.testing.assert_array_equal(state.full_lengths, [0, 9, 0])
    state, k, v = append(state, (2, 0, 0), seed=1)
    assert held(state, 0, 0, 0) == [row(i, k, v, 0, 0, 0, i) for i in range(2)]


def test_rejected_drafts_set_positions_back():
    state, _, _ = append(tracked(), (9, 0, 0))
    state, _ = compact(state, chosen([[0, 8], [1, 2]], [[], []], [[], []]))
    drafted, _, _ = append(state, (3, 0, 0), seed=1)
    table = dataclasses.replace(drafted.paged.table, lengths=counts_of(3, 0, 0))
    back = dataclasses.replace(drafted, paged=dataclasses.replace(drafted.paged, table=table))
    np.testing.assert_array_equal(back.full_lengths, [10, 0, 0])
    back, k, v = append(back, (1, 0, 0), seed=2)
    assert held(back, 0, 0, 0)[3:] == [row(10, k, v, 0, 0, 0, 0)]


def test_tracking_begins_at_any_time():
    state, _, _ = append(tracked(), (9, 5, 0))
    state, _ = share(state, 0, 2, 6)
    late = track(state.paged)
    for request, plane, head in np.ndindex(REQUESTS, PLANES, HEADS):
        assert held(late, request, plane, head) == held(state, request, plane, head)
    np.testing.assert_array_equal(late.full_lengths, state.full_lengths)
