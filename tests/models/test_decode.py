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
from models.ouro import Ouro, OuroConfig
from sparse_jax import paging, selectors

PAGE_SIZE = 4
CONFIG = OuroConfig.test(num_layers=2, loops=3)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(0))


def new_state(requests: int, config=CONFIG, pages: int = 40, dtype=jnp.float32) -> paging.PagedState:
    return paging.create(
        planes=config.planes,
        pages=pages,
        page_size=PAGE_SIZE,
        kv_heads=config.num_kv_heads,
        key_width=config.head_dim,
        requests=requests,
        pages_per_request=8,
        dtype=dtype,
    )


@functools.partial(jax.jit, static_argnames=("selector", "options"))
def jit_prefill(model, tokens, counts, paged, selector, selector_state, options=()):
    return decode.prefill(model, tokens, counts, paged, selector, selector_state, **dict(options))


@functools.partial(jax.jit, static_argnames=("selector", "options"))
def jit_step(model, tokens, positions, paged, selector, selector_state, options=()):
    return decode.decode_step(model, tokens, positions, paged, selector, selector_state, **dict(options))


def teacher_forced(model, sequences, prompts, selector=None, paged=None, **options):
    """Logits [steps + 1, B, V] after each prompt and each forced token, with the last DecodeOutput."""
    selector, options = selector or selectors.get("dense"), tuple(options.items())
    prefill_options = tuple(item for item in options if item[0] in ("exit_threshold", "exit_step"))
    paged = paged or new_state(len(sequences))
    tokens = np.zeros((len(sequences), 16), np.int32)
    for row, sequence, length in zip(tokens, sequences, prompts):
        row[:length] = sequence[:length]
    out = jit_prefill(model, tokens, np.int32(prompts), paged, selector, selector.init(paged.kv), prefill_options)
    outputs = [out]
    for step in range(max(len(s) - p for s, p in zip(sequences, prompts))):
        at = [p + step for p in prompts]
        forced = np.int32([s[min(a, len(s) - 1)] for s, a in zip(sequences, at)])
        positions = np.int32([a if a < len(s) else -1 for s, a in zip(sequences, at)])
        out = jit_step(model, forced, positions, out.paged, selector, out.selector_state, options)
        outputs.append(out)
    return np.stack([out.logits for out in outputs]), outputs


def sequences_of(*lengths):
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in lengths]


@functools.cache
def _forward(model):
    return jax.jit(lambda tokens: model.logits(model.forward(tokens).hidden))


def dense_logits(model, sequence):
    """Logits [U, S, V] of the full forward pass; one compiled shape for all."""
    return _forward(model)(jnp.asarray(sequence + [0] * (32 - len(sequence)))[None])[:, 0, : len(sequence)]


def assert_follows(model, logits, sequences, prompts, loop=-1, atol=1e-4):
    for request, (sequence, prompt) in enumerate(zip(sequences, prompts)):
        expected = dense_logits(model, sequence)[loop, prompt - 1 :]
        np.testing.assert_allclose(logits[: len(expected), request], expected, atol=atol, rtol=0)


def test_decode_equals_the_full_forward_at_every_position(model):
    """Requests of different lengths, across page boundaries, one that ends before the others, one prompt of one token."""
    sequences, prompts = sequences_of(17, 25, 11, 6), (5, 12, 1, 4)
    logits, outputs = teacher_forced(model, sequences, prompts)
    assert_follows(model, logits, sequences, prompts)
    np.testing.assert_array_equal(outputs[-1].paged.table.lengths, [17, 25, 11, 6])
    assert sum(int(out.stale) for out in outputs) == 0
    paging.check(outputs[-1].paged)


def test_batched_requests_equal_single_ones(model):
    sequences, prompts = sequences_of(17, 25, 11, 6), (5, 12, 1, 4)
    together, _ = teacher_forced(model, sequences, prompts)
    for request in (0, 2):
        alone, _ = teacher_forced(model, [sequences[request]], [prompts[request]])
        np.testing.assert_allclose(together[: len(alone), request], alone[:, 0], atol=1e-5, rtol=0)


