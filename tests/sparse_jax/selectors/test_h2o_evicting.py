"""Evicting H2O and TOVA, step by step, against the papers' rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import selectors
from sparse_jax.selectors import H2OEvicting
from tests.sparse_jax.selectors.evicting_cache import (
    Plain,
    Sizes,
    Steps,
    assert_follows,
    draw,
    empty,
    jit_decode,
    last_only,
    softmax,
    sum_up,
    whole_run,
)

BUDGET = 6


def h2o(tokens, plane, request, count, *, recent=BUDGET // 2, sinks=0, limit=BUDGET, prompt=None):
    def mean_of_sums(p):
        return p.sum(axis=2).mean(axis=1)

    rule = {"limit": limit, "sinks": sinks, "recent": recent, "prompt": prompt or mean_of_sums, "update": sum_up}
    return Plain(tokens, plane, request, count, **rule)


@pytest.mark.parametrize("group", [1, 3, 4])
def test_evicting_h2o_follows_the_paper(group):
    """Prompts longer and shorter than the budget, one that does not take part, one that pauses."""
    sizes = Sizes(group=group)
    assert_follows(whole_run(H2OEvicting(budget=BUDGET), sizes), sizes, h2o)


def test_sinks_a_window_and_a_share_of_the_prompt():
    sizes = Sizes()

    def plain(tokens, plane, request, count):
        # A share of 0.5: a request with 11 prompt tokens holds 6, with 3 two; the window and the sinks fit in that.
        return h2o(tokens, plane, request, count, limit=max(1, -(-count // 2)), sinks=1, recent=2)

    assert_follows(whole_run(H2OEvicting(budget=0.5, sinks=1, recent=2), sizes), sizes, plain)


def test_decay_and_prompts_that_do_not_vote():
    sizes = Sizes(planes=1)

    def plain(tokens, plane, request, count):
        reference = h2o(tokens, plane, request, count, prompt=lambda p: np.zeros(p.shape[::2][:1] + p.shape[3:]))

        def update(plain, p):
            plain.scores *= 0.5
            sum_up(plain, p)

        reference.update = update
        return reference

    run = whole_run(H2OEvicting(budget=BUDGET, decay=0.5, prompt_queries=False), sizes)
    assert_follows(run, sizes, plain)
    # The prompt of 11 keeps its last 6 tokens; one of them has gone for token 11.
    assert set(run[3].held(0, 0, 0, 0)) < set(range(5, 12))


def test_decay_weighs_the_queries_of_the_prompt():
    sizes = Sizes(planes=1)

    def plain(tokens, plane, request, count):
        weights = 0.5 ** np.arange(count)[::-1]
        reference = h2o(tokens, plane, request, count, prompt=lambda p: (p.mean(axis=1) * weights[:, None]).sum(axis=1))

        def update(plain, p):
            plain.scores *= 0.5
            sum_up(plain, p)

        reference.update = update
        return reference

    assert_follows(whole_run(H2OEvicting(budget=BUDGET, decay=0.5), sizes), sizes, plain)


def tova(tokens, plane, request, count):
    def last_query(p):
        return p[:, :, -1:].mean(axis=(0, 1)) if p.size else np.zeros((p.shape[0], 0))

    rule = {"limit": BUDGET, "sinks": 0, "recent": 1, "prompt": last_query, "update": last_only}
    return Plain(tokens, plane, request, count, **rule)


def test_tova_follows_the_paper():
    sizes = Sizes()
    run = whole_run(selectors.get("tova", budget=BUDGET), sizes)
    assert_follows(run, sizes, tova)
    np.testing.assert_array_equal(run[3].positions[:, :, :, 0], run[3].positions[:, :, :, 1])  # of both KV heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoudestHead(H2OEvicting):
    def updated(self, scores, weights):
        return scores + weights.max(axis=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Newest(H2OEvicting):
    def protected(self, limit):
        sinks, recent = super().protected(limit)
        return sinks, jnp.maximum(recent - 1, 1)


@pytest.mark.parametrize("wrong", [LoudestHead, Newest])
def test_mutation_another_victim_is_found_out(wrong):
    sizes = Sizes()
    with pytest.raises(AssertionError):
        assert_follows(whole_run(wrong(budget=BUDGET), sizes), sizes, h2o)


def follow(rows, tokens, budget, recent):
    """The paper's rule in float64 along the choices that were made; how many of them it would have made otherwise.

    A choice may differ where two sums are equal within float32 rounding: such sets part for good, so the choices are
    followed, and each is checked.
    """
    q, k, v = (np.asarray(x[0, 0, :, 0], np.float64) for x in (tokens.q, tokens.k, tokens.v))
    scores, held, others = np.zeros(len(q)), set(), 0
    for at, (row, out) in enumerate(zip(rows.positions[:, 0, 0, 0], rows.out[:, 0, 0, 0], strict=True)):
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


LONG = Sizes(counts=(0,), total=4096, group=1, kv_heads=1, planes=1, page_size=16, pages=40, table_width=36)


def test_4096_tokens_with_a_budget_of_512_in_bounded_memory():
    selector, tokens = H2OEvicting(budget=512), draw(LONG, sharpness=1.0)
    paged = empty(LONG)
    part = jnp.ones((LONG.total, 1), bool)
    paged, state, rows = jit_decode(selector, paged, selector.init(paged.kv, 1), part, tokens)
    rows = Steps(*map(np.asarray, rows))
    np.testing.assert_array_equal(rows.pages, np.minimum(-(-np.arange(1, 4097) // 16), 512 // 16))
    np.testing.assert_array_equal(rows.lengths[:, 0], np.minimum(np.arange(1, 4097), 512))
    np.testing.assert_array_equal(rows.at[:, 0], np.arange(4096))
    assert not rows.stale.any()
    assert follow(rows, tokens, 512, 256) < 5
    # The sums are those of 4,096 queries, less what left with the evicted ones.
    assert state.scores.dtype == jnp.float32
    assert float(state.scores.sum()) < 4096
    released, _ = jax.jit(lambda paged: selectors.base.paging.release(paged, jnp.array([True])))(paged)
    assert int(released.pool.free_count) == LONG.pages, "none leaks"
