"""Quest: the envelope is exact and follows its page, its bound holds, and the choice is the best by that bound."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import selectors
from sparse_jax.selectors.quest import page_bounds
from tests.sparse_jax.selectors.helpers import chosen, filled, make_cache, queries, select

QUEST = selectors.get("quest", budget=16, sinks=1, recent=2)


bounds_of = jax.jit(page_bounds, static_argnums=3)


def assert_same(state, other):
    for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(other)):
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint32), np.asarray(expected).view(np.uint32))


@pytest.mark.parametrize(("page_size", "dtype"), [(1, np.float16), (4, jnp.bfloat16), (16, np.float32)])
@pytest.mark.parametrize(("planes", "plane"), [(1, 0), (3, 0), (3, 2)])
def test_envelope_is_the_smallest_and_largest_key(page_size, planes, plane, dtype):
    cache = make_cache([33, 0, 16], page_size=page_size, table_width=48 // page_size, planes=planes, plane=plane)
    cache = cache._replace(keys=cache.keys.astype(dtype))
    state = filled(QUEST, cache)
    table = np.asarray(cache.view.page_table)
    for b, length in enumerate(np.asarray(cache.view.lengths)):
        for page in range(-(-int(length) // page_size)):
            keys = cache.keys[b, page * page_size : min(length, (page + 1) * page_size)].astype(np.float32)
            np.testing.assert_array_equal(state.lo[table[b, page]], keys.min(axis=0))
            np.testing.assert_array_equal(state.hi[table[b, page]], keys.max(axis=0))
    untouched = np.setdiff1d(np.arange(state.lo.shape[0]), table)
    assert not np.asarray(state.lo)[untouched].any()
    assert not np.asarray(state.hi)[untouched].any()


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 4]), st.sampled_from([1, 4, 16]), st.booleans())
@hypothesis.settings(max_examples=30, deadline=None)
def test_no_key_scores_above_the_bound_of_its_page(seed, group, page_size, large):
    cache = make_cache([32], page_size=page_size, table_width=32 // page_size, seed=seed)
    if large:
        cache = cache._replace(keys=cache.keys * 100)
    q = queries(1, 2, 2 * group, seed=seed)
    bounds = np.asarray(bounds_of(filled(QUEST, cache), q, cache.view.page_table[:, None]))
    exact = np.einsum("tkgd,skd->kgts", np.asarray(q[0], np.float64).reshape(2, 2, group, 8), cache.keys[0]) / 8**0.5
    exact = exact.reshape(2, group, 2, -1, page_size)
    assert (bounds[0] >= exact.max(axis=-1) - 1e-5 * np.abs(exact).max()).all()
    if page_size == 1:
        np.testing.assert_allclose(bounds[0], exact[..., 0], rtol=1e-5, atol=1e-5 * np.abs(exact).max())


def reference_share(cache, q, length, rows):
    """Best log share of any head and row that each page could have, [Hkv, pages], in float64 and by the definition."""
    _, _, kv_heads, page_size, width = cache.kv.k.shape
    keys = cache.keys[0, :length].astype(np.float64)
    q = np.asarray(q[0], np.float64).reshape(rows, kv_heads, -1, width) / width**0.5
    pages = -(-length // page_size)
    best = np.full((kv_heads, pages), -np.inf)
    for k in range(kv_heads):
        boxes = [keys[p * page_size : (p + 1) * page_size, k] for p in range(pages)]
        for t in range(rows):
            seen = (length - rows + t) // page_size + 1  # pages that begin at or before this row's position
            for g in range(q.shape[2]):
                bound = [np.maximum(q[t, k, g] * x.min(0), q[t, k, g] * x.max(0)).sum() for x in boxes[:seen]]
                best[k, :seen] = np.maximum(best[k, :seen], np.array(bound) - np.logaddexp.reduce(bound))
    return best


@pytest.mark.parametrize(
    ("group", "page_size", "rows"), [(1, 1, 1), (3, 4, 1), (4, 16, 1), (1, 16, 3), (3, 1, 3), (4, 4, 3)]
)
def test_pages_with_the_highest_shares_are_chosen(group, page_size, rows):
    length = 61
    cache = make_cache([length], page_size=page_size, table_width=64 // page_size, seed=group)
    q = queries(1, rows, 2 * group, seed=page_size) * np.repeat([1.0, 7.0], group)[:, None]
    selector = selectors.get("quest", budget=32, sinks=1, recent=1)
    kept = chosen(select(selector, cache, q))
    share = reference_share(cache, q, length, rows)
    always = {0, *(token // page_size for token in range(length - rows, length))}
    for k in range(2):
        rest = [page for page in np.argsort(-share[k], kind="stable") if page not in always]
        width = selector.width(page_size=page_size, table_width=64 // page_size, rows=rows)
        assert kept[k] == always | set(rest[: width - len(always)])


def test_a_loud_head_does_not_outvote_a_quiet_one():
    """One head has scores ten times as large but attends evenly; the other needs one page. Raw bounds would miss it."""
    keys = np.zeros((1, 64, 1, 8), np.float32)
    keys[0, :, 0, 0] = 5 + np.linspace(
        0, 0.01, 64
    )  # the loud head's direction: all pages alike, the last a hair better
    keys[0, 22, 0, 1] = 8  # what the quiet head looks for
    cache = make_cache([64], page_size=4, table_width=16, kv_heads=1)._replace(keys=keys)
    q = jnp.zeros((1, 1, 2, 8)).at[0, 0, 0, 0].set(10).at[0, 0, 1, 1].set(1)
    kept = chosen(select(selectors.get("quest", budget=12, sinks=0, recent=1), cache, q))[0]
    assert 22 // 4 in kept
    raw = bounds_of(filled(QUEST, cache), q, cache.view.page_table[:, None]).max(axis=(2, 3))[0, 0]
    assert 22 // 4 not in np.argsort(-raw)[:3]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("position", [4, 30, 77, 118])
def test_a_planted_key_is_found(position, rows):
    cache = make_cache([120, 64], page_size=4, table_width=32)
    needle = np.random.default_rng(2).standard_normal((2, 8)).astype(np.float32)
    q = queries(2, rows, 6).at[0, -1].add(2 * needle.repeat(3, axis=0))  # the heads of a group look for the same
    keys = cache.keys.copy()
    keys[0, position] = 4 * needle
    kept = chosen(select(QUEST, cache._replace(keys=keys), q))
    assert position // 4 in kept[0]
    assert position // 4 in kept[1]


def test_budget_at_least_the_length_is_all_pages():
    cache = make_cache([120, 7], page_size=4, table_width=64)
    for budget in (120, 121, 4096):
        kept = chosen(select(selectors.get("quest", budget=budget), cache, queries(2, 1, 4)))
        assert kept == [set(range(30))] * 2 + [{0, 1}] * 2


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prefill_equals_token_by_token_bit_for_bit(page_size):
    cache = make_cache([45, 32], page_size=page_size, table_width=48 // page_size, planes=2, plane=1)
    keys = cache.keys.copy()
    keys[:, ::3, :, ::2] = 0.0  # equal values and zeros of both signs: min and max must not depend on the order
    keys[:, 1::3, :, ::2] = -0.0
    keys[0, 5, 0, 3] = np.nan
    cache = cache._replace(keys=keys)
    prefill = jax.jit(QUEST.write)(QUEST.init(cache.kv), jnp.asarray(keys), jnp.asarray(cache.slots))

    def step(state, token):
        return QUEST.write(state, *token), None

    slots = jnp.asarray(cache.slots.T)
    steps, _ = jax.jit(functools.partial(jax.lax.scan, step))(
        QUEST.init(cache.kv), (jnp.asarray(keys.swapaxes(0, 1)), slots)
    )
    assert_same(prefill, steps)
    shuffled = np.random.default_rng(3).permutation(keys[0].shape[0])
    order = QUEST.write(QUEST.init(cache.kv), jnp.asarray(keys[1:]), jnp.asarray(cache.slots[1:]))
    order = QUEST.write(order, jnp.asarray(keys[0, shuffled]), jnp.asarray(cache.slots[0, shuffled]))
    assert_same(prefill, order)


def test_a_reused_page_begins_anew():
    """The next owner of a page inherits nothing, whether it fills the page at once or token by token."""
    cache = make_cache([8], page_size=4, table_width=2)
    page = int(cache.view.page_table[0, 1])
    fresh = jnp.asarray(np.random.default_rng(5).standard_normal((3, 2, 8)), jnp.float32)
    slots = page * 4 + jnp.arange(3, dtype=jnp.int32)
    loud = filled(QUEST, cache._replace(keys=cache.keys * 100))
    alone = QUEST.write(QUEST.init(cache.kv), fresh, slots)
    at_once = QUEST.write(loud, fresh, slots)
    one_by_one = loud
    for t in range(3):
        one_by_one = QUEST.write(one_by_one, fresh[t : t + 1], slots[t : t + 1])
    for state in (at_once, one_by_one):
        np.testing.assert_array_equal(state.lo[page], alone.lo[page])
        np.testing.assert_array_equal(state.hi[page], alone.hi[page])
        others = np.delete(np.arange(state.lo.shape[0]), page)
        np.testing.assert_array_equal(state.lo[others], loud.lo[others])


def test_mutation_without_the_reset_the_old_owner_shows():
    """The test above would notice: keys written from offset 1 on do not begin the page anew."""
    cache = make_cache([8], page_size=4, table_width=2)
    page = int(cache.view.page_table[0, 1])
    loud = filled(QUEST, cache._replace(keys=cache.keys * 100))
    late = QUEST.write(loud, jnp.ones((3, 2, 8)), page * 4 + 1 + jnp.arange(3, dtype=jnp.int32))
    assert (np.asarray(late.hi[page]) > 1).any()


BAD_SLOTS = [-1, -2, -(2**31), 2**31 - 1]


def test_case_PAD_2_and_OOB_1_absent_slots_write_nothing():
    """PAD-2, OOB-1: -1 and ids out of range reach no page; the last page least of all."""
    cache = make_cache([8], page_size=4, table_width=2)
    state = filled(QUEST, cache)
    pool = state.lo.shape[0] * 4
    bad = jnp.array([*BAD_SLOTS, pool, pool + 4], jnp.int32)
    assert_same(QUEST.write(state, jnp.full((6, 2, 8), 1e6), bad), state)
    mixed = QUEST.write(state, jnp.full((2, 2, 8), 1e6), jnp.array([-1, 5], jnp.int32))
    changed = np.flatnonzero((np.asarray(mixed.hi) != np.asarray(state.hi)).any(axis=(1, 2)))
    assert changed.tolist() == [1]


def test_case_PREFIX_1_side_data_moves_with_its_page():
    """PREFIX-1: after copies the targets have the sources' envelopes, and nothing else has changed."""
    cache = make_cache([32], page_size=4, table_width=8)
    state = filled(QUEST, cache)
    moved = jax.jit(QUEST.copy)(state, jnp.array([2, -1, 5, 3], jnp.int32), jnp.array([9, 4, -1, 0], jnp.int32))
    for name in ("lo", "hi"):
        expected = np.array(getattr(state, name))
        expected[[9, 0]] = expected[[2, 3]]
        np.testing.assert_array_equal(getattr(moved, name), expected)


