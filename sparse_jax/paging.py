"""Paged KV state: page tables, who owns which page, and the keys and values in them; functional, inside `jax.jit`.

    state = paging.create(planes=8, pages=256, page_size=16, kv_heads=2, key_width=64, requests=4, ...)
    state, reservation = paging.reserve(state, counts, width=1)           # room for new tokens; lengths grow here
    state, stale = paging.write(state, plane, reservation, k, v)          # once for each plane
    table = paging.view(state, plane)                                     # what the attention operations take
    paging.check(state)                                                   # on the host: raises OutOfPages

One page table serves all planes: page `p` of a plane is `plane * N + p` in the flattened pool (`flat`). Every entry
carries the incarnation its page was leased at; one that is no longer live is absent for reads and ignored by writes and
releases, and it is counted in the result.

A state is a `lax.scan` carry. Its buffers may be donated: keep the returned state then, the old one is gone. Outside
`jax.jit` NumPy arguments are copied; hand `jnp.array(x)` to a jitted step, which may read `x` after it returned.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_jax import paged_kv, slot_pool
from sparse_jax.page_allocation import grant, slots_of
from sparse_jax.paged_kv import PagedKV
from sparse_jax.paged_kv import flat as flat
from sparse_jax.slot_pool import SlotPool
from sparse_jax.validation import INT32_MAX, as_ids, require_kept

OK = 0
OUT_OF_PAGES = 1  # not enough free pages
TABLE_FULL = 2  # more tokens than pages_per_request pages hold
STALE = 3  # the partly filled last page is not this request's any more: there is no place to go on
BAD_COUNT = 4  # asked for less than 0 or more than `width` tokens


class OutOfPages(RuntimeError):
    """Some requests could not get the room they asked for. `requests` are their numbers."""

    def __init__(self, message: str, requests: tuple[int, ...]):
        super().__init__(message)
        self.requests = requests


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTable:
    """Pages of B requests, W at most for each, in the order of their tokens."""

    pages: jax.Array  # i32[B, W] page ids, -1 absent
    incarnations: jax.Array  # i32[B, W] that each page was leased at, -1 where absent
    lengths: jax.Array  # i32[B] tokens; may be set back: the pages stay and are used again (`truncate` lets go of them)
    status: jax.Array  # i32[B] OK or why the last reserve of this request failed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedState:
    """Page ownership, page tables, keys and values."""

    pool: SlotPool
    table: PageTable
    kv: PagedKV


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reservation:
    """Where the new tokens of a step go. Good until a page in it changes hands; after that writes ignore it."""

    slots: jax.Array  # i32[B, width] page * P + offset in one plane; -1 absent (fewer tokens, or the request failed)
    incarnations: jax.Array  # i32[B, width] of the pages of these slots, -1 absent
    copied_from: jax.Array  # i32[B] page that was copied before the write, -1 none
    copied_to: jax.Array  # i32[B] page that it was copied to, -1 none; side data of pages must be copied likewise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageView:
    """One plane as the attention operations read it: everything stale is already -1."""

    page_table: jax.Array  # i32[B, W] pages of the flattened pool, plane * N + page; -1 absent
    lengths: jax.Array  # i32[B]
    stale: jax.Array  # i32[] table entries that were hidden because they are not live
    plane: jax.Array | int = 0  # i32[] which one it is
    pages: int | None = dataclasses.field(default=None, metadata={"static": True})  # N; None: there are no other planes


def create(
    *,
    planes: int,
    pages: int,
    page_size: int,
    kv_heads: int,
    key_width: int,
    value_width: int | None = None,
    requests: int,
    pages_per_request: int,
    dtype=jnp.float32,
    latent_dim: int | None = None,
) -> PagedState:
    """An empty state: `pages` free pages of `page_size` tokens, and `requests` empty requests.

    Keys are [planes, pages, kv_heads, page_size, key_width] of `dtype` (a float type of 1, 2 or 4 bytes), values the
    same with value_width (default key_width). dtype may be a format of `LatentCache` by its name: then keys are latents
    of latent_dim columns and rotary ones, values the keys of an indexer (value_width 1: there are none), and `write`
    quantises both. Raises ValueError with the values seen.
    """
    value_width = key_width if value_width is None else value_width
    sizes = {"planes": planes, "pages": pages, "page_size": page_size, "kv_heads": kv_heads, "key_width": key_width}
    sizes |= {"value_width": value_width, "requests": requests, "pages_per_request": pages_per_request}
    if wrong := {name: size for name, size in sizes.items() if not isinstance(size, int | np.integer) or size < 1}:
        raise ValueError(f"sizes are integers from 1 up, got {wrong}")
    if page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {page_size}")
    if (slots := planes * pages * page_size) > INT32_MAX:
        raise ValueError(f"slots are int32: planes * pages * page_size = {slots} is above {INT32_MAX} ({sizes})")
    if (tokens := pages_per_request * page_size) > INT32_MAX:
        raise ValueError(f"token ids are int32: pages_per_request * page_size = {tokens} is above {INT32_MAX}")
    absent = (requests, pages_per_request)
    return PagedState(
        pool=slot_pool.create_slots(pages),
        table=PageTable(
            pages=jnp.full(absent, -1, jnp.int32),
            incarnations=jnp.full(absent, -1, jnp.int32),
            lengths=jnp.zeros(requests, jnp.int32),
            status=jnp.full(requests, OK, jnp.int32),
        ),
        kv=paged_kv.create((planes, pages, kv_heads, page_size), key_width, value_width, dtype, latent_dim),
    )


def reserve(state: PagedState, counts: jax.Array, width: int) -> tuple[PagedState, Reservation]:
    """Room for counts[b] <= width more tokens of each request b; all or nothing for each request.

    counts i32[B]. Requests are served as if they came one after the other: one that does not fit keeps its length,
    pages and KV and gets a status (OUT_OF_PAGES, TABLE_FULL, STALE, BAD_COUNT), and a later, smaller one may still fit.
    A count of 0 leaves the request and its status alone; any other success sets OK. A partly filled last page with
    several holders is copied in all planes before it can be written, except by the last of its holders. In the
    Reservation -1 is "nothing here": no slot, no page copied. Nothing is raised for want of room, see `check`. Where
    the width touches few pages (`page_allocation.MOST_COLUMNS`) a GPU never waits for the host here. Raises ValueError
    for counts that are no integers of shape [B], a width below 1, or a state that was donated.
    """
    require_kept("state", state)
    pool, table, kv = state.pool, state.table, state.kv
    requests, table_width = table.pages.shape
    counts = as_ids("counts", counts)
    if counts.shape != (requests,) or width < 1:
        raise ValueError(f"counts is i32[{requests}] and width at least 1, got {list(counts.shape)} and {width}")
    page_size, room = kv.page_size, table_width * kv.page_size
    length = jnp.clip(table.lengths, 0, room)
    offset = length % page_size
    wanted, fits = (counts > 0) & (counts <= width), counts <= room - length
    sized = jnp.where(wanted & fits, counts, 0)

    # The pages that up to `width` new tokens can touch: never more than these columns of the table.
    columns = (length // page_size)[:, None] + jnp.arange((width + page_size - 2) // page_size + 1, dtype=jnp.int32)
    touched = (sized > 0)[:, None] & (columns <= ((length + sized - 1) // page_size)[:, None])
    at = jnp.minimum(columns, table_width - 1)
    pages = jnp.where(touched, jnp.take_along_axis(table.pages, at, axis=1), -1)
    leased_at = jnp.where(touched, jnp.take_along_axis(table.incarnations, at, axis=1), -1)
    holders = slot_pool.holders_of(pool, pages, leased_at)
    orphan = (sized > 0) & (offset > 0) & (holders[:, 0] == 0)

    tail = jnp.where((offset > 0) & (holders[:, 0] > 0), pages[:, 0], -1)
    granted, fresh = grant((sized > 0) & ~orphan, touched, pages, holders, pool.free_count)
    pool, new_pages, new_incarnations = slot_pool.take(pool, fresh.reshape(-1))
    pool, _ = slot_pool.release(pool, jnp.where(fresh & (holders > 0), pages, -1), leased_at)
    copied = granted & fresh[:, 0] & (tail >= 0)
    pages = jnp.where(fresh, new_pages.reshape(fresh.shape), pages)
    leased_at = jnp.where(fresh, new_incarnations.reshape(fresh.shape), leased_at)
    copied_from, copied_to = jnp.where(copied, tail, -1), jnp.where(copied, pages[:, 0], -1)

    rows, into = jnp.arange(requests)[:, None], jnp.where(fresh, columns, table_width)
    conditions = [counts == 0, granted, ~wanted, ~fits, orphan]
    table = PageTable(
        pages=table.pages.at[rows, into].set(pages, mode="drop"),
        incarnations=table.incarnations.at[rows, into].set(leased_at, mode="drop"),
        lengths=jnp.where(granted, length + sized, table.lengths),
        status=jnp.select(conditions, [table.status, OK, BAD_COUNT, TABLE_FULL, STALE], OUT_OF_PAGES).astype(jnp.int32),
    )
    places = slots_of(pages, leased_at, offset, jnp.where(granted, sized, 0), width, page_size)
    reservation = Reservation(*places, copied_from, copied_to)
    return PagedState(pool, table, paged_kv.copy_pages(kv, copied_from, copied_to)), reservation


def write(
    state: PagedState, plane: jax.Array, reservation: Reservation, k: jax.Array, v: jax.Array
) -> tuple[PagedState, jax.Array]:
    """Write the new tokens of one plane: k [B, width, Hkv, D], v [B, width, Hkv, Dv] into the reserved slots.

    plane is i32[] and may be traced. Only live pages with a single holder are written, so a shared page never changes;
    reserve, write every plane, then share. Values are cast to the type of the pool; eight-bit floats saturate. Slots of
    -1 are skipped; a plane out of range is absent: nothing is written. Returns (state, stale i32[]): the reserved slots
    that were ignored. The pool is not copied when it is donated. Raises ValueError for k or v of another shape, slots
    or a plane that are no integers, or a state that was donated.
    """
    _check_new(state.kv, reservation.slots.shape, k, v)
    plane, slots, stale = _writable(state, plane, reservation)
    return _put(state, plane, slots, k[None], v[None]), stale


def append(state: PagedState, k: jax.Array, v: jax.Array, counts: jax.Array) -> tuple[PagedState, Reservation]:
    """Reserve and write all planes: k [planes, B, width, Hkv, D], v [planes, B, width, Hkv, Dv], counts i32[B].

    The first counts[b] tokens of request b are appended, or none; -1 in the Reservation is "nothing here" (see
    `reserve`). Raises ValueError for k or v of another shape, and where `reserve` does.
    """
    if k.ndim != 5 or k.shape[0] != state.kv.planes:
        raise ValueError(f"k is [{state.kv.planes} planes, B, width, Hkv, D], got {list(k.shape)}")
    _check_new(state.kv, (state.kv.planes, state.table.lengths.shape[0], k.shape[2]), k, v)
    state, reservation = reserve(state, counts, k.shape[2])
    plane, slots, _ = _writable(state, 0, reservation)
    return _put(state, plane, slots, k, v), reservation


def view(state: PagedState, plane: jax.Array) -> PageView:
    """Page table of one plane (i32[], may be traced) for the attention operations, with everything stale -1."""
    kv, table = state.kv, state.table
    plane, inside = _plane(state, plane)
    alive = slot_pool.live(state.pool, table.pages, table.incarnations)
    pages = jnp.where(alive & inside, plane * kv.pages + table.pages, -1)
    return PageView(pages, table.lengths, slot_pool.count_stale(table.pages, alive), plane, kv.pages)


def flat_slots(state: PagedState, plane: jax.Array, reservation: Reservation) -> jax.Array:
    """Slots i32[B, width] of the flattened pool that `write` writes for this plane; -1 absent or stale."""
    plane, slots, _ = _writable(state, plane, reservation)
    return jnp.where(slots >= 0, plane * (state.kv.pages * state.kv.page_size) + slots, -1)


def flat_copies(state: PagedState, reservation: Reservation) -> tuple[jax.Array, jax.Array]:
    """Pages of the flattened pool that `reserve` copied: (sources, targets) i32[planes * B], -1 none.

    What else is kept for a page (minima, scales, scores) must be copied along.
    """
    first = jnp.arange(state.kv.planes, dtype=jnp.int32)[:, None] * state.kv.pages
    sources, targets = reservation.copied_from, reservation.copied_to
    return tuple(jnp.where(x >= 0, first + x, -1).reshape(-1) for x in (sources, targets))  # type: ignore[return-value]


def share(state: PagedState, source: jax.Array, target: jax.Array, tokens: jax.Array) -> tuple[PagedState, jax.Array]:
    """Give the empty request `target` the first `tokens` tokens of `source` without copying; all i32[], may be traced.

    `tokens` is cut to the length of the source. The pages that hold them get one more holder, the last one too when it
    is only partly used: who appends to it first gets a copy. Nothing happens when `source` or `target` is -1.
    Returns (state, stale i32[]): the source's entries that are not live and stay absent in the target; or 1 for a share
    that was ignored because the target is not empty (it has tokens or pages), is the source, or either is out of range.
    Raises ValueError for arguments that are no integers, or a state that was donated.
    """
    require_kept("state", state)
    pool, table = state.pool, state.table
    requests, table_width = table.pages.shape
    source, target, tokens = as_ids("source", source), as_ids("target", target), as_ids("tokens", tokens)
    inside = (source >= 0) & (source < requests) & (target >= 0) & (target < requests) & (source != target)
    from_, to = jnp.where(inside, source, 0), jnp.where(inside, target, 0)
    alive = slot_pool.live(pool, table.pages[to], table.incarnations[to])
    allowed = inside & (table.lengths[to] <= 0) & ~jnp.any(alive)

    length = jnp.clip(tokens, 0, jnp.clip(table.lengths[from_], 0, table_width * state.kv.page_size))
    length = jnp.where(allowed, length, 0)
    covers = jnp.arange(table_width, dtype=jnp.int32) < (length + state.kv.page_size - 1) // state.kv.page_size
    pages = jnp.where(covers, table.pages[from_], -1)
    incarnations = jnp.where(covers, table.incarnations[from_], -1)
    kept = slot_pool.live(pool, pages, incarnations)
    pool, stale = slot_pool.hold(pool, pages, incarnations)

    into = jnp.where(length > 0, to, requests)
    table = dataclasses.replace(
        table,
        pages=table.pages.at[into].set(jnp.where(kept, pages, -1), mode="drop"),
        incarnations=table.incarnations.at[into].set(jnp.where(kept, incarnations, -1), mode="drop"),
        lengths=table.lengths.at[into].set(length, mode="drop"),
    )
    ignored = ~allowed & (source != -1) & (target != -1)
    return dataclasses.replace(state, pool=pool, table=table), stale + ignored.astype(jnp.int32)


def truncate(state: PagedState, lengths: jax.Array) -> tuple[PagedState, jax.Array]:
    """Take the last tokens of requests back: to lengths i32[B] where they are longer; below 0 counts as 0.

    Pages that hold no token any more are let go of, so tables, holders and free pages are those of a request that never
    had these tokens; side data of pages is the caller's. Returns (state, stale i32[]): entries ignored because they are
    not live. Raises ValueError for lengths that are no integers of shape [B], or a state that was donated.
    """
    require_kept("state", state)
    table, page_size = state.table, state.kv.page_size
    lengths = as_ids("lengths", lengths)
    if lengths.shape != table.lengths.shape:
        raise ValueError(f"lengths is i32{list(table.lengths.shape)}, got {list(lengths.shape)}")
    cut, lengths = lengths < table.lengths, jnp.maximum(lengths, 0)
    let_go = cut[:, None] & (jnp.arange(table.pages.shape[1], dtype=jnp.int32) >= -(-lengths // page_size)[:, None])
    gone = jnp.where(let_go, table.pages, -1)[::-1, ::-1]  # so they lie on the stack as before they were taken
    pool, stale = slot_pool.release(state.pool, gone, table.incarnations[::-1, ::-1])
    table = dataclasses.replace(
        table,
        pages=jnp.where(let_go, -1, table.pages),
        incarnations=jnp.where(let_go, -1, table.incarnations),
        lengths=jnp.where(cut, lengths, table.lengths),
    )
    return dataclasses.replace(state, pool=pool, table=table), stale


def release(state: PagedState, requests: jax.Array) -> tuple[PagedState, jax.Array]:
    """Empty the requests marked in `requests` bool[B]: let go of their pages, length 0, status OK.

    Returns (state, stale i32[]): their table entries ignored because they are not live; absent ones (-1) do not count.
    Raises ValueError for requests that are not bool[B], or a state that was donated.
    """
    require_kept("state", state)
    table, requests = state.table, jnp.array(requests)
    if requests.shape != table.lengths.shape or requests.dtype != jnp.bool_:
        raise ValueError(f"requests is bool{list(table.lengths.shape)}, got {requests.dtype}{list(requests.shape)}")
    rows = requests[:, None]
    pool, stale = slot_pool.release(state.pool, jnp.where(rows, table.pages, -1), table.incarnations)
    table = PageTable(
        pages=jnp.where(rows, -1, table.pages),
        incarnations=jnp.where(rows, -1, table.incarnations),
        lengths=jnp.where(requests, 0, table.lengths),
        status=jnp.where(requests, OK, table.status),
    )
    return dataclasses.replace(state, pool=pool, table=table), stale


def gather(state: PagedState, plane: jax.Array, request: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys [W * P, Hkv, D] and values [W * P, Hkv, Dv] of one request in token order; zeros where absent or stale.

    Quantised ones come as float32.
    """
    kv, table = state.kv, state.table
    plane, plane_inside = _plane(state, plane)
    request = as_ids("request", request)
    inside = (request >= 0) & (request < table.lengths.shape[0])
    row = jnp.where(inside, request, 0)
    alive = slot_pool.live(state.pool, table.pages[row], table.incarnations[row])
    token = jnp.arange(alive.size * kv.page_size, dtype=jnp.int32)
    valid = jnp.repeat(alive, kv.page_size) & (token < table.lengths[row]) & inside & plane_inside

    k, v = paged_kv.tokens_of(kv, plane, jnp.where(alive, table.pages[row], -1))
    return tuple(jnp.where(valid[:, None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))  # type: ignore[return-value]


def check(state: PagedState) -> None:
    """Raise OutOfPages if the last reserve of some request failed. For the host: it waits for the state."""
    require_kept("state", state)
    status, lengths = np.asarray(state.table.status), np.asarray(state.table.lengths)
    if not status.any():
        return
    table_width, page_size = state.table.pages.shape[1], state.kv.page_size
    reasons = {
        OUT_OF_PAGES: f"found too few free pages ({int(state.pool.free_count)} of {state.kv.pages} are free, of "
        f"{page_size} tokens each): release finished requests or create the state with more pages",
        TABLE_FULL: f"do not fit their page table of {table_width} pages of {page_size} tokens: "
        "create the state with more pages_per_request",
        STALE: "lost their last page: the table is older than the pool",
        BAD_COUNT: "were asked to grow by a count below 0 or above the width",
    }
    lines = []
    for code, reason in reasons.items():
        if (failed := np.flatnonzero(status == code)).size:
            lines.append(f"requests {failed.tolist()} with lengths {lengths[failed].tolist()} {reason}")
    raise OutOfPages("; ".join(lines), tuple(np.flatnonzero(status).tolist()))


def _plane(state: PagedState, plane) -> tuple[jax.Array, jax.Array]:
    require_kept("state", state)
    plane = as_ids("plane", plane)
    if plane.ndim:
        raise ValueError(f"plane is one number, got shape {list(plane.shape)}")
    inside = (plane >= 0) & (plane < state.kv.planes)
    return jnp.where(inside, plane, 0).astype(jnp.int32), inside


def _check_new(kv: PagedKV, leading: tuple[int, ...], k: jax.Array, v: jax.Array) -> None:
    for name, new, width in zip("kv", (k, v), kv.widths):
        if new.shape != (shape := (*leading, kv.kv_heads, width)):
            raise ValueError(f"{name} must be {list(shape)}, got {list(new.shape)}")


def _put(state: PagedState, plane: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> PagedState:
    k, v = (x.reshape(x.shape[0], slots.size, *x.shape[3:]) for x in (k, v))  # [planes, B * width, Hkv, D]
    return dataclasses.replace(state, kv=paged_kv.put(state.kv, plane, slots.reshape(-1), k, v))


def _writable(state: PagedState, plane, reservation: Reservation) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(plane i32[], slots i32[B, width] with -1 where not to be written, stale i32[])."""
    plane, inside = _plane(state, plane)
    slots, page_size = as_ids("slots", reservation.slots), state.kv.page_size
    pages = jnp.where(slots >= 0, slots // page_size, slots)
    sole = slot_pool.holders_of(state.pool, pages, reservation.incarnations) == 1
    return plane, jnp.where(sole & inside, slots, -1), slot_pool.count_stale(slots, sole & inside)
