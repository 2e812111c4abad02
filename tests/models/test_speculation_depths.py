"""Rounds of self-speculation of every size, from 1 draft to 8, from one loop and two, with and without correction."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from models.ouro import Ouro
from models.reference import ReferenceCorrection
from models.speculation import Speculation
from models.speculation_overlapped import Overlapped
from sparse_jax import paging
from tests.models.speculation_setting import CONFIG, assert_same_text, one_round, plain, prompts, speculate, start
from tests.models.test_speculation_rollback import WHOLE, equal_trees, only_the_token, undone

REQUESTS, TOKENS = 16, 14


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    """One layer of four loops: compiles faster."""
    return Ouro(dataclasses.replace(CONFIG, num_layers=1), rngs=nnx.Rngs(4))


def reading(retention):
    return dataclasses.replace(WHOLE, reference=retention and ReferenceCorrection(retention=retention))


@pytest.mark.parametrize(
    ("d", "drafts", "retention"),
    [
        *[(1, 2, None), (2, 4, None), (1, 5, None), (2, 6, None), (1, 7, None)],
        *[(1, 1, 0.3), (2, 2, 0.3), (1, 4, 0.3), (2, 5, 0.3), (2, 8, 0.3), (1, 8, 1.0)],
    ],
)
def test_rounds_give_the_tokens_of_plain_decoding(model, d, drafts, retention):
    """But where two logits are close; and always those of the same rows of which no draft is accepted."""
    speculation, options = Speculation(drafts=drafts, draft_loops=d), reading(retention)
    texts = prompts(drafts, REQUESTS)
    state = start(model, texts, TOKENS, options)
    found, after, outs = speculate(model, state, speculation, options)
    unspeculated, same, singles = speculate(model, state, speculation, options, most=0)
    assert found == unspeculated
    np.testing.assert_array_equal(after.paged.table.lengths, same.paged.table.lengths)
    assert len(singles) == TOKENS - 1
    assert sum(int((out.accepted > 0).sum()) for out in outs) > 4
    if retention == 0.3:
        expected, _ = plain(model, state, TOKENS, options)
        assert sum(a != b for a, b in zip(found, expected)) <= 1
    else:
        expected, _ = plain(model, state, TOKENS, WHOLE)
        assert assert_same_text(model, texts, expected, found, 1e-4) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("d", "drafts", "retention"), [(1, 4, 0.3), (1, 7, None)])
def test_overlapped_rounds_give_the_tokens_of_synchronous_ones(model, d, drafts, retention):
    """Where verification captures, and not the draft; slots and pages are free in the end."""
    speculation, options = Speculation(drafts=drafts, draft_loops=d), reading(retention)
    texts = prompts(drafts, REQUESTS)
    expected, _, outs = speculate(model, start(model, texts, TOKENS, options), speculation, options)
    rounds = Overlapped(model, start(model, texts, TOKENS, options), options, speculation)
    assert len(list(rounds)) in (len(outs), len(outs) + 1), "the end is seen one round late and costs no more"
    assert rounds.tokens == expected
    assert 0 < rounds.accepted < rounds.drafted
    assert (rounds.stale, int(rounds.state.paged.pool.free_count)) == (0, rounds.state.paged.kv.pages)
    assert retention is None or int(rounds.held.store.pool.free_count) == rounds.held.store.slots


@pytest.mark.parametrize(("d", "drafts", "retention"), [(1, 4, 0.3), (2, 8, 0.3), (1, 7, None)])
def test_case_SPEC_4_after_rejected_drafts_all_is_bit_equal_to_never_having_drafted(model, d, drafts, retention):
    """With corrected loops, whose references go with the round, and without; the same rows, none of them a draft."""
    speculation, options = Speculation(drafts=drafts, draft_loops=d), reading(retention)
    state = start(model, prompts(d, REQUESTS), 40, options)
    junk = np.random.default_rng(d).integers(0, 64, (REQUESTS, drafts))
    drafted, out = one_round(model, state, speculation, options, forced=junk, most=0)
    np.testing.assert_array_equal(out.drafted, drafts)
    never, without = one_round(model, only_the_token(state), speculation, options)
    never = undone(never, state)
    equal_trees(out.tokens, without.tokens)
    equal_trees(drafted.selector, never.selector)
    for field in ("pages", "lengths", "status"):
        equal_trees(getattr(drafted.paged.table, field), getattr(never.paged.table, field))
    pool, other = drafted.paged.pool, never.paged.pool
    equal_trees((pool.free_count, pool.holders), (other.free_count, other.holders))
    assert int((pool.incarnation - other.incarnation).sum()) > 0  # drafts had pages of their own
    for b, length in enumerate(drafted.paged.table.lengths.tolist()):
        for plane in range(model.config.planes):
            equal_trees(*([x[:length] for x in paging.gather(s.paged, plane, b)] for s in (drafted, never)))
