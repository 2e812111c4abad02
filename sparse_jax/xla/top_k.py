"""Exact, deterministic top-k, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from sparse_jax.validation import INT32_MAX

INFINITE, MASKED = 0x7F800000, -0x800000  # the bits of inf and -inf as int32


def top_k(scores: jax.Array, k: int, lengths: jax.Array | None, *, order: str) -> jax.Array:
    """scores [..., S], lengths None or i32[...] -> i32[..., k] ids."""
    size = scores.shape[-1]
    # Scores are compared by their bits, because comparing floats may flush denormal numbers to zero. lax.top_k goes by
    # the bits too: -0 below +0, NaN outside of the infinities.
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    magnitude = bits & INT32_MAX
    masked = (magnitude > INFINITE) | (bits == MASKED)
    if lengths is not None:
        masked |= jnp.arange(size, dtype=jnp.int32) >= lengths[..., None]
    bits = jnp.where(masked, MASKED, jnp.where(magnitude == 0, 0, bits))
    values, ids = lax.top_k(lax.bitcast_convert_type(bits, jnp.float32), min(k, size))
    ids = jnp.where(jnp.isneginf(values), -1, ids.astype(jnp.int32))
    if order == "id":
        ids = jnp.sort(jnp.where(ids < 0, INT32_MAX, ids), axis=-1)
        ids = jnp.where(ids == INT32_MAX, -1, ids)
    return jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, k - ids.shape[-1])], constant_values=-1)
