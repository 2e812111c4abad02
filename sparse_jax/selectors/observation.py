"""What the queries of a prompt say about its keys, and which tokens to keep for it: the prompt's side of eviction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from sparse_jax.ops import top_k
from sparse_jax.validation import INT32_MAX

BLOCK = 64
"""Queries whose probabilities are held at a time."""


def prompt_scores(
    q: jax.Array,
    k: jax.Array,
    counts: jax.Array,
    *,
    rows: int | None = None,
    decay: float = 1.0,
    scale: float | None = None,
) -> jax.Array:
    """Sums over queries of the probability of each key, averaged over the query heads of a group: f32[B, Hkv, S].

    q [B, S, Hq, D] and k [B, S, Hkv, D] of right-padded prompts of counts[b] tokens, causal inside the prompt; keys at
    or beyond the count score 0. rows: only the last that many queries (None: all). decay: the query that is n before
    the last counts decay ** n. scale: D ** -0.5 if None. A query whose probabilities are not finite adds nothing.

    Float32 throughout. Memory follows S, not S * S: queries come in blocks.
    """
    (batch, width, heads, depth), kv_heads = q.shape, k.shape[2]
    count, key = counts[:, None], jnp.arange(width, dtype=jnp.int32)
    wanted = width if rows is None else min(rows, width)
    ids = jnp.arange(wanted, dtype=jnp.int32) + (jnp.zeros_like(count) if rows is None else count - wanted)
    blocks = -(-wanted // BLOCK)
    ids = jnp.pad(ids, ((0, 0), (0, blocks * BLOCK - wanted)), constant_values=-1)
    keys = jnp.where((key < count)[..., None, None], k, jnp.zeros((), k.dtype))  # padding may hold anything
    scale = depth**-0.5 if scale is None else scale

    def add(total: jax.Array, ids: jax.Array) -> tuple[jax.Array, None]:  # ids i32[B, BLOCK]
        inside = (ids >= 0) & (ids < count)
        queries = jnp.take_along_axis(q, jnp.where(inside, ids, 0)[..., None, None], axis=1)
        queries = queries.reshape(batch, -1, kv_heads, heads // kv_heads, depth)
        scores = jnp.einsum("bthgd,bshd->bhgts", queries, keys, precision="highest", preferred_element_type=jnp.float32)
        seen = (inside[..., None] & (key <= ids[..., None]))[:, None, None]  # [B, 1, 1, BLOCK, S]
        scores = jnp.where(seen, scores * scale, -jnp.inf)
        total_of_row = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        p = jnp.exp(jnp.where(seen, scores - total_of_row, -jnp.inf))
        age = jnp.where(inside, count - 1 - ids, 0).astype(jnp.float32)
        p = jnp.nan_to_num(p, nan=0.0) * (jnp.float32(decay) ** age)[:, None, None, :, None]
        return total + p.mean(axis=2).sum(axis=2), None

    total = jnp.zeros((batch, kv_heads, width), jnp.float32)
    total, _ = lax.scan(add, total, ids.reshape(batch, blocks, BLOCK).swapaxes(0, 1))
    return total


def best_tokens(
    scores: jax.Array,
    counts: jax.Array,
    kept: jax.Array,
    *,
    sinks: jax.Array,
    recent: jax.Array,
    width: int,
) -> jax.Array:
    """The tokens to keep of prompts: the first `sinks`, the last `recent`, and the best of the others.

    scores f32[B, Hkv, S]; counts, kept, sinks, recent i32[B] with sinks + recent at most `kept` or `kept` all tokens.
    Of equal scores the later token is kept. Returns token ids i32[B, Hkv, width], the kept[b] ones ascending, then -1.
    """
    token = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    count, kept, sinks, recent = (x[:, None, None] for x in (counts, kept, sinks, recent))
    always = (token < sinks) | (token >= count - recent)
    rank = jnp.where(token < count, jnp.where(always, jnp.inf, scores), -jnp.inf)
    # top_k takes the lower id of two equal scores, so it reads the row backwards.
    ids = top_k(rank[..., ::-1], width)
    ids = jnp.where((ids >= 0) & (jnp.arange(width, dtype=jnp.int32) < kept), scores.shape[-1] - 1 - ids, INT32_MAX)
    ids = jnp.sort(ids, axis=-1)
    return jnp.where(ids == INT32_MAX, -1, ids)


def pooled(scores: jax.Array, kernel: int) -> jax.Array:
    """The mean of `kernel` (odd) neighbours of each score f32[B, Hkv, S]; what lies beyond the ends counts as 0."""
    half, window = kernel // 2, (1, 1, kernel)
    padding = ((0, 0), (0, 0), (half, half))
    return lax.reduce_window(scores, jnp.float32(0), lax.add, window, (1, 1, 1), padding) / kernel
