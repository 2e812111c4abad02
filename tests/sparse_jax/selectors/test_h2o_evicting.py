"""Evicting H2O and TOVA, step by step, against the papers' rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paging, selectors
from sparse_jax.selectors import H2OEvicting
from tests.sparse_jax.selectors.evicting_cache import (
    Plain,
    Sizes,
    Steps,
    assert_follows,
    decode,
    draw,
    empty,
    softmax,
    sum_up,
    whole_run,
)

BUDGET, SIZES = 6, Sizes()


def mean_of_sums(p):
    return p.sum(axis=2).mean(axis=1)


def h2o(tokens, plane, request, count, *, limit=BUDGET, recent=BUDGET // 2, **rule):
    rule = {"sinks": 0, "prompt": mean_of_sums, "update": sum_up} | rule
    return Plain(tokens, plane, request, count, limit=limit, recent=recent, **rule)


def loudest(plain, p):
    """A wrong rule: the largest probability of a group."""
    for head, weights in enumerate(p):
        plain.scores[head, plain.held[head]] += weights.max(axis=0)


def last_only(plain, p):
    """TOVA: mean over all heads, of the last query alone."""
    plain.scores[:] = 0
    plain.scores[:, plain.held[0]] = np.concatenate(p).mean(axis=0)


def last_query(p):
    return p[:, :, -1:].mean(axis=(0, 1)) if p.size else np.zeros((p.shape[0], 0))


@pytest.fixture(scope="module")
def run():
    """Prompts longer and shorter than the budget, one that does not take part, one that pauses."""
    return whole_run(H2OEvicting(budget=BUDGET), SIZES)


def test_evicting_h2o_follows_the_paper(run):
    assert_follows(run, SIZES, h2o)


WRONG = {
    "the last query alone": {"update": last_only},
    "the largest of the group": {"update": loudest},
    "the prompt does not vote": {"prompt": lambda p: 0.0},
    "a recent token too few": {"recent": BUDGET // 2 - 1},
    "one token too many": {"limit": BUDGET + 1},
    "sinks": {"sinks": 2},
}


@pytest.mark.parametrize("change", WRONG)
def test_mutation_another_rule_chooses_other_victims(run, change):
    with pytest.raises(AssertionError):
        assert_follows(run, SIZES, functools.partial(h2o, **WRONG[change]))


@pytest.mark.parametrize("counts", [SIZES.counts, (1, 2, 8, 0)])
def test_four_heads_decay_sinks_a_window_and_a_share_of_the_prompt(counts):
    """And EVICT-3: half of a prompt of 1 is 1, of 2 is 1; of 11 it is 6 and of 3 it is 2: sink and window fit in."""
    sizes = Sizes(group=4, counts=counts)

    def votes(p):
        return (p.mean(axis=1) * 0.5 ** np.arange(p.shape[2])[::-1, None]).sum(axis=1)

    def decayed(plain, p):
        plain.scores *= 0.5
        sum_up(plain, p)

    def plain(tokens, plane, request, count):
        rule = {"recent": 2, "sinks": 1, "prompt": votes, "update": decayed}
        return h2o(tokens, plane, request, count, limit=max(1, -(-count // 2)), **rule)

    selector = H2OEvicting(budget=0.5, sinks=1, recent=2, decay=0.5)
    assert_follows(whole_run(selector, sizes), sizes, plain)


def test_tova_follows_the_paper():
    run = whole_run(selectors.get("tova", budget=BUDGET), SIZES)
    rule = {"recent": 1, "prompt": last_query, "update": last_only}
    assert_follows(run, SIZES, functools.partial(h2o, **rule))
    np.testing.assert_array_equal(run[3].positions[:, :, :, 0], run[3].positions[:, :, :, 1])  # of both KV heads
    with pytest.raises(AssertionError):
        assert_follows(run, SIZES, functools.partial(h2o, **rule | {"update": sum_up}))


def follow(rows, tokens, plane, head, budget, recent):
    """The paper's rule in float64 along the choices that were made; how many of them it would have made otherwise.

    A choice may differ where two sums are equal within float32 rounding: such sets part for good, so the choices are
    followed, and each is checked.
    """
    q, k, v = (np.asarray(x[plane, 0, :, head], np.float64) for x in (tokens.q, tokens.k, tokens.v))
    scores, held, others = np.zeros(len(q)), set(), 0
    for at, (row, out) in enumerate(zip(rows.positions[:, plane, 0, head], rows.out[:, plane, 0, head], strict=True)):
        now = set(row[row >= 0].tolist())
        gone, new = held - now, now - held
        assert new == {at}
        assert len(gone) == (len(held) == budget)
        for victim in gone:
            candidates = np.array([p for p in held if p <= at - recent])
            assert victim in candidates
            least = scores[candidates].min()
            assert scores[victim] <= least * (1 + 2e-5), (at, victim, scores[victim], least)
            others += scores[victim] != least
        held = now
        ids = np.array(sorted(held))
        p = softmax(q[at] @ k[ids].T * q.shape[-1] ** -0.5)
        np.testing.assert_allclose(out, p @ v[ids], atol=2e-5, rtol=0)
        scores[ids] += p
    return others


LONG = Sizes(counts=(0,), total=4096, group=1, page_size=16, pages=4096, table_width=36)


def test_4096_tokens_with_a_budget_of_512_in_bounded_memory():
    """One scan. Pages never exceed those of the budget, none leaks, and nothing of the cache is copied."""
    selector, tokens = H2OEvicting(budget=512), draw(LONG, trend=0.0)
    paged, part = empty(LONG), jnp.ones((LONG.total, 1), bool)
    state = selector.init(paged.kv, 1)
    side_data = state.scores.nbytes
    run = jax.jit(decode, static_argnums=0, donate_argnums=(1, 2)).lower(selector, paged, state, part, tokens).compile()
    assert run.memory_analysis().temp_size_in_bytes < side_data / 4
    paged, state, rows = run(paged, state, part, tokens)
    rows = Steps(*map(np.asarray, rows))
    np.testing.assert_array_equal(rows.pages, np.minimum(-(-np.arange(1, 4097) // 16), 512 // 16))
    np.testing.assert_array_equal(rows.lengths[:, 0], np.minimum(np.arange(1, 4097), 512))
    np.testing.assert_array_equal(rows.at[:, 0], np.arange(4096))
    assert not rows.stale.any()
    for plane, head in ((0, 0), (1, 1)):
        assert follow(rows, tokens, plane, head, 512, 256) < 5
    released, stale = paging.release(paged, jnp.array([True]))
    assert (int(released.pool.free_count), int(stale)) == (LONG.pages, 0), "none leaks"
