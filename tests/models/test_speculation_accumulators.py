"""Selectors that accumulate (H2O) under speculation: only tokens that stay count, as plain steps would (SPEC-4)."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from models.decode import DecodeOptions
from models.loops import attend_by_selector
from models.ouro import Ouro
from models.reference import ReferenceCorrection
from models.speculation import Speculation
from models.speculation_overlapped import Overlapped
from sparse_jax import selectors
from sparse_jax.selectors import H2O, Dense
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

REQUESTS = 12
SPECULATION = Speculation(drafts=3, draft_loops=2)
SPARSE = DecodeOptions(selector=selectors.get("h2o", budget=6, sinks=1, recent=2))  # three tokens by their sums
OTHER = DecodeOptions(
    selector=selectors.get("h2o", budget=0.5, sinks=0, recent=0, group="max", decay=0.5, state_dtype="bfloat16")
)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(1))


def sums(state) -> np.ndarray:
    """Of the tokens in the cache, f32[planes, B, Hkv, W * P]."""
    pages, length = np.asarray(state.paged.table.pages), np.asarray(state.paged.table.lengths)
    scores = np.asarray(state.selector, np.float32).reshape(CONFIG.planes, -1, CONFIG.num_kv_heads, PAGE_SIZE)
    found = np.moveaxis(scores[:, np.maximum(pages, 0)], 3, 2).reshape(*scores.shape[:1], *pages.shape[:1], 2, -1)
    return np.where(np.arange(found.shape[-1]) < length[:, None, None], found, 0)


@pytest.mark.parametrize(("d", "drafts", "options"), [(1, 1, SPARSE), (2, 1, SPARSE), (1, 3, SPARSE), (2, 3, OTHER)])
def test_case_SPEC_4_after_rejected_drafts_the_sums_are_bit_equal_to_never_having_drafted(model, d, drafts, options):
    """The same rows without drafts: sums, pages and who holds them. A plain step has other shapes: rounding apart."""
    speculation = Speculation(drafts=drafts, draft_loops=d)
    state = start(model, prompts(drafts, REQUESTS), 40, options)
    _, state = plain(model, state, 6, options)
    junk = np.random.default_rng(d).integers(0, 64, (REQUESTS, drafts))
    drafted, out = one_round(model, state, speculation, options, forced=junk, most=0)
    np.testing.assert_array_equal(out.drafted, drafts)
    alone = dataclasses.replace(state, limits=state.generated + 1)
    never, without = one_round(model, alone, speculation, options)
    np.testing.assert_array_equal(without.drafted, 0)
    np.testing.assert_array_equal(out.tokens, without.tokens)
    np.testing.assert_array_equal(drafted.selector, never.selector)
    np.testing.assert_array_equal(drafted.paged.table.pages, never.paged.table.pages)
    np.testing.assert_array_equal(drafted.paged.pool.holders, never.paged.pool.holders)
    _, step = plain(model, state, 1, options)
    np.testing.assert_allclose(sums(drafted), sums(step), atol=1e-5 if options is SPARSE else 0.02, rtol=0)
    changed = (sums(step) != sums(state)).any(axis=(0, 2, 3))
    assert changed.sum() > REQUESTS // 2  # whose window is larger than what the budget leaves


@pytest.mark.parametrize("options", [SPARSE, OTHER])
def test_partly_accepted_rounds_leave_the_sums_of_plain_steps(model, options):
    """Of three drafts 3, 0 and 1 are right; each row that stays adds its own probabilities, at its own length."""
    state = start(model, prompts(5, REQUESTS), 40, options)
    _, state = plain(model, state, 6, options)
    truth, _ = plain(model, state, 4, options)
    accepted = np.array([3, 0, 1] * 4)
    candidates = np.array([row[:3] for row in truth])
    candidates = np.where(np.arange(3) < accepted[:, None], candidates, (candidates + 1) % 64)
    drafted, out = one_round(model, state, SPECULATION, options, forced=candidates)
    np.testing.assert_array_equal(out.accepted, accepted)
    for steps in range(4):
        _, stepped = plain(model, state, steps + 1, options)
        rows = accepted == steps
        a, b = sums(drafted)[:, rows], sums(stepped)[:, rows]
        np.testing.assert_allclose(a, b, atol=1e-5 if options is SPARSE else 0.02, rtol=0)
        assert not rows.any() or np.abs(b).max() > 0.5


@pytest.mark.parametrize(("d", "drafts"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_the_text_and_the_sums_are_those_of_plain_decoding(model, d, drafts):
    """Each row chooses by what the rows before it have added, so the budget need not hold everything."""
    texts, limits = prompts(d, REQUESTS), [1, 2, 3, 5, 8, 13, 21, 22, 23, 24, 25, 26]
    state = start(model, texts, limits, SPARSE)
    expected, after = plain(model, state, 26, SPARSE)
    found, state, outs = speculate(model, state, Speculation(drafts=drafts, draft_loops=d), SPARSE)
    same = np.array([a == b for a, b in zip(expected, found)])
    assert same.sum() >= REQUESTS - 1  # two logits, or two sums, may be as good as equal
    np.testing.assert_allclose(sums(state)[:, same], sums(after)[:, same], atol=1e-4, rtol=0)
    assert {0, 1} <= set(np.concatenate([out.accepted for out in outs]).tolist())
    assert sum(int(out.stale) for out in outs) == 0


def test_with_a_budget_that_holds_everything_the_text_is_that_of_dense_attention(model):
    options = DecodeOptions(selector=selectors.get("h2o", budget=64))
    texts = prompts(8, REQUESTS)
    expected, _ = plain(model, start(model, texts, 20), 20)
    found, state, _ = speculate(model, start(model, texts, 20, options), SPECULATION, options)
    assert assert_same_text(model, texts, expected, found, 1e-4) <= 1
    assert not np.asarray(state.selector).any()


def dense_in_the_first_loop(selector, state, plane, *arguments, **options):
    def dense():
        return attend_by_selector(Dense(), (), plane, *arguments, **options).output.out, state

    def sparse():
        attended = attend_by_selector(selector, state, plane, *arguments, **options)
        return attended.output.out, attended.state

    attended = attend_by_selector(selector, state, plane, *arguments, **options)
    out, state = jax.lax.cond(plane < CONFIG.num_layers, dense, sparse)
    return attended._replace(output=attended.output._replace(out=out), state=state)


def test_planes_that_do_not_ask_the_selector_teach_it_nothing(model):
    options = dataclasses.replace(SPARSE, attend=dense_in_the_first_loop)
    state = start(model, prompts(3, REQUESTS), 20, options)
    expected, after = plain(model, state, 20, options)
    found, state, _ = speculate(model, state, SPECULATION, options)
    same = np.array([a == b for a, b in zip(expected, found)])
    assert same.sum() >= REQUESTS - 1
    np.testing.assert_allclose(sums(state)[:, same], sums(after)[:, same], atol=1e-4, rtol=0)
    assert not sums(state)[: CONFIG.num_layers].any()
    assert sums(state)[CONFIG.num_layers :].any(axis=(1, 2, 3)).all()


def test_overlapped_rounds_give_the_same_and_rows_begin_with_empty_sums(model):
    texts = prompts(1, REQUESTS)
    expected, _, _ = speculate(model, start(model, texts, 20, SPARSE), SPECULATION, SPARSE)
    first = start(model, texts, 20, SPARSE).tokens.tolist()
    rounds = Overlapped(model, start(model, texts, 20, SPARSE), SPARSE, SPECULATION)
    for count, _ in enumerate(rounds):
        if count == 1:
            rounds.submit({4: texts[7]}, 20)
    assert rounds.tokens[4] == [first[7], *expected[7]]
    assert [text for b, text in enumerate(rounds.tokens) if b != 4] == expected[:4] + expected[5:]
    assert int(rounds.state.paged.pool.free_count) == rounds.state.paged.kv.pages


def test_corrected_loops_would_not_tell_the_selector_what_they_attend_to(model):
    options = dataclasses.replace(SPARSE, reference=ReferenceCorrection())
    state = start(model, prompts(1, REQUESTS), 20, SPARSE)
    for attempt in (
        lambda: one_round(model, state, SPECULATION, options),
        lambda: Overlapped(model, state, options, SPECULATION),
    ):
        with pytest.raises(ValueError, match="reference correction cannot be combined with the selector H2O"):
            attempt()


def test_a_selector_that_keeps_scores_of_requests_has_to_say_that_it_only_accumulates():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Silent(H2O):
        accumulates = False

    with pytest.raises(ValueError, match="Silent: it drops or moves tokens"):
        SPECULATION.check(CONFIG, Silent())
    SPECULATION.check(CONFIG, H2O())