def test_case_PREFIX_1_copies_happen_at_once():
    """A swap, and a page that is both read and overwritten: sources are read before any target is written."""
    cache = make_cache([32], page_size=4, table_width=8)
    state = filled(QUEST, cache)
    moved = QUEST.copy(state, jnp.array([1, 2, 3], jnp.int32), jnp.array([2, 1, 4], jnp.int32))
    np.testing.assert_array_equal(moved.lo[jnp.array([2, 1, 4])], state.lo[jnp.array([1, 2, 3])])


def test_copies_of_absent_pages_are_no_ops():
    state = filled(QUEST, make_cache([32], page_size=4, table_width=8))
    pages = state.lo.shape[0]
    bad = jnp.array([*BAD_SLOTS, pages], jnp.int32)
    assert_same(QUEST.copy(state, bad, jnp.zeros(5, jnp.int32)), state)
    assert_same(QUEST.copy(state, jnp.zeros(5, jnp.int32), bad), state)


def test_a_choice_does_not_depend_on_placement():
    """The same tokens in other physical pages give the same page indices."""
    q = queries(2, 1, 4)
    first = make_cache([61, 30], page_size=4, table_width=16, planes=3, plane=2)
    other = make_cache([61, 30], page_size=4, table_width=16, seed=9)._replace(keys=first.keys)
    np.testing.assert_array_equal(select(QUEST, first, q), select(QUEST, other, q))


