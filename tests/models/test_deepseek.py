"""DeepSeek-style models over a paged cache against themselves, generation, and what configurations refuse."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_jax
from models import decode
from models import generate as generation
from models.decode import decode_step
from models.deepseek import Deepseek, DeepseekConfig, IndexerConfig
from models.generate import generate
from models.loops import Cache, Step
from sparse_jax import paging, selectors
from tests.models.deepseek_setting import (
    INDEXER,
    PAGE_SIZE,
    PAGES,
    decoded,
    empty,
    prefill,
    random_tokens,
    small_deepseek,
)

SHARED = IndexerConfig(**(vars(INDEXER) | {"pattern": "FSF", "interleaved": True, "hadamard": True}))
full = nnx.jit(lambda model, tokens: model.logits(model.forward(tokens).hidden[0]))


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Deepseek:
    return Deepseek(small_deepseek(mtp_layers=1), rngs=nnx.Rngs(0))


def test_v3_2_has_its_parameters():
    """671,026,419,200 of DeepSeek-V3 without its extra layer, and 13,959,424 of the indexer in each of 61 layers."""
    model = nnx.eval_shape(lambda: Deepseek(DeepseekConfig.v3_2(num_layers=4), rngs=nnx.Rngs(0)))
    total, experts = (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(part))) for part in (model, model.layers[3])
    )
    assert total + 57 * experts == 671_026_419_200 + 61 * 13_959_424
    assert model.config.head_dim == 576


def test_it_is_a_looped_model_with_one_loop_and_one_head_of_latents():
    config = small_deepseek()
    assert (config.loops, config.planes, config.num_kv_heads, config.head_dim, config.value_dim) == (1, 3, 1, 20, 8)
    assert small_deepseek(indexer=None).value_dim == 1
    assert hash(config) == hash(small_deepseek())
    assert [layer.full for layer in small_deepseek(indexer=SHARED).index_layers] == [True, False, True]


CASES = {
    "dsa": ({}, None),
    "shared": ({"indexer": SHARED, "rope_dim": 0}, None),
    "dense": ({"indexer": None, "q_rank": None, "experts": None}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_paged_decode_equals_the_full_forward(case):
    changes, selector = CASES[case]
    model = Deepseek(small_deepseek(**changes), rngs=nnx.Rngs(1))
    tokens, prompts, lengths = random_tokens(), (5, 8), (14, 12)
    logits, out = decoded(model, tokens, prompts, lengths, model.config.selector_for(selector))
    expected = np.asarray(full(model, tokens))
    for request, (prompt, length) in enumerate(zip(prompts, lengths)):
        np.testing.assert_allclose(logits[request], expected[request, prompt - 1 : length], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(out.tokens_read, [[14 if case == "dense" else 5, 0]] * 3)


@pytest.mark.parametrize("name", ["dsa", "dense"])
def test_several_rows_of_a_step_choose_as_in_steps_of_their_own(name):
    """As drafts are verified: three rows of one request at once, two of the other and one of padding."""
    model = Deepseek(small_deepseek(indexer=SHARED if name == "dsa" else None), rngs=nnx.Rngs(2))
    tokens, selector, counts = random_tokens(), selectors.get(name), jnp.array([8, 7])
    out = prefill(model, tokens, counts, empty(model.config, 2), selector, ())
    rows = np.array([[8, 9, 10], [7, 8, -1]], np.int32)

    @nnx.jit
    def verify(model, paged):
        paged, state, room = selector.reserve(paged, (), jnp.array([3, 2]), 3)
        takes_part, seen = jnp.array([True, True]), jnp.asarray(rows) + 1
        step = Step(model=model, selector=selector, room=room, takes_part=takes_part, seen=seen)
        h = model.embed(jnp.asarray(tokens)[jnp.array([[0], [1]]), rows])
        output, cache = step.run(h, jnp.asarray(rows), Cache.of(paged, state))
        return model.logits(output.hidden[0]), cache.reads

    logits, reads = verify(model, out.paged)
    expected = np.asarray(full(model, tokens))
    np.testing.assert_allclose(logits[0], expected[0, 8:11], atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits[1, :2], expected[1, 7:9], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(reads, [[15, 10] if name == "dsa" else [11, 9]] * 3)


def test_a_leader_converts_once_and_its_group_reads_the_same_tokens(monkeypatch):
    """The groups are layers 0 and 1, and layer 2."""
    model = Deepseek(small_deepseek(indexer=SHARED, experts=None), rngs=nnx.Rngs(4))
    k, v = (jax.random.normal(jax.random.key(width), (3, 2, 9, 1, width)) for width in (20, 8))
    paged, _ = paging.append(empty(model.config, 2), k, v, jnp.array([9, 6]))
    to_slots, attention = sparse_jax.to_slots, sparse_jax.mla_sparse_attention
    converted, read = [], []

    def converting(*arguments, **options):
        converted.append(to_slots(*arguments, **options))
        return converted[-1]

    def reading(q, pool, slots, **options):
        read.append(slots)
        return attention(q, pool, slots, **options)

    monkeypatch.setattr(sparse_jax, "to_slots", converting)
    monkeypatch.setattr(sparse_jax, "mla_sparse_attention", reading)

    @nnx.jit
    def run(model, paged):
        decode_step(model, jnp.array([3, 4]), jnp.array([9, 6]), paged, selectors.get("dsa"), ())
        return converted, read

    (first, second), read = run(model, paged)
    assert len(read) == 3
    for plane, layer in enumerate(model.config.index_layers):
        slots = {0: first, 2: second}[layer.leader]
        assert (np.asarray(slots) >= 0).sum(axis=1).tolist() == [5, 5]
        np.testing.assert_array_equal(read[plane][:, 0], slots + plane * PAGES * PAGE_SIZE)


@pytest.mark.parametrize("topk", [5, 12])
def test_a_prompt_is_read_by_the_implementation_that_was_asked_for(topk, monkeypatch):
    """Longer than topk, so the indexer chooses: few tokens are gathered, many masked."""
    asked = []

    def watch(name):
        operation = getattr(sparse_jax, name)

        def watched(*arguments, **options):
            asked.append((name, options.get("implementation")))
            return operation(*arguments, **options)

        monkeypatch.setattr(sparse_jax, name, watched)

    for name in ("indexer_scores", "top_k", "mla_sparse_attention"):
        watch(name)
    model = Deepseek(small_deepseek(indexer=IndexerConfig(**(vars(INDEXER) | {"topk": topk}))), rngs=nnx.Rngs(0))
    arguments = jnp.array(random_tokens()), jnp.array([11, 9]), empty(model.config, 2), selectors.get("dsa"), ()
    nnx.eval_shape(lambda model: decode.prefill(model, *arguments, implementation="xla").logits, model)
    assert {how for _, how in asked} == {"xla"}
    assert {name for name, _ in asked} == {"indexer_scores", "top_k", *(["mla_sparse_attention"] if topk == 5 else [])}


def test_what_comes_later_changes_nothing(model):
    tokens = random_tokens()
    changed = np.concatenate([tokens[:, :9], 63 - tokens[:, 9:]], axis=1)
    np.testing.assert_allclose(full(model, changed)[:, :9], full(model, tokens)[:, :9], atol=1e-5)


def test_requests_of_a_batch_are_independent(model):
    tokens = random_tokens()
    other = np.stack([tokens[0], 63 - tokens[1]])
    np.testing.assert_allclose(full(model, other)[0], full(model, tokens)[0], atol=1e-5)


def test_the_choice_matters_and_not_the_gradient_of_the_indexer(model):
    tokens = random_tokens()
    dense = nnx.merge(nnx.split(model)[0], nnx.state(model))
    for layer in dense.layers:
        layer.self_attn.config = small_deepseek(indexer=IndexerConfig(**(vars(INDEXER) | {"topk": 64})))
    difference = np.abs(np.asarray(full(dense, tokens)) - np.asarray(full(model, tokens))).max(axis=(0, 2))
    assert difference[:5].max() < 1e-5
    assert difference[6:].max() > 1e-2
    gradients = nnx.jit(nnx.grad(lambda model, tokens: model.forward(tokens).hidden.std()))(model, tokens[:, :8])
    attention = gradients.layers[0].self_attn
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(nnx.state(attention.indexer)))
    assert np.asarray(attention.kv_b_proj[...]).any()


def test_dtypes_bf16_stream_float32_router_and_logits():
    shapes = nnx.eval_shape(
        lambda: Deepseek(small_deepseek(), rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    )
    kept = {".".join(map(str, path)) for path, leaf in nnx.to_flat_state(nnx.state(shapes)) if leaf.dtype != "bfloat16"}
    assert {name.rpartition("gate.")[2] for name in kept} == {"weight", "e_score_correction_bias"}
    tokens = jax.ShapeDtypeStruct((2, 12), jnp.int32)
    output = nnx.eval_shape(lambda model, tokens: model.forward(tokens), shapes, tokens)
    logits = nnx.eval_shape(lambda model, hidden: model.logits(hidden), shapes, output.hidden)
    chex.assert_shape([*output, logits], [(1, 2, 12, 32), (1, 2, 12), (1, 2, 12, 64)])
    chex.assert_type([*output, logits], [jnp.bfloat16, jnp.float32, jnp.float32])


def test_the_extra_layer_predicts_from_hidden_states_and_next_tokens(model):
    tokens = random_tokens()
    hidden = nnx.jit(lambda model, tokens: model.forward(tokens).hidden[0])(model, tokens)
    positions = jnp.broadcast_to(jnp.arange(17), (2, 17))

    @nnx.jit
    def predict(model, hidden, tokens):
        def attend(plane, q, k, v, planes):
            return model.causal(plane, q, k, v, ())[0], planes + plane

        return model.predict(hidden, tokens, positions, attend, jnp.int32(0))

    found, planes = predict(model, hidden[:, :-1], tokens[:, 1:])
    assert planes == 3
    chex.assert_shape(found, (2, 17, 32))
    other, _ = predict(model, hidden[:, :-1], 63 - tokens[:, 1:])
    assert np.abs(np.asarray(found) - np.asarray(other)).max() > 0.1
    with pytest.raises(ValueError, match="the model has 1 extra layers, got number 1"):
        model.predict(hidden[:, :-1], tokens[:, 1:], positions, model.causal, (), extra=1)


def test_generation_is_the_arg_max_of_the_full_forward_and_says_what_it_read(model):
    result = generate(model, [[1, 2, 3, 4], [5, 6]], max_tokens=[8, 5], chunk=4)
    for _ in result:
        pass
    assert isinstance(result.options.selector, selectors.DSA)
    for prompt, new in zip(result.prompts, result.tokens):
        tokens = np.zeros((2, 18), np.int32)
        tokens[0, : len(prompt) + len(new)] = prompt + new
        logits = np.asarray(full(model, tokens))[0]
        assert new == logits[len(prompt) - 1 : len(prompt) + len(new) - 1].argmax(axis=-1).tolist()
    stats = result.stats()
    # 7 steps at lengths 5 .. 11 and 4 at 3 .. 6, three planes of one head; at most 5 tokens are read.
    assert stats.kv_tokens_dense == 3 * (sum(range(5, 12)) + sum(range(3, 7)))
    assert stats.kv_tokens_read == 3 * (7 * 5 + 3 + 4 + 5 + 5)
    with pytest.raises(ValueError, match="'dsa' and 'dense', got Quest"):
        generate(model, [[1]], selector=selectors.get("quest"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, "fp8_ds_mla"])
def test_no_call_copies_the_pool(model, dtype):
    """A pool of one head is written in place, too: what a call needs beside its arguments is far below it."""
    result = generate(model, [[1, 2, 3]] * 2, max_tokens=32, page_size=4, pages=16_384, cache_dtype=dtype)
    state, static = result.state, {"graph": result._graph, "options": result.options}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.paged.kv))
    tokens, counts = np.zeros((2, 16), np.int32), np.int32([3, 3])
    prefill = generation._prefill.lower(result._params, tokens, counts, state, **static).compile()
    decode = generation._decode.lower(result._params, state, **static, steps=8, speculation=None).compile()
    for call in (prefill, decode):
        memory = call.memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < size / 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"rope_dim": 3}, "rope_dim must be even and at least 0, got 3"),
        ({"first_dense": -1}, "first_dense must be at least 0, got -1"),
        ({"q_rank": 0}, "q_rank must be at least 1, got 0"),
        ({"q_rank": None}, "it needs a q_rank"),
        ({"rope_dim": 10}, "head_dim 8 is below rope_dim 10"),
        ({"indexer": IndexerConfig(heads=1, head_dim=8, pattern="SFF")}, "the first layer has no earlier one"),
        ({"indexer": IndexerConfig(heads=1, head_dim=8, pattern="FF")}, "must have num_layers = 3 entries, got 2"),
    ],
)
def test_configuration_refuses_what_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        small_deepseek(**changes)


def test_an_indexer_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        IndexerConfig(heads=1, head_dim=8, topk=0)
    with pytest.raises(ValueError, match="a power of two, got 6"):
        IndexerConfig(heads=1, head_dim=6, hadamard=True)
