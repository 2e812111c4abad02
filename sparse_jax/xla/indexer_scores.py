"""Scores of the lightning indexer, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def indexer_scores(
    q: jax.Array,  # [B, T, heads, d]
    weights: jax.Array,  # f32[B, T, heads]
    keys: jax.Array,  # [N, P, d]
    key_scale: jax.Array | None,  # f32[N, P]
    page_table: jax.Array,  # i32[B, W]
    seen: jax.Array,  # i32[B, T] tokens that each row sees: those in the first places of its table
    *,
    k: int | None,
) -> jax.Array:
    """f32[B, T, W * P]: key_scale * sum_j weights_j * ReLU(q_j . key), -inf where not seen."""
    present = (page_table >= 0) & (page_table < keys.shape[0])
    pages, count = jnp.where(present, page_table, 0), page_table.shape[1] * keys.shape[1]

    def of_tokens(pool: jax.Array) -> jax.Array:  # [N, P, ...] -> [B, W * P, ...]
        return pool[pages].reshape(pages.shape[0], count, *pool.shape[2:])

    place = jnp.arange(count, dtype=jnp.int32)
    held = jnp.repeat(present, keys.shape[1], axis=1)
    visible = held[:, None] & (place < seen[..., None])
    # Selected before the product: a weight of 0 would not stop NaN in bytes that nobody may see.
    anyone = visible.any(axis=1)
    rows = of_tokens(keys)
    rows = jnp.where(anyone[..., None], rows, jnp.zeros_like(rows))
    compute = q.dtype if keys.dtype.itemsize < 2 else jnp.promote_types(q.dtype, keys.dtype)
    exists = visible.any(axis=-1)[..., None]
    q = jnp.where(exists[..., None], q, jnp.zeros_like(q)).astype(compute)
    s = jnp.einsum("bthd,bsd->bths", q, rows.astype(compute), precision="highest", preferred_element_type=jnp.float32)
    s = jnp.where(s <= 0, 0.0, s)  # NaN stays
    s = jnp.einsum("bth,bths->bts", jnp.where(exists, weights, 0.0), s, precision="highest")
    s = s if key_scale is None else s * jnp.where(anyone, of_tokens(key_scale), 1.0)[:, None]
    s = s if k is None else jnp.where((seen <= k)[..., None], 0.0, s)
    return jnp.where(visible, s, -jnp.inf)
