"""Self-speculation: a part of the model drafts tokens, the model verifies them in one batch.

Of looped models the first loops draft, as below. Of others an extra layer does, see `models.speculation_extra`; their
verification runs the whole model.

A round of K drafts, d of U loops deep, for requests whose next input is token s at position `base`:

    draft     K + 1 steps of one token: loops 0 .. d - 1 at base + i; the arg max after loop d - 1 is the next input.
              The last step only fills its planes
    verify    loops d .. U - 1 of all K + 1 rows at once, from the hidden states that the drafts left
    accept    the leading drafts that the target would have chosen, and the target's token after them
    roll back the tokens behind these: their pages, and what the selector knows of them

So a round yields 1 to K + 1 tokens, those that plain decoding would give, and runs the deeper loops once. Lengths,
positions and acceptance stay on the device: rounds are one `lax.scan`, and where drafts touch few pages
(`page_allocation.MOST_COLUMNS`) nothing in them waits for the host.

A request drafts less than K where its limit, its table or the free pages end; the rows behind are padding. Each row
chooses what it reads by itself, as in a step of its own. Only summaries of pages know the keys of all K + 1 rows then,
so a page that holds drafts may be chosen where plain decoding would not; elsewhere the choice is the same. What a
selector accumulates (H2O) a row sees as the rows before it have left it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models import speculation_accept, speculation_extra, speculation_rollback
from models.decode import DecodeOptions, DecodeState, StepOutput, stops
from models.exit_gate import chosen_exit, select_exit
from models.interface import LoopedModel, LoopOutput, ModelConfig
from models.loops import Cache, Step
from models.reference import ReferenceCorrection, empty_references
from sparse_jax import Reference, paging, slot_pool
from sparse_jax.paged_kv import key_shape
from sparse_jax.paging import PagedState, Reservation
from sparse_jax.reference_store import Lease, ReferenceStore
from sparse_jax.selectors import Selector


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """How much is drafted; hashable, so static under `jax.jit`. Raises ValueError for numbers below 1.

    drafts: K, tokens drafted in a round. by: who drafts, the first `draft_loops` loops (d) or the model's extra layer.
    """

    drafts: int = 3
    draft_loops: int = 2
    by: Literal["loops", "extra"] = "loops"

    def __post_init__(self) -> None:
        if self.by not in ("loops", "extra"):
            raise ValueError(f"by must be 'loops' or 'extra', got {self.by!r}")
        for name in ("drafts", "draft_loops"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 up, got {value!r}")

    def check(self, config: ModelConfig, selector: Selector, reference: ReferenceCorrection | None = None) -> None:
        """Raises ValueError unless a model of this configuration, read through these, can draft and verify so."""
        name, extra = type(selector).__name__, getattr(config, "mtp_layers", 0)
        if self.by == "loops" and not self.draft_loops < config.loops:
            more = ": draft by its extra layer, Speculation(by='extra')" if extra else ""
            raise ValueError(
                f"draft_loops must leave a loop to verify with: the model has {config.loops}, got {self.draft_loops}"
                + more
            )
        if self.by == "extra" and not extra:
            raise ValueError("drafts by 'extra' need a model with an extra layer, and this one has none (mtp_layers 0)")
        if self.by == "extra" and reference is not None:
            raise ValueError("drafts by 'extra' cannot be combined with reference correction, which is between loops")
        if not (selector.shareable or selector.accumulates):
            raise ValueError(
                f"speculation cannot take drafts back from the selector {name}: it drops or moves tokens of a "
                "request, and they would not come back (`shareable` and `accumulates` are False); use one that keeps "
                "all of them, or none"
            )
        if selector.accumulates and reference is not None:
            raise ValueError(
                f"reference correction cannot be combined with the selector {name}: the corrected loops would not tell "
                "it what they attend to"
            )


class RoundOutput(NamedTuple):
    """What a round tells the host. A request that took no part, or found no page, committed nothing."""

    tokens: jax.Array  # i32[B, K + 1] the new tokens, -1 where there is none, and in the place of a stop token
    drafted: jax.Array  # i32[B] drafts that were verified; 0 where the request took no part
    accepted: jax.Array  # i32[B] how many of them stay; -1 where the request took no part
    lengths: jax.Array  # i32[B] tokens in the cache after the round; 0 where the request took no part
    tokens_read: jax.Array  # i32[planes, B] cached tokens that were read by drafts and by verify
    exit_loop: jax.Array  # i32[B, K + 1], -1 for rows that do not stay
    stale: jax.Array  # i32[]
    retained: jax.Array | None = None  # f32[2, B] mass of the references of rows that stay: mean and least, else 1

    def steps(self) -> StepOutput:
        """Of rounds [R, ...]: the same as R * (K + 1) plain steps, where rows that do not stay take no part.

        What is not told by row is repeated (retained), or stays by round (tokens_read, stale).
        """
        rounds, requests, rows = self.tokens.shape
        row = jnp.arange(rows, dtype=jnp.int32)
        lengths = (self.lengths - self.accepted)[..., None] + row
        lengths = jnp.where(row <= self.accepted[..., None], lengths, 0)

        def by_step(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x, 2, 1).reshape(rounds * rows, requests)

        return StepOutput(
            tokens=by_step(self.tokens),
            lengths=by_step(lengths),
            tokens_read=self.tokens_read,
            exit_loop=by_step(self.exit_loop),
            stale=self.stale,
            retained=None if self.retained is None else jnp.repeat(self.retained, rows, axis=0),
        )


class Room(NamedTuple):
    """The room of a round, before anything is written."""

    granted: jax.Array  # bool[B] the request takes part
    base: jax.Array  # i32[B] tokens in the cache before the round
    drafts: jax.Array  # i32[B] how many the request drafts, 0 .. K
    reservation: Reservation  # of K + 1 tokens
    lease: Lease | None  # of K + 1 references, where they are in a store
    kept: Any  # the selector's state without any of these tokens
    working: Any  # the same for drafts and verification

    @property
    def real(self) -> jax.Array:
        """The rows that are no padding, bool[B, K + 1]."""
        rows = jnp.arange(self.reservation.slots.shape[1], dtype=jnp.int32)
        return self.granted[:, None] & (rows <= self.drafts[:, None])

    def of_real_rows(self) -> Lease | None:
        """The lease without padding."""
        return jax.tree.map(lambda x: jnp.where(self.real, x, -1), self.lease)


def speculative_round(
    model: LoopedModel, state: DecodeState, options: DecodeOptions, speculation: Speculation
) -> tuple[DecodeState, RoundOutput]:
    """One round of all requests that run: 1 to K + 1 tokens of each, as far as limits and pages allow.

    A request that finds pages for one token only takes a plain step; one that finds none waits, as in `decode_chunk`.
    A stop token ends a request inside the round. Afterwards lengths, tables, free pages and the selector's state are
    those of a request that was only ever given the tokens that stay.

    Raises ValueError where `Speculation.check` does.
    """
    return leased_round(model, state, options, speculation, None, None)[:2]


def leased_round(
    model: LoopedModel,
    state: DecodeState,
    options: DecodeOptions,
    speculation: Speculation,
    store: ReferenceStore | None,
    lease: Lease | None,
) -> tuple[DecodeState, RoundOutput, ReferenceStore | None]:
    """`speculative_round` with its references in a store, where there is one; also returns the store.

    lease: [B, K + 1], a slot of each row. A request without a live slot for its first row takes no part, and one drafts
    no further than its live slots reach. The lease is the caller's to accept and to release.
    """
    speculation.check(model.config, options.selector, options.reference)
    paged, room = _reserve(model, state, options.selector, speculation.drafts, store, lease)
    cache = _cache(model, options, paged, room, store)
    if speculation.by == "extra":
        candidates, q, cache = speculation_extra.draft(model, state, options, room, cache)
        h = model.embed(jnp.concatenate([state.tokens[:, None], candidates], axis=1))
        output, cache = _verify(model, options, room, h, 0, cache)
    else:
        candidates, q, drafted, cache = _draft(model, state, options, speculation, room, cache)
        output, cache = _verify(model, options, room, drafted.hidden[-1], speculation.draft_loops, cache)
        output = jax.tree.map(lambda *parts: jnp.concatenate(parts), drafted, output)
    exits = chosen_exit(model.config, options.exit_threshold, options.exit_step)
    hidden, exit_loop = select_exit(output.hidden, output.gate_logits, **exits)
    tokens, accepted = speculation_accept.accept(
        model.logits(hidden), candidates, q, room.drafts, state.keys, state.generated, options.sampling
    )
    if speculation.by == "extra":
        state, cache = speculation_extra.catch_up(
            model, state, options, room, cache, output.hidden[-1], tokens, accepted
        )
    state, out = _commit(state, options, room, cache, tokens, accepted, exit_loop)
    return state, out, cache.references if isinstance(cache.references, ReferenceStore) else None


def speculate_chunk(
    graph: nnx.GraphDef,
    params: nnx.State,
    state: DecodeState,
    options: DecodeOptions,
    speculation: Speculation,
    rounds: int,
) -> tuple[DecodeState, RoundOutput]:
    """Run `rounds` rounds in one `lax.scan`; returns (state, RoundOutput with a leading axis of rounds).

    As `decode_chunk`: for `jax.jit` with static graph, options, speculation and rounds, and a donated state.
    """
    model = nnx.merge(graph, params)

    def one(state: DecodeState, _: None) -> tuple[DecodeState, RoundOutput]:
        return speculative_round(model, state, options, speculation)

    return jax.lax.scan(one, state, None, length=rounds)


def _reserve(
    model: LoopedModel,
    state: DecodeState,
    selector: Selector,
    drafts: int,
    store: ReferenceStore | None,
    lease: Lease | None,
) -> tuple[PagedState, Room]:
    """Room for one token of each request that runs, as in a plain step, and then for its drafts."""
    running = state.started & ~state.done
    most: Any = drafts
    if store is not None and lease is not None:
        alive = slot_pool.live(store.pool, lease.slots, lease.incarnations)
        rows = jnp.cumprod(alive.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        running, most = running & (rows > 0), jnp.maximum(rows - 1, 0)
    base = selector.next_positions(state.paged, state.selector)
    paged, kept, first = selector.reserve(state.paged, state.selector, running.astype(jnp.int32), 1)
    granted = running & (paged.table.status == paging.OK)
    status = paged.table.status

    ends = min(paged.table.pages.shape[1] * paged.kv.page_size, model.config.max_positions)
    left = jnp.minimum(state.limits - state.generated, ends - base) - 1
    wanted = jnp.where(granted, jnp.clip(left, 0, most), 0)
    paged, working, more = selector.reserve(paged, kept, wanted, drafts)
    # Who found room for its token is not out of pages.
    paged = dataclasses.replace(paged, table=dataclasses.replace(paged.table, status=status))
    both = Reservation(
        slots=jnp.concatenate([first.slots, more.slots], axis=1),
        incarnations=jnp.concatenate([first.incarnations, more.incarnations], axis=1),
        copied_from=first.copied_from,
        copied_to=first.copied_to,
    )
    got = jnp.sum(more.slots >= 0, axis=1, dtype=jnp.int32)
    return paged, Room(granted, base, got, both, lease, kept, working)


def _cache(
    model: LoopedModel, options: DecodeOptions, paged: PagedState, room: Room, store: ReferenceStore | None
) -> Cache:
    """Before the first plane: references of every row, and room for what `speculation_rollback` tells again."""
    rows, references, keys, queries = room.real, store, None, None
    if options.reference is not None and store is None:
        tokens = paged.table.pages.shape[1] * paged.kv.page_size
        references = empty_references(options.reference, model.config, rows.size, tokens)
    if jax.tree.leaves(room.kept):
        planes, _, kv_heads, _, width = key_shape(paged.kv)
        keys = jnp.zeros((planes, *rows.shape, kv_heads, width), model.dtype)
        if options.selector.accumulates:
            queries = jnp.zeros((planes, *rows.shape, model.config.num_heads, width), model.dtype)
    return Cache.of(paged, room.working, references, keys, queries)


def _places(real: jax.Array) -> jax.Array:
    """Where the reference of each row lies in a layer, -1 for padding; bool[B, K + 1] -> i32[B, K + 1]."""
    return jnp.where(real, jnp.arange(real.size, dtype=jnp.int32).reshape(real.shape), -1)


def _draft(
    model: LoopedModel, state: DecodeState, options: DecodeOptions, speculation: Speculation, room: Room, cache: Cache
) -> tuple[jax.Array, jax.Array | None, LoopOutput, Cache]:
    """Candidates i32[B, K], their probabilities f32[B, K, V] unless greedy, the drafts' LoopOutput, the cache."""
    slots, incarnations = room.reservation.slots, room.reservation.incarnations
    nothing = jnp.full_like(room.base, -1)

    def row(carry: tuple[jax.Array, Cache], x: tuple[jax.Array, ...]) -> Any:
        (token, cache), (i, real, place, slot, incarnation, lease) = carry, x
        step = Step(
            model=model,
            selector=options.selector,
            room=Reservation(slot[:, None], incarnation[:, None], nothing, nothing),
            takes_part=real,
            lengths=room.base + i + 1,
            implementation=options.implementation,
            attend=options.attend,
            reference=options.reference,
            places=place[:, None],
            column=i,
            lease=jax.tree.map(lambda one: one[:, None], lease),
        )
        positions = jnp.where(real, room.base + i, -1)[:, None]
        output, cache = step.run(model.embed(token[:, None]), positions, cache, 0, speculation.draft_loops)
        logits = model.logits(output.hidden[-1, :, 0])
        token, q = speculation_accept.propose(logits, state.keys, state.generated + i, options.sampling)
        return (token, cache), (token, q, output)

    columns = jnp.arange(slots.shape[1], dtype=jnp.int32)
    by_row = room.real, _places(room.real), slots, incarnations, room.of_real_rows()
    xs = columns, *jax.tree.map(jnp.transpose, by_row)
    (_, cache), (tokens, q, output) = jax.lax.scan(row, (state.tokens, cache), xs)
    hidden = jnp.moveaxis(output.hidden[:, :, :, 0], 0, 2)  # [d, B, K + 1, H]
    output = LoopOutput(hidden, jnp.moveaxis(output.gate_logits[..., 0], 0, 2))
    return tokens[:-1].T, None if q is None else jnp.moveaxis(q[:-1], 0, 1), output, cache


