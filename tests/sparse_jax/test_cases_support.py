"""Reported cases of other systems that speak of selection, splitting and compaction, each named after its row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import (
    Config,
    compaction,
    merge_attention,
    page_sparse_attention,
    paged_attention,
    paging,
    retained_count,
    token_sparse_attention,
)
from tests.attention_cases import CASES, call, make_inputs
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax.scalar_attention import KERNELS, LN2, every_implementation, expect, ids, one, pool
from tests.sparse_jax.test_compaction import (
    append,
    chosen,
    compact,
    held,
    prefill,
    prompt,
    reserve,
    reserve_prompt,
    row,
    share,
    tracked,
    write,
    write_prompt,
)
from tests.sparse_jax.test_paging import counts_of, make, same

NONE = [[], []]


@pytest.mark.parametrize("mask", [np.array([[[True, False]]]), np.array([[[1.0, 0.0]]])])
def test_case_MASK_1_a_mask_is_no_list_of_ids(mask):
    """Tokens are chosen by id: a bool or 0/1 float mask is refused, and 0/1 integers are the ids 0 and 1."""
    k, v = pool([0.0, 5.0], 1), pool([1.0, 9.0], 1)
    with pytest.raises(ValueError, match=r"slots must hold integers, got (bool|float)"):
        token_sparse_attention(one(), k, v, mask)
    with pytest.raises(ValueError, match=r"page_indices must hold integers, got (bool|float)"):
        page_sparse_attention(one(), k, v, ids([0, 1]), ids(2), mask)
    with pytest.raises(ValueError, match=r"token_ids must hold integers, got (bool|float)"):
        compaction.compact(tracked(), mask)
    expect(token_sparse_attention(one(), k, v, ids([[0, -1]])), 1.0, 0.0)


@every_implementation
def test_case_CP_1_tokens_dealt_out_to_two_devices(implementation):
    """Token p is on device p mod 2, at p // 2 there: of the chosen 0, 3 and 4, the first has 0 and 2, the other 1."""
    rng, choice = np.random.default_rng(0), np.array([0, 3, 4])
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 2, 8), (6, 1, 8), (6, 1, 8)))
    whole = token_sparse_attention(q, k[:, :, None], v[:, :, None], ids([choice]), implementation=implementation)
    parts = []
    for device in range(2):
        local = choice[choice % 2 == device] // 2
        assert local.tolist() == ([0, 2], [1])[device]
        pools = (x[device::2][:, :, None] for x in (k, v))
        parts.append(token_sparse_attention(q, *pools, ids([local]), implementation=implementation))
    merged = merge_attention(jnp.stack([part.out for part in parts]), jnp.stack([part.lse for part in parts]))
    assert_close(merged.out, whole.out)
    assert_close(merged.lse, whole.lse, name="lse")


@every_implementation
@pytest.mark.parametrize("length", [1, 0])
def test_case_CP_2_most_of_eight_shards_are_empty(length, implementation):
    q, k, v = one(2.0), pool([3.0], 1), pool([5.0], 1)
    parts = [paged_attention(q, k, v, ids([0]), ids(int(i < length)), implementation=implementation) for i in range(8)]
    merged = merge_attention(jnp.stack([part.out for part in parts]), jnp.stack([part.lse for part in parts]))
    alone = paged_attention(q, k, v, ids([0]), ids(length), implementation=implementation)
    assert_same_bits(merged.out, alone.out)
    assert_same_bits(merged.lse, alone.lse)
    expect(merged, *((5.0, 6.0) if length else (0.0, -np.inf)))


@pytest.mark.parametrize("implementation", KERNELS)
def test_case_SPLIT_1_a_row_among_others(implementation):
    """One row alone, then with 1, 7 and 63 others: the same bits with the exact configuration."""
    case, per_row = dataclasses.replace(CASES["gqa4"], B=64), {"q", "page_table", "lengths", "page_indices", "slots"}
    x, config = make_inputs(case), Config(exact=True, block_tokens=16)
    rows = []
    for batch in (1, 2, 8, 64):
        part = {name: a[:batch] if name in per_row else a for name, a in x.items()}
        smaller = dataclasses.replace(case, B=batch)
        rows.append(call("token_sparse", smaller, part, implementation=implementation, config=config))
    for other in rows[1:]:
        assert_same_bits(other.out[0], rows[0].out[0])
        assert_same_bits(other.lse[0], rows[0].lse[0])


