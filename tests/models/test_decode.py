"""Prefill and decode over paged planes against the full forward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import decode
from models.decode import attend_by_selector
from models.ouro import Ouro
from sparse_jax import paging, selectors
from tests.models.configs import small_ouro

PAGE_SIZE, REQUESTS, PAGES = 4, 4, 40  # one shape for all tests: compiling is what takes time here
CONFIG = small_ouro(num_layers=2, loops=3, init=dataclasses.replace(small_ouro().init, gate_std=4.0))
DENSE = selectors.get("dense")
PROMPTS = (5, 12, 1, 4)
RNG = np.random.default_rng(0)
SEQUENCES = [RNG.integers(0, CONFIG.vocab_size, length).tolist() for length in (17, 25, 11, 6)]


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(0))


def new_state() -> paging.PagedState:
    return paging.create(
        planes=CONFIG.planes,
        pages=PAGES,
        page_size=PAGE_SIZE,
        kv_heads=CONFIG.num_kv_heads,
        key_width=CONFIG.head_dim,
        requests=REQUESTS,
        pages_per_request=8,
    )


@functools.partial(jax.jit, static_argnames="selector")
def _prefill(model, tokens, counts, paged, selector, selector_state):
    return decode.prefill(model, tokens, counts, paged, selector, selector_state)


@functools.partial(jax.jit, static_argnames=("selector", "options"))
def _step(model, tokens, positions, paged, selector, selector_state, options):
    return decode.decode_step(model, tokens, positions, paged, selector, selector_state, **dict(options))


def prefill(model, sequences, prompts, selector=DENSE):
    tokens = np.zeros((REQUESTS, 16), np.int32)
    for row, sequence, length in zip(tokens, sequences, prompts):
        row[:length] = sequence[:length]
    paged = new_state()
    state = selector.init(paged.kv)
    # Selectors without a state do nothing in a prefill.
    return _prefill(model, tokens, np.int32(prompts), paged, selector if jax.tree.leaves(state) else DENSE, state)


def step(model, out, tokens, positions, selector=DENSE, **options):
    arguments = np.int32(tokens), np.int32(positions), out.paged, selector, out.selector_state
    return _step(model, *arguments, tuple(options.items()))


def teacher_forced(model, sequences=SEQUENCES, prompts=PROMPTS, selector=DENSE, out=None, **options):
    """Logits [steps + 1, B, V] after each prompt and each forced token, and every DecodeOutput."""
    outputs = [out or prefill(model, sequences, prompts, selector)]
    for taken in range(max(len(s) - p for s, p in zip(sequences, prompts))):
        at = [p + taken if 0 < p + taken < len(s) else -1 for s, p in zip(sequences, prompts)]
        outputs.append(step(model, outputs[-1], [s[a] for s, a in zip(sequences, at)], at, selector, **options))
    return np.stack([out.logits for out in outputs]), outputs


@functools.cache
def _forward(model):
    return jax.jit(lambda tokens: model.logits(model.forward(tokens).hidden))


def dense_logits(model, sequence):
    """Logits [U, S, V] of the full forward pass; one compiled shape for all."""
    return _forward(model)(jnp.asarray(sequence + [0] * (32 - len(sequence)))[None])[:, 0, : len(sequence)]


def assert_follows(model, logits, loop=-1, atol=1e-4):
    for request, (sequence, prompt) in enumerate(zip(SEQUENCES, PROMPTS)):
        expected = dense_logits(model, sequence)[loop, prompt - 1 :]
        np.testing.assert_allclose(logits[: len(expected), request], expected, atol=atol, rtol=0)


def test_decode_equals_the_full_forward_at_every_position(model):
    """Different lengths, across page boundaries, one that ends before the others, one prompt of a single token."""
    logits, outputs = teacher_forced(model)
    assert_follows(model, logits)
    np.testing.assert_array_equal(outputs[-1].paged.table.lengths, [17, 25, 11, 6])
    assert sum(int(out.stale) for out in outputs) == 0
    paging.check(outputs[-1].paged)


def test_batched_requests_equal_single_ones(model):
    """Alone in the state, in another row: the other rows of the batch are empty."""
    together, _ = teacher_forced(model)
    for request in (0, 2):
        alone, _ = teacher_forced(model, [[0], SEQUENCES[request], [0], [0]], (0, PROMPTS[request], 0, 0))
        np.testing.assert_allclose(together[: len(alone), request], alone[:, 1], atol=1e-5, rtol=0)


def read_the_plane_of_the_first_loop(selector, state, plane, q, k_pages, v_pages, view, **options):
    loop = plane // CONFIG.num_layers
    wrong = jnp.where(view.page_table >= 0, view.page_table - loop * CONFIG.num_layers * PAGES, -1)
    view = dataclasses.replace(view, page_table=wrong)
    return attend_by_selector(selector, state, plane, q, k_pages, v_pages, view, **options)


def test_mutation_reading_the_plane_of_another_loop_changes_the_model(model):
    logits, _ = teacher_forced(model, attend=read_the_plane_of_the_first_loop)
    with pytest.raises(AssertionError):
        assert_follows(model, logits, atol=1e-2)


def test_a_selector_whose_budget_holds_everything_is_dense(model):
    logits, outputs = teacher_forced(model, selector=selectors.get("quest", budget=32))
    assert_follows(model, logits)
    np.testing.assert_array_equal(outputs[1].tokens_read[0], [2 * 6, 2 * 13, 2 * 2, 2 * 5])


def test_tokens_read_are_those_of_the_chosen_pages_inside_the_length(model):
    """Window: 4 sinks and the last 4 tokens in pages of 4, counted by hand per plane, summed over both KV heads."""
    logits, outputs = teacher_forced(model, selector=selectors.get("window", sinks=4, recent=4))
    dense, dense_outputs = teacher_forced(model)
    for taken, (out, full) in enumerate(zip(outputs, dense_outputs)):
        for request, (sequence, prompt) in enumerate(zip(SEQUENCES, PROMPTS)):
            length = prompt + taken if taken and prompt + taken <= len(sequence) else 0
            pages = {0} | set(range(max(length - 4, 0) // 4, (length + 3) // 4)) if length else set()
            tokens = sum(min(4, length - 4 * page) for page in pages)
            np.testing.assert_array_equal(out.tokens_read[:, request], 2 * tokens)
            np.testing.assert_array_equal(full.tokens_read[:, request], 2 * length)
    assert np.abs(logits[:, 1] - dense[:, 1]).max() > 1e-3  # it really is sparse


def test_a_request_that_takes_no_part_keeps_every_bit(model):
    selector = selectors.get("quest", budget=8, recent=1, sinks=0)
    before = prefill(model, SEQUENCES, PROMPTS, selector)
    after = step(model, before, [3] * 4, [5, -1, 1, 4], selector)
    assert int(after.tokens_read[:, 1].sum()) == 0
    for field in ("lengths", "pages", "status"):
        old, new = (getattr(out.paged.table, field)[1] for out in (before, after))
        np.testing.assert_array_equal(old, new)
    pages = np.asarray(before.paged.table.pages[1, :3])
    np.testing.assert_array_equal(before.paged.kv.k[:, pages], after.paged.kv.k[:, pages])
    np.testing.assert_array_equal(before.paged.kv.v[:, pages], after.paged.kv.v[:, pages])


def test_a_request_without_a_page_keeps_its_state_and_says_so(model):
    before = prefill(model, SEQUENCES, PROMPTS)
    pool = dataclasses.replace(before.paged.pool, free_count=jnp.int32(1))  # for one of the two that need a page
    before = before._replace(paged=dataclasses.replace(before.paged, pool=pool))
    after = step(model, before, [3] * 4, [5, 12, 1, 4])
    np.testing.assert_array_equal(after.paged.table.status, [paging.OK] * 3 + [paging.OUT_OF_PAGES])
    np.testing.assert_array_equal(after.paged.table.lengths, [6, 13, 2, 4])
    page = int(before.paged.table.pages[3, 0])
    np.testing.assert_array_equal(after.paged.kv.k[:, page], before.paged.kv.k[:, page])
    enough = step(model, prefill(model, SEQUENCES, PROMPTS), [3] * 4, [5, 12, 1, 4])
    np.testing.assert_array_equal(after.logits[:3], enough.logits[:3])


@pytest.mark.parametrize("name", ["dense", "quest"])
def test_shared_prefix_is_copied_before_it_is_written_with_its_side_data(model, name):
    """Two requests share 6 tokens (a page and a half), then go different ways."""
    selector = selectors.get(name, budget=8, recent=1, sinks=0)
    prefix, left, right = SEQUENCES[1][:6], SEQUENCES[0][:5], SEQUENCES[2][:5]
    sequences = [prefix + left, prefix + right, [0], [0]]
    alone, outputs_alone = teacher_forced(model, sequences, (6, 6, 0, 0), selector)
    out = prefill(model, sequences, (6, 0, 0, 0), selector)
    paged, stale = jax.jit(paging.share)(out.paged, 0, 1, 6)
    assert int(stale) == 0
    shared, outputs = teacher_forced(model, sequences, (6, 6, 0, 0), selector, out=out._replace(paged=paged))
    np.testing.assert_allclose(shared[1:, :2], alone[1:, :2], atol=1e-5, rtol=0)
    for out, expected in zip(outputs[1:], outputs_alone[1:]):
        np.testing.assert_array_equal(out.tokens_read, expected.tokens_read)
        assert int(out.stale) == 0


def test_stale_pages_are_ignored_and_counted(model):
    out = prefill(model, SEQUENCES, PROMPTS)
    page = out.paged.table.pages[1, 0]
    pool = dataclasses.replace(out.paged.pool, incarnation=out.paged.pool.incarnation.at[page].add(1))
    stale = step(model, out._replace(paged=dataclasses.replace(out.paged, pool=pool)), [3] * 4, [5, 12, 1, 4])
    fine = step(model, out, [3] * 4, [5, 12, 1, 4])
    assert (int(stale.stale), int(fine.stale)) == (CONFIG.planes, 0)
    np.testing.assert_array_equal(stale.logits[:1], fine.logits[:1])
    assert int(stale.tokens_read[0, 1]) == 2 * (13 - 4)


def test_exit_step_selects_the_hidden_state_of_its_loop(model):
    logits, outputs = teacher_forced(model, exit_step=1)
    expected = dense_logits(model, SEQUENCES[1])[1, PROMPTS[1] :]
    np.testing.assert_allclose(logits[1 : len(expected) + 1, 1], expected, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(outputs[1].exit_loop, 1)


def test_a_batch_with_different_exits_equals_single_requests(model):
    threshold = 0.6
    logits, outputs = teacher_forced(model, exit_threshold=threshold)
    loops = np.stack([out.exit_loop for out in outputs[1:]])
    assert len(set(loops[:, 1].tolist())) > 1
    for request in (0, 1, 2):
        sequence, prompt = SEQUENCES[request], PROMPTS[request]
        expected = dense_logits(model, sequence)
        for taken, position in enumerate(range(prompt, len(sequence))):
            loop = loops[taken, request]
            np.testing.assert_allclose(logits[taken + 1, request], expected[loop, position], atol=1e-4, rtol=0)
    alone, singles = teacher_forced(model, [[0], SEQUENCES[1], [0], [0]], (0, 12, 0, 0), exit_threshold=threshold)
    np.testing.assert_array_equal(np.stack([out.exit_loop for out in singles[1:]])[:, 1], loops[: len(singles) - 1, 1])
    np.testing.assert_allclose(alone[1:, 1], logits[1 : len(alone), 1], atol=1e-5, rtol=0)
