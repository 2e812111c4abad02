"""Reference correction while a looped model generates: against dense decoding and against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import decode, loops
from models import generate as generation
from models.checkpoints.families import tensors_of
from models.generate import generate
from models.llama import Llama
from models.ouro import Ouro
from models.reference import ReferenceCorrection
from sparse_jax import paging, retained_count, selectors
from tests.models.configs import small_llama, small_ouro
from tests.models.numpy_corrected import Decoder

CONFIG = small_ouro(num_layers=2, loops=4, init=dataclasses.replace(small_ouro().init, gate_std=4.0))
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 64, length).tolist() for length in (5, 14, 1)]
LIMITS = [12, 7, 13]
FORCED = RNG.integers(0, 64, (3, 6))
DENSE = selectors.get("dense")
QUEST = selectors.get("quest", budget=8, sinks=0, recent=1)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def shallow() -> Ouro:
    """One layer: compiles faster."""
    return Ouro(dataclasses.replace(CONFIG, num_layers=1), rngs=nnx.Rngs(0))


def run(model, prompts=PROMPTS, **options):
    options = {"max_tokens": LIMITS, "page_size": 4, "chunk": 6} | options
    result = generate(model, prompts, **options)
    for _ in result:
        pass
    return result


@functools.partial(jax.jit, static_argnames=("selector", "options"))
def _step(model, tokens, positions, paged, selector, state, options):
    return decode.decode_step(model, tokens, positions, paged, selector, state, **dict(options))


@functools.partial(jax.jit, static_argnames="selector")
def _prefill(model, tokens, counts, paged, selector, state):
    return decode.prefill(model, tokens, counts, paged, selector, state)


def prefilled(model, selector):
    paged = paging.create(
        planes=model.config.planes, pages=20, page_size=4, kv_heads=2, key_width=8, requests=3, pages_per_request=6
    )
    tokens = np.array([prompt + [0] * (16 - len(prompt)) for prompt in PROMPTS], np.int32)
    counts = np.int32([len(prompt) for prompt in PROMPTS])
    return _prefill(model, tokens, counts, paged, selector, selector.init(paged.kv))


def forced(model, selector=DENSE, takes_part=(True, True, True), **options):
    """Outputs of the prefill and of a decode step for each forced token."""
    outputs = [prefilled(model, selector)]
    for tokens in FORCED.T:
        last = outputs[-1]
        positions = np.where(takes_part, np.asarray(last.paged.table.lengths), -1).astype(np.int32)
        arguments = np.int32(tokens), positions, last.paged, selector, last.selector_state
        outputs.append(_step(model, *arguments, tuple(options.items())))
    return outputs


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_full_retention_gives_the_tokens_of_dense_decoding(shallow, requests):
    rng = np.random.default_rng(requests)
    prompts = [rng.integers(0, 64, length).tolist() for length in rng.integers(1, 17, requests)]
    dense = run(shallow, prompts, max_tokens=15, pages=224)
    full = run(shallow, prompts, max_tokens=15, pages=224, reference=ReferenceCorrection(retention=1.0))
    assert full.tokens == dense.tokens
    assert all(len(tokens) == 15 for tokens in full.tokens)
    assert full.stats().kv_fraction == 1.0
    assert full.stats().retained_mass == pytest.approx(1.0, abs=1e-6)


def test_full_retention_is_dense_decoding_but_for_rounding(shallow):
    """The corrected loops are programs of their own, which XLA may round differently; their attention is the same."""
    corrected = forced(shallow, reference=ReferenceCorrection(retention=1.0))
    for got, expected in zip(corrected, forced(shallow)):
        np.testing.assert_allclose(got.logits, expected.logits, atol=5e-6, rtol=0)
        np.testing.assert_array_equal(got.tokens_read, expected.tokens_read)


def numpy_logits(model, request, retention, capture_loops, pages=None):
    """The Decoder and its logits [1 + forced, U, V] after the prompt and after each forced token."""
    decoder = Decoder(tensors_of(model), model.config, retention, capture_loops, pages)
    for token in PROMPTS[request]:
        logits = decoder.step(token, correct=False)
    return decoder, [logits, *(decoder.step(token, correct=True) for token in FORCED[request])]


@pytest.mark.parametrize(
    ("retention", "capture_loops", "selector"),
    [(0.1, (1,), DENSE), (0.4, (1,), QUEST), (0.4, (2,), QUEST), (0.3, (1, 2), DENSE)],
    ids=str,
)
def test_partial_retention_equals_numpy(model, retention, capture_loops, selector):
    """Prompts are read densely, that of one token too; each later token is corrected in the loops after the capture."""
    reference = ReferenceCorrection(retention=retention, capture_loops=capture_loops)
    outputs = forced(model, selector, reference=reference)
    pages = 2 if selector is QUEST else None
    for request in range(3):
        decoder, expected = numpy_logits(model, request, retention, capture_loops, pages)
        got = np.array([out.logits[request] for out in outputs])
        np.testing.assert_allclose(got, np.array(expected)[:, -1], atol=2e-4, rtol=0)
        masses = np.array([out.references.mass.reshape(2, 3, 4)[:, request] for out in outputs[1:]])
        np.testing.assert_allclose(masses, decoder.masses, atol=1e-5, rtol=0)
        # The comparison can tell another retention, other captures and other pages.
        for other in ((1.0, capture_loops, pages), (retention, (0,), pages), (retention, capture_loops, 1)):
            if other[1:] != (capture_loops, 1) or pages is not None:
                assert np.abs(got - np.array(numpy_logits(model, request, *other)[1])[:, -1])[1:].max() > 0.005


def test_greedy_generation_and_its_account_equal_numpy(model):
    retention, tensors = 0.3, tensors_of(model)
    result = run(model, reference=ReferenceCorrection(retention=retention))
    masses, read = [], 0
    for request, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS)):
        decoder = Decoder(tensors, CONFIG, retention, (1,))
        for token in prompt:
            logits = decoder.step(token, correct=False)[-1]
        for token in result.tokens[request]:
            assert np.sort(logits)[-1] - np.sort(logits)[-2] > 1e-3, "a margin that rounding could turn"
            assert token == int(np.argmax(logits))
            logits = decoder.step(token, correct=True)[-1]
        masses += decoder.masses[:-1]  # the last token is not fed
        for n in range(len(prompt) + 1, len(prompt) + limit):
            kept = retained_count(n, retention)
            read += 2 * 2 * n * 2 + 2 * 2 * (n * 2 if kept == n else kept * 4)
    stats = result.stats()
    assert stats.retained_mass == pytest.approx(np.mean(masses), abs=1e-5)
    assert stats.retained_mass_least == pytest.approx(np.min(masses), abs=1e-5)
    assert stats.kv_tokens_read == read
    assert (stats.stale, sum(stats.exit_loops)) == (0, 29)


def test_a_prefill_is_never_corrected(shallow, monkeypatch):
    """Neither of a longer prompt nor of one token; the first decode step is."""

    def refuse(*arguments):
        raise AssertionError("corrected")

    monkeypatch.setattr(loops, "capture", refuse)
    monkeypatch.setattr(loops, "consume", refuse)
    result = generate(shallow, [[7], [3] * 5], max_tokens=3, reference=ReferenceCorrection(retention=0.37))
    plain = generate(shallow, [[7], [3] * 5], max_tokens=3)
    first, expected = next(iter(result)), next(iter(plain))
    assert first.tokens == expected.tokens
    for got, wanted in zip(jax.tree.leaves(result.state.paged), jax.tree.leaves(plain.state.paged)):
        np.testing.assert_array_equal(got, wanted)
    assert result.stats().retained_mass is None
    with pytest.raises(AssertionError, match="corrected"):
        list(result)


@pytest.mark.parametrize(("exit_step", "same"), [(1, True), (2, False)])
def test_an_exit_before_the_correction_is_that_of_dense_decoding(shallow, exit_step, same):
    """Corrected loops write other keys, but in their own planes only."""
    got = forced(shallow, exit_step=exit_step, reference=ReferenceCorrection(retention=0.2))
    expected = forced(shallow, exit_step=exit_step)
    difference = max(np.abs(a.logits - b.logits).max() for a, b in zip(got, expected))
    assert (difference < 1e-4) == same
    assert all((np.asarray(out.exit_loop) == exit_step).all() for out in got[1:])


def test_the_gate_chooses_among_corrected_loops(model):
    stats = run(model, exit_threshold=0.6, reference=ReferenceCorrection(retention=0.3)).stats()
    assert sum(stats.exit_loops) == 29
    assert sum(count > 0 for count in stats.exit_loops) > 1


def test_a_request_that_takes_no_part_keeps_every_bit_and_changes_nothing_for_the_others(model):
    reference = ReferenceCorrection(retention=0.3)
    together = forced(model, QUEST, reference=reference)
    without = forced(model, QUEST, (True, False, True), reference=reference)
    before, after = without[0].paged, without[-1].paged
    for plane in range(CONFIG.planes):
        for pool in ("k", "v"):
            old, new = (np.asarray(getattr(paged.kv, pool))[plane] for paged in (before, after))
            pages = np.asarray(paging.view(before, plane).page_table)[1] - plane * old.shape[0]
            held = pages[pages >= 0]
            held = held[held < old.shape[0]]
            assert len(held)
            np.testing.assert_array_equal(new[held], old[held])
    assert after.table.lengths[1] == before.table.lengths[1] == 14
    for got, expected in zip(without[1:], together[1:]):
        np.testing.assert_array_equal(got.logits[::2], expected.logits[::2])
        assert (got.tokens_read[:, 1] == 0).all()
        assert (got.references.count.reshape(2, 3)[:, 1] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_call_copies_the_pool(shallow, dtype):
    result = generate(
        shallow, [[1, 2, 3]] * 2, max_tokens=32, page_size=4, pages=4096, cache_dtype=dtype,
        selector=selectors.get("quest", budget=32), reference=ReferenceCorrection(retention=0.1),
    )  # fmt: skip
    state = result.state
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((state.paged.kv, state.selector)))
    static = {"graph": result._graph, "options": result.options, "speculation": None}
    memory = generation._decode.lower(result._params, state, **static, steps=8).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 20


def test_interpreted_kernels_generate_the_same(shallow):
    options = {"max_tokens": 4, "chunk": 3, "reference": ReferenceCorrection(retention=0.3)}
    interpreted = run(shallow, PROMPTS[:1], implementation="interpret", **options)
    assert interpreted.tokens == run(shallow, PROMPTS[:1], **options).tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capture_loops": (3,)}, r"4 loops has none to correct after the capture_loops \(3,\)"),
        ({"capture_loops": (1, 4)}, r"4 loops has none to correct after the capture_loops \(1, 4\)"),
        ({"capture_loops": (1, 3)}, r"4 loops has none to correct after the capture_loops \(1, 3\)"),
        ({"capture_loops": 1}, "capture_loops must be rising loops from 0 up, at least one, got 1"),
        ({"capture_loops": (True,)}, r"capture_loops must be .* got \(True,\)"),
        ({"capture_loops": (0, 1.0)}, r"capture_loops must be .* got \(0, 1\.0\)"),
        ({"capture_loops": (-1,)}, r"capture_loops must be .* got \(-1,\)"),
        ({"capture_loops": (2, 1)}, r"rising loops from 0 up.*\(2, 1\)"),
        ({"capture_loops": ()}, "at least one"),
        ({"retention": 0.0}, r"retention must be above 0 and at most 1, got 0\.0"),
        ({"retention": 1.5}, r"got 1\.5"),
        ({"retention": "0.1"}, r"retention must be above 0 and at most 1, got '0\.1'"),
        ({"retention": True}, "retention must be above 0 and at most 1, got True"),
        ({"retention": float("nan")}, "retention must be above 0 and at most 1, got nan"),
    ],
)
def test_refuses_with_the_values_seen(shallow, options, message):
    with pytest.raises(ValueError, match=message):
        generate(shallow, PROMPTS, reference=ReferenceCorrection(**options))


def test_numbers_of_numpy_are_kept_as_those_of_python():
    found = ReferenceCorrection(retention=np.float64(0.2), capture_loops=np.arange(1, 3))
    assert found == ReferenceCorrection(retention=0.2, capture_loops=(1, 2))
    assert {type(value) for value in (found.retention, *found.capture_loops)} == {float, int}
    found.check(4)


@pytest.mark.parametrize(("name", "kind"), [("reference", "ReferenceCorrection"), ("speculation", "Speculation")])
def test_options_of_another_kind_are_refused_by_name(shallow, name, kind):
    with pytest.raises(ValueError, match=f"{name} must be a {kind}, got 4"):
        generate(shallow, PROMPTS, **{name: 4})


def test_a_model_with_one_loop_has_nothing_to_correct():
    llama = Llama(small_llama(num_layers=1), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="a model with 1 loop has none to correct"):
        generate(llama, PROMPTS, reference=ReferenceCorrection())


@pytest.mark.parametrize("name", [name for name in selectors.names() if not selectors.get(name).shareable])
def test_selectors_that_learn_from_every_loop_are_refused(shallow, name):
    with pytest.raises(ValueError, match=f"cannot be combined with the selector {type(selectors.get(name)).__name__}"):
        generate(shallow, PROMPTS, selector=selectors.get(name), reference=ReferenceCorrection())