def test_case_EVICT_1_the_next_token_after_compaction():
    """Tokens 1 and 3 of 0 to 5 go: the next one sits at 6, and what was kept keeps its key as it was rotated."""
    state, k, v = append(tracked(), (6, 0, 0))
    state, _ = compact(state, chosen([[0, 2, 4, 5]] * 2, NONE, NONE))
    assert int(state.full_lengths[0]) == 6
    state, k1, v1 = append(state, (1, 0, 0), seed=1)
    expected = [row(i, k, v, 0, 0, 0, i) for i in (0, 2, 4, 5)] + [row(6, k1, v1, 0, 0, 0, 0)]
    assert held(state, 0, 0, 0) == expected
    assert int(compaction.query_positions(state)[0, 0]) - expected[0][0] == 6


@every_implementation
def test_case_EVICT_2_drafts_after_compaction_compare_positions(implementation):
    """Kept [0, 2, 5], drafts at 6 and 7: both see all that was kept, and the first does not see the second."""
    state = compaction.track(make(planes=1, kv_heads=1, key_width=1, value_width=1, requests=1))
    zeros = jnp.zeros((1, 6, 1, 1))
    state, room = reserve_prompt(state, ids(6), ids(3), 3)
    state, _ = write_prompt(state, 0, room, ids([[0, 2, 5]]), zeros, zeros)
    state, reservation = reserve(state, ids(2), 2)
    state, _ = write(state, 0, reservation, zeros[:, :2], zeros[:, :2])
    positions, view = compaction.query_positions(state, 2), paging.view(state.paged, 0)
    assert positions.tolist() == [[6, 7]]
    got = paged_attention(
        jnp.ones((1, 2, 1, 1)), *paging.flat(state.paged.kv), view.page_table, view.lengths,
        q_positions=positions, key_positions=state.key_positions, implementation=implementation,
    )  # fmt: skip
    np.testing.assert_allclose(np.exp(got.lse.ravel()), [4, 5], rtol=1e-5)


def test_case_EVICT_3_a_short_prompt_keeps_a_token():
    state, (k, v) = tracked(), prompt(tracked())
    kept = retained_count(np.array([1, 2, 9]), 0.4)
    assert kept.tolist() == [1, 1, 4]
    state = prefill(state, (1, 2, 9), kept, chosen([[0]] * 2, [[1], [0]], [[0, 1, 2, 3]] * 2), k, v)
    np.testing.assert_array_equal(state.paged.table.lengths, kept)
    np.testing.assert_array_equal(state.full_lengths, [1, 2, 9])


def test_case_PREFIX_1_positions_follow_the_page_that_is_copied():
    state, k, v = append(tracked(), (9, 0, 0))
    state, _ = compact(state, chosen([[0, 8], [1, 2]], NONE, NONE))
    state, _ = share(state, 0, 1, 2)
    page = int(state.paged.table.pages[1, 0])
    state, k1, v1 = append(state, (0, 1, 0), seed=1)  # into a copy: the page is request 0's as well
    assert int(state.paged.table.pages[1, 0]) != page
    for head, kept in enumerate(([0, 8], [1, 2])):
        here = [row(i, k, v, 1, 0, head, i) for i in kept]
        assert held(state, 1, 1, head) == [*here, row(9, k1, v1, 1, 1, head, 0)]
        assert held(state, 0, 1, head) == here


def test_case_PREFIX_2_compaction_leaves_the_other_owner_alone():
    alone, k, v = append(tracked(), (9, 0, 0))
    shared, _ = share(alone, 0, 1, 9)
    before = jax.tree.map(lambda x: x[:, :3], shared.paged.kv)  # the three pages of both
    shared, _ = compact(shared, chosen([[0, 8], [1, 2]], NONE, NONE))
    same(jax.tree.map(lambda x: x[:, :3], shared.paged.kv), before)
    assert held(shared, 1, 1, 0) == [row(i, k, v, 1, 0, 0, i) for i in range(9)]


