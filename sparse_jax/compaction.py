"""KV compaction: each KV head keeps tokens of its own, packed into few pages, at their true positions.

    state = compaction.track(paging.create(...))
    state, room = compaction.reserve_prompt(state, prompt_lengths, kept, width)     # of a prompt, only `kept` tokens
    state, stale = compaction.write_prompt(state, plane, room, token_ids, k, v)     # once for each plane
    state, stale = compaction.compact(state, token_ids)                             # or: of what is in pages already
    state, reservation = compaction.reserve(state, counts, width=1)                 # then decode, as with `paging`
    state, stale = compaction.write(state, plane, reservation, k, v)
    table = paging.view(state.paged, plane)
    paged_attention(q, *paging.flat(state.paged.kv), table.page_table, table.lengths,
                    q_positions=compaction.query_positions(state), key_positions=state.key_positions)

Which tokens a head keeps is the caller's choice (the prompt's own attention stays dense, and may tell). How many is the
same for all heads of a request: where a head keeps fewer, its last places hold nobody's key, position -1. Everything
that changes the state goes through the functions here, so that positions stay true; `paging.view`, `gather`, `flat` and
`check` read `state.paged`. States are `lax.scan` carries and can be donated, as in `sparse_jax.paging`.

Source: SnapKV, arXiv 2404.14469, keeps tokens per head after the prompt; TensorRT-LLM writes them compacted.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sparse_jax import paged_kv, paging, slot_pool, xla
from sparse_jax.ops import to_slots
from sparse_jax.page_allocation import slots_of
from sparse_jax.paging import PagedState, PageTable, Reservation
from sparse_jax.slot_pool import SlotPool
from sparse_jax.validation import as_ids, check_shape, debug_ids, require


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompactedState:
    """A paged cache and the true positions of what is in it."""

    paged: PagedState  # its lengths count the places in the cache, kept and later tokens
    key_positions: jax.Array  # i32[planes * N, Hkv, P], addressed like the flattened pool; -1 is nobody's key
    left_out: jax.Array  # i32[B] tokens of each request that are not in the cache

    @property
    def full_lengths(self) -> jax.Array:
        """Tokens of each request, those left out included, i32[B]: the position of its next token.

        Lengths of the table that are set back (rejected drafts) set it back, too.
        """
        table, page_size = self.paged.table, self.paged.kv.page_size
        return jnp.clip(table.lengths, 0, table.pages.shape[1] * page_size) + self.left_out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptReservation:
    """Where the kept tokens of a prompt go. Good until the pages change hands or the requests grow."""

    reservation: Reservation
    start: jax.Array  # i32[B] position of the first prompt token
    lengths: jax.Array  # i32[B] prompt tokens, kept or not


def track(paged: PagedState) -> CompactedState:
    """A state in which nothing is left out yet: every key's position is its place in the table of its request.

    Raises ValueError for quantised latents, which cannot be moved one by one.
    """
    kv, table = paged.kv, paged.table
    require(kv.quantised is None, f"compaction moves keys and values, not the bytes of {kv.quantised}")
    alive = slot_pool.live(paged.pool, table.pages, table.incarnations)
    place = jnp.arange(table.pages.shape[1] * kv.page_size, dtype=jnp.int32).reshape(-1, 1, kv.page_size)
    positions = jnp.full((kv.planes, kv.pages, kv.kv_heads, kv.page_size), -1, jnp.int32)
    positions = positions.at[:, jnp.where(alive, table.pages, kv.pages)].set(place, mode="drop")
    return CompactedState(paged, positions.reshape(-1, *positions.shape[2:]), jnp.zeros_like(table.lengths))


def query_positions(state: CompactedState, rows: int = 1) -> jax.Array:
    """Positions i32[B, rows] of the last `rows` tokens of each request, for `q_positions`; -1 where it has fewer."""
    row = jnp.arange(rows, dtype=jnp.int32)
    return jnp.maximum(state.full_lengths[:, None] - rows + row, -1)


def reserve_prompt(
    state: CompactedState, prompt_lengths: jax.Array, kept: jax.Array, width: int
) -> tuple[CompactedState, PromptReservation]:
    """Room for kept[b] <= width of the next prompt_lengths[b] tokens of each request b; all or nothing for each.

    prompt_lengths, kept i32[B]. The request's length grows by `kept`, its next token comes prompt_lengths later. A
    request that finds no room keeps everything and gets its status, one with a count of 0 takes no part, as in
    `paging.reserve`. In the reservation -1 is "nothing here".

    Raises ValueError for arguments of another shape, and where `paging.reserve` does.
    """
    prompt_lengths = as_ids("prompt_lengths", prompt_lengths)
    check_shape("prompt_lengths", prompt_lengths, state.left_out.shape)
    kept = as_ids("kept", kept)
    paged, reservation = paging.reserve(state.paged, kept, width)
    start = state.full_lengths
    granted = reservation.slots[:, 0] >= 0
    left_out = state.left_out + jnp.where(granted, prompt_lengths - kept, 0)
    key_positions = follow_copies(state.key_positions, paged, reservation)
    return CompactedState(paged, key_positions, left_out), PromptReservation(reservation, start, prompt_lengths)


def write_prompt(
    state: CompactedState, plane: jax.Array, room: PromptReservation, token_ids: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[CompactedState, jax.Array]:
    """Write the kept tokens of one plane: place j of a KV head gets key and value of its j-th token id.

    token_ids i32[B, Hkv, width]: numbers of prompt tokens from 0, ascending; -1, and any id at or beyond the prompt's
    length, is absent. The ids that are present move to the front, in their order; those beyond the reserved room are
    not written; where a head has fewer, its last places stay nobody's. k [B, S, Hkv, D], v [B, S, Hkv, Dv]: all of the
    prompt. Returns (state, stale i32[]) as `paging.write`.

    Raises ValueError for arguments of another shape, and where `paging.write` does.
    """
    reservation, kv = room.reservation, state.paged.kv
    requests, width = reservation.slots.shape
    token_ids = as_ids("token_ids", token_ids)
    check_shape("token_ids", token_ids, (requests, kv.kv_heads, width))
    check_shape("k", k, (requests, None, kv.kv_heads, kv.k.shape[-1]))
    check_shape("v", v, (requests, k.shape[1], kv.kv_heads, kv.v.shape[-1]))
    end = jnp.minimum(room.lengths, k.shape[1])[:, None, None]
    debug_ids("token_ids", token_ids, end)
    ids = jnp.swapaxes(xla.compact(jnp.where(token_ids < end, token_ids, -1))[0], 1, 2)  # [B, width, Hkv]
    present = ids >= 0

    def chosen(x: jax.Array) -> jax.Array:
        rows = jnp.take_along_axis(x, jnp.where(present, ids, 0)[..., None], axis=1)
        return jnp.where(present[..., None], rows, jnp.zeros((), x.dtype))

    slots = paging.flat_slots(state.paged, plane, reservation)
    positions = jnp.where(present, room.start[:, None, None] + ids, -1)
    paged, stale = paging.write(state.paged, plane, reservation, chosen(k), chosen(v))
    key_positions = put(state.key_positions, slots, positions)
    return dataclasses.replace(state, paged=paged, key_positions=key_positions), stale


def reserve(state: CompactedState, counts: jax.Array, width: int) -> tuple[CompactedState, Reservation]:
    """`paging.reserve`; the new tokens of a request get the positions from its full length on, in all planes."""
    paged, reservation = paging.reserve(state.paged, counts, width)
    start, kv = state.full_lengths, state.paged.kv
    key_positions = follow_copies(state.key_positions, paged, reservation)
    positions = (start[:, None] + jnp.arange(width, dtype=jnp.int32))[..., None]
    slots = in_all_planes(kv, reservation.slots)
    positions = jnp.broadcast_to(positions, (*slots.shape, kv.kv_heads))
    return CompactedState(paged, put(key_positions, slots, positions), state.left_out), reservation


def write(
    state: CompactedState, plane: jax.Array, reservation: Reservation, k: jax.Array, v: jax.Array
) -> tuple[CompactedState, jax.Array]:
    """`paging.write` of new tokens, into the slots that `reserve` gave."""
    paged, stale = paging.write(state.paged, plane, reservation, k, v)
    return dataclasses.replace(state, paged=paged), stale


def compact(state: CompactedState, token_ids: jax.Array) -> tuple[CompactedState, jax.Array]:
    """Keep only chosen tokens of what is in pages: they move to new pages, and the old ones are let go.

    token_ids i32[B, Hkv, C] (alike in all planes) or i32[planes, B, Hkv, C]: places in the cache from 0, ascending,
    which are positions as long as nothing was left out. -1 is absent, and so is an id at or beyond the length, on a
    page that is not live, or of a place that is nobody's. The ids that are present move to the front, in their order,
    and the new length is their largest number in any head and plane. A request without any is left as it is.

    Requests are served one after the other, and each lets go of its pages before it takes new ones. One that finds too
    few (its pages have other holders, who keep them unchanged) keeps everything and gets the status OUT_OF_PAGES, or
    TABLE_FULL for more tokens than a table holds; success sets OK. Reservations made before are stale afterwards. What
    else is kept for a page (minima, scores) starts anew: write it for the new pages.

    Returns (state, stale i32[]): table entries of these requests that were ignored because they are not live. Raises
    ValueError for ids of another shape, or a state that was donated.
    """
    paged, kv, table = state.paged, state.paged.kv, state.paged.table
    requests, table_width = table.pages.shape
    token_ids = as_ids("token_ids", token_ids)
    shape = (requests, kv.kv_heads, None)
    check_shape("token_ids", token_ids, shape, (kv.planes, *shape))
    require(token_ids.shape[-1] >= 1, f"token_ids must have at least one column, got {list(token_ids.shape)}")
    slots, positions = _present(state, jnp.broadcast_to(token_ids, (kv.planes, *token_ids.shape[-3:])))
    kept = jnp.max(jnp.sum(slots >= 0, axis=-1, dtype=jnp.int32), axis=(0, 2))  # i32[B]

    fits, page_size, width = kept <= table_width * kv.page_size, kv.page_size, token_ids.shape[-1]
    wanted = jnp.where(fits, (kept + page_size - 1) // page_size, 0)
    pool, pages, incarnations, stale = _trade(paged.pool, table, wanted, most=-(-width // page_size))
    done = pages[:, 0] >= 0
    places, _ = slots_of(pages, incarnations, jnp.zeros_like(kept), jnp.where(done, kept, 0), width, page_size)
    status = jnp.select([kept == 0, done, ~fits], [table.status, paging.OK, paging.TABLE_FULL], paging.OUT_OF_PAGES)
    table = PageTable(
        pages=jnp.where(done[:, None], _columns(pages, table_width), table.pages),
        incarnations=jnp.where(done[:, None], _columns(incarnations, table_width), table.incarnations),
        lengths=jnp.where(done, kept, table.lengths),
        status=status.astype(jnp.int32),
    )
    left_out = jnp.where(done, state.full_lengths - kept, state.left_out)
    key_positions = put(state.key_positions, in_all_planes(kv, places), jnp.swapaxes(positions, 2, 3))
    paged = PagedState(pool, table, _move(kv, slots, places))
    return CompactedState(paged, key_positions, left_out), stale


def share(
    state: CompactedState, source: jax.Array, target: jax.Array, tokens: jax.Array
) -> tuple[CompactedState, jax.Array]:
    """`paging.share`: `tokens` counts places in the cache. The target's next token follows the last one it shares.

    A cut among tokens that compaction kept has no such meaning: share all of them, or share before compacting.
    """
    paged, stale = paging.share(state.paged, source, target, tokens)
    source, target = as_ids("source", source), as_ids("target", target)
    requests = state.left_out.shape[0]
    shared = (jnp.arange(requests) == target) & (state.paged.table.lengths <= 0) & (paged.table.lengths > 0)
    left_out = jnp.where(shared, state.left_out[jnp.clip(source, 0, requests - 1)], state.left_out)
    return dataclasses.replace(state, paged=paged, left_out=left_out), stale


def release(state: CompactedState, requests: jax.Array) -> tuple[CompactedState, jax.Array]:
    """`paging.release`: empties the requests marked in `requests` bool[B]."""
    paged, stale = paging.release(state.paged, requests)
    left_out = jnp.where(jnp.array(requests), 0, state.left_out)
    return dataclasses.replace(state, paged=paged, left_out=left_out), stale


def _present(state: CompactedState, token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slots of the flattened pool and positions of the ids that are present, in front; both i32[planes, B, Hkv, C]."""
    paged, (planes, requests, heads, chosen) = state.paged, token_ids.shape
    page_size = paged.kv.page_size
    tables = jax.vmap(lambda plane: paging.view(paged, plane).page_table)(jnp.arange(planes, dtype=jnp.int32))
    slots = to_slots(
        token_ids.reshape(-1, heads, chosen),
        tables.reshape(planes * requests, -1),
        jnp.arange(planes * requests, dtype=jnp.int32),
        page_size=page_size,
        lengths=jnp.tile(paged.table.lengths, planes),
    )
    slots = jnp.where(_positions_of(state.key_positions, slots) >= 0, slots, -1)
    slots, _ = xla.compact(slots)
    return tuple(x.reshape(token_ids.shape) for x in (slots, _positions_of(state.key_positions, slots)))  # type: ignore[return-value]


