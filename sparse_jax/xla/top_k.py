"""Exact, deterministic top-k, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from sparse_jax.validation import INT32_MAX


def top_k(scores: jax.Array, k: int, lengths: jax.Array | None, *, order: str) -> jax.Array:
    """scores [..., S], lengths None or i32[...] -> i32[..., k] ids."""
    scores = scores.astype(jnp.float32)
    size = scores.shape[-1]
    # lax.top_k orders by bits: -0 below +0, NaN above all.
    scores = jnp.where(scores == 0, 0.0, scores)
    masked = jnp.isnan(scores) | jnp.isneginf(scores)
    if lengths is not None:
        masked |= jnp.arange(size, dtype=jnp.int32) >= lengths[..., None]
    values, ids = lax.top_k(jnp.where(masked, -jnp.inf, scores), min(k, size))
    ids = jnp.where(jnp.isneginf(values), -1, ids.astype(jnp.int32))
    if order == "id":
        ids = jnp.sort(jnp.where(ids < 0, INT32_MAX, ids), axis=-1)
        ids = jnp.where(ids == INT32_MAX, -1, ids)
    return jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, k - ids.shape[-1])], constant_values=-1)
