"""The projections of latent attention and of its indexer, as `attend` gets them, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.deepseek import IndexerConfig
from models.latent_layers import LatentAttention, LayerNorm
from sparse_jax import hadamard
from tests.models.deepseek_setting import small_deepseek

HEADS, WIDTH, POSITIONS = 3, 8, np.array([[5, 0, 70]], np.int32)


def projected(x, **changes):
    """(module, what it gives to `attend`: query, rows, index keys) for x [1, 3, H] and an indexer of 3 heads."""
    indexer = IndexerConfig(heads=HEADS, head_dim=WIDTH, **changes)
    module = LatentAttention(small_deepseek(indexer=indexer), 0, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    rng, given = np.random.default_rng(1), {}
    for _, leaf in nnx.to_flat_state(nnx.state(module)):
        if leaf[...].ndim == 1:  # norms start as ones and zeros
            leaf[...] = jnp.asarray(rng.standard_normal(leaf[...].shape), jnp.float32)

    def attend(plane, query, rows, keys, cache):
        given["all"] = query, rows, keys
        return (jnp.zeros((*x.shape[:2], 4, 6), x.dtype), None), cache

    with jax.default_matmul_precision("highest"):
        module(x, POSITIONS, jnp.int32(0), attend, (), None)
    return module, *given["all"]


def weight(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return np.float64(module[...])


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def turned(x, *, interleaved):
    """x [1, S, heads, 4] rotated by theta 10,000."""
    angle = POSITIONS[..., None, None] * 1e4 ** (-np.arange(2) / 2)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :2], x[..., 2:])
    pair = (first + 1j * second) * np.exp(1j * angle)
    return np.stack([pair.real, pair.imag], axis=-1 if interleaved else -2).reshape(x.shape)


def inputs(size=1.0):
    return jnp.asarray(size * np.random.default_rng(0).standard_normal((1, 3, 32)), jnp.float32)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_indexer(interleaved, mixed):
    """Its query comes from the squeezed one after the norm; of both, first columns are rotated; weights are scaled."""
    x = inputs(1e-3)  # as small as eps, which then shows
    module, query, _, keys = projected(x, interleaved=interleaved, hadamard=mixed)
    x = np.float64(x)
    qr = rms_norm(x @ weight(module, "q_a_proj").T, weight(module, "q_a_layernorm.weight"))
    q = (qr @ weight(module, "indexer.wq_b").T).reshape(1, 3, HEADS, WIDTH)
    k = x @ weight(module, "indexer.wk").T
    k = (k - k.mean(axis=-1, keepdims=True)) / np.sqrt(k.var(axis=-1, keepdims=True) + 1e-6)
    k = (k * weight(module, "indexer.k_norm.weight") + weight(module, "indexer.k_norm.bias"))[:, :, None]
    for found, expected in ((query.index_q, q), (keys, k)):
        expected = np.concatenate([turned(expected[..., :4], interleaved=interleaved), expected[..., 4:]], axis=-1)
        expected = np.float64(hadamard(jnp.asarray(expected, jnp.float32))) if mixed else expected
        np.testing.assert_allclose(found, expected, atol=1e-5)
    w = x @ weight(module, "indexer.weights_proj").T * HEADS**-0.5 * WIDTH**-0.5
    np.testing.assert_allclose(query.index_weights, w, rtol=1e-4, atol=1e-9)


def test_queries_and_the_row_that_is_cached():
    """Heads are [plain | rotated], the row is [latent after its norm | rotated key], and the scale is that of heads."""
    x = inputs(1e-3)
    module, query, rows, _ = projected(x)
    x = np.float64(x)
    qr = rms_norm(x @ weight(module, "q_a_proj").T, weight(module, "q_a_layernorm.weight"))
    q = (qr @ weight(module, "q_b_proj").T).reshape(1, 3, 4, 12)
    np.testing.assert_allclose(query.q_nope, q[..., :8], atol=1e-5)
    np.testing.assert_allclose(query.q_pe, turned(q[..., 8:], interleaved=True), atol=1e-5)
    row = x @ weight(module, "kv_a_proj_with_mqa").T
    c = rms_norm(row[..., :16], weight(module, "kv_a_layernorm.weight"))
    np.testing.assert_allclose(rows[:, :, 0, :16], c, atol=1e-5)
    np.testing.assert_allclose(rows[:, :, :, 16:], turned(row[:, :, None, 16:], interleaved=True), atol=1e-8)
    up = weight(module, "kv_b_proj").reshape(4, 14, 16)
    np.testing.assert_array_equal(query.w_uk[0, 0], up[:, :8])
    np.testing.assert_array_equal(query.w_uv[0, 0], up[:, 8:])
    assert query.scale == 12**-0.5


def test_head_weights_are_float32_whatever_the_activations():
    _, query, rows, keys = projected(inputs().astype(jnp.bfloat16))
    assert query.index_weights.dtype == jnp.float32
    assert {x.dtype for x in (query.index_q, query.q_nope, rows, keys)} == {jnp.dtype(jnp.bfloat16)}


def test_statistics_of_the_norm_of_index_keys_are_float32():
    """A mean far from 0 would take bfloat16's digits away."""
    norm = LayerNorm(64, param_dtype=jnp.float32)
    x = jnp.asarray(100 + np.random.default_rng(0).standard_normal(64), jnp.bfloat16)
    x64 = np.float64(x)
    np.testing.assert_allclose(np.float64(norm(x)), (x64 - x64.mean()) / x64.std(), atol=0.02)
