"""Attention over chosen tokens, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_jax.xla.masked_attention import masked_attention


def token_sparse_attention(
    q: jax.Array,  # [B, T, Hq, D]
    k_pages: jax.Array,  # [N, Hkv, P, D]
    v_pages: jax.Array,  # [N, Hkv, P, Dv]
    slots: jax.Array,  # i32[B, T or 1, Hkv, C]
    k_scale: jax.Array | None,  # f32[1] or f32[N, Hkv, P]
    v_scale: jax.Array | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out f32[B, T, Hq, Dv], lse f32[B, T, Hq], scores f32[B, T, Hq, C]."""
    pages, kv_heads, page_size, _ = k_pages.shape
    groups, rows = q.shape[0] * slots.shape[1], q.shape[1] // slots.shape[1]
    slots = slots.reshape(groups, kv_heads, -1)
    page = slots // page_size
    present = (slots >= 0) & (page < pages)
    page, offset, head = jnp.where(present, page, 0), slots % page_size, jnp.arange(kv_heads)[:, None]

    def gather(pool: jax.Array) -> jax.Array:
        return pool[page, head, offset]

    visible = jnp.broadcast_to(present[:, None], (groups, rows, *present.shape[1:]))
    k_scale, v_scale = (s if s is None or s.ndim == 1 else gather(s) for s in (k_scale, v_scale))
    return masked_attention(
        q, gather(k_pages), gather(v_pages), visible, k_scale, v_scale, scale=scale, soft_cap=soft_cap
    )
