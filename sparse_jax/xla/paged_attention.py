"""Dense attention over a page table, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_jax.xla.masked_attention import masked_attention


def paged_attention(
    q: jax.Array,  # [B, T, Hq, D]
    k_pages: jax.Array,  # [N, Hkv, P, D]
    v_pages: jax.Array,  # [N, Hkv, P, Dv]
    page_table: jax.Array,  # i32[B, Hkv or 1, W]
    lengths: jax.Array,  # i32[B, Hkv or 1]
    q_positions: jax.Array | None,  # i32[B, T]
    key_positions: jax.Array | None,  # i32[N, Hkv, P]
    k_scale: jax.Array | None,  # f32[1] or f32[N, Hkv, P]
    v_scale: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Every page of the table is chosen, in order."""
    batch, kv_heads, width = q.shape[0], k_pages.shape[1], page_table.shape[-1]
    every = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, 1, kv_heads, width))
    return page_sparse_attention(
        q, k_pages, v_pages, page_table, lengths, every, q_positions, key_positions, k_scale, v_scale,
        scale=scale, window=window, soft_cap=soft_cap,
    )  # fmt: skip


def page_sparse_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    page_indices: jax.Array,  # i32[B, T or 1, Hkv, C]
    q_positions: jax.Array | None,
    key_positions: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention over the chosen pages: out f32[B, T, Hq, Dv], lse f32[B, T, Hq], scores f32[B, T, Hq, C * P]."""
    pages, kv_heads, page_size, _ = k_pages.shape
    (batch, t_rows), t_lists, head = q.shape[:2], page_indices.shape[1], jnp.arange(kv_heads)[:, None, None]
    index, present = page_indices[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32), page_indices >= 0
    present &= page_indices < page_table.shape[-1]
    table = jnp.broadcast_to(page_table[:, None], (batch, t_lists, kv_heads, page_table.shape[-1]))
    page = jnp.take_along_axis(table, jnp.where(present, page_indices, 0), axis=-1)
    present &= (page >= 0) & (page < pages)
    page = jnp.where(present, page, 0)
    length = jnp.broadcast_to(lengths, (batch, kv_heads))[:, None, :, None, None]
    present = present[..., None] & (index < length)  # [B, T or 1, Hkv, C, P]
    position = index if key_positions is None else key_positions[page, head[..., 0]]
    row = (
        length - t_rows + jnp.arange(t_rows, dtype=jnp.int32)[:, None, None, None]
        if q_positions is None
        else q_positions[..., None, None, None]
    )
    visible = present & (position >= 0) & (position <= row)  # [B, T, Hkv, C, P]
    visible = visible if window is None else visible & (position > row - window)

    def gather(pool: jax.Array) -> jax.Array:
        rows = pool[page, head[..., 0]]  # [B, T or 1, Hkv, C, P, ...]
        return rows.reshape(batch * t_lists, kv_heads, -1, *pool.shape[3:])

    visible = visible.reshape(batch * t_lists, t_rows // t_lists, kv_heads, -1)
    k_scale, v_scale = (s if s is None or s.ndim == 1 else gather(s) for s in (k_scale, v_scale))
    return masked_attention(
        q, gather(k_pages), gather(v_pages), visible, k_scale, v_scale, scale=scale, soft_cap=soft_cap
    )