def test_case_POISON_foreign_pages_change_nothing():
    """POISON: whatever pages outside the table hold, and whatever a sick request wrote, the choice is the same."""
    cache = make_cache([61, 40], page_size=4, table_width=16)
    q = queries(2, 1, 4)
    clean = select(QUEST, cache, q)
    keys = cache.keys.copy()
    keys[1] = np.nan
    keys[1, ::2] = np.inf
    sick = filled(QUEST, cache._replace(keys=keys))
    unused = np.setdiff1d(np.arange(sick.lo.shape[0]), np.asarray(cache.view.page_table))
    sick = QUEST.write(sick, jnp.full((len(unused), 2, 8), -jnp.inf), jnp.asarray(unused * 4, jnp.int32))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sick))
    pages = select(QUEST, cache, q.at[1, 0, 1].set(jnp.nan), sick)
    np.testing.assert_array_equal(pages[0], clean[0])
    assert [len(kept) for kept in chosen(pages[1])] == [4, 4]  # a sick request still gets its pages


@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_does_not_copy_the_envelope(batch):
    """Two layers inside lax.scan, the keys of the second made of what the first one chose: the state exists once."""
    cache = make_cache([4096], page_size=4, table_width=1024, planes=2)
    state = QUEST.init(cache.kv)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    pages = state.lo.shape[0] // 2
    view = type(cache.view)(jnp.arange(8 * batch, dtype=jnp.int32).reshape(batch, 8), jnp.full(batch, 20, jnp.int32))

    def step(state, token):
        keys, slots = token
        for plane in range(2):
            state = QUEST.write(state, keys, jnp.where(slots >= 0, slots + plane * pages * 4, -1))
            table = jnp.where(view.page_table >= 0, view.page_table + plane * pages, -1)
            chosen_pages = QUEST.select(state, keys, view._replace(page_table=table), kv_heads=2, page_size=4)
            keys = keys + chosen_pages.sum(axis=-1, keepdims=True)
        return state, None

    def run(state, keys, slots):
        return jax.lax.scan(step, state, (keys, slots))[0]

    arguments = (state, jnp.ones((8, batch, 2, 8)), jnp.zeros((8, batch), jnp.int32))
    compiled = jax.jit(run, donate_argnums=0).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < size / 4


