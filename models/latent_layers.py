"""The projections of latent attention and of its indexer; what they attend to is the business of `attend`.

    qr = norm(W_qa x)           q = W_qb qr, per head [q_nope | q_pe]
    [c | k_pe] = W_kva x        c = norm(c); the cached row is [c | k_pe] with k_pe rotated
    W_kvb, per head [W_UK | W_UV]
    indexer   q_I = W_qI qr,  k_I = layer_norm(W_kI x), both [rotated | plain],  w = W_w x * (heads * d_I) ** -0.5

Legend: B requests, S tokens, H hidden width, Hq heads, R query rank; see `models.latent_attention` for the others.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.deepseek_config import DeepseekConfig, IndexerConfig
from models.interface import Attend, Cache
from models.latent_attention import Choice, LatentQuery
from models.layers import RMSNorm, matrix
from models.rotary import rotate
from sparse_jax import hadamard

INNER_EPS = 1e-6
"""Of the norms inside attention, whatever that of the layers."""


class LayerNorm(nnx.Module):
    """(x - mean) / sd * weight + bias over the last axis, statistics in float32."""

    def __init__(self, width: int, *, param_dtype):
        self.weight = nnx.Param(jnp.ones(width, param_dtype))
        self.bias = nnx.Param(jnp.zeros(width, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [..., width]."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - x32.mean(axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + INNER_EPS)
        return (x32 * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Indexer(nnx.Module):
    """Queries, keys and head weights of the lightning indexer. No gradient of the model passes through it."""

    def __init__(self, config: DeepseekConfig, indexer: IndexerConfig, *, rngs: nnx.Rngs, param_dtype):
        self.config, self.indexer = config, indexer
        assert config.q_rank is not None
        width = indexer.heads * indexer.head_dim
        self.wq_b = matrix(rngs, width, config.q_rank, param_dtype=param_dtype)
        self.wk = matrix(rngs, indexer.head_dim, config.hidden_size, param_dtype=param_dtype)
        self.k_norm = LayerNorm(indexer.head_dim, param_dtype=param_dtype)
        self.weights_proj = matrix(rngs, indexer.heads, config.hidden_size, param_dtype=param_dtype)

    def __call__(self, x: jax.Array, qr: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """From x [B, S, H] and qr [B, S, R]: (q [B, S, heads, d_I], weights f32[B, S, heads], keys [B, S, 1, d_I])."""
        heads, width = self.indexer.heads, self.indexer.head_dim
        x, qr = jax.lax.stop_gradient(x), jax.lax.stop_gradient(qr)
        wq = self.wq_b[...].astype(x.dtype).reshape(heads, width, -1)
        q = self._placed(jnp.einsum("bsr,ndr->bsnd", qr, wq), positions)
        keys = self.k_norm(jnp.einsum("bsh,dh->bsd", x, self.wk[...].astype(x.dtype)))
        keys = self._placed(keys[:, :, None], positions)
        weights = jnp.einsum(
            "bsh,nh->bsn", x, self.weights_proj[...].astype(x.dtype), preferred_element_type=jnp.float32
        )
        return q, weights * (heads * width) ** -0.5, keys

    def _placed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotate the first widths of x [B, S, heads, d_I]; mix all of them where the model says so."""
        c, split = self.config, self.config.rope_dim
        interleaved = self.indexer.interleaved
        turned = rotate(x[..., :split], positions, c.rope_theta, interleaved=interleaved, yarn=c.stretched)
        x = jnp.concatenate([turned, x[..., split:]], axis=-1)
        return hadamard(x) if self.indexer.hadamard else x