def test_case_PAD_2_and_OOB_1_absent_tokens_write_nothing():
    """Neither keys nor positions, at the end of the last page least of all."""
    state = tracked()
    marked = dataclasses.replace(state, key_positions=jnp.full_like(state.key_positions, 77))
    k, v = prompt(state)
    after, room = reserve_prompt(marked, counts_of(9, 0, 9), counts_of(2, 0, 1), 6)
    after, stale = write_prompt(after, 0, room, chosen([[0, 8], [1, 2]], NONE, [[3], [4]]), k[0], v[0])
    assert int(stale) == 0
    changed = np.asarray(after.key_positions) != 77
    assert changed.sum() == (2 + 1) * 2
    assert not changed[:, :, 3].any()
    assert not changed[9:].any(), "the other plane"
    assert (np.asarray(after.paged.kv.k) != 0).any(axis=(2, 4)).sum() == 3


def test_case_BOUNDS_1_a_wild_plane_is_absent():
    state, (k, v) = tracked(), prompt(tracked())
    state, room = reserve_prompt(state, counts_of(9, 0, 0), counts_of(2, 0, 0), 6)
    for plane in (-1, 2, 2**31 - 1):
        after, stale = write_prompt(state, plane, room, chosen([[0, 8], [1, 2]], NONE, NONE), k[0], v[0])
        same(after, state)
        assert int(stale) == 2


def test_case_COMPILE_1_and_2_lengths_and_selections_do_not_retrace():
    traces = []

    @jax.jit
    def keep(state, selection):
        traces.append(1)
        return compaction.compact(state, selection)[0]

    for n in (3, 7):
        state, k, v = append(tracked(), (n, 0, 0))
        kept = keep(state, chosen([[0, n - 1], [1, n - 1]], NONE, NONE))
        assert held(kept, 0, 0, 0) == [row(i, k, v, 0, 0, 0, i) for i in (0, n - 1)]
    assert len(traces) == 1


def test_case_DONATE_1_and_2_a_state_is_donated_as_a_whole():
    state, _, _ = append(tracked(), (9, 0, 0))
    after, _ = jax.jit(compaction.compact, donate_argnums=0)(state, chosen([[0], [1]], NONE, NONE))
    assert int(after.full_lengths[0]) == 9
    with pytest.raises(ValueError, match="was donated to an earlier call: go on with what"):
        compaction.reserve(state, counts_of(1, 0, 0), 1)


def test_case_QUANT_2_kept_values_saturate_in_eight_bits():
    values = [448.0, 464.0, 465.0, 1000.0, -1000.0]
    state = compaction.track(make(planes=1, kv_heads=1, key_width=5, value_width=5, requests=1, dtype="float8_e4m3fn"))
    state, room = reserve_prompt(state, ids(2), ids(1), 1)
    new = jnp.array([[0.0] * 5, values]).reshape(1, 2, 1, 5)
    state, _ = write_prompt(state, 0, room, ids([[1]]), new, new)
    kept = paging.gather(state.paged, 0, 0)[0][0, 0].astype(jnp.float32)
    assert kept.tolist() == [448, 448, 448, 448, -448]


def test_case_LOOP_1_each_plane_keeps_tokens_of_its_own():
    state, k, v = append(tracked(), (9, 0, 0))
    state, _ = compact(state, jnp.stack([chosen([[1], [1]], NONE, NONE), chosen([[2], [2]], NONE, NONE)]))
    for plane in range(2):
        assert held(state, 0, plane, 0) == [row(plane + 1, k, v, plane, 0, 0, plane + 1)]


@every_implementation
def test_case_POISON_1_nobodys_places_hold_anything(implementation):
    """A head that keeps fewer tokens than the others has places without a key: NaN there reaches nothing."""
    positions = ids([[0, 3, -1, -1]]).reshape(1, 1, 4)
    k, v = pool([0.0, 0.0, np.nan, np.nan], 4), pool([1.0, 3.0, np.nan, np.nan], 4)
    options = {"q_positions": ids(9), "key_positions": positions, "implementation": implementation}
    expect(paged_attention(one(), k, v, ids([0]), ids(4), **options), 2.0, LN2)
    expect(page_sparse_attention(one(), k, v, ids([0]), ids(4), ids([[0]]), **options), 2.0, LN2)