def test_the_scale_is_that_of_the_attention():
    cache = make_cache([32], page_size=4, table_width=8)
    state, q, table = filled(QUEST, cache), queries(1, 1, 4), cache.view.page_table[:, None]
    np.testing.assert_allclose(
        bounds_of(state, q, table, 0.5), bounds_of(state, q, table) * 0.5 * 8**0.5, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "scale", [float("nan"), float("inf"), -float("inf"), 1e39, 10**400, "0.5", True, 1j, [0.5], np.float32("nan")]
)
def test_a_scale_that_is_no_finite_number_is_refused(scale):
    with pytest.raises(ValueError, match="scale is a finite number"):
        selectors.get("quest", scale=scale)


def test_a_scale_becomes_a_float():
    for scale in (1, 1.0, np.float32(1), np.int64(1)):
        selector = selectors.get("quest", scale=scale)
        assert selector == selectors.get("quest", scale=1.0)
        assert type(selector.scale) is float
    assert selectors.get("quest").scale is None


@pytest.mark.parametrize("shape", [(3, 2, 7), (3, 1, 8), (2, 2, 8), (2, 8), (1, 3, 2, 8), (3, 8, 2), (16, 3)])
def test_key_shapes_are_checked(shape):
    state = QUEST.init(make_cache([8], page_size=4, table_width=2).kv)
    with pytest.raises(ValueError, match=r"keys must have the shape \[3, 2, 8\].* got \[" + ", ".join(map(str, shape))):
        QUEST.write(state, jnp.zeros(shape), jnp.arange(3, dtype=jnp.int32))


def test_slots_and_copies_are_checked():
    state = QUEST.init(make_cache([8], page_size=4, table_width=2).kv)
    with pytest.raises(ValueError, match=r"slots must hold integers, got float32"):
        QUEST.write(state, jnp.zeros((3, 2, 8)), jnp.zeros(3))
    with pytest.raises(ValueError, match=r"sources and targets must have one shape, got \[1\] and \[2\]"):
        QUEST.copy(state, jnp.zeros(1, jnp.int32), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"targets must hold integers, got float32"):
        QUEST.copy(state, jnp.zeros(1, jnp.int32), jnp.zeros(1))


