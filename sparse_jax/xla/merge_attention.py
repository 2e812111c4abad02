"""Merging attention over disjoint sets of keys, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def merge_attention(outs: jax.Array, lses: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Merges outs [parts, ..., Hq, Dv], lses f32[parts, ..., Hq] and sinks None or f32[Hq].

    Returns out f32[..., Hq, Dv] and lse f32[..., Hq]. With w_i = exp(lse_i - max lse):

        lse = max + log(sum_i w_i),  out = sum_i w_i out_i / sum_i w_i * sigmoid(lse - sink)

    The last factor is the sum without the sink over the sum with it. NaN stays NaN.
    """
    top = jnp.max(lses, axis=0, initial=-jnp.inf)
    top = lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    used = ~jnp.isneginf(lses)
    weights = jnp.where(used, jnp.exp(jnp.where(used, lses, 0.0) - top), 0.0)
    total = jnp.sum(weights, axis=0)
    safe = jnp.where(total == 0, 1.0, total)
    lse = top + jnp.log(safe)
    share = weights / safe if sinks is None else weights / safe * jax.nn.sigmoid(lse - sinks)
    # A part of weight 0 is selected away: its out may hold anything.
    out = jnp.sum(jnp.where((weights > 0)[..., None], outs.astype(jnp.float32), 0.0) * share[..., None], axis=0)
    return out, jnp.where(total == 0, -jnp.inf, lse)
