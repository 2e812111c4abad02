"""What selectors share that forget tokens: of a prompt only some get pages, each KV head its own, at true positions.

An evicting selector takes the cache over from `paging` by way of `compaction`: a kept key keeps its rotation and its
true position (`key_positions`), the next token of a request comes after all that it has had, and pages are never held
for tokens that are not kept, not even while the prompt is computed. Which tokens a prompt keeps is the method's
`prompt_scores`; what happens while decoding is either nothing more (`snapkv.py`) or one token out for each that comes
in (`replacing.py`).

The state belongs to requests, so pages cannot be shared (`shareable` is False).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from sparse_jax import compaction, paging
from sparse_jax.compaction import CompactedState, PromptReservation
from sparse_jax.paged_kv import key_shape
from sparse_jax.paging import PagedKV, PagedState, PageView
from sparse_jax.selectors import budgets
from sparse_jax.selectors.base import DEFAULT_BUDGET, Selector
from sparse_jax.selectors.observation import best_tokens
from sparse_jax.validation import INT32_MAX, as_ids, check_shape, require


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What an evicting selector remembers of B requests."""

    key_positions: jax.Array  # i32[planes * N, Hkv, P] true positions; -1 is nobody's key
    left_out: jax.Array  # i32[B] tokens that a request has had and does not hold; void where it holds none
    limit: jax.Array  # i32[B] tokens that a request may hold, decided when it began
    stepped: jax.Array  # bool[B] the last `reserve` gave the request a token
    scores: Any  # f32[planes * N, Hkv, P], or None where the method keeps none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evicting(Selector):
    """Options of an evicting selector.

    budget: tokens that a request may hold per KV head, the query's own included: a number, a share of the prompt's
    length (of the table, for a request that begins without a prompt), or an array for all heads of a request alike.
    At most what the table holds. recent, sinks: last and first tokens that are never dropped, recent ones first, as
    many as fit into the budget. scale: of the scores before the softmax, as in the attention; D ** -0.5 if None.

    Raises ValueError for budgets by plane or KV head: the tables, and with them how many, are the same for all.
    """

    sinks: int = 0
    scale: float | None = None

    shareable: ClassVar[bool] = False
    scored: ClassVar[bool] = False
    """Whether the state has scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name, budget = type(self).__name__, self.held_budget()
        if isinstance(budget, tuple) or (jnp.ndim(budget) and jnp.shape(budget)[-1] != 1):
            raise ValueError(
                f"{name}: what a request holds is the same for all planes and KV heads, so its budget is a whole "
                "number of tokens, at least 1, a share of the prompt, or an i32 array of shape [] or [B, 1]; got "
                f"{budget if isinstance(budget, tuple) else list(jnp.shape(budget))}."
            )
        self.check_number("scale", "a finite number (in float32), or None", optional=True)

    # What a method says

    def prompt_scores(self, q: jax.Array, k: jax.Array, counts: jax.Array) -> jax.Array:
        """What the tokens of prompts are worth, f32[B, Hkv, S]: q [B, S, Hq, D], k [B, S, Hkv, D], counts i32[B]."""
        raise NotImplementedError

    def recent_of(self, limit: jax.Array) -> jax.Array:
        """How many last tokens are never dropped for limits i32[B]; the query's own always is one of them."""
        recent = 1 if self.recent is None else self.recent
        return jnp.clip(min(recent, INT32_MAX), 1, limit)

    def held_budget(self) -> Any:
        """The budget of what a request holds."""
        return DEFAULT_BUDGET if self.budget is None else self.budget

    # What it remembers

    def init(self, kv: PagedKV, requests: int = 1) -> Kept:
        """See `Selector.init`."""
        planes, pages, kv_heads, page_size, _ = key_shape(kv)
        shape = (planes * pages, kv_heads, page_size)
        return Kept(
            key_positions=jnp.full(shape, -1, jnp.int32),
            left_out=jnp.zeros(requests, jnp.int32),
            limit=jnp.ones(requests, jnp.int32),
            stepped=jnp.zeros(requests, bool),
            scores=jnp.zeros(shape, jnp.float32) if self.scored else None,
        )

    def next_positions(self, paged: PagedState, state: Kept) -> jax.Array:
        """See `Selector.next_positions`."""
        return compacted(paged, state).full_lengths

    def tokens_held(self, prompt: int, total: int) -> int:
        """See `Selector.tokens_held`."""
        budget = self.held_budget()
        return min(
            total, budgets.most_tokens(budget, self.most, max(prompt, 1) if isinstance(budget, float) else total)
        )

    def limits(self, counts: jax.Array, longest: int, room: int) -> jax.Array:
        """How many tokens requests may hold whose prompts have counts i32[B] <= longest tokens; at most `room`."""
        count = jnp.clip(counts, 0, longest)[:, None]
        tokens = budgets.tokens(self.held_budget(), self.most, count, 0, kv_heads=1, capacity=longest)
        limit = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), count.shape)[:, 0]
        return jnp.clip(limit, 1, room)

    def protected(self, limit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(sinks, recent) i32[B] that are never dropped where `limit` tokens are held: together no more than these."""
        recent = self.recent_of(limit)
        return jnp.minimum(min(self.sinks, INT32_MAX), limit - recent), recent

    # A prompt

    def reserve_prompt(
        self, paged: PagedState, state: Kept, counts: jax.Array, width: int
    ) -> tuple[PagedState, Kept, PromptReservation]:
        """Room for as many tokens of each prompt as its budget allows; see `Selector.reserve_prompt`.

        A request that is not empty, or a count out of 0 .. width, gets the status BAD_COUNT and changes nothing.
        """
        check_requests(paged, state)
        counts, room = as_ids("counts", counts), room_of(paged)
        check_shape("counts", counts, state.left_out.shape)
        limit = self.limits(counts, max(width, room), room)
        bad = (counts < 0) | (counts > width) | ((counts != 0) & (paged.table.lengths > 0))
        kept = jnp.where(bad, -1, jnp.minimum(counts, limit))
        columns = min(budgets.most_tokens(self.held_budget(), self.most, width), room)
        cache, prompt = compaction.reserve_prompt(compacted(paged, state), counts, kept, columns)
        granted = prompt.reservation.slots[:, 0] >= 0
        state = dataclasses.replace(after(state, cache), limit=jnp.where(granted, limit, state.limit))
        return cache.paged, state, prompt

    def store_prompt(
        self,
        paged: PagedState,
        state: Any,
        plane: Any,
        room: PromptReservation,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> tuple[PagedState, Any, jax.Array]:
        """Chooses what each KV head keeps and writes it; see `Selector.store_prompt`."""
        return self.store_chosen(paged, state, plane, room, *self.choose(state, room, q, k), k, v)

    def store_chosen(
        self,
        paged: PagedState,
        state: Any,
        plane: Any,
        room: PromptReservation,
        ids: jax.Array,
        scores: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> tuple[PagedState, Any, jax.Array]:
        """Writes what `choose` chose: ids i32[B, Hkv, C] with scores f32[B, Hkv, S] of all tokens."""
        cache, stale = compaction.write_prompt(compacted(paged, state), plane, room, ids, k, v)
        state = after(state, cache)
        if state.scores is not None:
            slots = paging.flat_slots(cache.paged, plane, room.reservation)
            kept = jnp.where(ids >= 0, jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=-1), 0.0)
            state = dataclasses.replace(state, scores=compaction.put(state.scores, slots, kept.swapaxes(1, 2)))
        return cache.paged, state, stale

    def choose(self, state: Kept, room: PromptReservation, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(token ids i32[B, Hkv, C] to keep of prompts, ascending, then -1; scores f32[B, Hkv, S] of all tokens)."""
        (batch, width, kv_heads, _), columns = k.shape, room.reservation.slots.shape[1]
        kept = jnp.sum(room.reservation.slots >= 0, axis=1, dtype=jnp.int32)
        # A budget known now of at least the padded prompt keeps everything.
        everything = columns == width and isinstance(self.held_budget(), int | float)
        if everything and not self.scored:
            scores = jnp.zeros((batch, kv_heads, width), jnp.float32)
        else:
            scores = self.prompt_scores(q, k, room.lengths)
        if everything:
            token = jnp.arange(width, dtype=jnp.int32)
            ids = jnp.broadcast_to(jnp.where(token < kept[:, None, None], token, -1), (batch, kv_heads, width))
        else:
            sinks, recent = self.protected(state.limit)
            ids = best_tokens(scores, room.lengths, kept, sinks=sinks, recent=recent, width=columns)
        return ids, scores

    # A step

    def select(
        self, state: Any, q: jax.Array, view: PageView, *, kv_heads: int, page_size: int, plane: Any = 0
    ) -> jax.Array | None:
        """Everything that is held is read."""
        del state, q, view, kv_heads, page_size, plane
        return None

    def attention_options(self, state: Kept, view: PageView, rows: int, options: dict[str, Any]) -> dict[str, Any]:
        """`options` of an attention operation with true positions of `rows` query tokens of each request."""
        capacity = view.page_table.shape[1] * state.key_positions.shape[2]
        had = jnp.where(view.lengths > 0, jnp.clip(view.lengths, 0, capacity) + state.left_out, 0)
        positions = had[:, None] - rows + jnp.arange(rows, dtype=jnp.int32)
        scale = {} if self.scale is None else {"scale": self.scale}
        return {
            **scale, "q_positions": jnp.maximum(positions, -1), "key_positions": state.key_positions, **options
        }  # fmt: skip


def compacted(paged: PagedState, state: Kept) -> CompactedState:
    """The cache as `compaction` takes it. A request that holds nothing (released, say) has left nothing out."""
    left_out = jnp.where(paged.table.lengths > 0, state.left_out, 0)
    return CompactedState(paged, state.key_positions, left_out)


def after(state: Kept, cache: CompactedState) -> Kept:
    """The state with what `compaction` changed."""
    return dataclasses.replace(state, key_positions=cache.key_positions, left_out=cache.left_out)


def room_of(paged: PagedState) -> int:
    """Tokens that a page table holds."""
    return paged.table.pages.shape[1] * paged.kv.page_size


def check_requests(paged: PagedState, state: Kept) -> None:
    """Raises ValueError for a state that was made for another number of requests."""
    requests = paged.table.lengths.shape[0]
    require(
        state.left_out.shape == (requests,),
        f"the selector's state is for {state.left_out.shape[0]} requests, the cache has {requests}: "
        "make it with init(kv, requests)",
    )


def by_place(side_data: jax.Array, view: PageView) -> jax.Array:
    """Side data [planes * N, Hkv, P] of the tokens of a view by place in its table, [B, Hkv, W * P]; absent: any."""
    inside = (view.page_table >= 0) & (view.page_table < side_data.shape[0])
    rows = side_data[jnp.where(inside, view.page_table, 0)].swapaxes(1, 2)  # [B, Hkv, W, P]
    return rows.reshape(*rows.shape[:2], -1)


def places_held(view: PageView, page_size: int) -> jax.Array:
    """Which places of a view are in use, bool[B, W * P]."""
    place = jnp.arange(view.page_table.shape[1] * page_size, dtype=jnp.int32)
    return jnp.repeat(view.page_table >= 0, page_size, axis=1) & (place < view.lengths[:, None])


def positions_held(state: Kept, view: PageView) -> jax.Array:
    """True positions of the keys of a view, i32[B, Hkv, W * P]; -1 where there is none."""
    held = places_held(view, state.key_positions.shape[2])
    return jnp.where(held[:, None], by_place(state.key_positions, view), -1)