class LatentAttention(nnx.Module):
    """Multi-head latent attention of one layer."""

    def __init__(self, config: DeepseekConfig, layer: int, *, rngs: nnx.Rngs, param_dtype):
        self.config = c = config
        width = c.num_heads * (c.nope_dim + c.rope_dim)
        options: dict[str, Any] = {"param_dtype": param_dtype}
        inner: dict[str, Any] = {"value": 1.0, "eps": INNER_EPS, "param_dtype": param_dtype}
        if c.q_rank is None:
            self.q_proj = matrix(rngs, width, c.hidden_size, **options)
        else:
            self.q_a_proj = matrix(rngs, c.q_rank, c.hidden_size, **options)
            self.q_a_layernorm = RMSNorm(c.q_rank, **inner)
            self.q_b_proj = matrix(rngs, width, c.q_rank, **options)
        self.kv_a_proj_with_mqa = matrix(rngs, c.latent_dim + c.rope_dim, c.hidden_size, **options)
        self.kv_a_layernorm = RMSNorm(c.latent_dim, **inner)
        self.kv_b_proj = matrix(rngs, c.num_heads * (c.nope_dim + c.v_dim), c.latent_dim, **options)
        self.o_proj = matrix(rngs, c.hidden_size, c.num_heads * c.v_dim, **options)
        if c.indexer is not None and c.has_indexer(layer):
            self.indexer = Indexer(c, c.indexer, rngs=rngs, **options)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        plane: jax.Array,
        attend: Attend,
        cache: Cache,
        chosen: Choice | None,
    ) -> tuple[jax.Array, Choice | None, Cache]:
        """Attend from x [B, S, H] at positions i32[B, S] -> (out [B, S, H], what followers see, new cache).

        chosen: the Choice of this layer's leader. `attend` gets a LatentQuery, the rows [B, S, 1, E] and the indexer's
        keys [B, S, 1, value_dim], and gives (out [B, S, Hq, d_v], the Choice for the layers that follow) back.
        """
        c = self.config
        qr, q = self._queries(x)
        q_pe = self._turned(q[..., c.nope_dim :], positions)
        row = jnp.einsum("bsh,eh->bse", x, self.kv_a_proj_with_mqa[...].astype(x.dtype))
        k_pe = self._turned(row[:, :, None, c.latent_dim :], positions)
        latent = self.kv_a_layernorm(row[..., : c.latent_dim])[:, :, None]
        up = self.kv_b_proj[...].astype(x.dtype).reshape(1, 1, c.num_heads, c.nope_dim + c.v_dim, c.latent_dim)
        index_q = index_weights = None
        index_keys = jnp.zeros((*x.shape[:2], 1, c.value_dim), x.dtype)
        if hasattr(self, "indexer"):
            index_q, index_weights, index_keys = self.indexer(x, qr, positions)
        query = LatentQuery(
            q_nope=q[..., : c.nope_dim],
            q_pe=q_pe,
            w_uk=up[..., : c.nope_dim, :],
            w_uv=up[..., c.nope_dim :, :],
            index_q=index_q,
            index_weights=index_weights,
            chosen=chosen,
            scale=c.scale,
            topk=None if c.indexer is None else c.indexer.topk,
        )
        rows = jnp.concatenate([latent, k_pe], axis=-1)
        (out, chosen), cache = attend(plane, query, rows, index_keys, cache)
        o_proj = self.o_proj[...].astype(x.dtype).reshape(c.hidden_size, c.num_heads, c.v_dim)
        return jnp.einsum("bsnv,hnv->bsh", out, o_proj), chosen, cache

    def _queries(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The squeezed query [B, S, R] (x itself where there is none) and the heads' [B, S, Hq, d_n + d_r]."""
        if self.config.q_rank is None:
            qr, weight = x, self.q_proj
        else:
            qr = self.q_a_layernorm(jnp.einsum("bsh,rh->bsr", x, self.q_a_proj[...].astype(x.dtype)))
            weight = self.q_b_proj
        weight = weight[...].astype(x.dtype).reshape(self.config.num_heads, -1, qr.shape[-1])
        return qr, jnp.einsum("bsr,ndr->bsnd", qr, weight)

    def _turned(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        c = self.config
        return rotate(x, positions, c.rope_theta, interleaved=c.rope_interleaved, yarn=c.stretched)
