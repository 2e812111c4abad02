"""Quest and LServe: no key scores above its bound, and the choice is the best by that bound."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import selectors
from sparse_jax.selectors import Pages
from tests.sparse_jax.selectors.helpers import (
    KV,
    chosen,
    filled,
    make_cache,
    queries,
    quick_jit,
    select,
    write,
)

QUEST = selectors.get("quest", budget=16, sinks=1, recent=2)


def _bounds(state, q, view, page_size, scale):
    pages = Pages.of(view, kv_heads=2, page_size=page_size, rows=q.shape[1])
    return state.bounds(q, pages, scale)


jitted_bounds = quick_jit(_bounds, static_argnums=(3, 4))


def bounds_of(state, q, cache, scale=8**-0.5):
    """[B, Hkv, G, T, W]"""
    return np.asarray(jitted_bounds(state, q, cache.view, cache.kv.k.shape[3], scale))


def exact_scores(cache, q, page_size):
    """[Hkv, G, T, W, P] of request 0, whose table is full, in float64."""
    keys = np.asarray(cache.keys[0], np.float64)
    q = np.asarray(q[0], np.float64).reshape(q.shape[1], 2, -1, 8)
    scores = np.einsum("tkgd,skd->kgts", q, keys) / 8**0.5
    return scores.reshape(*scores.shape[:3], -1, page_size)


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3]), st.sampled_from([1, 4, 32]), st.booleans())
@hypothesis.settings(max_examples=30, deadline=None)
def test_no_key_scores_above_the_bound_of_its_page(seed, group, page_size, large):
    """T27: for queries of both signs; of pages of one token the bound is the score."""
    selector = selectors.get("lserve" if page_size == 32 else "quest")
    cache = make_cache([64], page_size=page_size, table_width=64 // page_size, seed=seed)
    if large:
        cache = cache._replace(keys=cache.keys * 100)
    q = queries(1, 1, 2 * group, seed=seed)
    state, exact = filled(selector, cache), exact_scores(cache, q, page_size)
    bounds, slack = bounds_of(state, q, cache)[0], 1e-5 * np.abs(exact).max()
    assert (bounds >= exact.max(axis=-1) - slack).all()
    if page_size == 1:
        np.testing.assert_allclose(bounds, exact[..., 0], rtol=1e-5, atol=slack)


def test_mutation_the_largest_components_alone_are_no_bound():
    """T27: where q is negative q . hi is a lower bound; the test above would notice."""
    cache, q = make_cache([64], page_size=4, table_width=16), queries(1, 1, 6)
    state = filled(QUEST, cache)
    exact = exact_scores(cache, q, 4).max(axis=-1)
    assert (bounds_of(state, q, cache)[0] >= exact - 1e-5).all()
    assert (bounds_of(dataclasses.replace(state, lo=state.hi), q, cache)[0] < exact - 0.1).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bound_holds_for_the_stored_keys_of_a_16_bit_pool(dtype):
    cache, q = make_cache([64], page_size=4, table_width=16), queries(1, 1, 6)
    state = filled(QUEST, cache._replace(kv=KV(*(x.astype(dtype) for x in cache.kv))))
    stored = cache._replace(keys=np.asarray(jnp.asarray(cache.keys).astype(dtype), np.float32))
    assert (bounds_of(state, q, cache)[0] >= exact_scores(stored, q, 4).max(axis=-1) - 1e-5).all()


def test_parts_of_a_page_bound_more_tightly_and_never_show_an_old_owner():
    """LServe: the largest of the bounds of 16 tokens; a part that holds no token yet does not count."""
    cache, q = make_cache([64, 40], page_size=32, table_width=2), queries(2, 1, 4)
    lserve, quest = selectors.get("lserve"), selectors.get("quest")
    loud = filled(lserve, cache._replace(view=cache.view._replace(lengths=jnp.array([64, 64])), keys=cache.keys * 100))
    state = write(lserve, loud, cache.keys, cache.slots)
    tight, loose = bounds_of(state, q, cache), bounds_of(filled(quest, cache), q, cache)
    assert (tight <= loose + 1e-5).all()
    assert (tight[0] < loose[0] - 0.1).any()
    exact = exact_scores(cache, q, 32).max(axis=-1)
    assert (tight[0] >= exact - 1e-5).all()
    np.testing.assert_array_equal(tight, bounds_of(filled(lserve, cache), q, cache))


@pytest.mark.parametrize("page_size", [4, 16])
def test_lserve_is_quest_at_page_sizes_up_to_16(page_size):
    cache, q = make_cache([256, 100], page_size=page_size, table_width=256 // page_size), queries(2, 1, 6)
    options = {"budget": 4 * page_size, "sinks": 1, "recent": 2}
    quest, lserve = (select(selectors.get(name, **options), cache, q) for name in ("quest", "lserve"))
    np.testing.assert_array_equal(quest, lserve)


def reference_share(cache, q, length, rows, name):
    """Best log share of any head and row that each page could have, [Hkv, pages], in float64 and by the definition."""
    _, _, kv_heads, page_size, width = cache.kv.k.shape
    keys = cache.keys[0, :length].astype(np.float64)
    q = np.asarray(q[0], np.float64).reshape(rows, kv_heads, -1, width) / width**0.5
    pages = -(-length // page_size)
    best = np.full((kv_heads, pages), -np.inf)
    for k in range(kv_heads):
        inside = [keys[p * page_size : (p + 1) * page_size, k] for p in range(pages)]
        for t in range(rows):
            seen = (length - rows + t) // page_size + 1  # pages that begin at or before this row's position
            for g in range(q.shape[2]):
                x = q[t, k, g]
                if name == "quest":
                    logit = [np.maximum(x * page.min(0), x * page.max(0)).sum() for page in inside[:seen]]
                else:
                    logit = [x @ page.mean(axis=0) for page in inside[:seen]]
                best[k, :seen] = np.maximum(best[k, :seen], np.array(logit) - np.logaddexp.reduce(logit))
    return best


@pytest.mark.parametrize("name", ["quest", "centroid"])
@pytest.mark.parametrize(("group", "page_size", "rows"), [(1, 1, 1), (3, 4, 1), (4, 16, 1), (1, 16, 3), (4, 4, 3)])
def test_pages_with_the_highest_shares_are_chosen(name, group, page_size, rows):
    length = 61
    cache = make_cache([length], page_size=page_size, table_width=64 // page_size, seed=group)
    q = queries(1, rows, 2 * group, seed=page_size) * np.repeat([1.0, 7.0], group)[:, None]
    selector = selectors.get(name, budget=32, sinks=1, recent=1)
    kept = chosen(select(selector, cache, q))
    share = reference_share(cache, q, length, rows, name)
    always = {0, *(token // page_size for token in range(length - rows, length))}
    for k in range(2):
        rest = [page for page in np.argsort(-share[k], kind="stable") if page not in always]
        width = selector.width(page_size=page_size, table_width=64 // page_size, rows=rows)
        assert kept[k] == always | set(rest[: width - len(always)])


def test_a_loud_head_does_not_outvote_a_quiet_one():
    """One head has scores ten times as large but attends evenly; the other needs one page. Raw bounds would miss it."""
    keys = np.zeros((1, 64, 2, 8), np.float32)
    # the loud head's direction: all pages alike, the last a hair better
    keys[0, :, :, 0] = (5 + np.linspace(0, 0.01, 64))[:, None]
    keys[0, 22, :, 1] = 8  # what the quiet head looks for
    cache = make_cache([64], page_size=4, table_width=16)._replace(keys=keys)
    q = jnp.zeros((1, 1, 4, 8)).at[0, 0, ::2, 0].set(10).at[0, 0, 1::2, 1].set(1)
    kept = chosen(select(selectors.get("quest", budget=12, sinks=0, recent=1), cache, q))
    assert 22 // 4 in kept[0]
    raw = bounds_of(filled(QUEST, cache), q, cache).max(axis=(2, 3))[0, 0]
    assert 22 // 4 not in np.argsort(-raw)[:3]


@pytest.mark.parametrize("name", ["quest", "centroid", "lserve", "h2o_sparse_attention", "gqa_h2o_sparse_attention"])
def test_a_planted_key_is_found(name):
    selector = selectors.get(name, budget=16, sinks=1, recent=2)
    needle = np.random.default_rng(2).standard_normal((2, 8)).astype(np.float32)
    q = queries(2, 1, 6).at[0, -1].add(3 * needle.repeat(3, axis=0))  # the heads of a group look for the same
    for position in (4, 30, 77, 118):
        cache = make_cache([120, 64], page_size=4, table_width=32)
        keys = cache.keys.copy()
        keys[0, position] = 8 * needle
        kept = chosen(select(selector, cache._replace(keys=keys), q))
        assert position // 4 in kept[0]
        assert position // 4 in kept[1]


@pytest.mark.parametrize("name", ["quest", "centroid", "gqa_h2o_sparse_attention"])
def test_case_POISON_foreign_pages_change_nothing(name):
    """POISON, T26: whatever other pages hold, and whatever a sick request wrote, the choice is the same."""
    selector = selectors.get(name, budget=16, sinks=1, recent=2)
    cache = make_cache([61, 40], page_size=4, table_width=16)
    q = queries(2, 1, 4)
    clean = select(selector, cache, q)
    keys = cache.keys.copy()
    keys[1] = np.nan
    keys[1, ::2] = np.inf
    sick = filled(selector, cache._replace(keys=keys))
    unused = np.setdiff1d(np.arange(34), np.asarray(cache.view.page_table))
    sick = write(selector, sick, np.full((len(unused), 2, 8), -np.inf, np.float32), (unused * 4).astype(np.int32))
    pages = select(selector, cache, q.at[1, 0, 1].set(jnp.nan), sick)
    np.testing.assert_array_equal(pages[0], clean[0])
    assert [len(kept) for kept in chosen(pages[1])] == [4, 4]  # a sick request still gets its pages


def test_the_scale_is_that_of_the_attention():
    cache, q = make_cache([32], page_size=4, table_width=8), queries(1, 1, 4)
    state = filled(QUEST, cache)
    np.testing.assert_allclose(
        bounds_of(state, q, cache, 0.5), bounds_of(state, q, cache) * 0.5 * 8**0.5, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", ["quest", "centroid", "lserve"])
def test_a_scale_that_is_no_finite_number_is_refused(name):
    for scale in (float("nan"), float("inf"), -float("inf"), 1e39, 10**400, "0.5", True, 1j, [0.5], np.float32("nan")):
        with pytest.raises(ValueError, match="scale is a finite number"):
            selectors.get(name, scale=scale)


def test_a_scale_becomes_a_float():
    for scale in (1, 1.0, np.float32(1), np.int64(1)):
        selector = selectors.get("quest", scale=scale)
        assert selector == selectors.get("quest", scale=1.0)
        assert type(selector.scale) is float
    assert selectors.get("quest").scale is None


@pytest.mark.parametrize("name", ["quest", "centroid", "h2o_sparse_attention"])
@pytest.mark.parametrize("budget", [4, 4096])  # ranked, and everything fits
def test_q_and_pool_must_fit(name, budget):
    cache = make_cache([32], page_size=4, table_width=8)
    selector = selectors.get(name, budget=budget, sinks=0, recent=1)
    state = selector.init(cache.kv)
    with pytest.raises(ValueError, match=r"q must have the key width D = 8 of the pool, got \[1, 1, 4, 6\]"):
        selector.select(state, queries(1, 1, 4, width=6), cache.view, kv_heads=2, page_size=4)
    with pytest.raises(ValueError, match="kv_heads and page_size must be those of the pool, 2 and 4, got 4 and 4"):
        selector.select(state, queries(1, 1, 4), cache.view, kv_heads=4, page_size=4)
    with pytest.raises(ValueError, match="kv_heads and page_size must be those of the pool, 2 and 4, got 2 and 8"):
        selector.select(state, queries(1, 1, 4), cache.view, kv_heads=2, page_size=8)
