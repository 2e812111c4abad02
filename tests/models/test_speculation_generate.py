"""generate() with a speculation: the account, and want of pages. Texts of a trained model: `test_shipped_model.py`."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from models.generate import generate
from models.ouro import Ouro
from models.reference import ReferenceCorrection
from models.speculation import Speculation
from models.speculation_overlapped import Overlapped
from sparse_jax import paging, selectors
from tests.models.configs import small_ouro

SMALL = small_ouro(num_layers=1, loops=3)
PROMPTS = [np.random.default_rng(b).integers(0, 64, length).tolist() for b, length in enumerate((5, 14, 9))]
LIMITS = [20, 7, 13]
SPECULATION = Speculation(drafts=2, draft_loops=1)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(SMALL, rngs=nnx.Rngs(0))


def run(model, prompts=PROMPTS, **options):
    options = {"max_tokens": LIMITS, "page_size": 4, "chunk": 9} | options
    result = generate(model, prompts, **options)
    for _ in result:
        pass
    return result


def test_the_account_counts_drafts_rounds_and_what_was_read(model):
    plain, found = run(model), run(model, speculation=SPECULATION)
    assert found.tokens == plain.tokens
    assert found.finished == plain.finished == ["length"] * 3
    a, b = plain.stats(), found.stats()
    assert (a.acceptance, a.tokens_per_round) == (None, None)
    assert 0 < b.acceptance < 1
    assert 1 < b.tokens_per_round <= 3
    assert b.tokens == a.tokens == sum(LIMITS)
    assert b.kv_tokens_dense == a.kv_tokens_dense == a.kv_tokens_read
    assert b.exit_loops == a.exit_loops == (0, 0, sum(LIMITS) - 3)
    assert b.stale == 0
    # Drafts of one loop of three read all of it again, the others are read once a round.
    assert b.kv_tokens_read < 1.7 * b.kv_tokens_dense


def test_with_correction_the_account_tells_the_mass_that_was_kept(model):
    reference = ReferenceCorrection(retention=0.5, capture_loops=(0,))
    a = run(model, reference=reference)
    b = run(model, reference=reference, speculation=SPECULATION)
    assert a.tokens == b.tokens
    a, b = a.stats(), b.stats()
    assert b.retained_mass == pytest.approx(a.retained_mass, abs=1e-5)
    assert b.retained_mass_least == pytest.approx(a.retained_mass_least, abs=1e-5)
    assert 0.3 < b.retained_mass_least < b.retained_mass < 1


def test_with_too_few_pages_drafts_get_less_room_and_the_texts_are_the_same(model):
    """Room for two of three requests: who ended is released when nobody can go on."""
    expected = run(model).tokens
    tight = generate(model, PROMPTS, max_tokens=LIMITS, page_size=4, chunk=9, pages=12, speculation=SPECULATION)
    raised = 0
    while not all(tight.finished):
        try:
            for _ in tight:
                pass
        except paging.OutOfPages:
            raised += 1
            assert raised < 5
            tight.release([b for b, reason in enumerate(tight.finished) if reason])
    assert raised
    assert tight.tokens == expected
    tight.release([0, 1, 2])
    assert int(tight.state.paged.pool.free_count) == 12
    assert tight.stats().stale == 0


def test_exits_of_single_tokens_are_those_of_plain_decoding(model):
    gated = Ouro(small_ouro(num_layers=1, loops=3, init=_gates()), rngs=nnx.Rngs(0))
    plain = run(gated, exit_threshold=0.6)
    found = run(gated, exit_threshold=0.6, speculation=SPECULATION)
    assert found.tokens == plain.tokens
    assert found.stats().exit_loops == plain.stats().exit_loops
    assert sum(count > 0 for count in found.stats().exit_loops) > 1


def _gates():
    return dataclasses.replace(small_ouro().init, gate_std=4.0)


def test_overlapped_rounds_go_on_from_the_prompts_of_a_generation(model):
    """Three rows have prompts; one of them is empty at first, and gets its request while the others run."""
    expected = run(model)
    generation = generate(model, PROMPTS, max_tokens=LIMITS, page_size=4)
    first = next(iter(generation)).tokens
    generation.release([2])
    rounds = Overlapped(model, generation.state, generation.options, SPECULATION)
    told = [list(text) for text in first]
    for count, tokens in enumerate(rounds):
        for text, more in zip(told, tokens):
            text += more
        if count == 2:
            rounds.submit({2: PROMPTS[2]}, LIMITS[2])
    assert told[:2] == expected.tokens[:2]
    assert rounds.tokens[2] == expected.tokens[2]
    assert int(rounds.state.paged.pool.free_count) == rounds.state.paged.kv.pages


def test_a_sparse_selector_reads_less(model):
    found = run(model, speculation=SPECULATION, selector=selectors.get("quest", budget=8, sinks=0, recent=4))
    assert found.stats().kv_tokens_read < 0.9 * run(model, speculation=SPECULATION).stats().kv_tokens_read
    assert [len(text) for text in found.tokens] == LIMITS


@pytest.mark.parametrize("name", ["h2o_token_sparse_attention", "oracle"])
def test_selectors_of_tokens_serve_several_rows(model, name):
    """Those with sums see each row after the other, those without all at once."""
    options = {"selector": selectors.get(name, budget=6, recent=2), "page_size": None}
    plain, found = run(model, **options), run(model, speculation=SPECULATION, **options)
    assert found.tokens == plain.tokens
    assert 0 < found.stats().acceptance < 1
    assert found.stats().kv_tokens_read < run(model, speculation=SPECULATION).stats().kv_tokens_read


def test_what_does_not_go_together_is_refused(model):
    for selector in (selectors.get("h2o", form="evict"), selectors.get("snapkv")):
        with pytest.raises(ValueError, match=type(selector).__name__):
            generate(model, PROMPTS, selector=selector, speculation=SPECULATION)
    with pytest.raises(ValueError, match="draft_loops"):
        generate(model, PROMPTS, speculation=Speculation(draft_loops=3))
