"""The pages of a `PageView` as selectors need them: which exist, which are always kept, what reading them means."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse_jax.paging import PageView
from sparse_jax.validation import as_ids, require


def inside_pool(view: PageView, pages: int) -> PageView:
    """The view with every id that is no page of a pool of `pages` pages as -1: absent, and never counted."""
    table = as_ids("view.page_table", view.page_table)
    return PageView(jnp.where(table < pages, table, -1), view.lengths, jnp.int32(0))


class Pages(NamedTuple):
    """The pages of a view as a page selector needs them, per KV head."""

    ids: jax.Array  # i32[B, Hkv or 1, W] in the flattened pool, -1 absent
    lengths: jax.Array  # i32[B, Hkv or 1, 1], cut to the table
    exists: jax.Array  # bool[B, Hkv, W], has an id and holds tokens
    page_size: int
    rows: int = 1  # T, the query tokens of this step
    plane: Any = 0  # an int or i32[]

    @classmethod
    def of(cls, view: PageView, *, kv_heads: int, page_size: int, rows: int = 1, plane: Any = 0) -> Pages:
        """The pages of `view`, for a step of `rows` query tokens. Raises ValueError for a view of another shape."""
        ids, lengths = as_ids("view.page_table", view.page_table), as_ids("view.lengths", view.lengths)
        require(
            ids.ndim in (2, 3) and ids.shape[-1] >= 1 and (ids.ndim == 2 or ids.shape[1] == kv_heads),
            f"view.page_table must be [B, W] or [B, {kv_heads}, W] with W at least 1, got {list(ids.shape)}",
        )
        require(
            lengths.ndim in (1, 2)
            and lengths.shape[0] == ids.shape[0]
            and lengths.shape[1:] in ((), (1,), (kv_heads,)),
            f"view.lengths must be [{ids.shape[0]}] or [{ids.shape[0]}, {kv_heads}], got {list(lengths.shape)}",
        )
        ids = ids if ids.ndim == 3 else ids[:, None]
        lengths = lengths if lengths.ndim == 2 else lengths[:, None]
        capacity = ids.shape[-1] * page_size
        lengths = jnp.clip(lengths, 0, capacity).astype(jnp.int32)[:, :, None]
        first = jnp.arange(ids.shape[-1], dtype=jnp.int32) * page_size
        exists = jnp.broadcast_to((ids >= 0) & (first < lengths), (ids.shape[0], kv_heads, ids.shape[-1]))
        return cls(ids, lengths, exists, page_size, rows, plane)

    @property
    def first(self) -> jax.Array:
        """Position of the first token of each page, i32[W]."""
        return jnp.arange(self.ids.shape[-1], dtype=jnp.int32) * self.page_size

    def always(self, sinks: int, recent: int | jax.Array) -> jax.Array:
        """Which pages hold a sink token or a recent token of any of the rows; bool, broadcastable to [B, Hkv, W].

        recent: an int, or i32 of at least 1 that is broadcastable to [B, Hkv, 1].
        """
        capacity = self.ids.shape[-1] * self.page_size  # more tokens than this are all tokens, and might not be int32
        sinks = min(sinks, capacity)
        window: Any = (
            recent_tokens(min(recent, capacity), self.rows)
            if isinstance(recent, int)
            else (jnp.minimum(recent, capacity) + self.rows - 1)
        )
        holds_recent = (
            (self.first + self.page_size > self.lengths - window) & (self.first < self.lengths) & (window > 0)
        )
        return (self.first < sinks) | holds_recent


def recent_tokens(recent: int, rows: int) -> int:
    """Tokens in the union of the recent windows of the last `rows` positions; each counts its own token."""
    return recent + rows - 1 if recent else 0


def tokens_read(page_indices: jax.Array | None, view: PageView, *, kv_heads: int, page_size: int) -> jax.Array:
    """Counts the cached tokens of the chosen pages, i32[B, Hkv]; `page_indices` None counts all (dense attention)."""
    return _held(page_indices, Pages.of(view, kv_heads=kv_heads, page_size=page_size)).sum(axis=-1, dtype=jnp.int32)


def positions_read(page_indices: jax.Array | None, view: PageView, *, kv_heads: int, page_size: int) -> jax.Array:
    """The positions of the cached tokens of the chosen pages, i32[B, Hkv, C * P], -1 absent; None: of all pages."""
    pages = Pages.of(view, kv_heads=kv_heads, page_size=page_size)
    held = _held(page_indices, pages)
    chosen = jnp.arange(held.shape[-1], dtype=jnp.int32) if page_indices is None else page_indices
    offset = jnp.arange(page_size, dtype=jnp.int32)
    positions = jnp.where(offset < held[..., None], chosen[..., None] * page_size + offset, -1)
    return positions.reshape(*held.shape[:2], -1)


def _held(page_indices: jax.Array | None, pages: Pages) -> jax.Array:
    """How many tokens each chosen page holds, i32[B, Hkv, C]."""
    held = jnp.where(pages.exists, jnp.clip(pages.lengths - pages.first, 0, pages.page_size), 0)  # [B, Hkv, W]
    if page_indices is None:
        return held
    inside = (page_indices >= 0) & (page_indices < held.shape[-1])
    return jnp.where(inside, jnp.take_along_axis(held, jnp.where(inside, page_indices, 0), axis=-1), 0)
