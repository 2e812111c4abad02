"""Loops of a model over a paged cache: the attention that decode steps, drafts and verification share.

For each plane: the new tokens' keys and values are stored, then their rows attend, by what the loop does
(`models.reference`): through the selector, or capturing a reference, or corrected from one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import latent_attention
from models.interface import Attend, LoopedModel, LoopOutput
from models.latent_attention import LatentQuery
from models.reference import (
    CAPTURE,
    SELECT,
    ReferenceCorrection,
    capture,
    capture_leased,
    consume,
    consume_leased,
)
from sparse_jax import Reference, paging, reference_store
from sparse_jax.paging import PagedState, PageView
from sparse_jax.reference_store import Lease, Plan, ReferenceStore
from sparse_jax.selectors import Attended, Dense, Selector

Arguments = tuple[Any, jax.Array, jax.Array, PageView]
"""q [B, T, Hq, D] or a `LatentQuery`, k_pages, v_pages and the view of one plane."""

AttendPlane = Callable[..., Attended]
"""(selector, selector_state, plane i32[], q [B, T, Hq, D], k_pages, v_pages, view, **options) -> Attended"""


def attend_by_selector(selector: Selector, state: Any, plane, q, k_pages, v_pages, view, **options) -> Attended:
    """The default `AttendPlane`: the selector chooses and attends; latents are chosen by the model's own indexer."""
    if isinstance(q, LatentQuery):
        return latent_attention.attend(selector, state, q, k_pages, v_pages, view, **options)
    return selector.attend(state, q, k_pages, v_pages, view, plane=plane, **options)


