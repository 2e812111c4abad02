"""The Llama-style model against NumPy, and over a paged cache against itself."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import decode
from models.checkpoints.families import abstract_model, filled
from models.llama import Llama, LlamaConfig
from sparse_jax import paging, selectors
from tests.models import numpy_llama
from tests.models.configs import small_llama

CONFIG = small_llama()
TENSORS = numpy_llama.random_tensors(CONFIG)
DENSE = selectors.get("dense")
PAGES, PAGE_SIZE = 12, 4
LENGTHS, PROMPTS = (14, 9), (5, 8)
forward = nnx.jit(lambda model, tokens: model.logits(model.forward(tokens).hidden[0]))


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Llama:
    return filled(abstract_model(CONFIG), TENSORS.__getitem__)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 16)).astype(np.int32)


def test_smollm2_has_its_parameters():
    model = nnx.eval_shape(lambda: Llama(LlamaConfig.smollm2_135m(), rngs=nnx.Rngs(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model))) == 134_515_008
    assert model.config.planes == 30


def test_a_plain_decoder_is_a_looped_one_with_one_loop():
    assert (CONFIG.loops, CONFIG.planes, CONFIG.exit_threshold, CONFIG.exit_step) == (1, 3, 1.0, None)
    assert hash(CONFIG) == hash(small_llama())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_kv_heads": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"head_dim": 7}, "head_dim must be even"),
    ],
)
def test_configuration_refuses_what_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        small_llama(**changes)


def test_dtypes_bf16_stream_float32_parameters_and_logits():
    model = abstract_model(CONFIG, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    output = nnx.eval_shape(lambda model, tokens: model.forward(tokens), model, tokens)
    logits = nnx.eval_shape(lambda model, hidden: model.logits(hidden), model, output.hidden)
    chex.assert_shape([*output, logits], [(1, 2, 16, 32), (1, 2, 16), (1, 2, 16, 64)])
    chex.assert_type([*output, logits], [jnp.bfloat16, jnp.float32, jnp.float32])


def test_numbers_are_those_of_numpy_at_every_position(model, tokens):
    """House tolerance 1e-4 against an independent float64 transcription."""
    for logits, row in zip(np.asarray(forward(model, tokens)), tokens):
        np.testing.assert_allclose(logits, numpy_llama.forward(TENSORS, CONFIG, row), atol=1e-4, rtol=0)


def test_mutation_numpy_sees_a_change_of_any_tensor(model, tokens):
    logits = np.asarray(forward(model, tokens))[0]
    for name in TENSORS:
        changed = TENSORS | {name: np.flip(TENSORS[name], 0) * 1.05}
        assert np.abs(logits - numpy_llama.forward(changed, CONFIG, tokens[0])).max() > 1e-2, name


def test_layers_are_called_in_the_order_of_the_planes(model, tokens):
    def attend(plane, q, k, v, seen):
        count, order = seen
        return model.causal(plane, q, k, v, ())[0], (count + 1, order.at[count].set(plane))

    positions = jnp.broadcast_to(jnp.arange(16), tokens.shape)
    _, (count, order) = model.loops(model.embed(tokens), positions, attend, (jnp.int32(0), jnp.full(4, -1)))
    assert int(count) == 3
    np.testing.assert_array_equal(order, [0, 1, 2, -1])


@functools.partial(jax.jit, static_argnames="wrong_plane")
def _step(model, tokens, positions, paged, wrong_plane=False):
    def attend(selector, state, plane, q, k_pages, v_pages, view, **options):
        if wrong_plane:  # every layer reads what the first one wrote
            here = view.page_table - plane * PAGES
            view = view.__class__(**(vars(view) | {"page_table": jnp.where(view.page_table >= 0, here, -1)}))
        return decode.attend_by_selector(selector, state, plane, q, k_pages, v_pages, view, **options)

    return decode.decode_step(model, tokens, positions, paged, DENSE, (), attend=attend)


def decoded(model, tokens, **options):
    """Logits [request][position - prompt] of prefill and teacher-forced decode steps over pages."""
    paged = paging.create(
        planes=CONFIG.planes, pages=PAGES, page_size=PAGE_SIZE, kv_heads=2, key_width=8, requests=2, pages_per_request=4
    )
    counts = jnp.array(PROMPTS)
    out = jax.jit(decode.prefill, static_argnames="selector")(model, tokens, counts, paged, DENSE, ())
    logits = [[row] for row in np.asarray(out.logits)]
    for taken in range(max(LENGTHS) - min(PROMPTS)):
        at = [p + taken if p + taken < n else -1 for p, n in zip(PROMPTS, LENGTHS)]
        out = _step(model, tokens[[0, 1], at], np.int32(at), out.paged, **options)
        for request, position in enumerate(at):
            if position >= 0:
                logits[request].append(np.asarray(out.logits[request]))
    np.testing.assert_array_equal(out.paged.table.lengths, LENGTHS)
    assert int(out.stale) == 0
    return logits


def assert_follows(model, tokens, logits, atol):
    expected = np.asarray(forward(model, tokens))
    for request, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS)):
        np.testing.assert_allclose(logits[request], expected[request, prompt - 1 : length], atol=atol, rtol=0)


def test_paged_decode_equals_the_full_forward(model, tokens):
    assert_follows(model, tokens, decoded(model, tokens), atol=1e-4)


def test_mutation_reading_the_plane_of_another_layer_is_seen(model, tokens):
    logits = decoded(model, tokens, wrong_plane=True)
    with pytest.raises(AssertionError):
        assert_follows(model, tokens, logits, atol=1e-2)
