"""Exact top-k of rows of scores, as a tournament of chunks that fit in registers.

One program finds the k largest of one chunk and writes them in the order of their ids; the survivors of a row's chunks
are chunks of the next round, until one is left. Scores are compared as keys: their bits as integers of the same order.
A chunk keeps every key from a threshold up:

    count(key >= lo) = n_lo >= k > n_hi = count(key >= hi)

lo and hi close in on the k-th largest key: first by interpolating the counts, then by halving the distance while
snapping to keys that occur, so that many equal scores end the search at once. It ends when n_lo survivors fit the
places of the next round, or when only one value lies in [lo, hi); of that value the lowest ids are kept. A round but
the last may keep more than k, which spares it most of the search.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import lowering
from pallas_kernels.config import INT32_MAX, next_power_of_two

LARGEST_K = 8192
LANES = 32
MASKED, INFINITE = -2139095041, 2139095040  # the keys of -inf and inf
INTERPOLATIONS = 10  # before the search turns to halving: most scores need 2 to 8, heavy tails gain by no more


class Round(NamedTuple):
    """One round: how a row is cut and what survives."""

    size: int  # scores of a row
    chunk: int  # scores of a program, a power of two
    kept: int  # places for the survivors of a chunk, at least min(k, chunk)
    warps: int

    @property
    def chunks(self) -> int:
        """Programs of a row."""
        return -(-self.size // self.chunk)


def rounds(size: int, k: int, *, rows: int, chunk: int | None = None, per_thread: int | None = None) -> list[Round]:
    """The rounds for `rows` rows of `size` scores; pure, from shapes alone.

    chunk: scores of a program, at least; more where k asks for it. per_thread: scores in the registers of one thread.
    """
    # Room for more than k ends most searches after two or three steps, which is worth a larger next round, but not
    # where all programs run at once and each round costs its latency (H200: 1 x 131,072 in 25 us against 29).
    small = chunk is None and size <= 2**17 and rows * size <= 8192 * lowering.MULTIPROCESSORS
    slack = 1 if small else 2
    if chunk is None:
        chunk = 8192 if small else 32768 if size > 2**16 and rows * size >= 2**22 else 16384
    plan: list[Round] = []
    while True:
        most = max(chunk, min(4 * next_power_of_two(k), 32 * 1024))
        cut = min(most, max(LANES, next_power_of_two(size)))
        warps = max(1, min(32, cut // (LANES * (per_thread or (16 if cut <= 2048 else 32)))))
        chunks = -(-size // cut)
        if chunks == 1:
            return [*plan, Round(size, cut, min(k, size), warps)]
        kept = min(cut // 2, slack * k)
        plan.append(Round(size, cut, kept, warps))
        size = chunks * kept


class Bracket(NamedTuple):
    """Thresholds around the k-th largest score, as ordered bits, and how many scores reach them."""

    lo: jax.Array  # i32[]
    hi: jax.Array
    n_lo: jax.Array
    n_hi: jax.Array


def top_k_kernel(
    # inputs
    scores_ref,  # [rows, size], any float, or i32: the keys that an earlier round wrote
    ids_ref,  # None (the place is the id) or i32[rows, size]
    lengths_ref,  # None or i32[groups]; groups of as many rows each
    counts_ref,  # None or i32[groups], how many are wanted of a row; k bounds them
    # outputs
    ids_out_ref,  # i32[rows, chunks * kept]
    keys_out_ref=None,  # i32[rows, chunks * kept]
    *,
    k: int,
    this: Round,
):
    """One program: the survivors of one chunk of one row, in the order of their ids, then -1."""
    chunks = this.chunks
    row, part = lax.div(pl.program_id(0), jnp.int32(chunks)), lax.rem(pl.program_id(0), jnp.int32(chunks))
    place = part * this.chunk + _flat(this.chunk, this.warps)
    keys = _keys(scores_ref, lengths_ref, row, place, this)

    valid = _count(keys > MASKED)
    wanted = jnp.minimum(valid, k if counts_ref is None else jnp.clip(_of_row(counts_ref, row, scores_ref), 0, k))
    room = this.kept if chunks > 1 else wanted
    found = _search(keys, valid, wanted, room)
    equals = jnp.where(found.n_lo <= room, found.n_lo, wanted) - found.n_hi  # how many from [lo, hi) are kept
    last = _last_equal(keys, place, part * this.chunk, found, equals)
    chosen = keys >= jnp.where(place <= last, found.lo, found.hi)
    if counts_ref is not None:
        chosen = chosen & (room > 0)  # of a row that wants none, no bracket holds the wanted keys

    # The interpreter writes masked elements back, so they need a place that nobody writes: one past the end.
    end = chunks * this.kept
    target = jnp.where(chosen, _rank(chosen, part * this.kept), end)
    ids = place if ids_ref is None else lowering.load(ids_ref.at[row, place], mask=chosen, other=-1)
    lowering.store(ids_out_ref.at[row, target], ids, mask=chosen)
    rest = jnp.arange(next_power_of_two(this.kept), dtype=jnp.int32)
    empty = (rest >= found.n_hi + equals) & (rest < this.kept)
    rest = jnp.where(empty, part * this.kept + rest, end)
    lowering.store(ids_out_ref.at[row, rest], jnp.full(rest.shape, -1, jnp.int32), mask=empty)
    if keys_out_ref is not None:
        lowering.store(keys_out_ref.at[row, target], keys, mask=chosen)
        lowering.store(keys_out_ref.at[row, rest], jnp.full(rest.shape, MASKED, jnp.int32), mask=empty)


def _keys(scores_ref: Any, lengths_ref: Any, row: jax.Array, place: jax.Array, this: Round) -> jax.Array:
    """i32, like place: the keys of a chunk, MASKED from the end of its row on."""
    mask = None
    if lengths_ref is not None:
        mask = place < jnp.clip(_of_row(lengths_ref, row, scores_ref), 0, this.size)
    elif this.size % this.chunk:
        mask = place < this.size
    is_keys = scores_ref.dtype == jnp.int32
    other = None if mask is None else MASKED if is_keys else -jnp.inf
    loaded = lowering.load(scores_ref.at[row, place], mask=mask, other=other)
    return loaded if is_keys else to_keys(loaded.astype(jnp.float32))


def _of_row(ref: Any, row: jax.Array, scores_ref: Any) -> jax.Array:
    """i32[]: the number of the row's group."""
    return ref[lax.div(row, jnp.int32(scores_ref.shape[0] // ref.shape[0]))]


def _flat(size: int, warps: int) -> jax.Array:
    """i32[per thread, threads] = 0 .. size - 1 in row-major order.

    The first axis lies inside a thread, so that sums over it move no data; the hint keeps each load one element wide,
    or the loaded layout would have to be exchanged for this one.
    """
    threads = min(size, LANES * warps)
    each = jnp.arange(size // threads, dtype=jnp.int32)[:, None]
    return lowering.one_element_wide(each * threads + jnp.arange(threads, dtype=jnp.int32)[None, :])


def _count(mask: jax.Array) -> jax.Array:
    """i32[]: float sums inside a thread, because they run at twice the rate of integer ones."""
    return jnp.sum(jnp.sum(mask.astype(jnp.float32), axis=0).astype(jnp.int32), dtype=jnp.int32)


def to_keys(x: jax.Array) -> jax.Array:
    """float32 as int32 of the same order: exact for denormal numbers too, which float comparisons may flush to 0.

    -0 becomes +0; NaN becomes -inf, which is MASKED.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = jnp.where(keys == -1, 0, keys)
    return jnp.where((keys > INFINITE) | (keys < MASKED), MASKED, keys)


def _float(key: jax.Array) -> jax.Array:
    """The inverse of `to_keys`."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def _search(keys: jax.Array, valid: jax.Array, wanted: jax.Array, enough: Any) -> Bracket:
    """Narrows the bracket until at most `enough` scores reach lo, or one value lies in it."""
    start = Bracket(_lowest(keys, keys > MASKED), _highest(keys, keys > MASKED) + 1, valid, jnp.int32(0))
    enough = jnp.int32(enough)

    def open_(bracket: Bracket) -> jax.Array:
        return (bracket.n_lo > enough) & (bracket.lo + 1 < bracket.hi)

    # Interpolation in the square roots of the counts, a line through the upper tail of most scores; a side that stays
    # put loses half of its weight each time (the Illinois rule), or the other would only creep towards it.
    aim = jnp.sqrt(0.5 * (wanted + jnp.maximum(wanted, jnp.minimum(enough, valid))).astype(jnp.float32))

    def interpolate(state: Any) -> Any:
        bracket, above, below, last, steps = state
        low, high = _float(bracket.lo), _float(bracket.hi)
        share = above / (above - below)
        guess = low * (1.0 - share) + high * share
        halfway = _middle(bracket)
        pivot = jnp.where((guess > low) & (guess < high), to_keys(guess), halfway)
        pivot = jnp.minimum(jnp.maximum(pivot, bracket.lo + 1), bracket.hi - 1)
        count = _count(keys >= pivot)
        up = count >= wanted
        miss = jnp.sqrt(count.astype(jnp.float32)) - aim
        above, below = (
            jnp.where(up, miss, jnp.where(last < 0, above * 0.5, above)),
            jnp.where(up, jnp.where(last > 0, below * 0.5, below), miss),
        )
        return _moved(bracket, up, pivot, pivot, count), above, below, 2 * up.astype(jnp.int32) - 1, steps + 1

    def halve(bracket: Bracket) -> Bracket:
        reached = keys >= _middle(bracket)
        count = _count(reached)
        return _moved(bracket, count >= wanted, _lowest(keys, reached), _highest(keys, ~reached) + 1, count)

    ends = jnp.sqrt(valid.astype(jnp.float32)) - aim, -aim
    state = lax.while_loop(
        lambda state: open_(state[0]) & (state[4] < INTERPOLATIONS),
        interpolate,
        (start, *ends, jnp.int32(0), jnp.int32(0)),
    )
    return lax.while_loop(open_, halve, state[0])


def _lowest(keys: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.min(jnp.min(jnp.where(mask, keys, INFINITE), axis=0))


def _highest(keys: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.max(jnp.max(jnp.where(mask, keys, MASKED), axis=0))


def _middle(bracket: Bracket) -> jax.Array:
    """Between lo and hi, without overflow."""
    return (bracket.lo >> 1) + (bracket.hi >> 1) + (bracket.lo & bracket.hi & 1)


def _moved(bracket: Bracket, up: jax.Array, lo: jax.Array, hi: jax.Array, count: jax.Array) -> Bracket:
    """The bracket with lo raised (up) or hi lowered."""
    return Bracket(
        jnp.where(up, lo, bracket.lo),
        jnp.where(up, bracket.hi, hi),
        jnp.where(up, count, bracket.n_lo),
        jnp.where(up, bracket.n_hi, count),
    )


def _last_equal(keys: jax.Array, place: jax.Array, first: jax.Array, found: Bracket, wanted: jax.Array) -> jax.Array:
    """i32[]: the place up to which [lo, hi) has `wanted` keys; the largest int32 where all are wanted."""

    def halve(ends: Any) -> Any:
        low, high = ends
        middle = low + ((high - low) >> 1)
        enough = _count((keys >= found.lo) & (keys < found.hi) & (place <= middle)) >= wanted
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    cut = found.n_lo - found.n_hi > wanted
    ends = jnp.where(cut, first, INT32_MAX), jnp.where(cut, first + (place.size - 1), INT32_MAX)
    return lax.while_loop(lambda ends: ends[0] < ends[1], halve, ends)[0]


def _rank(mask: jax.Array, first: jax.Array) -> jax.Array:
    """i32, like the mask: `first` for its first member in row-major order, and so on.

    Lines of a warp's width are scanned, which needs no shared memory, and four of them at once, each in six bits of an
    int32, because a scan is a chain of five shuffles.
    """
    lines = mask.size // LANES
    fields = 4 if lines % 4 == 0 else 1
    bits = 6 * jnp.arange(fields, dtype=jnp.int32)[:, None, None]
    flags = mask.astype(jnp.int32).reshape(fields, lines // fields, LANES)
    flags = jnp.sum(flags << bits, axis=0, dtype=jnp.int32)
    upto = (jnp.cumsum(flags, axis=1, dtype=jnp.int32)[None] >> bits) & 63
    totals = jnp.sum(flags, axis=1, dtype=jnp.int32)
    totals = ((totals[None, :] >> bits[:, :, 0]) & 63).reshape(lines)
    before = (jnp.cumsum(totals, dtype=jnp.int32) - totals + (first - 1)).reshape(fields, lines // fields)
    return (upto + before[:, :, None]).reshape(mask.shape)


def top_k(
    scores: jax.Array,
    k: int,
    lengths: jax.Array | None,
    *,
    order: str,
    interpret: bool,
    counts: jax.Array | None = None,
    chunk: int | None = None,
    per_thread: int | None = None,
) -> jax.Array:
    """Ids of the k largest scores of each row.

    scores [rows, S], any float; lengths None or i32[groups], for rows / groups rows each; order "score" or "id"; counts
    None or i32[groups], where a row wants fewer than k. Returns i32[rows, k]: falling scores with ties by rising id, or
    rising ids; then -1.
    """
    count, width = scores.shape[0], min(k, scores.shape[1])
    plan = rounds(scores.shape[1], width, rows=count, chunk=chunk, per_thread=per_thread)
    found: tuple[jax.Array, ...] = ()
    for this in plan:
        # Ids and keys of the survivors; the last round writes keys only if they are asked for.
        operands = (scores, None, lengths, counts) if this is plan[0] else (found[1], found[0], None, counts)
        shape = lowering.result((count, this.chunks * this.kept), jnp.int32, operands)
        shapes = [shape] * (1 if this is plan[-1] and order == "id" else 2)
        found = lowering.call(
            functools.partial(top_k_kernel, k=width, this=this),
            name="top_k",
            programs=count * this.chunks,
            in_specs=jax.tree.map(lowering.whole, list(operands)),
            out_specs=[lowering.whole(shape) for shape in shapes],
            out_shape=shapes,
            num_warps=this.warps,
            num_stages=1,
            interpret=interpret,
        )(*operands)
    ids = found[0]
    if order == "score":
        # Stable, and equal scores stand in the order of their ids. An absent place has the lowest key.
        _, ids = lax.sort((~found[1], ids), dimension=1, num_keys=1, is_stable=True)
    return jnp.pad(ids, [(0, 0), (0, k - width)], constant_values=-1)
