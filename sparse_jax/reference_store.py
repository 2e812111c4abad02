"""Slots for references: who owns which, and what a capture left in them; functional, inside `jax.jit`.

    store = reference_store.create(slots=2 * requests * (drafts + 1), layers=24, heads=16, ...)
    store, lease, shortfall = reference_store.reserve(store, rows)                # a slot for each row, or none at all
    plan, stale = reference_store.plan(store, lease, reference_store.CAPTURE)     # once a loop: what each row does
    output, store, stale = reference_store.capture(store, plan, layer, q, ...)    # loop 1, once a layer
    out, stale, uncaptured = reference_store.consume(store, plan, layer, q, ...)  # later loops, once a layer
    store, stale = reference_store.accept(store, lease, accepted)                 # rejected rows are unreadable
    store, stale = reference_store.release(store, lease)

A row is a token of a request, in a batch [B] or [B, T], as for attention. Slots belong to a `SlotPool`, as pages do: a
lease or plan carries (slot, incarnation) pairs, and every function here asks `slot_pool.live` about them. A stale pair
is absent for reads and ignored by all else, and it is counted in the result. A plan says nothing about requests, so
rounds of one request may overlap: they hold different slots.

A store is a `lax.scan` carry. Its buffers may be donated: keep the returned store then, the old one is gone. Where one
traced step runs all loops of a row, a `Reference` is a temporary of that step and needs no store.

Source: reference correction for looped models, its public review.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import Config
from pallas_kernels.config import INT32_MAX
from sparse_jax import slot_pool
from sparse_jax.attention_call import AttentionOutput, Call
from sparse_jax.ops import retained_count
from sparse_jax.reference import Reference, check_reference, consume_rows, reference_capture
from sparse_jax.slot_pool import SlotPool
from sparse_jax.tuning import Tuning
from sparse_jax.validation import as_array, as_ids, as_int, check_shape, debug_check, debug_ids, require, require_kept

ABSENT = -1  # takes no part
DENSE = 0  # ordinary attention: the first loop, and rows of a prompt. Has no slot.
CAPTURE = 1  # dense attention that publishes its reference
CONSUME = 2  # corrected from the reference

_POOL_BYTES = 12  # of a slot in a SlotPool: its place on the stack, incarnation and holders


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReferenceStore:
    """Slots, and one reference for each slot and layer: the leading axes of `references` are [slots, layers].

    A count of 0 there: nothing to read, whatever stands in the other buffers. The same holds behind the count.
    """

    pool: SlotPool
    references: Reference

    slots = property(lambda self: self.references.count.shape[0])
    layers = property(lambda self: self.references.count.shape[1])
    capacity = property(lambda self: self.references.indices.shape[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lease:
    """The slot of each row. A part of a lease (indexed, or with rows set to -1) is a lease, too."""

    slots: jax.Array  # i32[...], -1 none
    incarnations: jax.Array  # i32[...] that each slot was leased at, -1 none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What each row does in one loop. Good until its slots change hands; after that they are stale."""

    modes: jax.Array  # i32[...] DENSE, CAPTURE, CONSUME or ABSENT
    slots: jax.Array  # i32[...], -1 for rows that neither capture nor consume
    incarnations: jax.Array  # i32[...], -1 for the same rows


def create(
    *,
    slots: int,
    layers: int,
    heads: int,
    value_width: int,
    max_length: int,
    retention: float,
    capacity: int | None = None,
    initial_capacity: int | None = None,
    memory_limit: int | None = None,
) -> ReferenceStore:
    """A store of free slots, for `layers` layers with `heads` query heads and values of `value_width`.

    A round holds a slot for each row: requests * (drafts + 1), and twice that where two rounds overlap.
    max_length, retention: of the longest context; `retained_count` of them is what a reference must have room for.
    capacity: that room, by default exactly this count. It is a buffer size and changes no result; less is refused.
    initial_capacity: room to begin with, to be made larger by `grow` in the steps of `capacities`.
    memory_limit: bytes that the store may take, counted before anything is allocated, old and new buffers of the
    largest step of growth included.

    Raises ValueError with the sizes for a setting that cannot work.
    """
    most = retained_count(as_int("max_length", max_length), retention)
    capacity = most if capacity is None else as_int("capacity", capacity)
    require(
        capacity >= most,
        f"capacity must be at least {most} (max_length {max_length}, retention {retention}), got {capacity}: "
        "a reference is never cut; begin smaller with initial_capacity",
    )
    sizes = capacities(capacity, initial_capacity)
    shape = {"layers": layers, "heads": heads, "value_width": value_width}
    peak = peak_bytes(slots=slots, **shape, capacities=sizes)
    require(
        slots * layers <= INT32_MAX, f"slots * layers must fit in 32 bits, got {slots} * {layers} = {slots * layers}"
    )
    if memory_limit is not None and peak > memory_limit:
        full = slots * bytes_per_slot(**shape, capacity=capacity)
        raise ValueError(
            f"memory_limit of {memory_limit} bytes is too small: {slots} slots ({shape}) take {full} bytes at capacity "
            f"{capacity}, and {peak} at the peak of growth through the capacities {sizes}"
        )
    vectors = (slots, layers, heads, value_width)
    return ReferenceStore(
        pool=slot_pool.create_slots(slots),
        references=Reference(
            indices=jnp.full((slots, layers, heads, sizes[0]), -1, jnp.int32),
            count=jnp.zeros((slots, layers), jnp.int32),
            mass=jnp.zeros((slots, layers, heads), jnp.float32),
            output=jnp.zeros(vectors, jnp.float32),
            contribution=jnp.zeros(vectors, jnp.float32),
        ),
    )


