import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.ouro import Ouro, OuroConfig, RMSNorm
from models.rotary import rotate
from tests.models.configs import small_ouro


def parameters(config: OuroConfig) -> int:
    model = nnx.eval_shape(lambda: Ouro(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model)))


forward = nnx.jit(lambda model, tokens: model.forward(tokens))


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(small_ouro(), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (OuroConfig.ouro_1_4b(), 1_434_652_673),
        (OuroConfig.ouro_2_6b(), 2_667_974_657),
        (OuroConfig.tiny(), 3_155_713),
    ],
)
def test_parameter_counts_of_the_sizes(config, count):
    assert parameters(config) == count


def test_planes_are_loops_times_layers():
    assert OuroConfig.ouro_1_4b().planes == 96
    assert OuroConfig.ouro_2_6b().planes == 192
    assert OuroConfig.tiny().planes == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"exit_step": 4}, "exit_step must be a loop from 0 to 3, got 4"),
    ],
)
def test_configuration_refuses_what_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        small_ouro(**changes)


def test_configuration_is_hashable_and_init_does_not_change_its_meaning():
    tiny = OuroConfig.tiny()
    assert hash(tiny) == hash(OuroConfig.tiny())
    assert tiny == dataclasses.replace(tiny, init=small_ouro().init)


def test_tiny_starts_as_its_recipe_says():
    model = Ouro(OuroConfig.tiny(), rngs=nnx.Rngs(0))
    layer = model.layers[0]
    assert float(model.embed_tokens[...].std()) == pytest.approx(1.0, rel=0.02)
    assert float(layer.self_attn.q_proj[...].std()) == pytest.approx(384**-0.5, rel=0.02)
    assert float(layer.mlp.down_proj[...].std()) == pytest.approx(1024**-0.5, rel=0.02)
    assert float(model.lm_head[...].std()) == pytest.approx(0.5 * 384**-0.5, rel=0.02)
    for norm, value in [
        (layer.input_layernorm, 1.0),
        (layer.input_layernorm_2, 0.35),
        (layer.post_attention_layernorm, 1.0),
        (layer.post_attention_layernorm_2, 0.35),
        (model.norm, 1.0),
    ]:
        np.testing.assert_allclose(norm.weight[...], value, rtol=1e-6)
    np.testing.assert_array_equal(model.early_exit_gate.weight[...], 0)
    np.testing.assert_array_equal(model.early_exit_gate.bias[...], -1)


def test_dtypes_bf16_stream_float32_parameters_gate_and_logits():
    model = Ouro(small_ouro(), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
    output = forward(model, jnp.arange(6)[None])
    arrays = [output.hidden, output.gate_logits, model.logits(output.hidden)]
    chex.assert_shape(arrays, [(4, 1, 6, 32), (4, 1, 6), (4, 1, 6, 64)])
    chex.assert_type(arrays, [jnp.bfloat16, jnp.float32, jnp.float32])


def test_one_hot_embedding_is_the_gather(model):
    tokens = jnp.arange(12).reshape(2, 6) % 64
    other = Ouro(small_ouro(), rngs=nnx.Rngs(0), embedding="one_hot")
    np.testing.assert_allclose(other.embed(tokens), model.embed(tokens), rtol=1e-6)


def test_forward_is_causal_and_padding_changes_nothing_before_it(model):
    tokens = jax.random.randint(jax.random.key(1), (1, 11), 0, 64)
    whole = forward(model, tokens).hidden
    padded = forward(model, jnp.pad(tokens[:, :7], ((0, 0), (0, 4)), constant_values=63)).hidden
    np.testing.assert_allclose(padded[:, :, :7], whole[:, :, :7], atol=1e-5)


def test_attention_reads_the_plane_of_its_loop_and_layer(model):
    planes = []

    def attend(plane, q, k, v, cache):
        out, _ = model.causal(plane, q, k, v, ())
        return out, cache.at[plane].add(1)

    tokens = jnp.zeros((1, 3), jnp.int32)
    positions = jnp.arange(3)[None]
    _, planes = model.loops(model.embed(tokens), positions, attend, jnp.zeros(10, jnp.int32))
    np.testing.assert_array_equal(planes, [1] * 8 + [0, 0])


def test_norm_rounds_before_the_weight():
    norm = RMSNorm(4, value=1.0, eps=1e-6, param_dtype=jnp.float32)
    weight = jnp.array([1.01, 3.3, 0.7, 1.9])
    norm.weight[...] = weight
    x = jnp.array([1.3, -0.2, 7.7, 0.01], jnp.bfloat16)
    x32 = np.asarray(x, np.float32)
    normal = jnp.asarray(x32 / np.sqrt(np.mean(x32 * x32) + 1e-6)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(norm(x), normal * weight.astype(jnp.bfloat16))


def test_rotary_is_relative_far_out_too():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 64))

    def turn(x, at):
        return rotate(x, jnp.array([[at]]), 1e6, interleaved=False)

    def score(at_q, at_k):
        return float((np.asarray(turn(q, at_q), np.float64) * np.asarray(turn(k, at_k), np.float64)).sum())

    assert score(60_011, 60_000) == pytest.approx(score(11, 0), abs=0.05)
    np.testing.assert_array_equal(turn(q, 0), q)


def test_gradients_reach_every_parameter(model):
    tokens = jnp.arange(6)[None]

    def loss(model):
        output = model.forward(tokens)
        return jnp.mean(model.logits(output.hidden) ** 2) + jnp.mean(output.gate_logits**2)

    for path, leaf in nnx.to_flat_state(nnx.jit(nnx.grad(loss))(model)):
        assert np.isfinite(leaf[...]).all(), path
        assert float(jnp.abs(leaf[...]).max()) > 0, path
