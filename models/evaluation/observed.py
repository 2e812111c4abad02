"""A selector around another one that watches what it reads; models and decoding know nothing of it.

Methods that forget tokens cannot be held against dense attention from their own cache, so for those every token is also
kept in a second cache, the shadow. A method that keeps all tokens is its own shadow.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.evaluation.diagnostics import Diagnosis, diagnose, nothing
from sparse_jax import paging
from sparse_jax.attention_call import AttentionOutput
from sparse_jax.paging import PagedKV, PagedState, PageView
from sparse_jax.selectors import Attended, Dense, Selector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched:
    """State of an `Observed` selector."""

    inner: Any
    shadow: PagedState | None  # every token, where the method's own cache does not have them all
    asked: jax.Array  # bool[], whether this step is diagnosed
    found: Diagnosis  # f32[planes, B] of this step
    read: jax.Array  # f32[planes, B] tokens read, averaged over the KV heads


class Rooms(NamedTuple):
    """Reservations of the method and of the shadow."""

    inner: Any
    shadow: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed(Selector):
    """Does what `inner` does.

    diagnostics: compare the steps that are `asked` with dense attention. shadow: an empty cache for every token, or
    None. dense_planes: the first planes read everything, whatever `inner` would choose there.
    """

    inner: Selector = dataclasses.field(default_factory=Dense)
    diagnostics: bool = True
    shadow: PagedState | None = None
    dense_planes: int = 0

    def watched(self, inner_state: Any, planes: int, requests: int) -> Watched:
        """A state around one of `inner`."""
        none, zeros = nothing(planes, requests), jnp.zeros((planes, requests), jnp.float32)
        return Watched(inner_state, self.shadow, jnp.zeros((), bool), none, zeros)

    def begin(self, kv: PagedKV, requests: int) -> Watched:
        """The state for an empty cache."""
        return self.watched(self.inner.init(kv, requests), kv.planes, requests)

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
        """See `Selector.attend`; takes note of what was read and missed."""
        attended = self._attend(state.inner, q, k_pages, v_pages, view, plane, options)
        read = state.read.at[plane].set(attended.tokens_read.astype(jnp.float32).mean(axis=-1))
        state = dataclasses.replace(state, inner=attended.state, read=read)
        if not self.diagnostics:
            return attended._replace(state=state)
        k_all, v_all, everything = k_pages, v_pages, view
        if state.shadow is not None:
            k_all, v_all = paging.flat(state.shadow.kv)
            everything = paging.view(state.shadow, plane)
            taken = jnp.where(view.lengths > 0, everything.lengths, 0)
            everything = dataclasses.replace(everything, lengths=taken)
        found = jax.lax.cond(
            state.asked,
            lambda: diagnose(q, attended.output.out, k_all, v_all, everything, attended.positions),
            lambda: nothing(q.shape[0]),
        )
        found = jax.tree.map(lambda all_, new: all_.at[plane].set(new), state.found, found)
        return attended._replace(state=dataclasses.replace(state, found=found))

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


def _reserve(shadow: PagedState | None, counts: jax.Array, width: int) -> tuple[PagedState | None, Any]:
    return (None, None) if shadow is None else paging.reserve(shadow, counts, width)


def _write(shadow: PagedState | None, plane: Any, room: Any, k: jax.Array, v: jax.Array) -> PagedState | None:
    return None if shadow is None else paging.write(shadow, plane, room, k, v)[0]
