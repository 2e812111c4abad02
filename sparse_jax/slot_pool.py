"""Slots that are handed out, shared and taken back inside `jax.jit`: pages of a KV pool, and slots of references.

Ownership is a pair (slot id, incarnation). The incarnation of a slot grows each time the slot is handed out and is
never reset, so a pair kept after its slot was taken back can be told from the pair of the next owner. `live` is that
check, the only one in this library: every read, write, share and release asks it.

Two limits of such a pair. It names a lease, not a holder: each holder must let go once (page tables do, by clearing
their row). And an int32 incarnation comes back to an old value after 2**32 leases of one slot.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sparse_jax.validation import INT32_MAX, as_ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotPool:
    """N slots. A slot is free (no holder, on the stack once) or held (1 holder or more, not on the stack)."""

    free: jax.Array  # i32[N], a stack: the first free_count entries are the free slots, the last of them goes next
    free_count: jax.Array  # i32[]
    incarnation: jax.Array  # i32[N], how often the slot was handed out
    holders: jax.Array  # i32[N], 0 = free, more than 1 = shared


def create_slots(n: int) -> SlotPool:
    """A pool of `n` free slots, handed out from 0 upwards. ValueError when n is not in 1 .. 2**31 - 2."""
    if not 1 <= n < INT32_MAX:  # n itself must be an int32 too: it is the id that scatters drop
        raise ValueError(f"a pool has 1 .. {INT32_MAX - 1} slots, got {n}")
    return SlotPool(
        free=jnp.arange(n - 1, -1, -1, dtype=jnp.int32),
        free_count=jnp.full((), n, jnp.int32),
        incarnation=jnp.zeros(n, jnp.int32),
        holders=jnp.zeros(n, jnp.int32),
    )


def live(pool: SlotPool, ids: jax.Array, incarnations: jax.Array) -> jax.Array:
    """Which (id, incarnation) pairs still own their slot: incarnations agree and the slot has a holder.

    ids, incarnations i32[...] of one shape -> bool[...]. -1 and every id out of range are not live.
    """
    ids, incarnations = _pairs(ids, incarnations)
    inside = (ids >= 0) & (ids < pool.holders.shape[0])
    at = jnp.where(inside, ids, 0)
    return inside & (_read(pool.incarnation, at) == incarnations) & (_read(pool.holders, at) > 0)


def holders_of(pool: SlotPool, ids: jax.Array, incarnations: jax.Array) -> jax.Array:
    """Holders of each pair's slot, i32[...]; 0 where the pair is not live."""
    alive = live(pool, ids, incarnations)
    return jnp.where(alive, _read(pool.holders, jnp.where(alive, ids, 0)), 0)


def take(pool: SlotPool, want: jax.Array) -> tuple[SlotPool, jax.Array, jax.Array]:
    """Hand out one slot for each True of the M wishes `want` bool[M], in order, as long as there are free ones.

    Returns (pool, ids i32[M], incarnations i32[M]); both are -1 where none was wanted or none was left. Raises
    ValueError for `want` of another type or rank.
    """
    if want.ndim != 1 or want.dtype != jnp.bool_:
        raise ValueError(f"want is bool[M], got {want.dtype}{list(want.shape)}")
    rank = jnp.cumsum(want, dtype=jnp.int32)  # 1 for the first wanted one
    got = want & (rank <= pool.free_count)
    ids = jnp.where(got, _read(pool.free, jnp.where(got, pool.free_count - rank, 0)), -1)
    at = _or_dropped(pool, got, ids)
    incarnation = pool.incarnation.at[at].add(1, mode="drop")
    taken = SlotPool(
        free=pool.free,
        free_count=pool.free_count - jnp.sum(got, dtype=jnp.int32),
        incarnation=incarnation,
        holders=pool.holders.at[at].set(1, mode="drop"),
    )
    return taken, ids, jnp.where(got, _read(incarnation, jnp.where(got, ids, 0)), -1)


def hold(pool: SlotPool, ids: jax.Array, incarnations: jax.Array) -> tuple[SlotPool, jax.Array]:
    """One more holder for each live pair of ids, incarnations i32[...]; the same pair twice is two holders.

    Returns (pool, stale i32[]): the ids other than -1 that were ignored because they are not live.
    """
    ids, incarnations = _pairs(ids, incarnations)
    alive = live(pool, ids, incarnations)
    holders = pool.holders.at[_or_dropped(pool, alive, ids)].add(1, mode="drop")
    return dataclasses.replace(pool, holders=holders), count_stale(ids, alive)


def release(pool: SlotPool, ids: jax.Array, incarnations: jax.Array) -> tuple[SlotPool, jax.Array]:
    """One holder less for each live pair of ids, incarnations i32[...]; slots without a holder become free.

    The same pair several times counts that often, as if released one after the other: those beyond the holders are
    stale. Returns (pool, stale i32[]): the ids other than -1 that were ignored.
    """
    ids, incarnations = (x.reshape(-1) for x in _pairs(ids, incarnations))
    n, entries = pool.holders.shape[0], jnp.arange(ids.size, dtype=jnp.int32)
    alive = live(pool, ids, incarnations)
    at = _or_dropped(pool, alive, ids)
    left = pool.holders.at[at].add(-1, mode="drop")  # below 0 where a pair came too often

    # A slot goes back once, however many entries name it: its first entry speaks for all of them.
    first = jnp.full(n, ids.size, jnp.int32).at[at].min(entries, mode="drop")
    safe = jnp.where(alive, ids, 0)
    speaks, remaining = alive & (_read(first, safe) == entries), _read(left, safe)
    freed = speaks & (remaining <= 0)
    excess = jnp.sum(jnp.where(speaks, jnp.maximum(-remaining, 0), 0), dtype=jnp.int32)

    rank = jnp.cumsum(freed, dtype=jnp.int32)
    place = jnp.where(freed, pool.free_count + rank - 1, n)
    released = dataclasses.replace(
        pool,
        free=pool.free.at[place].set(ids, mode="drop"),
        free_count=pool.free_count + jnp.sum(freed, dtype=jnp.int32),
        holders=jnp.maximum(left, 0),
    )
    return released, count_stale(ids, alive) + excess


def count_stale(ids: jax.Array, alive: jax.Array) -> jax.Array:
    """How many ids i32[...] are present (not -1) but not live, i32[]."""
    return jnp.sum((ids != -1) & ~alive, dtype=jnp.int32)


def _pairs(ids, incarnations) -> tuple[jax.Array, jax.Array]:
    ids, incarnations = as_ids("ids", ids), as_ids("incarnations", incarnations)
    if ids.shape != incarnations.shape:
        raise ValueError(f"ids {list(ids.shape)} and incarnations {list(incarnations.shape)} must have one shape")
    return ids, incarnations


def _read(array: jax.Array, at: jax.Array) -> jax.Array:
    return array.at[at].get(mode="promise_in_bounds")


def _or_dropped(pool: SlotPool, mask: jax.Array, ids: jax.Array) -> jax.Array:
    # "drop" mode drops what is out of range, but -1 would count from the end: send it past the end instead.
    return jnp.where(mask, ids, pool.holders.shape[0])
