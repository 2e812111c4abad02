"""After a round the cache and the selector are as if the rejected drafts had never been (SPEC-1, SPEC-4)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decode import DecodeOptions
from models.ouro import Ouro
from models.speculation import Speculation, speculate_chunk
from sparse_jax import paging, selectors
from tests.models.speculation_setting import CONFIG, PAGE_SIZE, one_round, plain, prompts, speculate, start

REQUESTS = 12
SPECULATION = Speculation(drafts=3, draft_loops=2)
# Both kinds of page statistics: the box around the keys, and their sum.
SPARSE = DecodeOptions(selector=selectors.get("gqa_h2o_sparse_attention", budget=16, sinks=0, recent=4))
# The rows of a round share their choice of pages, so drafts have a say in it; here the budget holds all pages.
WHOLE = DecodeOptions(selector=selectors.get("gqa_h2o_sparse_attention", budget=64))


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(1))


def equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def only_the_token(state):
    """The same requests with a limit that leaves no room for drafts."""
    return dataclasses.replace(state, limits=state.generated + 1)


def undone(state, like):
    return dataclasses.replace(state, limits=like.limits, done=like.done)


@pytest.mark.parametrize("round_", [0, 1, 2, 3])
def test_case_SPEC_4_after_rejected_drafts_all_is_bit_equal_to_never_having_drafted(model, round_):
    """The same rows without drafts: keys, values, lengths, tables, holders, the free stack, page statistics, the token.

    Twelve requests at different offsets of a page, so that some drafts had pages of their own.
    """
    state = start(model, prompts(round_, REQUESTS), 40, WHOLE)
    junk = np.random.default_rng(round_).integers(0, 64, (REQUESTS, 3))
    drafted, out = one_round(model, state, SPECULATION, WHOLE, forced=junk, most=0)
    np.testing.assert_array_equal(out.drafted, 3)
    never, without = one_round(model, only_the_token(state), SPECULATION, WHOLE)
    np.testing.assert_array_equal(without.drafted, 0)
    never = undone(never, state)
    equal_trees(out.tokens, without.tokens)
    equal_trees(drafted.selector, never.selector)
    for field in ("pages", "lengths", "status"):
        equal_trees(getattr(drafted.paged.table, field), getattr(never.paged.table, field))
    pool, other = drafted.paged.pool, never.paged.pool
    equal_trees((pool.free_count, pool.holders), (other.free_count, other.holders))
    equal_trees(pool.free[: int(pool.free_count)], other.free[: int(other.free_count)])
    assert int((pool.incarnation - other.incarnation).min()) >= 0  # these may have grown
    assert int((pool.incarnation - other.incarnation).sum()) > 0
    for b, length in enumerate(drafted.paged.table.lengths.tolist()):
        for plane in range(CONFIG.planes):
            equal_trees(*([x[:length] for x in paging.gather(s.paged, plane, b)] for s in (drafted, never)))
    again, never_again = (one_round(model, s, SPECULATION, WHOLE) for s in (drafted, never))
    equal_trees(again[1]._replace(stale=0), never_again[1]._replace(stale=0))
    equal_trees(again[0].paged.table.pages, never_again[0].paged.table.pages)


def replayed(selector, before, after):
    """The statistics of `before` after plain writes, token by token, of what `after` has in its cache beyond it."""
    kv, table = after.paged.kv, after.paged.table
    had, has = np.asarray(before.paged.table.lengths), np.asarray(table.lengths)
    statistics = before.selector
    for i in range((has - had).max()):
        at, some = had + i, had + i < has
        page = np.asarray(table.pages)[np.arange(len(at)), np.minimum(at // PAGE_SIZE, table.pages.shape[1] - 1)]
        slots = np.where(some, page * PAGE_SIZE + at % PAGE_SIZE, -1)
        for plane in range(kv.planes):
            keys = kv.k[plane, np.maximum(page, 0), :, at % PAGE_SIZE]
            flat = np.where(some, slots + plane * kv.pages * PAGE_SIZE, -1)[:, None]
            statistics = _write(selector, statistics, keys[:, None], flat)
    return statistics


_write = jax.jit(
    lambda selector, state, keys, slots: selector.write(state, keys, jnp.asarray(slots, jnp.int32)), static_argnums=0
)


def test_page_statistics_are_those_of_the_tokens_that_stay(model):
    """Some drafts right, some wrong: the statistics have the bits of plain writes of what is in the cache."""
    state = start(model, prompts(7, REQUESTS), 40, SPARSE)
    accepted = set()
    for _ in range(4):
        before = state
        state, out = one_round(model, state, SPECULATION, SPARSE)
        accepted |= set(np.asarray(out.accepted).tolist())
        equal_trees(state.selector, replayed(SPARSE.selector, before, state))
    assert {0, 1} <= accepted


def test_case_SPEC_1_lengths_and_the_next_step_after_three_different_acceptances(model):
    """Three requests at length 10, three drafts each, of which 3, 0 and 1 are right."""
    texts = [text[:10] for text in [list(range(1, 11)), list(range(20, 30)), list(range(40, 50))] * 4]
    state = start(model, texts, 40, WHOLE)
    truth, _ = plain(model, state, 8, WHOLE)
    right = np.arange(3) < np.array([3, 0, 1] * 4)[:, None]
    candidates = np.array([row[:3] for row in truth])
    candidates = np.where(right, candidates, (candidates + 1) % 64)
    drafted, out = one_round(model, state, SPECULATION, WHOLE, forced=candidates)
    np.testing.assert_array_equal(out.accepted, [3, 0, 1] * 4)
    np.testing.assert_array_equal(drafted.paged.table.lengths, [14, 11, 12] * 4)
    steps = dataclasses.replace(state, limits=state.generated + jnp.array([4, 1, 2] * 4))
    _, never = plain(model, steps, 8, WHOLE)
    never = undone(never, state)
    np.testing.assert_array_equal(never.paged.table.lengths, [14, 11, 12] * 4)
    np.testing.assert_array_equal(drafted.tokens, never.tokens)
    for a, b in zip(*(jax.tree.leaves(_by_request(s)) for s in (drafted, never)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
    for s in (drafted, never):
        np.testing.assert_array_equal((np.asarray(s.paged.table.pages) >= 0).sum(axis=1), [4, 3, 3] * 4)
        assert int(s.paged.pool.free_count) == s.paged.kv.pages - 40
    found, _ = plain(model, drafted, 8, WHOLE)
    expected, _ = plain(model, never, 8, WHOLE)
    assert found == expected


def _by_request(state):
    """Keys and values of every request and plane, and the statistics of its pages."""
    pages = np.asarray(state.paged.table.pages)
    at = [plane * state.paged.kv.pages + pages[pages >= 0] for plane in range(CONFIG.planes)]
    statistics = [jax.tree.map(lambda x, at=at: x[np.concatenate(at)], state.selector)]
    return statistics, [paging.gather(state.paged, plane, b) for plane in range(CONFIG.planes) for b in range(3)]


def test_a_shared_prefix_is_copied_with_its_statistics_before_a_round_writes_to_it(model):
    """Two requests share a page and a half; a round of one leaves the other as it was, and both go their way."""
    texts = prompts(2, REQUESTS)
    texts[0] = [5, 9, 30, 1, 2, 8]
    alone = start(model, [*texts[:1], texts[0], *texts[2:]], 12, WHOLE)
    state = start(model, texts, 12, WHOLE)
    empty, _ = paging.release(state.paged, jnp.arange(REQUESTS) == 1)
    shared, stale = paging.share(empty, jnp.int32(0), jnp.int32(1), jnp.int32(6))
    tokens = state.tokens.at[1].set(state.tokens[0])
    state = dataclasses.replace(state, paged=shared, tokens=tokens)
    assert int(stale) == 0
    found, state, outs = speculate(model, state, SPECULATION, WHOLE)
    expected, alone, _ = speculate(model, alone, SPECULATION, WHOLE)
    assert found == expected
    assert sum(int(out.stale) for out in outs) == 0
    assert int(state.paged.pool.free_count) == int(alone.paged.pool.free_count) + 1  # the page they share


def test_pages_that_are_chosen_do_not_depend_on_padding_rows_nor_on_bytes_without_a_token(model):
    """Whoever drafts nothing (limit, pages) gets the same token and reads the same, whatever lies in free slots."""
    state = start(model, prompts(11, REQUESTS), 40, SPARSE)
    state, _ = one_round(model, state, SPECULATION, SPARSE)
    clean, out = one_round(model, only_the_token(state), SPECULATION, SPARSE)
    length = np.asarray(state.paged.table.lengths)
    token = np.arange(state.paged.table.pages.shape[1] * PAGE_SIZE)
    used = np.zeros((state.paged.kv.pages, PAGE_SIZE), bool)
    for pages, n in zip(np.asarray(state.paged.table.pages), length):
        used[pages[token[:n] // PAGE_SIZE], token[:n] % PAGE_SIZE] = True
    spoiled = jax.tree.map(lambda x: jnp.where(used[:, None, :, None], x, jnp.nan), state.paged.kv)
    dirty = dataclasses.replace(state, paged=dataclasses.replace(state.paged, kv=spoiled))
    dirty, spoiled_out = one_round(model, only_the_token(dirty), SPECULATION, SPARSE)
    equal_trees(out, spoiled_out)
    equal_trees(clean.selector, dirty.selector)


def test_every_round_has_one_compilation_and_a_scan_of_rounds_the_same_result(model):
    state = start(model, prompts(4, REQUESTS), 12, SPARSE)
    traces = []

    def counted(params, state):
        traces.append(1)
        return speculate_chunk(graph, params, state, SPARSE, SPECULATION, 4)

    graph, params = nnx.split(model)
    chunk = jax.jit(counted, donate_argnums=1)
    tokens: list[list[int]] = [[] for _ in range(REQUESTS)]
    expected, _, _ = speculate(model, state, SPECULATION, SPARSE)
    for _ in range(3):
        state, out = chunk(params, state)
        for text, rows in zip(tokens, np.moveaxis(np.asarray(out.tokens), 1, 0)):
            text += rows[rows >= 0].tolist()
        steps = out.steps()
        assert steps.tokens.shape == steps.lengths.shape == (16, REQUESTS)
        np.testing.assert_array_equal((np.asarray(steps.lengths) > 0).sum(axis=0), _committed(out))
    assert len(traces) == 1
    assert tokens == expected
    weak = [leaf.weak_type for leaf in jax.tree.leaves(jax.eval_shape(chunk, params, state)[0])]
    assert not any(weak)


def _committed(out):
    accepted = np.asarray(out.accepted)
    return np.where(accepted >= 0, accepted + 1, 0).sum(axis=0)
