"""One token out for each that comes in: what H2O and TOVA share.

A request grows, page by page, until it holds as many tokens as its budget. From then on each new token takes the slot
of another one, in every plane and KV head the one that the method ranks lowest: pages, their number and their order in
the table stay, only the slot's position, score, key and value change. So nothing is compacted in the steady state, no
page is taken or given back, and a step reads what is held and nothing else.

The ranks come out of the attention that is computed anyway (`return_weights`): no pass over the cache is added. In the
papers attention sees the budget and the new token, and then one of them goes; here the new token counts in the budget,
and the other goes just before it comes. The decisions are the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from sparse_jax import compaction, paged_kv, paging, slot_pool
from sparse_jax.attention import page_sparse_attention
from sparse_jax.paging import PagedState, PageView, Reservation
from sparse_jax.selectors import budgets
from sparse_jax.selectors.base import Attended
from sparse_jax.selectors.evicting import (
    Evicting,
    Kept,
    after,
    by_place,
    check_requests,
    compacted,
    places_held,
    positions_held,
    room_of,
)
from sparse_jax.selectors.views import inside_pool
from sparse_jax.validation import INT32_MAX, as_array, as_ids, check_shape, require


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRoom:
    """Where the new token of each request goes: to the end, or to the slot of one that `store` chooses."""

    reservation: Reservation  # of the requests that grow
    replacing: jax.Array  # bool[B]
    positions: jax.Array  # i32[B] of the new tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replacing(Evicting):
    """Holds at most `budget` tokens, from the prompt on; the token of the lowest score is replaced.

    Of equal scores the lowest position goes first. A step takes one token of each request.
    """

    scored: ClassVar[bool] = True

    def updated(self, scores: jax.Array, weights: jax.Array) -> jax.Array:
        """The scores f32[B, Hkv, C] after a step whose query heads gave the tokens weights f32[B, Hkv, G, C]."""
        raise NotImplementedError

    # A step

    def reserve(self, paged: PagedState, state: Kept, counts: jax.Array, width: int) -> tuple[PagedState, Kept, Any]:
        """See `Selector.reserve`. Raises NotImplementedError for a width above 1."""
        check_requests(paged, state)
        if width != 1:
            raise NotImplementedError(
                f"{type(self).__name__} takes one token of each request a step, got a width of {width}: a token that "
                "was dropped for a draft could not come back."
            )
        counts, table, room = as_ids("counts", counts), paged.table, room_of(paged)
        check_shape("counts", counts, state.left_out.shape)
        length = jnp.clip(table.lengths, 0, room)
        limit = jnp.where(length > 0, state.limit, self.limits(jnp.full_like(length, room), room, room))
        full = (counts == 1) & (length >= limit)
        # Of a page that changed hands, nothing is there to replace: such a request keeps what it has.
        used = jnp.arange(table.pages.shape[1], dtype=jnp.int32) * paged.kv.page_size < length[:, None]
        lost = jnp.any(used & ~slot_pool.live(paged.pool, table.pages, table.incarnations), axis=1)
        positions, replacing = self.next_positions(paged, state), full & ~lost

        paged, reservation = paging.reserve(paged, jnp.where(full, 0, counts), 1)
        status = jnp.select([replacing, full], [paging.OK, paging.STALE], paged.table.status).astype(jnp.int32)
        paged = dataclasses.replace(paged, table=dataclasses.replace(paged.table, status=status))
        grown = reservation.slots[:, 0] >= 0
        state = dataclasses.replace(
            state,
            key_positions=compaction.follow_copies(state.key_positions, paged, reservation),
            scores=compaction.follow_copies(state.scores, paged, reservation),
            left_out=jnp.where(grown & (length == 0), 0, state.left_out) + replacing.astype(jnp.int32),
            limit=jnp.where(grown, limit, state.limit),
            stepped=grown | replacing,
        )
        return paged, state, StepRoom(reservation, replacing, positions)

    def store(
        self, paged: PagedState, state: Kept, plane: Any, reservation: StepRoom, k: jax.Array, v: jax.Array
    ) -> tuple[PagedState, Kept, jax.Array]:
        """See `Selector.store`. A slot on a page with several holders is not replaced, but counted as stale."""
        kv, room = paged.kv, reservation
        plane = as_ids("plane", plane)
        for name, new, pool in (("k", k, kv.k), ("v", v, kv.v)):
            check_shape(name, new, (*room.reservation.slots.shape, kv.kv_heads, pool.shape[-1]))
        # The side data waits for the keys. Otherwise it could be written before the previous layer has read it, and XLA
        # would copy all of it in every layer to allow that.
        key_positions, scores, k = lax.optimization_barrier((state.key_positions, state.scores, k))
        state = dataclasses.replace(state, key_positions=key_positions, scores=scores)
        taken = self.victims(paged, state, plane, room)
        grown = paging.flat_slots(paged, plane, room.reservation)
        slots = jnp.where(room.replacing[:, None], taken, grown)  # i32[B, Hkv]
        wanted = room.replacing | (room.reservation.slots[:, 0] >= 0)
        stale = jnp.sum(wanted & jnp.any(slots < 0, axis=1), dtype=jnp.int32)

        first = plane * (kv.pages * kv.page_size)
        at = jnp.where(slots >= 0, slots - first, -1)
        kv = paged_kv.put(kv, jnp.clip(plane, 0, kv.planes - 1), at, k.swapaxes(0, 1), v.swapaxes(0, 1))
        positions = jnp.broadcast_to(room.positions[:, None], slots.shape)
        state = dataclasses.replace(
            state,
            key_positions=compaction.put(key_positions, slots, positions),
            scores=compaction.put(scores, slots, jnp.zeros(slots.shape, jnp.float32)),
        )
        return dataclasses.replace(paged, kv=kv), state, stale

    def victims(self, paged: PagedState, state: Kept, plane: jax.Array, room: StepRoom) -> jax.Array:
        """Slots i32[B, Hkv] of the flattened pool whose tokens go; -1 where there is none that may be written."""
        page_size, table = paged.kv.page_size, paged.table
        view = paging.view(paged, plane)
        positions, scores = by_place(state.key_positions, view), by_place(state.scores, view)
        sinks, recent = (x[:, None, None] for x in self.protected(state.limit))
        droppable = (positions < 0) | ((positions >= sinks) & (positions <= room.positions[:, None, None] - recent))
        droppable &= places_held(view, page_size)[:, None]
        place, some = lowest(scores, positions, droppable)
        column = place // page_size
        page = jnp.take_along_axis(view.page_table, column, axis=1)
        sole = slot_pool.holders_of(paged.pool, table.pages, table.incarnations) == 1
        writable = some & jnp.take_along_axis(sole, column, axis=1) & (page >= 0)
        return jnp.where(writable, page * page_size + place % page_size, -1)

    def attend(
        self,
        state: Kept,
        q: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        view: PageView,
        *,
        plane: Any = 0,
        **options: Any,
    ) -> Attended:
        """See `Selector.attend`; `options` go to `page_sparse_attention`. Raises ValueError for several query rows."""
        del plane
        q = as_array("q", q)
        require(
            q.ndim == 3 or (q.ndim == 4 and q.shape[1] == 1),
            f"{type(self).__name__} takes one query token of each request a step: q [B, Hq, D] or [B, 1, Hq, D], "
            f"got {list(q.shape)}",
        )
        view = inside_pool(view, k_pages.shape[0])
        (batch, width), (_, kv_heads, page_size, _) = view.page_table.shape, k_pages.shape
        every = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, kv_heads, width))
        options = self.attention_options(state, view, 1, options)
        options["return_weights"] = True
        output = page_sparse_attention(q, k_pages, v_pages, view.page_table, view.lengths, every, **options)
        weights = jnp.asarray(output.weights).reshape(batch, kv_heads, -1, width * page_size)
        # A sick query, whose probabilities are not finite, says nothing.
        weights = jnp.where(jnp.isfinite(weights), weights, 0.0)
        scores = self.updated(by_place(state.scores, view), weights)
        scores = scores.reshape(batch, kv_heads, width, page_size).swapaxes(1, 2)
        changed = (view.page_table >= 0) & (state.stepped & (view.lengths > 0))[:, None]
        pages = jnp.where(changed, view.page_table, state.scores.shape[0])
        positions = positions_held(state, view)
        state = dataclasses.replace(state, scores=state.scores.at[pages].set(scores, mode="drop"))
        return Attended(output, state, jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32), positions)

    # More than the budget

    def track(self, paged: PagedState) -> Kept:
        """A state for a cache that was filled without this selector: every token is there, none has a score yet."""
        cache, requests = compaction.track(paged), paged.table.lengths.shape[0]
        state, room = self.init(paged.kv, requests), room_of(paged)
        limit = self.limits(cache.full_lengths, room, room)
        return dataclasses.replace(after(state, cache), limit=limit)

    def evict(self, paged: PagedState, state: Kept) -> tuple[PagedState, Kept, jax.Array]:
        """Shrinks requests that hold more than their budget; what they held moves to fewer pages, the others return.

        For a budget that was lowered, or a cache from `track`. A share of the prompt stays what it was. A request that
        finds no page (others hold its own too) keeps everything and gets its status, see `compaction.compact`.
        Reservations made before are stale afterwards. Returns (paged, state, stale i32[]).
        """
        check_requests(paged, state)
        room, cache = room_of(paged), compacted(paged, state)
        share = isinstance(self.held_budget(), float)
        limit = state.limit if share else self.limits(cache.full_lengths, room, room)
        columns = room if share else budgets.most_tokens(self.held_budget(), self.most, room)
        sinks, recent = self.protected(limit)
        end, kept = cache.full_lengths, jnp.where(paged.table.lengths > limit, limit, 0)

        def of_plane(plane):
            view = paging.view(paged, plane)
            positions, scores = by_place(state.key_positions, view), by_place(state.scores, view)
            always = (positions < sinks[:, None, None]) | (positions >= (end - recent)[:, None, None])
            rank = jnp.where(always, jnp.inf, scores)
            rank = jnp.where(places_held(view, paged.kv.page_size)[:, None] & (positions >= 0), rank, -jnp.inf)
            place = jnp.flip(jnp.lexsort((positions, rank)), axis=-1)[..., :columns].astype(jnp.int32)
            stays = jnp.take_along_axis(rank, place, axis=-1) > -jnp.inf
            stays &= jnp.arange(columns, dtype=jnp.int32) < kept[:, None, None]
            place = jnp.sort(jnp.where(stays, place, INT32_MAX), axis=-1)
            ids = jnp.where(place < INT32_MAX, place, -1)
            return ids, jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=-1)

        ids, scores = jax.vmap(of_plane)(jnp.arange(paged.kv.planes, dtype=jnp.int32))  # [planes, B, Hkv, columns]
        cache, stale = compaction.compact(cache, ids)
        moved = jnp.any(cache.paged.table.incarnations != paged.table.incarnations, axis=1)
        moved |= jnp.any(cache.paged.table.pages != paged.table.pages, axis=1)
        state = dataclasses.replace(after(state, cache), limit=limit)
        slots = jnp.where(moved[:, None], _slots(cache.paged, columns), -1)
        slots = compaction.in_all_planes(paged.kv, slots)
        state = dataclasses.replace(state, scores=compaction.put(state.scores, slots, scores.swapaxes(2, 3)))
        return cache.paged, state, stale


def lowest(scores: jax.Array, positions: jax.Array, droppable: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(place i32[...] of the lowest score [..., C], whether there is one bool[...]); ties: the lowest position.

    A place that is nobody's, position -1, goes before all others.
    """
    rank = jnp.where(droppable, jnp.where(positions < 0, -jnp.inf, scores), jnp.inf)
    ties = droppable & (rank == rank.min(axis=-1, keepdims=True))
    place = jnp.argmin(jnp.where(ties, positions, INT32_MAX), axis=-1)
    return place.astype(jnp.int32), jnp.any(droppable, axis=-1)


def _slots(paged: PagedState, columns: int) -> jax.Array:
    """Slots i32[B, columns] of the first places of each request, in one plane; -1 beyond its length."""
    page_size, place = paged.kv.page_size, jnp.arange(columns, dtype=jnp.int32)
    pages = paged.table.pages[:, place // page_size]
    return jnp.where(place < paged.table.lengths[:, None], pages * page_size + place % page_size, -1)
