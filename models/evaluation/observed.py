"""A selector around another one that watches what it reads; models and decoding know nothing of it.

Methods that forget tokens cannot be held against dense attention from their own cache, so for those every token is also
kept in a second cache, the shadow. A method that keeps all tokens is its own shadow.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.evaluation.diagnostics import Diagnosis, diagnose, read_mask
from models.latent_attention import LatentQuery
from models.loops import attend_by_selector
from sparse_jax import paging
from sparse_jax.attention_call import AttentionOutput
from sparse_jax.paging import PagedKV, PagedState, PageView
from sparse_jax.selectors import Attended, Dense, Selector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """One step of every plane: queries, what the method made of them, and which tokens it read."""

    q: jax.Array  # [planes, B, 1, Hq, D]
    out: jax.Array  # [planes, B, 1, Hq, D]
    read: jax.Array  # bool[planes, B, Hkv, S]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched:
    """State of an `Observed` selector."""

    inner: Any
    shadow: PagedState | None  # every token, where the method's own cache does not have them all
    seen: Seen | None  # of the last step; None without diagnostics
    tokens_read: jax.Array  # f32[planes, B] of the last step, averaged over the KV heads


class Rooms(NamedTuple):
    """Reservations of the method and of the shadow."""

    inner: Any
    shadow: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed(Selector):
    """Does what `inner` does, and remembers each step. dense_planes: the first planes read everything instead."""

    inner: Selector = dataclasses.field(default_factory=Dense)
    dense_planes: int = 0

    def write(self, state: Watched, keys: jax.Array, slots: jax.Array) -> Watched:
        """See `Selector.write`."""
        return dataclasses.replace(state, inner=self.inner.write(state.inner, keys, slots))

    def copy(self, state: Watched, sources: jax.Array, targets: jax.Array) -> Watched:
        """See `Selector.copy`."""
        return dataclasses.replace(state, inner=self.inner.copy(state.inner, sources, targets))

    def reserve(self, paged: PagedState, state: Watched, counts: jax.Array, width: int):
        """See `Selector.reserve`."""
        paged, inner, room = self.inner.reserve(paged, state.inner, counts, width)
        shadow, shadow_room = _reserve(state.shadow, counts, width)
        return paged, dataclasses.replace(state, inner=inner, shadow=shadow), Rooms(room, shadow_room)

    def reserve_prompt(self, paged: PagedState, state: Watched, counts: jax.Array, width: int):
        """See `Selector.reserve_prompt`."""
        paged, inner, room = self.inner.reserve_prompt(paged, state.inner, counts, width)
        shadow, shadow_room = _reserve(state.shadow, counts, width)
        return paged, dataclasses.replace(state, inner=inner, shadow=shadow), Rooms(room, shadow_room)

    def store(self, paged: PagedState, state: Watched, plane: Any, reservation: Rooms, k: jax.Array, v: jax.Array):
        """See `Selector.store`."""
        paged, inner, stale = self.inner.store(paged, state.inner, plane, reservation.inner, k, v)
        shadow = _write(state.shadow, plane, reservation.shadow, k, v)
        return paged, dataclasses.replace(state, inner=inner, shadow=shadow), stale

    def store_prompt(self, paged: PagedState, state: Watched, plane: Any, room: Rooms, q, k, v):
        """See `Selector.store_prompt`."""
        paged, inner, stale = self.inner.store_prompt(paged, state.inner, plane, room.inner, q, k, v)
        shadow = _write(state.shadow, plane, room.shadow, k, v)
        return paged, dataclasses.replace(state, inner=inner, shadow=shadow), stale

    def next_positions(self, paged: PagedState, state: Watched) -> jax.Array:
        """See `Selector.next_positions`."""
        return self.inner.next_positions(paged, state.inner)

    def attend(self, state: Watched, q, k_pages, v_pages, view: PageView, *, plane: Any = 0, **options) -> Attended:
        """See `Selector.attend`; takes note of what was read."""
        attended = self._attend(state.inner, q, k_pages, v_pages, view, plane, options)
        counts = state.tokens_read.at[plane].set(attended.tokens_read.astype(jnp.float32).mean(axis=-1))
        seen = state.seen
        if seen is not None:
            seen = Seen(
                seen.q.at[plane].set(q.astype(seen.q.dtype)),
                seen.out.at[plane].set(attended.output.out.astype(seen.out.dtype)),
                seen.read.at[plane].set(read_mask(attended.positions, seen.read.shape[-1])),
            )
        state = dataclasses.replace(state, inner=attended.state, seen=seen, tokens_read=counts)
        return attended._replace(state=state)

    def _attend(self, inner_state: Any, q, k_pages, v_pages, view: PageView, plane: Any, options: dict) -> Attended:
        """By the method, or densely in the first planes."""
        capacity = view.page_table.shape[-1] * k_pages.shape[2]

        def by(selector: Selector) -> Attended:
            attended = selector.attend(inner_state, q, k_pages, v_pages, view, plane=plane, **options)
            width = attended.positions.shape[-1]
            positions = jnp.pad(attended.positions, ((0, 0), (0, 0), (0, max(0, capacity - width))), constant_values=-1)
            output = AttentionOutput(attended.output.out, attended.output.lse, None)
            return attended._replace(output=output, positions=positions)

        if not self.dense_planes:
            return self.inner.attend(inner_state, q, k_pages, v_pages, view, plane=plane, **options)
        return jax.lax.cond(plane < self.dense_planes, lambda: by(Dense()), lambda: by(self.inner))


def attend(selector: Observed, state: Watched, plane: Any, q: Any, *arguments: Any, **options: Any) -> Attended:
    """An `AttendPlane`: as the default one; of latent attention, which attends by itself, the reads are counted."""
    if not isinstance(q, LatentQuery):
        return attend_by_selector(selector, state, plane, q, *arguments, **options)
    if state.seen is not None:
        raise ValueError("latent attention has no keys of heads to hold its choice against: leave out diagnostics")
    attended = attend_by_selector(selector.inner, state.inner, plane, q, *arguments, **options)
    counts = state.tokens_read.at[plane].set(attended.tokens_read.astype(jnp.float32).mean(axis=-1))
    return attended._replace(state=dataclasses.replace(state, inner=attended.state, tokens_read=counts))


def watch(
    inner_state: Any, kv: PagedKV, requests: int, heads: int, tokens: int | None, shadow: PagedState | None = None
) -> Watched:
    """A state around one of the inner selector, before the first step.

    heads: Hq. tokens: the longest request, for diagnostics; None: without them. shadow: an empty cache for every token,
    where the inner selector keeps fewer.
    """
    seen = None
    if tokens is not None:
        shape = (kv.planes, requests, 1, heads)
        q, out = (jnp.zeros((*shape, pool.shape[-1]), jnp.float32) for pool in (kv.k, kv.v))
        seen = Seen(q, out, jnp.zeros((kv.planes, requests, kv.kv_heads, tokens), bool))
    return Watched(inner_state, shadow, seen, jnp.zeros((kv.planes, requests), jnp.float32))


def diagnosed(paged: PagedState, state: Watched) -> Diagnosis:
    """What the last step missed, f32[planes, B]; `paged` is the method's cache after it."""
    assert state.seen is not None
    cache = paged if state.shadow is None else state.shadow
    k_pages, v_pages = paging.flat(cache.kv)

    def one(plane_and_seen: tuple[jax.Array, Seen]) -> Diagnosis:
        plane, seen = plane_and_seen
        return diagnose(seen.q[:, 0], seen.out[:, 0], k_pages, v_pages, paging.view(cache, plane), seen.read)

    return jax.lax.map(one, (jnp.arange(cache.kv.planes, dtype=jnp.int32), state.seen))


def _reserve(shadow: PagedState | None, counts: jax.Array, width: int) -> tuple[PagedState | None, Any]:
    return (None, None) if shadow is None else paging.reserve(shadow, counts, width)


def _write(shadow: PagedState | None, plane: Any, room: Any, k: jax.Array, v: jax.Array) -> PagedState | None:
    return None if shadow is None else paging.write(shadow, plane, room, k, v)[0]
