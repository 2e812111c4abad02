"""H2O's accumulator, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def h2o_accumulate(
    scores: jax.Array,  # f32 or bf16 [N, Hkv, P]
    q: jax.Array,  # [B, Hkv, R, D], R = G or 1 (the group's mean)
    k_pages: jax.Array,  # [N, Hkv, P, D]
    page_table: jax.Array,  # i32[B, Hkv or 1, W]
    windows: jax.Array,  # i32[B, Hkv, 2], first token and end; equal where nothing is accumulated
    factors: jax.Array,  # f32[2], scale and decay
) -> jax.Array:
    """Inside the window H <- max_r softmax_t(scale * q_r . k_t) + decay * H; nothing changes elsewhere.

    What is not finite counts as 0.
    """
    pages, kv_heads, page_size = scores.shape
    scale, decay = factors
    head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    table = jnp.broadcast_to(page_table, (page_table.shape[0], kv_heads, page_table.shape[-1]))
    exists = (table >= 0) & (table < pages)
    at = jnp.where(exists, table, 0)
    keys = k_pages[at, head].astype(jnp.float32)  # [B, Hkv, W, P, D]
    s = scale * jnp.einsum("bkrd,bkwpd->bkrwp", q.astype(jnp.float32), keys, precision="highest")
    token = jnp.arange(table.shape[-1] * page_size, dtype=jnp.int32).reshape(-1, page_size)
    start, end = windows[..., 0, None, None], windows[..., 1, None, None]
    inside = exists[..., None] & (token >= start) & (token < end)  # [B, Hkv, W, P]
    s = jnp.where(inside[:, :, None], s, -jnp.inf)
    top = s.max(axis=(-2, -1), keepdims=True)
    weight = jnp.exp(s - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weight.sum(axis=(-2, -1), keepdims=True)
    p = (weight / jnp.where(total == 0, 1.0, total)).max(axis=2)  # [B, Hkv, W, P]
    p = jnp.where(p < jnp.inf, p, 0.0)  # not NaN either
    new = p + decay * scores[at, head].astype(jnp.float32)
    page = jnp.where(inside, table[..., None], pages)  # past the end: dropped
    offset = jnp.arange(page_size, dtype=jnp.int32)
    return scores.at[page, head[..., None], offset].set(new.astype(scores.dtype), mode="drop")