def bytes_per_slot(*, layers: int, heads: int, value_width: int, capacity: int) -> int:
    """Bytes of a slot: layers * heads * (4 * capacity + 8 * value_width + 4), the counts, and its entry in the pool.

    Raises ValueError for sizes below 1.
    """
    sizes = {"layers": layers, "heads": heads, "value_width": value_width, "capacity": capacity}
    layers, heads, value_width, capacity = (_positive(name, size) for name, size in sizes.items())
    return layers * heads * (4 * capacity + 8 * value_width + 4) + 4 * layers + _POOL_BYTES


def peak_bytes(*, slots: int, layers: int, heads: int, value_width: int, capacities: tuple[int, ...]) -> int:
    """The most bytes that a store takes while it grows through `capacities`: old and new indices are there at once.

    Raises ValueError for sizes below 1.
    """
    slots = _positive("slots", slots)
    old = (0, *capacities[:-1])
    of_slot = [bytes_per_slot(layers=layers, heads=heads, value_width=value_width, capacity=new) for new in capacities]
    return slots * max(size + 4 * layers * heads * before for size, before in zip(of_slot, old, strict=True))


def capacities(capacity: int, initial: int | None = None) -> tuple[int, ...]:
    """The capacities that a store grows through: `initial`, doubled again and again, and `capacity` as the last one.

    Each is a size of its own to compile for. Without `initial` there is one. Raises ValueError for sizes below 1, or an
    initial one above the last.
    """
    capacity = _positive("capacity", capacity)
    size = capacity if initial is None else _positive("initial_capacity", initial)
    require(size <= capacity, f"initial_capacity must be at most the capacity, got {size} and {capacity}")
    sizes = []
    while size < capacity:
        sizes.append(size)
        size *= 2
    return (*sizes, capacity)


def capacity_for(count: int, capacities: tuple[int, ...]) -> int:
    """The smallest of the capacities that has room for a count; for the host, before a step is started.

    Raises ValueError for a count above all of them: a reference is never cut.
    """
    count = as_int("count", count)
    fits = [size for size in capacities if size >= count]
    require(bool(fits), f"count must be at most the largest capacity of {capacities}, got {count}")
    return min(fits)


def grow(store: ReferenceStore, capacity: int) -> ReferenceStore:
    """The same store with room for `capacity` indices, a static size. Leases, plans and contents stay good.

    Old and new indices are in memory together. Raises ValueError for a capacity below that of the store.
    """
    require_kept("store", store)
    capacity = as_int("capacity", capacity)
    more = capacity - store.capacity
    require(more >= 0, f"capacity must be at least that of the store, {store.capacity}, got {capacity}")
    if more == 0:
        return store
    indices = jnp.pad(store.references.indices, ((0, 0), (0, 0), (0, 0), (0, more)), constant_values=-1)
    return dataclasses.replace(store, references=dataclasses.replace(store.references, indices=indices))


def reserve(store: ReferenceStore, rows: Any) -> tuple[ReferenceStore, Lease, jax.Array]:
    """A slot for each True of `rows` bool[...], for all of them or for none; nothing can be read from it yet.

    Returns (store, lease with the shape of rows, shortfall i32[]): how many free slots were missing, 0 for success. The
    lease is -1 for rows that wanted none, and everywhere if slots were missing; the store is unchanged then. Raises
    ValueError for rows of another type, before anything changes: the old store is as good as it was.
    """
    require_kept("store", store)
    rows = as_array("rows", rows)
    require(rows.dtype == jnp.bool_, f"rows must be bool, got {rows.dtype}{list(rows.shape)}")
    shortfall = jnp.maximum(jnp.sum(rows, dtype=jnp.int32) - store.pool.free_count, 0)
    pool, slots, incarnations = slot_pool.take(store.pool, rows.reshape(-1) & (shortfall == 0))
    count = store.references.count.at[_or_dropped(store, slots >= 0, slots)].set(0, mode="drop")
    lease = Lease(slots.reshape(rows.shape), incarnations.reshape(rows.shape))
    return ReferenceStore(pool, dataclasses.replace(store.references, count=count)), lease, shortfall


