"""Budgets by number, by share of the length, by plane, by KV head, and decided at run time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import retained_count, selectors
from sparse_jax.selectors import budgets
from tests.sparse_jax.selectors.helpers import LENGTHS, common_cache, filled, queries, quick_jit, select

METHODS = "window", "quest", "h2o_sparse_attention"
OPTIONS = {"sinks": 1, "recent": 4}


def limits(budget, lengths, plane=0, most=None, kv_heads=2, capacity=100):
    lengths = jnp.asarray(lengths, jnp.int32)[:, None]
    found = budgets.tokens(budget, most, lengths, plane, kv_heads=kv_heads, capacity=capacity)
    return found if isinstance(found, int) else np.asarray(found).tolist()


def test_a_number_is_the_same_for_all():
    assert limits(64, [5, 50]) == 64
    assert limits(10**30, [5, 50]) == 100
    assert budgets.most_tokens(64, None, 100) == 64
    assert budgets.most_tokens(64, None, 20) == 20


@pytest.mark.parametrize("share", [0.1, 0.29, 1 / 3, 0.5, 1.0])
def test_a_share_is_the_retained_count_of_the_length(share):
    lengths = [0, 1, 7, 29, 99, 100]
    assert limits(share, lengths) == [[retained_count(length, share)] for length in lengths]
    assert budgets.most_tokens(share, None, 100) == retained_count(100, share)


def test_planes_take_turns():
    budget = (8, 0.5, 16)
    assert [limits(budget, [20], plane) for plane in range(4)] == [8, [[10]], 16, 8]
    traced = jax.jit(lambda plane: budgets.tokens(budget, None, jnp.array([[20]]), plane, kv_heads=2, capacity=100))
    assert [np.asarray(traced(jnp.int32(plane))).tolist() for plane in range(4)] == [[[8]], [[10]], [[16]], [[8]]]
    assert traced._cache_size() == 1
    assert limits((8,), [20], jnp.int32(3)) == 8
    assert budgets.most_tokens(budget, None, 100) == 50


def test_heads_have_their_own():
    assert limits(((8, 16), (0.5, 4)), [20, 40], 0) == [[8, 16]] * 2
    assert limits(((8, 16), (0.5, 4)), [20, 40], 1) == [[10, 4], [20, 4]]
    assert limits(((8, 16), 5), [20], jnp.int32(1)) == [[5, 5]]
    with pytest.raises(ValueError, match="one entry for each of 2 heads, got 3"):
        limits(((1, 2, 3),), [20])


def test_an_array_is_cut_to_its_most():
    assert limits(jnp.int32(8), [20, 30], most=16) == [[8], [8]]
    assert limits(jnp.array([[4], [99]]), [20, 30], most=16) == [[4], [16]]
    assert limits(jnp.array([[0, 5]]), [20, 30], most=16) == [[1, 5]] * 2
    assert budgets.most_tokens(jnp.int32(8), 16, 100) == 16
    assert budgets.most_tokens(jnp.int32(8), 160, 100) == 100


@pytest.mark.parametrize(
    "budget",
    [0, -1, True, 0.0, 1.5, float("nan"), "8", (), [], ((),), (8, 0), (8, (4, True)), (((8,),),), {"a": 1}],
)
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(ValueError, match="Quest: budget is a whole number of tokens, at least 1"):
        selectors.get("quest", budget=budget)


@pytest.mark.parametrize(
    ("budget", "most"), [(jnp.int32(8), None), (np.array([8, 9]), None), (jnp.float32(0.5), 8), (np.array([0.5]), 8)]
)
def test_an_array_needs_a_most_and_integers(budget, most):
    with pytest.raises(ValueError, match="Quest: a budget that is an array holds integers and goes with most="):
        selectors.get("quest", budget=budget, most=most)


def test_budgets_are_hashable():
    selector = selectors.get("quest", budget=[[8, np.float32(0.5)], np.int64(4)])
    assert selector.budget == ((8, 0.5), 4)
    assert hash(selector) == hash(selectors.get("quest", budget=((8, 0.5), 4)))


def sets(pages):
    return [[set(row[row >= 0].tolist()) for row in request] for request in np.asarray(pages)]


def by_number(name, q, tokens):
    """The pages of a budget that is a number."""
    return sets(select(selectors.get(name, budget=tokens, **OPTIONS), common_cache(), q))


@pytest.mark.parametrize("name", METHODS)
def test_selectors_keep_to_every_kind_of_budget(name):
    """Each row has the pages that its budget as a number would give it."""
    cache, q = common_cache(), queries(len(LENGTHS), 1, 6)
    choose = quick_jit(
        lambda selector, state, plane: selector.select(state, q, cache.view, kv_heads=2, page_size=4, plane=plane),
        static_argnums=0,
    )
    expected = {tokens: by_number(name, q, tokens) for tokens in (16, 24, 32)}
    state = filled(selectors.get(name), cache)

    for budget, plane in [((16, (24, 32)), 1), ((32, 16), 0), ((32, 16), 1)]:
        selector = selectors.get(name, budget=budget, **OPTIONS)
        per_head = budget[plane] if isinstance(budget[plane], tuple) else (budget[plane],) * 2
        wanted = [[expected[per_head[head]][b][head] for head in range(2)] for b in range(len(LENGTHS))]
        assert sets(choose(selector, state, jnp.int32(plane))) == wanted
    share = sets(choose(selectors.get(name, budget=0.25, **OPTIONS), state, 0))
    assert share[0] == expected[16][0]  # of 61 tokens
    assert share[5] == expected[16][5]  # of 64
    assert [len(pages) for pages in share[1]] == [0, 0]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("most", [32, 1024])  # below the table's 64 tokens, and above
def test_one_compilation_serves_all_budgets(name, most):
    """Also where the largest would hold everything, and with the default window, which follows the budget."""
    cache, q = common_cache(), queries(len(LENGTHS), 1, 6)
    state = filled(selectors.get(name), cache)
    plain = selectors.get(name, sinks=1)

    @quick_jit
    def choose(tokens):
        selector = dataclasses.replace(plain, budget=tokens, most=most)
        return selector.select(state, q, cache.view, kv_heads=2, page_size=4)

    for tokens in (16, 24, 32):
        expected = select(dataclasses.replace(plain, budget=tokens), cache, q)
        assert sets(choose(np.full((len(LENGTHS), 2), tokens, np.int32))) == sets(expected)
    by_row = np.full((len(LENGTHS), 2), 16, np.int32)
    by_row[0, 1] = 32
    found = sets(choose(by_row))
    assert choose._cache_size() == 1
    assert [found[0][head] for head in range(2)] == [
        sets(select(dataclasses.replace(plain, budget=tokens), cache, q))[0][head]
        for head, tokens in enumerate((16, 32))
    ]
