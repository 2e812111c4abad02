"""The two page-level H2O flows, step by step against their rules in float64 NumPy."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import selectors
from tests.sparse_jax.selectors.helpers import chosen, filled, make_cache, queries, quick_jit, select, write

FLOWS = "h2o_sparse_attention", "gqa_h2o_sparse_attention"
FIRST, LAST, PICKS, TABLE = 2, 3, 2, 12  # b, e, k, W in pages


def options(page_size, **more):
    """Options that come to these pages without being multiples of them."""
    sinks, recent = FIRST * page_size - page_size // 2, LAST * page_size - page_size // 2
    return {"sinks": sinks, "recent": recent, "budget": (FIRST + LAST + PICKS) * page_size - page_size // 2, **more}


def reference_scores(keys, q, flow, page_size, w_avg=1.0, w_peak=1.0):
    """Scores [npages] of one request and KV head: keys [S, D], q [G, D]."""
    scores = []
    for first in range(0, len(keys), page_size):
        page = keys[first : first + page_size]
        centroid, smallest, largest = page.mean(axis=0), page.min(axis=0), page.max(axis=0)
        heads = [q.mean(axis=0)] if flow == "h2o_sparse_attention" else list(q)
        mean = max(head @ centroid for head in heads)
        peak = max(sum(max(x * a, x * b) for x, a, b in zip(head, largest, smallest)) for head in heads)
        scores.append(w_avg * mean + w_peak * peak)
    return np.array(scores)


def reference_pages(keys, q, flow, page_size, first=FIRST, last=LAST, picks=PICKS, **weights):
    """Section 1 of the rules: the first pages, the best of those between, the last pages."""
    held = -(-len(keys) // page_size)
    if held - first - last <= picks:
        return set(range(held))
    window = np.arange(first, held - last)
    scores = reference_scores(keys, q, flow, page_size, **weights)[window]
    best = window[np.argsort(-scores, kind="stable")[:picks]]
    return {*range(first), *best.tolist(), *range(held - last, held)}


@functools.partial(quick_jit, static_argnums=(0, 1))
def step(flows, page_size, states, keys, slots, q, view):
    """Writes a token of each request, then chooses, in all flows."""
    states = [flow.write(state, keys, slots) for flow, state in zip(flows, states)]
    return states, [flow.select(state, q, view, kv_heads=2, page_size=page_size) for flow, state in zip(flows, states)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 6, 7, 8])
def test_flows_equal_their_rules_step_by_step(group, page_size):
    """T1, T28: no token, fewer than b + e pages, all that fits and a page more, last pages of one and of P tokens."""
    most = TABLE * page_size
    start = [0, 1, (FIRST + LAST) * page_size - 1, (FIRST + LAST + PICKS) * page_size - 1, most - 3, most // 2 + 1]
    cache = make_cache([most] * len(start), page_size=page_size, table_width=TABLE, seed=group)
    flows = tuple(selectors.get(name, **options(page_size)) for name in FLOWS)
    before = np.where(np.arange(most) < np.array(start)[:, None], cache.slots, -1)
    states = [write(flow, flow.init(cache.kv), cache.keys, before) for flow in flows]
    lengths, rows = np.array(start), np.arange(len(start))
    for turn in range(3):
        grows = lengths > 0  # the first request stays empty
        slots = np.where(grows, cache.slots[rows, np.minimum(lengths, most - 1)], -1)
        keys = cache.keys[rows, np.minimum(lengths, most - 1)]
        lengths = lengths + grows
        q = queries(len(start), 1, 2 * group, seed=turn)
        view = cache.view._replace(lengths=jnp.asarray(lengths, jnp.int32))
        states, found = step(flows, page_size, states, keys, slots, q, view)
        for name, pages in zip(FLOWS, found):
            assert pages.shape == (len(start), 2, FIRST + PICKS + LAST)
            for b in rows:
                for head, kept in enumerate(chosen(np.asarray(pages[b]))):
                    own = cache.keys[b, : lengths[b], head].astype(np.float64)
                    q64 = np.asarray(q[b, 0], np.float64).reshape(2, group, 8)[head]
                    assert kept == reference_pages(own, q64, name, page_size), (name, b, head, turn)


def run(selector, cache, q):
    return step((selector,), 4, [filled(selector, cache)], *nothing(cache), q, cache.view)[1][0]


def nothing(cache):
    batch = cache.view.lengths.shape[0]
    return jnp.zeros((batch, 2, 8)), jnp.full(batch, -1, jnp.int32)


@functools.cache
def one_request():
    return make_cache([47], page_size=4, table_width=12)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("weights", [{"w_peak": 0.0}, {"w_avg": 8.0, "w_peak": 0.5}])
def test_the_weights_are_those_of_the_two_terms(flow, weights):
    cache, q = one_request(), queries(1, 1, 6)
    pages = run(selectors.get(flow, **options(4, **weights)), cache, q)
    for head, kept in enumerate(chosen(np.asarray(pages[0]))):
        q64 = np.asarray(q[0, 0], np.float64).reshape(2, 3, 8)[head]
        assert kept == reference_pages(cache.keys[0, :47, head].astype(np.float64), q64, flow, 4, **weights)


def test_several_rows_choose_by_the_best_of_them():
    cache, q = one_request(), queries(1, 3, 6)
    for flow in FLOWS:
        pages = run(selectors.get(flow, **options(4)), cache, q)
        for head, kept in enumerate(chosen(np.asarray(pages[0]))):
            own = cache.keys[0, :47, head].astype(np.float64)
            rows = np.asarray(q[0], np.float64).reshape(3, 2, 3, 8)[:, head]
            scores = np.max([reference_scores(own, row, flow, 4) for row in rows], axis=0)
            last = LAST + 1  # each of the three rows has its own last tokens
            window = np.arange(FIRST, 12 - last)
            best = window[np.argsort(-scores[window], kind="stable")[: PICKS - 1]].tolist()
            assert kept == {*range(FIRST), *best, *range(12 - last, 12)}


def test_mutations_of_the_rules_are_noticed():
    """The mean of the heads and the maximum over them choose differently, and so does scaling one term only."""
    mean, largest, scaled = (
        [
            np.asarray(run(selectors.get(flow, **options(4, w_peak=weight)), one_request(), q))
            for q in map(some_q, range(5))
        ]
        for flow, weight in ((FLOWS[0], 1), (FLOWS[1], 1), (FLOWS[1], 8**-0.5))
    )
    assert (np.array(mean) != np.array(largest)).any()
    assert (np.array(scaled) != np.array(largest)).any()


def some_q(seed):
    return queries(1, 1, 6, seed=seed)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, True])
def test_weights_are_finite_numbers(value):
    with pytest.raises(ValueError, match="w_peak is a finite number"):
        selectors.get("h2o_sparse_attention", w_peak=value)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", FLOWS)
def test_every_row_of_a_draft_reads_its_own_token(name, page_size):
    cache = make_cache([12], page_size=page_size, table_width=16 // page_size)
    selector = selectors.get(name, budget=4, sinks=0, recent=3)
    pages = select(selector, cache, queries(1, 5, 4))
    assert all(set(range(5 // page_size, -(-12 // page_size))) <= set(row.tolist()) for row in pages[0])