def read_the_plane_of_the_first_loop(selector, state, plane, q, k_pages, v_pages, view, **options):
    pages = k_pages.shape[0] // CONFIG.planes
    loop = plane // CONFIG.num_layers
    wrong = jnp.where(view.page_table >= 0, view.page_table - loop * CONFIG.num_layers * pages, -1)
    view = dataclasses.replace(view, page_table=wrong)
    return attend_by_selector(selector, state, plane, q, k_pages, v_pages, view, **options)


def test_mutation_reading_the_plane_of_another_loop_changes_the_model(model):
    sequences, prompts = sequences_of(17, 25, 11, 6), (5, 12, 1, 4)
    logits, _ = teacher_forced(model, sequences, prompts, attend=read_the_plane_of_the_first_loop)
    with pytest.raises(AssertionError):
        assert_follows(model, logits, sequences, prompts, atol=1e-2)


def test_a_selector_whose_budget_holds_everything_is_dense(model):
    sequences, prompts = sequences_of(17, 25, 11, 6), (5, 12, 1, 4)
    logits, _ = teacher_forced(model, sequences, prompts, selectors.get("quest", budget=32))
    assert_follows(model, logits, sequences, prompts)


def test_tokens_read_are_those_of_the_chosen_pages_inside_the_length(model):
    """Window: 4 sinks and the last 4 tokens in pages of 4, counted by hand per plane, summed over both KV heads."""
    sequences, prompts = sequences_of(17, 25, 11, 6), (5, 12, 1, 4)
    logits, outputs = teacher_forced(model, sequences, prompts, selectors.get("window", sinks=4, recent=4))
    dense, dense_outputs = teacher_forced(model, sequences, prompts)
    for step, (out, full) in enumerate(zip(outputs[1:], dense_outputs[1:]), start=1):
        for request, (sequence, prompt) in enumerate(zip(sequences, prompts)):
            length = prompt + step if prompt + step <= len(sequence) else 0
            pages = {0} | set(range(max(length - 4, 0) // 4, (length + 3) // 4)) if length else set()
            tokens = sum(min(4, length - 4 * page) for page in pages)
            np.testing.assert_array_equal(out.tokens_read[:, request], 2 * tokens)
            np.testing.assert_array_equal(full.tokens_read[:, request], 2 * length)
    assert np.abs(logits - dense).max() > 1e-3  # it really is sparse
    np.testing.assert_array_equal(outputs[0].tokens_read, 0)


def test_a_request_that_takes_no_part_keeps_every_bit(model):
    sequences, prompts = sequences_of(9, 9), (7, 7)
    selector = selectors.get("quest", budget=8)
    _, outputs = teacher_forced(model, sequences, prompts, selector)
    before = outputs[-1]
    after = jit_step(model, np.int32([3, 3]), np.int32([9, -1]), before.paged, selector, before.selector_state)
    assert int(after.tokens_read[:, 1].sum()) == 0
    for field in ("lengths", "pages", "status"):
        old, new = (getattr(out.paged.table, field)[1] for out in (before, after))
        np.testing.assert_array_equal(old, new)
    for plane in range(CONFIG.planes):
        np.testing.assert_array_equal(paging.gather(before.paged, plane, 1), paging.gather(after.paged, plane, 1))


def test_a_request_without_a_page_keeps_its_state_and_says_so(model):
    """Two requests of 8 tokens fill all 4 pages; the token after that fits nowhere."""
    sequences, prompts = sequences_of(8, 8), (7, 7)
    paged = new_state(2, pages=4)
    _, outputs = teacher_forced(model, sequences, prompts, paged=paged)
    before = outputs[-1]
    after = jit_step(model, np.int32([3, 3]), np.int32([8, 8]), before.paged, selectors.get("dense"), ())
    np.testing.assert_array_equal(after.paged.table.status, [paging.OUT_OF_PAGES] * 2)
    jax.tree.map(np.testing.assert_array_equal, after.paged.kv, before.paged.kv)
    jax.tree.map(np.testing.assert_array_equal, after.paged.pool, before.paged.pool)
    np.testing.assert_array_equal(after.paged.table.lengths, [8, 8])


@pytest.mark.parametrize("name", ["dense", "quest"])
def test_shared_prefix_is_copied_before_it_is_written_with_its_side_data(model, name):
    """Two requests share 6 tokens (a page and a half), then go different ways."""
    selector = selectors.get(name, budget=8, recent=1, sinks=0)
    prefix, (left, right) = sequences_of(6)[0], sequences_of(5, 5)
    sequences = [prefix + left, prefix + right]
    alone, outputs_alone = teacher_forced(model, sequences, (6, 6), selector)
    paged = new_state(2)
    tokens = np.zeros((2, 16), np.int32)
    tokens[0, :6] = prefix
    out = jit_prefill(model, tokens, np.int32([6, 0]), paged, selector, selector.init(paged.kv))
    paged, stale = paging.share(out.paged, 0, 1, 6)
    assert int(stale) == 0
    state = out.selector_state
    for step in range(5):
        forced = np.int32([left[step], right[step]])
        out = jit_step(model, forced, np.int32([6 + step, 6 + step]), paged, selector, state)
        paged, state = out.paged, out.selector_state
        np.testing.assert_allclose(out.logits, alone[step + 1], atol=1e-5, rtol=0)
        np.testing.assert_array_equal(out.tokens_read, outputs_alone[step + 1].tokens_read)
        assert int(out.stale) == 0


def test_stale_pages_are_ignored_and_counted(model):
    sequences, prompts = sequences_of(9, 9), (7, 7)
    _, outputs = teacher_forced(model, sequences, prompts)
    paged = outputs[-1].paged
    page = paged.table.pages[1, 0]
    pool = dataclasses.replace(paged.pool, incarnation=paged.pool.incarnation.at[page].add(1))
    out = jit_step(
        model, np.int32([3, 3]), np.int32([9, 9]), dataclasses.replace(paged, pool=pool), selectors.get("dense"), ()
    )
    assert int(out.stale) == CONFIG.planes
    fine = jit_step(model, np.int32([3, 3]), np.int32([9, 9]), paged, selectors.get("dense"), ())
    np.testing.assert_array_equal(out.logits[0], fine.logits[0])


@pytest.mark.parametrize(
    "options", [{"exit_threshold": 0.0}, {"exit_step": 0}, {"exit_step": 1, "exit_threshold": 0.0}]
)
def test_exit_selects_the_hidden_state_of_its_loop(model, options):
    sequences, prompts = sequences_of(9, 9), (7, 7)
    logits, outputs = teacher_forced(model, sequences, prompts, **options)
    loop = options.get("exit_step", 0)
    assert_follows(model, logits, sequences, prompts, loop=loop)
    np.testing.assert_array_equal(outputs[-1].exit_loop, loop)


def test_different_exits_in_one_batch_equal_single_requests(model):
    sequences, prompts = sequences_of(12, 12, 12, 12), (4, 4, 4, 4)
    together, outputs = teacher_forced(model, sequences, prompts, exit_threshold=0.55)
    assert len({int(loop) for out in outputs for loop in out.exit_loop}) > 1
    for request in range(2):
        alone, singles = teacher_forced(model, [sequences[request]], [4], exit_threshold=0.55)
        np.testing.assert_allclose(together[:, request], alone[:, 0], atol=1e-5, rtol=0)
        assert [int(out.exit_loop[request]) for out in outputs] == [int(out.exit_loop[0]) for out in singles]
