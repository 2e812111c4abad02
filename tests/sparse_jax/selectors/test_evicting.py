"""Selectors that forget tokens, as users of a cache: room, shrinking, sharing, releasing, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paging, selectors
from sparse_jax.selectors import H2OEvicting
from sparse_jax.selectors.observation import best_tokens, pooled, prompt_scores
from tests.sparse_jax.selectors.evicting_cache import (
    Plain,
    Sizes,
    assert_follows,
    begin,
    draw,
    empty,
    go_on,
    parts,
    softmax,
    sum_up,
    whole_run,
)

SIZES, SELECTOR = Sizes(), H2OEvicting(budget=6)


def h2o(tokens, plane, request, count, limit=6, prompt=None):
    def mean_of_sums(p):
        return p.sum(axis=2).mean(axis=1)

    rule = {"limit": limit, "sinks": 0, "recent": limit // 2, "prompt": prompt or mean_of_sums, "update": sum_up}
    return Plain(tokens, plane, request, count, **rule)


@pytest.mark.parametrize(("rows", "decay"), [(None, 1.0), (None, 0.9), (3, 1.0), (1000, 1.0)])
def test_prompt_scores_equal_plain_sums(rows, decay):
    """More queries than one block; padding is NaN and says nothing."""
    counts, width = (150, 2, 0), 150
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((3, width, heads, 4)).astype(np.float32) for heads in (6, 2))
    expected = np.zeros((3, 2, width))
    for b, count in enumerate(counts):
        q[b, count:], k[b, count:] = np.nan, np.nan
        for t in range(max(0, count - (rows or width)), count):
            s = np.einsum("hgd,shd->hgs", q[b, t].reshape(2, 3, 4).astype(np.float64), k[b, : t + 1]) / 2
            expected[b, :, : t + 1] += softmax(s).mean(axis=1) * decay ** (count - 1 - t)
    found = jax.jit(functools.partial(prompt_scores, rows=rows, decay=decay))(q, k, jnp.array(counts, jnp.int32))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_a_sick_query_or_key_says_nothing():
    q, k = np.ones((1, 3, 2, 4), np.float32), np.ones((1, 3, 2, 4), np.float32)
    q[0, 1, 0] = np.nan
    k[0, 2, 1] = np.inf
    found = np.asarray(prompt_scores(jnp.asarray(q), jnp.asarray(k), jnp.array([3])))
    np.testing.assert_allclose(found[0], [[1 + 1 / 3, 1 / 3, 1 / 3], [1.5, 0.5, 0]], rtol=1e-6)


def test_best_tokens_of_equal_scores_are_the_later_ones():
    scores = jnp.array([[[3.0, 1, 2, 1, 0, 9]], [[0.0, 0, 0, 0, 9, 9]], [[5.0, 1, 1, 1, 9, 9]]])
    counts, kept = jnp.array([5, 4, 4]), jnp.array([3, 3, 3])
    ids = best_tokens(scores, counts, kept, sinks=jnp.array([0, 1, 0]), recent=jnp.array([1, 1, 1]), width=4)
    np.testing.assert_array_equal(ids[:, 0], [[0, 2, 4, -1], [0, 2, 3, -1], [0, 2, 3, -1]])


def test_prompts_that_do_not_vote_keep_their_last_tokens():
    selector = H2OEvicting(budget=3, prompt_queries=False)
    scores = selector.prompt_scores(jnp.ones((1, 5, 2, 4)), jnp.ones((1, 5, 1, 4)), jnp.array([5]))
    np.testing.assert_array_equal(scores, np.zeros((1, 1, 5)))
    ids = best_tokens(scores, *jnp.array([[5], [3]]), sinks=jnp.array([0]), recent=jnp.array([1]), width=3)
    np.testing.assert_array_equal(ids[0, 0], [2, 3, 4])


def test_pooling_counts_nothing_beyond_the_ends():
    np.testing.assert_allclose(pooled(jnp.array([[[3.0, 0, 6, 0, 0]]]), 3)[0, 0], [1, 3, 2, 2, 0])


@pytest.mark.parametrize(("step", "times"), [(0.01, 1000), (1 / 4096, 4096)])
def test_case_EVICT_4_sums_do_not_stop_growing(step, times):
    """EVICT-4: 0.01 a thousand times is 10, 1/4096 that many times is 1; float32 whatever the cache."""
    state = SELECTOR.init(empty(SIZES._replace(dtype=jnp.bfloat16)).kv, 4)
    assert state.scores.dtype == jnp.float32
    weights = jnp.full((1, 1, 2, 1), step)
    total = jax.lax.fori_loop(0, times, lambda _, x: SELECTOR.updated(x, weights), jnp.zeros((1, 1, 1)))
    np.testing.assert_allclose(total, step * times, rtol=1e-3)


def test_case_EVICT_1_kept_keys_stay_as_they_are_at_their_true_positions():
    """EVICT-1: the next position counts every token that was, and no byte of a kept key changes."""
    tokens, paged, state, rows = whole_run(SELECTOR, SIZES)
    np.testing.assert_array_equal(SELECTOR.next_positions(paged, state), rows.at.max(axis=0) + 1)
    np.testing.assert_array_equal(paged.table.lengths, [6, 6, 6, 0])
    k_pages, v_pages = map(np.asarray, paging.flat(paged.kv))
    for plane, request, place in np.ndindex(SIZES.planes, 3, 6):
        page = int(paging.view(paged, plane).page_table[request, place // 4])
        for head in range(SIZES.kv_heads):
            at = int(state.key_positions[page, head, place % 4])
            assert at in rows.held(-1, plane, request, head)
            np.testing.assert_array_equal(k_pages[page, head, place % 4], tokens.k[plane, request, at, head])
            np.testing.assert_array_equal(v_pages[page, head, place % 4], tokens.v[plane, request, at, head])


def test_a_prompt_takes_the_pages_of_its_budget_only():
    paged, _ = begin(SELECTOR, SIZES, draw(SIZES))
    assert SIZES.pages - int(paged.pool.free_count) == 2 + 1 + 2  # 6, 3 and 6 tokens in pages of 4
    assert SELECTOR.tokens_held(11, 23) == 6
    assert SELECTOR.tokens_held(3, 5) == 5
    assert H2OEvicting(budget=0.25).tokens_held(11, 23) == 3


def test_one_that_finds_no_page_keeps_everything_and_goes_on_later():
    tokens = draw(SIZES)
    paged, state = begin(SELECTOR, SIZES, tokens)
    none = dataclasses.replace(paged, pool=dataclasses.replace(paged.pool, free_count=jnp.int32(0)))
    everyone = jnp.zeros((SIZES.steps, 4), bool).at[:3].set(jnp.array([True, True, True, False]))
    _, dry, dry_state, rows = go_on(SELECTOR, SIZES, tokens, none, state, everyone)
    # Request 1 grows from 3 to 4 tokens in its page, then finds no other; 0 and 2 need none.
    np.testing.assert_array_equal(dry.table.status, [paging.OK, paging.OUT_OF_PAGES, paging.OK, paging.OK])
    np.testing.assert_array_equal(SELECTOR.next_positions(dry, dry_state), [14, 4, 10, 0])
    assert not rows.stale.any()

    paged = dataclasses.replace(dry, pool=dataclasses.replace(dry.pool, free_count=jnp.int32(SIZES.pages - 5)))
    part = parts(SIZES).at[-3:].set(False)
    _, paged, state, later = go_on(SELECTOR, SIZES, tokens, paged, dry_state, part)
    # As if it had paused: its attempts left no trace in its scores.
    at = np.concatenate(
        [np.where(np.arange(4) == 1, np.where(np.arange(12)[:, None] < 1, rows.at, -1), rows.at), later.at]
    )
    both = type(rows)(*(np.concatenate(pair) for pair in zip(rows, later, strict=True)))._replace(at=at)
    both.read[1:12, :, 1] = 0
    assert_follows((tokens, paged, state, both), SIZES, h2o)


def test_released_requests_begin_anew_on_pages_with_old_scores():
    _, paged, state, _ = whole_run(SELECTOR, SIZES)
    paged, _ = jax.jit(paging.release)(paged, jnp.array([True, True, True, True]))
    np.testing.assert_array_equal(SELECTOR.next_positions(paged, state), [0, 0, 0, 0])
    assert int(paged.pool.free_count) == SIZES.pages
    tokens = draw(SIZES, seed=1)
    paged, state = begin(SELECTOR, SIZES, tokens, paged, state)
    assert_follows(go_on(SELECTOR, SIZES, tokens, paged, state), SIZES, h2o)


def test_case_PREFIX_2_a_page_with_another_holder_is_not_written():
    """PREFIX-2: somebody else holds the pages of request 0; its new tokens are dropped, and counted."""
    tokens = draw(SIZES)
    paged, state = begin(SELECTOR, SIZES, tokens)
    pages = paged.table.pages[0, :2]
    holders = paged.pool.holders.at[pages].add(1)
    paged = dataclasses.replace(paged, pool=dataclasses.replace(paged.pool, holders=holders))
    before = [np.asarray(x[:, pages]) for x in (paged.kv.k, paged.kv.v)]
    part = parts(SIZES).at[5:].set(False)
    _, paged, _, rows = go_on(SELECTOR, SIZES, tokens, paged, state, part)
    assert rows.stale.tolist() == [SIZES.planes] * 5 + [0] * 7
    for x, old in zip((paged.kv.k, paged.kv.v), before, strict=True):
        np.testing.assert_array_equal(x[:, pages], old)


def test_what_may_not_be_shared_is_refused():
    with pytest.raises(ValueError, match="H2OEvicting keeps scores or positions of one request"):
        selectors.share(SELECTOR, empty(SIZES), *jnp.array([0, 1, 4]))


@functools.partial(jax.jit, static_argnums=2)
def shrink(paged, state, track, budget):
    selector = dataclasses.replace(SELECTOR, budget=budget, most=8)
    state = selector.track(paged) if track else state
    return selector.evict(paged, state)


def test_a_cache_that_was_filled_without_it_shrinks_and_goes_on():
    """Nothing is known about its tokens: the last ones stay. Pages return to the pool."""
    tokens = draw(SIZES)
    k, v = (x[:, :, : SIZES.prompt] for x in (tokens.k, tokens.v))
    paged, _ = jax.jit(paging.append)(empty(SIZES), k, v, jnp.asarray(SIZES.counts, jnp.int32))
    assert int(paged.pool.free_count) == SIZES.pages - (3 + 1 + 2)
    paged, state, stale = shrink(paged, SELECTOR.init(paged.kv, 4), True, jnp.int32(6))
    assert int(paged.pool.free_count) == SIZES.pages - (2 + 1 + 2)
    assert int(stale) == 0
    run = go_on(SELECTOR, SIZES, tokens, paged, state)
    assert_follows(run, SIZES, functools.partial(h2o, prompt=lambda p: 0.0))


def test_a_lower_budget_gives_pages_back_and_keeps_the_best():
    tokens, paged, state, rows = whole_run(SELECTOR, SIZES)
    free = int(paged.pool.free_count)
    small, shrunk, _ = shrink(paged, state, False, jnp.int32(4))
    assert int(small.pool.free_count) == free + 3
    np.testing.assert_array_equal(small.table.lengths, [4, 4, 4, 0])
    np.testing.assert_array_equal(SELECTOR.next_positions(small, shrunk), SELECTOR.next_positions(paged, state))
    reference = [h2o(tokens, plane, r, SIZES.counts[r]) for plane, r in np.ndindex(SIZES.planes, 3)]
    for (plane, request), plain in zip(np.ndindex(SIZES.planes, 3), reference, strict=True):
        for _ in range(int((rows.at[:, request] >= 0).sum())):
            plain.step()
        page = int(paging.view(small, plane).page_table[request, 0])
        for head in range(SIZES.kv_heads):
            plain.recent = 2
            while len(plain.held[head]) > 4:
                plain.drop(head, plain.at - 2)
            at = np.asarray(shrunk.key_positions[page, head])
            assert sorted(at.tolist()) == sorted(plain.held[head])
            np.testing.assert_allclose(shrunk.scores[page, head], plain.scores[head, at], rtol=1e-5)
            np.testing.assert_array_equal(
                small.kv.k.reshape(-1, 2, 4, 4)[page, head], tokens.k[plane, request, at, head]
            )
    again, unchanged, _ = shrink(small, shrunk, False, jnp.int32(5))
    jax.tree.map(np.testing.assert_array_equal, again, small)
    np.testing.assert_array_equal(unchanged.scores, shrunk.scores)


def test_a_budget_is_at_most_the_table_and_may_be_an_array_by_request():
    lengths = jnp.array([9, 2, 0, 30], jnp.int32)
    assert H2OEvicting(budget=10**30).limits(lengths, 16, 16).tolist() == [16] * 4
    assert H2OEvicting(budget=0.4).limits(lengths, 32, 16).tolist() == [4, 1, 1, 12]
    array = H2OEvicting(budget=jnp.array([[3], [0], [9], [90]]), most=9)
    assert array.limits(lengths, 32, 16).tolist() == [3, 1, 9, 9]


REFUSED = [
    ({"budget": (4, 8)}, r"same for all planes and KV heads.*\(4, 8\)"),
    ({"budget": jnp.ones((4, 2), jnp.int32), "most": 4}, r"same for all planes and KV heads.*\[4, 2\]"),
    ({"budget": 0}, "whole number of tokens"),
    ({"scale": float("inf")}, "scale is a finite number"),
    ({"decay": 0.0}, "decay is above 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        H2OEvicting(**options)


def test_drafts_and_states_of_other_batches_are_refused():
    paged = empty(SIZES)
    state = SELECTOR.init(paged.kv, 4)
    with pytest.raises(NotImplementedError, match="one token of each request a step, got a width of 2"):
        SELECTOR.reserve(paged, state, jnp.ones(4, jnp.int32), 2)
    with pytest.raises(ValueError, match=r"q \[B, Hq, D\] or \[B, 1, Hq, D\], got \[4, 2, 6, 4\]"):
        SELECTOR.attend(state, jnp.ones((4, 2, 6, 4)), *paging.flat(paged.kv), paging.view(paged, 0))
    with pytest.raises(ValueError, match="state is for 1 requests, the cache has 4"):
        SELECTOR.reserve(paged, SELECTOR.init(paged.kv), jnp.ones(4, jnp.int32), 1)