class Cache(NamedTuple):
    """What the planes of one step thread on."""

    paged: PagedState
    selector: Any
    reads: jax.Array  # i32[planes, B] tokens read, summed over the KV heads
    stale: jax.Array  # i32[]
    # layer * rows + row, or slots that outlive the step; None without reference correction
    references: Reference | ReferenceStore | None = None
    # As they were computed, where a caller wants them back:
    keys: jax.Array | None = None  # [planes, B, rows, Hkv, D]
    queries: jax.Array | None = None  # [planes, B, rows, Hq, D]

    @staticmethod
    def of(
        paged: PagedState,
        selector: Any,
        references: Reference | ReferenceStore | None = None,
        keys: jax.Array | None = None,
        queries: jax.Array | None = None,
    ) -> Cache:
        """Before the first plane."""
        reads = jnp.zeros((paged.kv.planes, paged.table.lengths.shape[0]), jnp.int32)
        return Cache(paged, selector, reads, jnp.int32(0), references, keys, queries)

    def after(self, stored: tuple[PagedState, Any, jax.Array]) -> Cache:
        """With what `Selector.store` returned."""
        paged, selector, stale = stored
        return self._replace(paged=paged, selector=selector, stale=self.stale + stale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What the planes of one step share; made while a step is traced."""

    model: LoopedModel
    selector: Selector
    room: Any  # what the selector reserved for the new tokens
    takes_part: jax.Array  # bool[B]
    lengths: jax.Array | None = None  # i32[B] by which the rows see; None: those of the page tables
    implementation: str | None = None
    attend: AttendPlane = attend_by_selector
    reference: ReferenceCorrection | None = None
    # The rows of drafts are steps of one token first and a batch of rows afterwards:
    places: jax.Array | None = None  # i32[B, T] of each row's reference in a layer, -1 none; None: b * T + t
    column: Any = 0  # of the first row in `Cache.keys` and `Cache.queries`
    seen: jax.Array | None = None  # i32[B, T] keys that each row sees, 0 for rows that do not exist; None: all exist
    lease: Lease | None = None  # of the rows' slots, [B, T], where `Cache.references` is a store

    def run(
        self, h: jax.Array, positions: jax.Array, cache: Cache, first: int = 0, last: int | None = None
    ) -> tuple[LoopOutput, Cache]:
        """The loops first .. last - 1 over h [B, T, H] at positions i32[B, T], -1 for rows that do not exist."""
        last = self.model.config.loops if last is None else last
        found = []
        for start, end, mode in self._segments(first, last):
            attend, cache = self._attend(mode, cache)
            output, cache = self.model.loops(h, positions, attend, cache, first=start, last=end)
            h = output.hidden[-1]
            found.append(output)
        return found[0] if len(found) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *found), cache

    def further(
        self, hidden: jax.Array, tokens: jax.Array, positions: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """The extra layer of a model that has one, after its loops: see `models.deepseek.Deepseek.predict`."""
        model: Any = self.model
        attend, cache = self._attend(SELECT, cache)
        return model.predict(hidden, tokens, positions, attend, cache)

    def _segments(self, first: int, last: int) -> list[tuple[int, int, int]]:
        if self.reference is None:
            return [(first, last, SELECT)]
        return self.reference.segments(self.model.config.loops, first, last)

    def _attend(self, mode: int, cache: Cache) -> tuple[Attend, Cache]:
        """What the planes of loops of one mode do; their plan counts the stale slots of the rows."""
        plan = None
        if mode != SELECT and isinstance(cache.references, ReferenceStore):
            assert self.lease is not None
            plan, stale = reference_store.plan(cache.references, self.lease, mode)
            cache = cache._replace(stale=cache.stale + stale)

        def attend(plane, q, k, v, cache: Cache):
            cache = cache.after(self.selector.store(cache.paged, cache.selector, plane, self.room, k, v))
            at = plane, 0, self.column, 0, 0
            cache = cache._replace(keys=_kept(cache.keys, k, at), queries=_kept(cache.queries, q, at))
            view = paging.view(cache.paged, plane)
            lengths = view.lengths if self.lengths is None else self.lengths
            view = dataclasses.replace(view, lengths=jnp.where(self.takes_part, lengths, 0))
            cache = cache._replace(stale=cache.stale + view.stale)
            arguments = q, *paging.flat(cache.paged.kv), view
            if mode == SELECT:
                out, read, cache = self._select(plane, arguments, cache)
            elif mode == CAPTURE:
                out, read, cache = self._capture(plan, plane, arguments, cache)
            else:
                out, read, cache = self._consume(plan, plane, arguments, cache)
            return out, cache._replace(reads=cache.reads.at[plane].add(read.sum(axis=-1, dtype=jnp.int32)))

        return attend, cache

    def _select(self, plane: jax.Array, arguments: Arguments, cache: Cache) -> tuple[Any, jax.Array, Cache]:
        q, k_pages, v_pages, view = arguments
        options: dict[str, Any] = {"implementation": self.implementation}
        rows = jax.tree.leaves(q)[0].shape[:2]
        if self.seen is not None and self.selector.accumulates:
            return self._select_in_turn(plane, arguments, cache)
        if self.seen is not None and isinstance(self.selector, Dense):  # the rows share one walk over the keys
            view = dataclasses.replace(view, lengths=self.seen.max(axis=1))
            options["q_positions"] = self.seen - 1
        elif self.seen is not None:  # each row chooses for itself, as it would in a step of its own
            q = jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), q)
            table = jnp.repeat(view.page_table, rows[1], axis=0)
            view = dataclasses.replace(view, page_table=table, lengths=self.seen.reshape(-1))
        attended = self.attend(self.selector, cache.selector, plane, q, k_pages, v_pages, view, **options)
        out = jax.tree.map(lambda x: x.reshape(*rows, *x.shape[2:]), attended.output.out)
        read = attended.tokens_read.reshape(rows[0], -1)
        return out, read, cache._replace(selector=attended.state)

    def _select_in_turn(
        self, plane: jax.Array, arguments: Arguments, cache: Cache
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Each row chooses by what those before it have added to the selector's state."""
        q, k_pages, v_pages, view = arguments
        assert self.seen is not None

        def row(state: Any, x: tuple[jax.Array, jax.Array]) -> tuple[Any, tuple[jax.Array, jax.Array]]:
            q, seen = x
            its_view = dataclasses.replace(view, lengths=seen)
            options = {"implementation": self.implementation}
            attended = self.attend(self.selector, state, plane, q[:, None], k_pages, v_pages, its_view, **options)
            return attended.state, (attended.output.out[:, 0], attended.tokens_read)

        state, (out, read) = jax.lax.scan(row, cache.selector, (q.swapaxes(0, 1), self.seen.T))
        return out.swapaxes(0, 1), read.sum(axis=0, dtype=jnp.int32), cache._replace(selector=state)

    def _capture(
        self, plan: Plan | None, plane: jax.Array, arguments: Arguments, cache: Cache
    ) -> tuple[jax.Array, jax.Array, Cache]:
        assert self.reference is not None
        references: Any = cache.references
        q, k_pages, _, view = arguments
        layer, stale = plane % self.model.config.num_layers, cache.stale
        if plan is None:
            at = self._places(references, layer, q)
            out, references = capture(self.reference, references, at, *arguments, self.implementation)
        else:
            out, references, more = capture_leased(
                self.reference, references, plan, layer, *arguments, self.implementation
            )
            stale += more
        # The keys are read once for all rows.
        read = view.lengths[:, None] if self.seen is None else self.seen.max(axis=1, keepdims=True)
        return out, read * k_pages.shape[1], cache._replace(references=references, stale=stale)

    def _consume(
        self, plan: Plan | None, plane: jax.Array, arguments: Arguments, cache: Cache
    ) -> tuple[jax.Array, jax.Array, Cache]:
        references: Any = cache.references
        layer = plane % self.model.config.num_layers
        if plan is None:
            at = self._places(references, layer, arguments[0])
            return *consume(references, at, *arguments, self.implementation), cache
        out, read, stale = consume_leased(references, plan, layer, *arguments, self.implementation)
        return out, read, cache._replace(stale=cache.stale + stale)

    def _places(self, references: Reference, layer: jax.Array, q: jax.Array) -> jax.Array:
        if self.places is None:
            return layer * (q.shape[0] * q.shape[1])
        of_layer = references.count.shape[0] // self.model.config.num_layers
        return jnp.where(self.places >= 0, layer * of_layer + self.places, -1)


def _kept(kept: jax.Array | None, new: jax.Array, at: tuple[Any, ...]) -> jax.Array | None:
    """With the new rows at their place, where any are kept."""
    return None if kept is None else jax.lax.dynamic_update_slice(kept, new[None].astype(kept.dtype), at)