def test_wide_numpy_slots_do_not_wrap():
    """Contract 1: 2 ** 32 is out of range, not slot 0."""
    cache = make_cache([8], page_size=4, table_width=2)
    state = filled(QUEST, cache)
    wide = np.array([2**32, -(2**32), 2**33 + 4])
    assert_same(QUEST.write(state, np.full((3, 2, 8), 9.0, np.float32), wide), state)
    assert_same(QUEST.copy(state, np.array([1, 1, 1]), wide), state)


@pytest.mark.parametrize("budget", [4, 4096])  # ranked, and everything fits
def test_q_and_pool_must_fit(budget):
    cache = make_cache([32], page_size=4, table_width=8)
    selector, state = selectors.get("quest", budget=budget, sinks=0, recent=1), filled(QUEST, cache)
    with pytest.raises(ValueError, match=r"q must have the key width D = 8 of the pool, got \[1, 1, 4, 6\]"):
        selector.select(state, queries(1, 1, 4, width=6), cache.view, kv_heads=2, page_size=4)
    with pytest.raises(ValueError, match="kv_heads and page_size must be those of the pool, 2 and 4, got 4 and 4"):
        selector.select(state, queries(1, 1, 4), cache.view, kv_heads=4, page_size=4)
    with pytest.raises(ValueError, match="kv_heads and page_size must be those of the pool, 2 and 4, got 2 and 8"):
        selector.select(state, queries(1, 1, 4), cache.view, kv_heads=2, page_size=8)


def drafting():
    """Six tokens, a loud draft of three (two in page 1, which stays, one in page 2), and the tokens that come instead.

    Returns the cache with all nine true tokens, the state before the draft, the state after it, and the true tokens.
    """
    cache = make_cache([9], page_size=4, table_width=3)
    slots = jnp.asarray(cache.slots[0])
    keys = jnp.asarray(cache.keys[0])
    before = QUEST.write(QUEST.init(cache.kv), keys[:6], slots[:6])
    draft = jnp.asarray(np.random.default_rng(7).normal(0, 50, (3, 2, 8)), jnp.float32)
    return cache, before, QUEST.write(before, draft, slots[6:9]), keys, slots


def test_case_SPEC_4_a_rejected_draft_loosens_the_bound_of_its_page_only():
    """SPEC-4: the bound stays an upper bound; a page that began with the draft is exact again."""
    cache, before, drafted, keys, slots = drafting()
    never, after = (QUEST.write(state, keys[6:9], slots[6:9]) for state in (before, drafted))
    page = int(cache.view.page_table[0, 1])
    assert (np.asarray(after.lo) <= np.asarray(never.lo)).all()
    assert (np.asarray(after.hi) >= np.asarray(never.hi)).all()
    differs = (np.asarray(after.lo) != np.asarray(never.lo)) | (np.asarray(after.hi) != np.asarray(never.hi))
    assert np.flatnonzero(differs.any(axis=(1, 2))).tolist() == [page]
    q, table = queries(1, 1, 2), cache.view.page_table[:, None]
    loose, tight = (np.asarray(bounds_of(state, q, table))[0, :, 0, 0] for state in (after, never))  # [Hkv, W]
    exact = np.einsum("kd,skd->ks", np.asarray(q[0, 0]), cache.keys[0, 4:8]) / 8**0.5
    assert (loose[:, 1] >= exact.max(axis=-1)).all()
    assert (loose[:, 1] > tight[:, 1]).all()
    np.testing.assert_array_equal(loose[:, [0, 2]], tight[:, [0, 2]])


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_case_SPEC_4_the_old_state_gives_the_bits_of_no_draft(accepted):
    """SPEC-4: the state before the draft, or its touched pages put back, then only the accepted tokens."""
    cache, before, drafted, keys, slots = drafting()
    assert any((np.asarray(x) != np.asarray(y)).any() for x, y in zip(*map(jax.tree.leaves, (before, drafted))))
    count = 6 + accepted
    one_by_one = QUEST.init(cache.kv)
    for t in range(count):
        one_by_one = QUEST.write(one_by_one, keys[t], slots[t])
    kept = jnp.where(jnp.arange(9) < count, slots[:9], -1)[6:]
    touched = cache.view.page_table[0, 1:]
    put_back = dataclasses.replace(
        drafted, lo=drafted.lo.at[touched].set(before.lo[touched]), hi=drafted.hi.at[touched].set(before.hi[touched])
    )
    for restored in (before, put_back):
        assert_same(QUEST.write(restored, keys[6:9], kept), one_by_one)