def _verify(
    model: LoopedModel,
    options: DecodeOptions,
    room: Room,
    h: jax.Array,
    first: int,
    cache: Cache,
) -> tuple[LoopOutput, Cache]:
    """The LoopOutput of the loops from `first` on, of K + 1 rows [U - first, B, K + 1, ...]; h [B, K + 1, H]."""
    rows = jnp.arange(room.real.shape[1], dtype=jnp.int32)
    positions = jnp.where(room.real, room.base[:, None] + rows, -1)
    step = Step(
        model=model,
        selector=options.selector,
        room=room.reservation,
        takes_part=room.granted,
        lengths=room.base + rows.size,
        implementation=options.implementation,
        attend=options.attend,
        reference=options.reference,
        places=_places(room.real),
        lease=room.of_real_rows(),
        seen=positions + 1,
    )
    return step.run(h, positions, cache, first)


def _commit(
    state: DecodeState,
    options: DecodeOptions,
    room: Room,
    cache: Cache,
    tokens: jax.Array,
    accepted: jax.Array,
    exit_loop: jax.Array,
) -> tuple[DecodeState, RoundOutput]:
    """Keeps tokens 0 .. accepted of each request, up to a stop token, and takes the others back."""
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    ends = stops(tokens, options) & (rows <= accepted[:, None])
    stopped = ends.any(axis=1)
    accepted = jnp.where(stopped, jnp.argmax(ends, axis=1).astype(jnp.int32), accepted)
    stays = room.granted[:, None] & (rows <= accepted[:, None])
    committed = jnp.where(room.granted, accepted + 1, 0)

    lengths = jnp.where(stays, room.base[:, None] + rows + 1, 0)
    selector = speculation_rollback.told_again(options, room.kept, cache, room.reservation, lengths)
    paged, stale = paging.truncate(cache.paged, room.base + committed)
    last = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
    generated = state.generated + committed
    state = dataclasses.replace(
        state,
        paged=paged,
        selector=selector,
        tokens=jnp.where(room.granted, last, state.tokens),
        generated=generated,
        done=state.done | (room.granted & (stopped | (generated >= state.limits))),
    )
    return state, RoundOutput(
        tokens=jnp.where(stays & ~ends, tokens, -1),
        drafted=jnp.where(room.granted, room.drafts, 0),
        accepted=jnp.where(room.granted, accepted, -1),
        lengths=jnp.where(room.granted, room.base + committed, 0),
        tokens_read=jnp.where(room.granted, cache.reads, 0),
        exit_loop=jnp.where(stays, exit_loop, -1),
        stale=cache.stale + stale,
        retained=None if cache.references is None else _retained(cache.references, room.lease, stays),
    )


def _retained(references: Reference | ReferenceStore, lease: Lease | None, stays: jax.Array) -> jax.Array:
    """Mass of the references of rows that stay: f32[2, B], the mean and the least; 1 for a request without."""
    if isinstance(references, ReferenceStore):
        assert lease is not None
        mass = jnp.moveaxis(references.references.mass[jnp.maximum(lease.slots, 0)], 2, 0)  # [L, B, K + 1, Hq]
    else:
        mass = references.mass.reshape(-1, *stays.shape, references.mass.shape[-1])
    stays = stays[:, :, None]
    count = jnp.maximum(stays.sum(axis=(1, 2)), 1) * (mass.shape[0] * mass.shape[3])
    mean = jnp.where(stays, mass, 0.0).sum(axis=(0, 2, 3)) / count
    least = jnp.where(stays, mass, 1.0).min(axis=(0, 2, 3))
    return jnp.stack([jnp.where(stays.any(axis=(1, 2)), mean, 1.0), least])
