"""Sparse attention over chosen latents, in plain jnp: a row is every head's key, and its first columns the value."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_jax.xla.masked_attention import masked_attention


def mla_sparse_attention(
    q: jax.Array,  # [B, T, Hq, E]
    pool: jax.Array,  # [N, P, E], or u8[N, P, bytes]
    slots: jax.Array,  # i32[B, T or 1, C]
    *,
    scale: float,
    value_dim: int,
    read: Callable[[jax.Array], jax.Array],  # rows [..., E] of what is stored in the pool
) -> tuple[jax.Array, jax.Array]:
    """out f32[B, T, Hq, value_dim], lse f32[B, T, Hq]."""
    groups, rows = q.shape[0] * slots.shape[1], q.shape[1] // slots.shape[1]
    slots = slots.reshape(groups, -1)
    present = (slots >= 0) & (slots // pool.shape[1] < pool.shape[0])
    page, offset = jnp.where(present, slots // pool.shape[1], 0), slots % pool.shape[1]
    k = read(pool[page, offset])[:, None]
    visible = jnp.broadcast_to(present[:, None, None], (groups, rows, 1, slots.shape[1]))
    out, lse, _ = masked_attention(q, k, k[..., :value_dim], visible, None, None, scale=scale, soft_cap=None)
    return out, lse