def _positions_of(key_positions: jax.Array, slots: jax.Array) -> jax.Array:
    """Positions at slots i32[..., Hkv, C], -1 where absent."""
    heads, page_size = key_positions.shape[1:]
    at = jnp.where(slots >= 0, slots, 0)
    return jnp.where(slots >= 0, key_positions[at // page_size, jnp.arange(heads)[:, None], at % page_size], -1)


def _trade(
    pool: SlotPool, table: PageTable, wanted: jax.Array, *, most: int
) -> tuple[SlotPool, jax.Array, jax.Array, jax.Array]:
    """One request after the other lets go of its pages and takes wanted[b] <= most new ones, or keeps what it has.

    Returns (pool, pages i32[B, most], incarnations i32[B, most], stale i32[]), -1 where nothing was taken.
    """

    def one(pool, request):
        pages, incarnations, wanted = request
        left, stale = slot_pool.release(pool, jnp.where(wanted > 0, pages, -1), incarnations)
        taken, *new = slot_pool.take(left, jnp.arange(most, dtype=jnp.int32) < wanted)
        done = (wanted > 0) & (jnp.sum(new[0] >= 0, dtype=jnp.int32) == wanted)
        pool = jax.tree.map(lambda new, old: jnp.where(done, new, old), taken, pool)
        return pool, (*(jnp.where(done, x, -1) for x in new), stale)

    pool, (pages, incarnations, stale) = lax.scan(one, pool, (table.pages, table.incarnations, wanted))
    return pool, pages, incarnations, jnp.sum(stale, dtype=jnp.int32)


def _move(kv: paged_kv.PagedKV, slots: jax.Array, places: jax.Array) -> paged_kv.PagedKV:
    """Keys and values at slots i32[planes, B, Hkv, C] of the flattened pool, to places i32[B, C] of each plane."""
    at = jnp.swapaxes(slots, 2, 3)  # [planes, B, C, Hkv]
    present, at = at >= 0, jnp.where(at >= 0, at, 0)

    def gather(pool: jax.Array) -> jax.Array:
        rows = pool[at // kv.page_size, jnp.arange(kv.kv_heads), at % kv.page_size]
        rows = jnp.where(present[..., None], rows, jnp.zeros((), pool.dtype))
        return rows.reshape(kv.planes, places.size, kv.kv_heads, -1)

    k, v = map(gather, paged_kv.flat(kv))
    return paged_kv.put(kv, jnp.int32(0), places.reshape(-1), k, v)


def follow_copies(side_data: jax.Array, paged: PagedState, reservation: Reservation) -> jax.Array:
    """Side data [planes * N, ...] of pages moves with those that `paging.reserve` copied."""
    sources, targets = paging.flat_copies(paged, reservation)
    rows = side_data[jnp.maximum(sources, 0)]
    return side_data.at[jnp.where(targets >= 0, targets, side_data.shape[0])].set(rows, mode="drop")


def put(side_data: jax.Array, slots: jax.Array, new: jax.Array) -> jax.Array:
    """Writes side data [planes * N, Hkv, P] of tokens: new [..., Hkv] at slots of the flattened pool; -1 is skipped.

    slots: i32[...], or i32[..., Hkv] where each KV head has a slot of its own; they differ from each other (in a head).
    """
    pages, heads, page_size = side_data.shape
    # "drop" mode drops what is past the end but lets -1 wrap; there each absent one gets a page of its own.
    slots = slots.reshape(-1, heads if slots.ndim == new.ndim else 1)
    beyond = pages + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)
    page = jnp.where(slots >= 0, slots // page_size, beyond)
    at = (page, jnp.arange(heads, dtype=jnp.int32), jnp.maximum(slots, 0) % page_size)
    return side_data.at[at].set(new.reshape(-1, heads), mode="drop", unique_indices=True)


def in_all_planes(kv: paged_kv.PagedKV, slots: jax.Array) -> jax.Array:
    """Slots i32[planes, ...] of the flattened pool for slots i32[...] of each plane; -1 stays."""
    first = jnp.arange(kv.planes, dtype=jnp.int32) * (kv.pages * kv.page_size)
    return jnp.where(slots >= 0, first.reshape(-1, *[1] * slots.ndim) + slots, -1)


def _columns(x: jax.Array, width: int) -> jax.Array:
    """The first `width` columns of x i32[B, K]; -1 where there are fewer."""
    return jnp.pad(x, ((0, 0), (0, max(0, width - x.shape[1]))), constant_values=-1)[:, :width]
