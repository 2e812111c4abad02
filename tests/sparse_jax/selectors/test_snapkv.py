"""SnapKV and RocketKV against plain sums over the prompt's last queries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paging, selectors
from tests.sparse_jax.selectors.evicting_cache import (
    QUICK,
    Plain,
    Sizes,
    assert_follows,
    begin,
    draw,
    go_on,
    softmax,
    whole_run,
)

SIZES, BUDGET = Sizes(total=20, table_width=5, pages=16), 6
SNAP = selectors.get("snapkv", budget=BUDGET, window=2, kernel=3)
ROCKET = selectors.get("rocketkv", prompt_budget=BUDGET, window=2, kernel=3, budget=8)


def snap(tokens, plane, request, count, kernel=3, window=2):
    def votes(p):
        """Mean over the group, sum over the last queries, then the mean of neighbours before the window."""
        total = p.mean(axis=1)[:, max(0, count - window) :].sum(axis=1)
        before = max(0, count - window)
        padded = np.pad(total[:, :before], ((0, 0), (kernel // 2, kernel // 2)))
        total[:, :before] = sum(padded[:, i : i + before] for i in range(kernel)) / kernel
        return total

    return Plain(tokens, plane, request, count, limit=BUDGET, sinks=0, recent=window, prompt=votes)


@pytest.fixture(scope="module")
def run():
    return whole_run(SNAP, SIZES)


def test_snapkv_keeps_the_window_and_the_best_of_the_prompt_and_all_later_tokens(run):
    """Each step's output, too. Prompts of 11 and 7 shrink to 6, one of 3 does not."""
    assert_follows(run, SIZES, snap)
    _, paged, _, rows = run
    steps = (rows.at >= 0).sum(axis=0)
    np.testing.assert_array_equal(paged.table.lengths, [6, 3, 6, 0] + steps)
    assert SNAP.tokens_held(11, 11 + int(steps[0])) == paged.table.lengths[0]
    assert SNAP.tokens_held(3, 9) == 9


@pytest.mark.parametrize("wrong", [{"kernel": 1}, {"kernel": 5}, {"window": 1}])
def test_mutation_another_pooling_or_window_keeps_other_tokens(run, wrong):
    with pytest.raises(AssertionError):
        assert_follows(run, SIZES, functools.partial(snap, **wrong))


def test_case_EVICT_2_two_rows_see_by_true_position():
    """EVICT-2: both rows see what was kept, the first does not see the second."""
    tokens = draw(SIZES)
    paged, state = begin(SNAP, SIZES, tokens)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def two(paged, state):
        at = SNAP.next_positions(paged, state)[:, None] + jnp.arange(2)
        q, k, v = (jnp.take_along_axis(x[1], at[..., None, None], axis=1) for x in (tokens.q, tokens.k, tokens.v))
        paged, state, room = SNAP.reserve(paged, state, jnp.array([2, 2, 2, 0]), 2)
        paged, state, _ = SNAP.store(paged, state, 1, room, k, v)
        return SNAP.attend(state, q, *paging.flat(paged.kv), paging.view(paged, 1), plane=1).output.out

    out = two(paged, state)
    for request in range(3):
        plain = snap(tokens, 1, request, SIZES.counts[request])
        for row in range(2):
            np.testing.assert_allclose(out[request, row], plain.step(), atol=2e-5, rtol=0)


def best_pages(q, keys, page_size, wanted):
    """Quest's choice in plain NumPy for one KV head: (scores by page, the last page always, the best of the others)."""
    pages = [keys[i : i + page_size] for i in range(0, len(keys), page_size)]
    bounds = np.array([np.maximum(q * page.min(axis=0), q * page.max(axis=0)).sum(axis=-1) for page in pages]).T
    score = np.log(softmax(bounds * q.shape[-1] ** -0.5)).max(axis=0)
    order = sorted(range(len(pages) - 1), key=lambda page: -score[page])
    return score, {len(pages) - 1, *order[: wanted - 1]}


def test_rocketkv_reads_the_best_pages_of_what_snapkv_holds():
    tokens, paged, _, rows = whole_run(ROCKET, SIZES)
    for plane, request in np.ndindex(SIZES.planes, 3):
        plain = snap(tokens, plane, request, SIZES.counts[request])
        for i, at in enumerate(rows.at[:, request]):
            if at < 0:
                continue
            plain.step()
            for head, held in enumerate(plain.held):
                q, held = plain.q[at, head], np.array(sorted(held))
                score, chosen = best_pages(q * SIZES.width**0.5, plain.k[held, head], 4, wanted=2)
                read = rows.held(i, plane, request, head)
                found = {page for page in range(len(score)) if held[4 * page] in read}
                assert rows.read[i, plane, request, head] == len(read) <= 8
                assert read == sorted(np.concatenate([held[4 * page : 4 * page + 4] for page in found]).tolist())
                # Boxes may be kept in fewer bits than the keys: a choice may differ between equals.
                assert abs(sum(score[page] for page in found) - sum(score[page] for page in chosen)) < 0.05
                assert len(found) == len(chosen)
                out = softmax(q @ plain.k[read, head].T) @ plain.v[read, head]
                np.testing.assert_allclose(rows.out[i, plane, request, 3 * head : 3 * head + 3], out, atol=2e-5)
    assert not rows.stale.any()
    paging.check(paged)
    assert ROCKET.tokens_held(11, 20) == 15


def test_a_prompt_without_a_page_stays_out_and_comes_in_later():
    tokens = draw(SIZES)
    paged, state = begin(SNAP, SIZES, tokens)
    assert int(paged.pool.free_count) == SIZES.pages - (2 + 1 + 2)
    again, _ = begin(SNAP, SIZES, tokens, *jax.tree.map(jnp.copy, (paged, state)))
    np.testing.assert_array_equal(again.table.status, [paging.BAD_COUNT] * 3 + [paging.OK])  # they are not empty
    np.testing.assert_array_equal(again.table.lengths, paged.table.lengths)
    paged, _ = paging.release(paged, jnp.ones(4, bool))
    dry = dataclasses.replace(paged, pool=dataclasses.replace(paged.pool, free_count=jnp.int32(1)))
    dry, state = begin(SNAP, SIZES, tokens, dry, state)
    out_of = paging.OUT_OF_PAGES
    np.testing.assert_array_equal(dry.table.status, [out_of, paging.OK, out_of, paging.OK])
    np.testing.assert_array_equal(SNAP.next_positions(dry, state), [0, 3, 0, 0])
    paged, _ = paging.release(dry, jnp.ones(4, bool))
    paged = dataclasses.replace(paged, pool=dataclasses.replace(paged.pool, free_count=jnp.int32(SIZES.pages)))
    paged, state = begin(SNAP, SIZES, tokens, paged, state)
    assert_follows(go_on(SNAP, SIZES, tokens, paged, state), SIZES, snap)


REFUSED = [
    ("snapkv", {"kernel": 4}, "kernel is an odd number"),
    ("snapkv", {"window": 0}, "window is a whole number"),
    ("snapkv", {"budget": (4, 8)}, "same for all planes and KV heads"),
    ("rocketkv", {"prompt_budget": 0}, "RocketKV prompt_budget: budget is a whole number"),
    ("rocketkv", {"prompt_budget": (4, 8)}, "same for all planes and KV heads"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_options_that_cannot_be(name, options, message):
    with pytest.raises(ValueError, match=message):
        selectors.get(name, **options)


def test_a_step_of_rocketkv_takes_any_budget():
    assert selectors.get("rocketkv", budget=(64, 0.5)).quest.budget == (64, 0.5)
