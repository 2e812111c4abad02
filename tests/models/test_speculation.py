"""Rounds of self-speculation against plain decoding, and what a round leaves behind."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decode import DecodeOptions
from models.ouro import Ouro
from models.speculation import Speculation
from sparse_jax import paging, selectors
from tests.models.speculation_setting import (
    CONFIG,
    PAGE_SIZE,
    assert_same_text,
    one_round,
    plain,
    prompts,
    speculate,
    start,
)

BOUND = 1e-4  # two logits as close as this may change places where rows are batched differently
REQUESTS, STOP = 64, (7, 23)
NEVER = DecodeOptions(selector=selectors.get("dense"))
STOPPING = dataclasses.replace(NEVER, stop_ids=STOP)
SPECULATION = Speculation(drafts=3, draft_loops=2)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(0))


def limits(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 22, REQUESTS).tolist()


@pytest.fixture(scope="module")
def by_plain_decoding(model):
    """Of options and a seed, computed once: (the state after the prompts, the tokens after them, the last state)."""

    @functools.cache
    def decoded(options, seed):
        state = start(model, prompts(seed, REQUESTS), limits(seed), options)
        return state, *plain(model, state, 21, options)

    return decoded


@pytest.mark.slow
@pytest.mark.parametrize(("d", "drafts", "batches"), [(1, 1, 2), (2, 1, 2), (1, 3, 4), (2, 3, 4), (1, 8, 2), (2, 8, 2)])
def test_hundreds_of_prompts_get_the_tokens_of_plain_decoding(model, by_plain_decoding, d, drafts, batches):
    """And always (asked of the first 64) those of the same rows without a draft that is accepted.

    Prompts of 1 to 14 tokens, limits from 1 to 21, ends in mid-round by limit, and one time by stop tokens.
    """
    speculation, different, accepted = Speculation(drafts=drafts, draft_loops=d), 0, []
    options = STOPPING if speculation == SPECULATION else NEVER
    for seed in range(batches):
        begun, expected, after = by_plain_decoding(options, seed)
        found, state, outs = speculate(model, begun, speculation, options)
        different += assert_same_text(model, prompts(seed, REQUESTS), expected, found, BOUND)
        if seed == 0:
            assert found == speculate(model, begun, speculation, options, most=0)[0]
        np.testing.assert_array_equal(state.done, True)
        if found == expected:
            np.testing.assert_array_equal(state.generated, after.generated)
            np.testing.assert_array_equal(state.paged.table.lengths, after.paged.table.lengths)
            assert int(state.paged.pool.free_count) == int(after.paged.pool.free_count)
        accepted += [np.asarray(out.accepted) for out in outs]
        assert sum(int(out.stale) for out in outs) == 0
    assert different <= batches // 2  # of 64 each
    accepted = np.concatenate(accepted)
    assert {0, 1} <= set(accepted.tolist())  # not all of it trivial


def wrong(tokens):
    return (np.asarray(tokens) + 1) % CONFIG.vocab_size


def drafted(model, state, drafts, options=NEVER):
    """What plain decoding would choose next, as candidates: i32[B, K + 1]."""
    tokens, _ = plain(model, state, 21, options)
    return np.array([(row + [0] * 30)[: drafts + 1] for row in tokens], np.int32)


def forced(truth, accepted):
    """Candidates i32[B, K] of which the first accepted[b] are right, and none of the others."""
    right = np.arange(truth.shape[1] - 1) < np.asarray(accepted)[:, None]
    return np.where(right, truth[:, :-1], wrong(truth[:, :-1]))


@pytest.mark.parametrize("d", [1, 2])
def test_rejection_at_every_index(model, d):
    """Request b has b % 9 of its 8 drafts right: 0 to all of them, in one round."""
    state = start(model, prompts(9, REQUESTS), 40, NEVER)
    truth, accepted = drafted(model, state, 8), np.arange(REQUESTS) % 9
    before = np.asarray(state.paged.table.lengths)
    state, out = one_round(model, state, Speculation(drafts=8, draft_loops=d), NEVER, forced=forced(truth, accepted))
    np.testing.assert_array_equal(out.accepted, accepted)
    np.testing.assert_array_equal(out.drafted, 8)
    row = np.arange(9)
    np.testing.assert_array_equal(out.tokens, np.where(row <= accepted[:, None], truth, -1))
    np.testing.assert_array_equal(state.paged.table.lengths, before + accepted + 1)
    np.testing.assert_array_equal(state.tokens, truth[np.arange(REQUESTS), accepted])
    held = (np.asarray(state.paged.table.pages) >= 0).sum(axis=1)
    np.testing.assert_array_equal(held, -(-(before + accepted + 1) // PAGE_SIZE))
    assert int(state.paged.pool.free_count) == state.paged.kv.pages - held.sum()


def test_a_draft_that_is_always_right_and_one_that_is_always_wrong_give_the_same_text(model):
    state = start(model, prompts(3, REQUESTS), 21)
    truth = np.pad(np.array(plain(model, state, 20)[0]), ((0, 0), (0, 4)))
    for accepted, rounds in ((3, 5), (0, 20)):
        after = state
        for done in range(rounds):
            ahead = truth[:, done * (accepted + 1) :][:, :4]
            after, out = one_round(model, after, SPECULATION, forced=forced(ahead, [accepted] * REQUESTS))
            np.testing.assert_array_equal(out.accepted, np.minimum(accepted, out.drafted))
            np.testing.assert_array_equal(out.tokens[:, : accepted + 1], ahead[:, : accepted + 1])
        np.testing.assert_array_equal(after.done, True)
        np.testing.assert_array_equal(after.generated, 21)


def test_a_stop_token_ends_a_request_inside_the_round(model):
    """All drafts are right, so what stops a request is the stop token, in any row; nothing behind it stays."""
    state = start(model, prompts(0, REQUESTS), 40, STOPPING)
    went_on = {True: 0, False: 0}
    for _ in range(4):
        truth, before = drafted(model, state, 3), np.asarray(state.paged.table.lengths)
        running = ~np.asarray(state.done)
        ends = np.isin(np.asarray(one_round(model, state, SPECULATION, NEVER, forced=truth[:, :-1])[1].tokens), STOP)
        state, out = one_round(model, state, SPECULATION, STOPPING, forced=truth[:, :-1])
        for b in np.flatnonzero(running & ends.any(axis=1)):
            row = int(ends[b].argmax())
            assert int(out.accepted[b]) == row
            assert bool(state.done[b])
            assert int(state.paged.table.lengths[b]) == before[b] + row + 1
            assert (np.asarray(out.tokens[b]) >= 0).sum() == row
            went_on[row < 3] += 1
    assert went_on[True] > 2  # in the middle of a round


def test_limits_cut_the_drafts(model):
    state = start(model, prompts(1, REQUESTS), [1, 2, 3, 4, 5, 6, 7, 8] * 8, NEVER)
    _, out = one_round(model, state, SPECULATION, NEVER)
    np.testing.assert_array_equal(out.drafted, [0, 0, 1, 2, 3, 3, 3, 3] * 8)
    np.testing.assert_array_equal(np.asarray(out.accepted) < 0, [True, *[False] * 7] * 8)  # the first are done
    tokens, state, _ = speculate(model, state, SPECULATION, NEVER)
    assert [len(text) for text in tokens] == [0, 1, 2, 3, 4, 5, 6, 7] * 8
    np.testing.assert_array_equal(state.generated, [1, 2, 3, 4, 5, 6, 7, 8] * 8)


def test_a_full_table_ends_the_drafts_and_not_the_text(model):
    """Tables of 64 tokens: plain decoding fills them to the last place, and so do rounds."""
    texts = [text[:2] for text in prompts(2, REQUESTS)]
    state = start(model, texts, 1000, NEVER)
    expected, plain_state = plain(model, state, 66, NEVER)
    tokens, rounds = [[] for _ in texts], 0
    while rounds < 70 and not (np.asarray(state.paged.table.status) == paging.TABLE_FULL).all():
        state, out = one_round(model, state, SPECULATION, NEVER)
        rounds += 1
        for text, row in zip(tokens, np.asarray(out.tokens)):
            text += [x for x in row.tolist() if x >= 0]
    assert assert_same_text(model, texts, expected, tokens, BOUND) <= 1
    np.testing.assert_array_equal(state.paged.table.lengths, plain_state.paged.table.lengths)
    np.testing.assert_array_equal(state.paged.table.lengths, 64)


def test_pages_for_one_token_only_make_a_plain_step_and_without_any_a_request_waits(model):
    """The first requests get pages for their token first; drafts get what is left."""
    texts = [[1, 2, 3, 4]] * REQUESTS  # a full page: the next token needs one more, and the fifth from here another
    state = start(model, texts, 40, NEVER)
    tight = dataclasses.replace(state.paged.pool, free_count=jnp.int32(REQUESTS - 1))
    state = dataclasses.replace(state, paged=dataclasses.replace(state.paged, pool=tight))
    five = Speculation(drafts=8, draft_loops=1)
    after, out = one_round(model, state, five, NEVER, forced=np.full((REQUESTS, 8), 0))
    np.testing.assert_array_equal(out.drafted, 0)
    np.testing.assert_array_equal(out.accepted, [0] * (REQUESTS - 1) + [-1])
    np.testing.assert_array_equal(after.paged.table.status, [paging.OK] * (REQUESTS - 1) + [paging.OUT_OF_PAGES])
    np.testing.assert_array_equal(after.paged.table.lengths, [5] * (REQUESTS - 1) + [4])
    assert int(after.generated[-1]) == 1
    assert int(after.paged.pool.free_count) == 0
    expected = drafted(model, start(model, texts, 40, NEVER), 8)
    np.testing.assert_array_equal(out.tokens[:-1, 0], expected[:-1, 0])


def test_a_cancelled_request_gives_its_pages_back_and_the_others_go_on(model):
    texts = prompts(5, REQUESTS)
    state = start(model, texts, 21, NEVER)
    undisturbed, _, _ = speculate(model, state, SPECULATION, NEVER)
    state, first = one_round(model, state, SPECULATION, NEVER)
    gone = jnp.arange(REQUESTS) % 2 == 0
    paged, stale = paging.release(state.paged, gone)
    state = dataclasses.replace(state, paged=paged, done=state.done | gone)
    found, state, outs = speculate(model, state, SPECULATION, NEVER)
    assert int(stale) + sum(int(out.stale) for out in outs) == 0
    for b, text in enumerate(found):
        begun = [x for x in first.tokens[b].tolist() if x >= 0]
        assert begun + text == (begun if b % 2 == 0 else undisturbed[b])
    held = -(-np.asarray(state.paged.table.lengths) // PAGE_SIZE)
    assert held[::2].sum() == 0
    assert int(state.paged.pool.free_count) == state.paged.kv.pages - held.sum()


@pytest.mark.parametrize("name", ["quest", "window"])
def test_a_round_without_drafts_is_a_plain_step_whatever_is_chosen(model, name):
    """Rows that do not exist wish for no page, and each row chooses as in a step of its own."""
    options = DecodeOptions(selector=selectors.get(name, budget=8, sinks=0))
    _, state = plain(model, start(model, prompts(3, 8), 40, options), 20, options)
    state = dataclasses.replace(state, limits=state.generated + 1)
    after, out = one_round(model, state, Speculation(drafts=8, draft_loops=2), options)
    expected, stepped = plain(model, state, 1, options)
    assert out.drafted.tolist() == [0] * 8
    assert after.tokens.tolist() == stepped.tokens.tolist()
    assert [[int(x) for x in row if x >= 0] for row in np.asarray(out.tokens)] == expected
    assert int(out.tokens_read.max()) <= 3 * PAGE_SIZE * CONFIG.num_kv_heads


def test_what_cannot_be_taken_back_is_refused_by_name():
    for name, options in (("h2o", {"form": "evict"}), ("tova", {}), ("snapkv", {}), ("rocketkv", {})):
        selector = selectors.get(name, **options)
        with pytest.raises(ValueError, match=type(selector).__name__):
            SPECULATION.check(CONFIG, selector)
    pages = ("quest", "centroid", "lserve", "window", "random", "h2o_sparse_attention", "gqa_h2o_sparse_attention")
    tokens = ("h2o", "h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention", "oracle")
    for name in ("dense", *pages, *tokens):
        SPECULATION.check(CONFIG, selectors.get(name))
    with pytest.raises(ValueError, match="the model has 2"):
        SPECULATION.check(dataclasses.replace(CONFIG, loops=2), selectors.get("dense"))
    for options in ({"drafts": 0}, {"drafts": True}, {"draft_loops": 0}, {"drafts": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            Speculation(**options)