def plan(store: ReferenceStore, lease: Lease, modes: Any) -> tuple[Plan, jax.Array]:
    """What each row of a lease does in one loop: modes i32[...] of the lease's shape, or one for all rows.

    Rows that are DENSE get no slot, so a row of a prompt cannot have one. Rows that capture or consume and have no live
    slot become ABSENT, as do modes out of range. Returns (plan, stale i32[]): rows among them with a stale slot. Raises
    ValueError for arguments that do not fit each other.
    """
    slots, incarnations = _pairs(store, lease)
    modes = as_ids("modes", modes)
    check_shape("modes", modes, slots.shape, ())
    debug_ids("modes", modes, CONSUME + 1)
    modes = jnp.broadcast_to(modes, slots.shape)
    wanted = (modes == CAPTURE) | (modes == CONSUME)
    slots = jnp.where(wanted, slots, -1)
    alive = slot_pool.live(store.pool, slots, incarnations)
    made = Plan(
        modes=jnp.where(alive | (modes == DENSE), modes, ABSENT),
        slots=jnp.where(alive, slots, -1),
        incarnations=jnp.where(alive, incarnations, -1),
    )
    return made, slot_pool.count_stale(slots, alive)


def write(store: ReferenceStore, plan: Plan, layer: Any, reference: Reference) -> tuple[ReferenceStore, jax.Array]:
    """Put the references of the rows that capture into their slots, at one layer.

    layer: i32[], may be traced; out of range, -1 too, nothing is written. reference: of the plan's rows, with room for
    as many indices as the store has, or fewer. A count above that room publishes nothing (count 0); `checked` raises.
    Returns (store, stale i32[]): rows that capture and were ignored. The store is not copied when it is donated.

    Raises ValueError for a reference or a layer of another shape. Rows of a plan have different slots, as leased.
    """
    slots, layer, stale = _rows(store, plan, layer, CAPTURE)
    kept = store.references
    check_reference(reference, slots.shape, *kept.output.shape[2:])
    room = reference.indices.shape[-1]
    require(room <= store.capacity, f"reference.indices has room for {room}, the store only for {store.capacity}")
    debug_check(
        (slots < 0) | (reference.count <= room),
        "reference.count: must be at most the capacity of {room}, got {most}",
        room=jnp.int32(room),
        most=jnp.max(reference.count),
    )
    reference = dataclasses.replace(reference, count=jnp.where(reference.count > room, 0, reference.count))
    slots, new = slots.reshape(-1), reference.flat(slots.ndim)
    # "drop" mode drops what is past the end but lets -1 wrap, so absent rows go past the end, each to a slot of its
    # own: unique indices spare a GPU the atomics. Slot and layer are indexed apart: no flat offset can pass 2**31.
    slots = jnp.where(slots >= 0, slots, store.slots + jnp.arange(slots.size, dtype=jnp.int32))

    def put(buffer: jax.Array, rows: jax.Array) -> jax.Array:
        at = (slots, layer, *map(slice, rows.shape[1:]))  # of the indices, perhaps the first ones only
        return buffer.at[at].set(rows, mode="drop", unique_indices=True)

    return dataclasses.replace(store, references=jax.tree.map(put, kept, new)), stale


def capture(
    store: ReferenceStore,
    plan: Plan,
    layer: Any,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    counts: Any,
    *,
    scale: float | None = None,
    implementation: str | None = None,
    config: Config | Tuning | None = None,
) -> tuple[AttentionOutput, ReferenceStore, jax.Array]:
    """`reference_capture` of one layer into the slots of the rows that capture. Every row gets its dense attention.

    plan: of q's rows, [B] or [B, T]. layer: i32[], may be traced. The rest: as for `reference_capture`; counts of rows
    that do not capture are not read. Returns (AttentionOutput, store, stale i32[]) as `write`, and raises what it and
    `reference_capture` raise.
    """
    slots, _, _ = _rows(store, plan, layer, CAPTURE)
    counts = as_ids("counts", counts)
    check_shape("counts", counts, slots.shape)
    output, reference = reference_capture(
        q, k_pages, v_pages, page_table, lengths, jnp.where(slots >= 0, counts, 0), capacity=store.capacity,
        scale=scale, implementation=implementation, config=config,
    )  # fmt: skip
    store, stale = write(store, plan, layer, reference)
    return output, store, stale


def consume(
    store: ReferenceStore,
    plan: Plan,
    layer: Any,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    scale: float | None = None,
    implementation: str | None = None,
    config: Config | Tuning | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference_consume` of one layer, for the rows that consume, from their slots; other rows and stale ones give 0.

    plan: of q's rows, [B] or [B, T]. layer: i32[], may be traced; out of range there is nothing to read. The rest: as
    for `reference_consume`. Returns (out like q with Dv last, stale i32[], uncaptured i32[]): rows that consume and
    were ignored, and those whose slot is live but holds nothing at this layer (not captured, or retired); they give 0,
    too. Raises ValueError for arguments that do not fit each other.
    """
    call = Call.of(q, k_pages, v_pages, None, None, None, None)
    slots, layer, stale = _rows(store, plan, layer, CONSUME)
    references, leading = store.references, call.q.shape[: 1 if call.single else 2]
    check_shape("plan.modes", slots, leading)
    check_reference(references, (store.slots, store.layers), call.q.shape[2], call.v_pages.shape[-1])
    readable = slots >= 0
    empty = references.count[jnp.where(readable, slots, 0), layer] <= 0
    # The kernel finds each row's reference in the store by itself: indices are neither gathered nor copied.
    rows = jnp.where(readable, slots * store.layers + layer, -1).reshape(call.q.shape[:2])
    out = consume_rows(
        call, page_table, lengths, references.flat(2), rows, scale, implementation=implementation, config=config
    )
    return out[:, 0] if call.single else out, stale, jnp.sum(readable & empty, dtype=jnp.int32)


def accept(store: ReferenceStore, lease: Lease, accepted: Any) -> tuple[ReferenceStore, jax.Array]:
    """Retire the rejected rows of a round: row t of request b where t > accepted[b]. Nothing can be read from them.

    lease: [B, T]. accepted: i32[B], how many drafts were right; below 0 counts as 0, so row 0 always stays. The slots
    stay leased until they are released. Writes counts and masses only. Returns (store, stale i32[]): slots of the lease
    that were ignored. Raises ValueError for arguments that do not fit each other.
    """
    slots, incarnations = _pairs(store, lease)
    accepted = as_ids("accepted", accepted)
    check_shape("lease.slots", slots, (None, None))
    check_shape("accepted", accepted, slots.shape[:1])
    alive = slot_pool.live(store.pool, slots, incarnations)
    rejected = jnp.arange(slots.shape[1], dtype=jnp.int32) > jnp.maximum(accepted, 0)[:, None]
    at, kept = _or_dropped(store, alive & rejected, slots), store.references
    retired = dataclasses.replace(
        kept, count=kept.count.at[at].set(0, mode="drop"), mass=kept.mass.at[at].set(0.0, mode="drop")
    )
    return dataclasses.replace(store, references=retired), slot_pool.count_stale(slots, alive)


def release(store: ReferenceStore, lease: Lease) -> tuple[ReferenceStore, jax.Array]:
    """Give the slots of a lease back, after its last reader. Writes the pool only.

    Returns (store, stale i32[]): slots of the lease that were ignored.
    """
    require_kept("store", store)
    pool, stale = slot_pool.release(store.pool, lease.slots, lease.incarnations)
    return dataclasses.replace(store, pool=pool), stale


def _rows(store: ReferenceStore, plan: Plan, layer: Any, mode: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(slots i32[...] of the live rows of one mode, -1 for all others, layer i32[], stale i32[])."""
    layer, modes, (slots, incarnations) = as_ids("layer", layer), as_ids("plan.modes", plan.modes), _pairs(store, plan)
    check_shape("layer", layer, ())
    check_shape("plan.slots", slots, modes.shape)
    inside = (layer >= 0) & (layer < store.layers)
    slots = jnp.where(modes == mode, slots, -1)
    alive = slot_pool.live(store.pool, slots, incarnations) & inside
    return jnp.where(alive, slots, -1), jnp.where(inside, layer, 0), slot_pool.count_stale(slots, alive)


def _pairs(store: ReferenceStore, held: Lease | Plan) -> tuple[jax.Array, jax.Array]:
    require_kept("store", store)
    return as_ids("slots", held.slots), as_ids("incarnations", held.incarnations)


def _or_dropped(store: ReferenceStore, mask: jax.Array, slots: jax.Array) -> jax.Array:
    # "drop" mode drops what is past the end, but -1 would count from the end.
    return jnp.where(mask, slots, store.slots)


def _positive(name: str, size: Any) -> int:
    size = as_int(name, size)
    require(1 <= size <= INT32_MAX, f"{name} must be from 1 to {INT32_MAX}, got {size}")
    return size
