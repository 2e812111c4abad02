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
INTERPOLATIONS = 8  # before the search turns to halving: bell-shaped scores need 2 to 8, heavy tails never gain by more


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


def rounds(size: int, k: int, *, chunk: int = 16384, per_thread: int = 32, slack: int = 2) -> list[Round]:
    """The rounds for rows of `size` scores; pure, from shapes alone.

    chunk: scores of a program, at least; more where k asks for it. per_thread: scores in the registers of one thread.
    """
    plan = []
    while True:
        most = max(chunk, min(4 * next_power_of_two(k), 32 * 1024))
        cut = min(most, max(LANES, next_power_of_two(size)))
        warps = max(1, min(32, cut // (LANES * per_thread)))
        chunks = -(-size // cut)
        if chunks == 1:
            return [*plan, Round(size, cut, min(k, size), warps)]
        # Room for more than k ends most searches after two or three steps, which is worth a larger next round.
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
    lengths_ref,  # None or i32[rows]
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
    size = jnp.int32(this.size)
    length = size if lengths_ref is None else jnp.clip(lengths_ref[row], 0, size)
    place = part * this.chunk + _flat(this.chunk)
    inside = place < length
    at = scores_ref.at[row, jnp.where(inside, place, 0)]
    if scores_ref.dtype == jnp.int32:
        keys = lowering.load(at, mask=inside, other=MASKED)
    else:
        keys = to_keys(lowering.load(at, mask=inside, other=-jnp.inf).astype(jnp.float32))

    valid = _count(keys > MASKED)
    wanted = jnp.minimum(valid, k)
    found = _search(keys, valid, wanted, this.kept if chunks > 1 else wanted)
    at_least, above = keys >= found.lo, keys >= found.hi
    equals = jnp.where(found.n_lo <= this.kept, found.n_lo, wanted) - found.n_hi  # how many from [lo, hi) are kept
    chosen = above | (at_least & (place <= _last_equal(at_least & ~above, place, equals, found.n_lo - found.n_hi)))
    target = _rank(chosen)

    # The interpreter writes masked elements back, so they need a place that nobody writes: one past the end.
    end = chunks * this.kept
    target = jnp.where(chosen, part * this.kept + target, end)
    ids = place
    if ids_ref is not None:
        ids = lowering.load(ids_ref.at[row, jnp.where(chosen, place, 0)], mask=chosen, other=-1)
    lowering.store(ids_out_ref.at[row, target], ids, mask=chosen)
    rest = jnp.arange(next_power_of_two(this.kept), dtype=jnp.int32)
    empty = (rest >= found.n_hi + equals) & (rest < this.kept)
    rest = jnp.where(empty, part * this.kept + rest, end)
    lowering.store(ids_out_ref.at[row, rest], jnp.full(rest.shape, -1, jnp.int32), mask=empty)
    if keys_out_ref is not None:
        lowering.store(keys_out_ref.at[row, target], keys, mask=chosen)
        lowering.store(keys_out_ref.at[row, rest], jnp.full(rest.shape, MASKED, jnp.int32), mask=empty)


def _flat(size: int) -> jax.Array:
    """i32[lines, 32] = 0 .. size - 1 in row-major order: a line is a warp wide, so scans along it stay inside a warp.

    The hint keeps each load one element wide, or the loaded layout would have to be exchanged for this one.
    """
    places = jnp.arange(size // LANES, dtype=jnp.int32)[:, None] * LANES + jnp.arange(LANES, dtype=jnp.int32)[None, :]
    return lowering.one_element_wide(places)


def _count(mask: jax.Array) -> jax.Array:
    """i32[]: float sums inside a warp's lane, because they run at twice the rate of integer ones."""
    return jnp.sum(jnp.sum(jnp.where(mask, 1.0, 0.0), axis=0).astype(jnp.int32), dtype=jnp.int32)


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

    # Interpolation in the logit of the counts, in which bell-shaped scores are nearly a line; a side that stays put
    # loses half of its weight each time (the Illinois rule), or the other would only creep towards it.
    aim = _logit(0.5 * (wanted + jnp.maximum(wanted, jnp.minimum(enough, valid))).astype(jnp.float32), valid)

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
        miss = _logit(count.astype(jnp.float32), valid) - aim
        above, below = (
            jnp.where(up, miss, jnp.where(last < 0, above * 0.5, above)),
            jnp.where(up, jnp.where(last > 0, below * 0.5, below), miss),
        )
        return _moved(bracket, up, pivot, pivot, count), above, below, 2 * up.astype(jnp.int32) - 1, steps + 1

    def halve(bracket: Bracket) -> Bracket:
        reached = keys >= _middle(bracket)
        count = _count(reached)
        return _moved(bracket, count >= wanted, _lowest(keys, reached), _highest(keys, ~reached) + 1, count)

    ends = _logit(valid.astype(jnp.float32), valid) - aim, _logit(jnp.float32(0), valid) - aim
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


def _logit(count: jax.Array, valid: jax.Array) -> jax.Array:
    return jnp.log((count + 0.5) / (valid.astype(jnp.float32) - count + 0.5))


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


def _last_equal(equal: jax.Array, place: jax.Array, wanted: jax.Array, found: jax.Array) -> jax.Array:
    """i32[]: the place up to which `equal` has `wanted` members; the largest int32 where all `found` are wanted."""

    def halve(ends: Any) -> Any:
        first, last = ends
        middle = (first + last) >> 1
        enough = _count(equal & (place <= middle)) >= wanted
        return jnp.where(enough, first, middle + 1), jnp.where(enough, middle, last)

    end = jnp.max(jnp.max(place, axis=0))
    start = jnp.where(found > wanted, end - (place.size - 1), INT32_MAX)
    return lax.while_loop(lambda ends: ends[0] < ends[1], halve, (start, jnp.where(found > wanted, end, INT32_MAX)))[0]


def _rank(mask: jax.Array) -> jax.Array:
    """i32[lines, 32]: how many members of the mask stand before each place, in row-major order.

    Four lines share a scan, each in six bits of an int32, because a scan is a chain of five shuffles.
    """
    lines = mask.shape[0]
    fields = 4 if lines % 4 == 0 else 1
    bits = 6 * jnp.arange(fields, dtype=jnp.int32)[:, None, None]
    flags = jnp.sum(mask.astype(jnp.int32).reshape(fields, lines // fields, LANES) << bits, axis=0, dtype=jnp.int32)
    upto = (jnp.cumsum(flags, axis=1, dtype=jnp.int32)[None] >> bits) & 63
    totals = jnp.sum(flags, axis=1, dtype=jnp.int32)
    totals = ((totals[None, :] >> bits[:, :, 0]) & 63).reshape(lines)
    before = (jnp.cumsum(totals, dtype=jnp.int32) - totals).reshape(fields, lines // fields)
    return (upto + before[:, :, None]).reshape(lines, LANES) - 1


def top_k(
    scores: jax.Array,
    k: int,
    lengths: jax.Array | None,
    *,
    order: str,
    interpret: bool,
    **settings: int,
) -> jax.Array:
    """Ids of the k largest scores of each row.

    scores [rows, S], any float; lengths None or i32[rows]; order "score" or "id". Returns i32[rows, k]: falling scores
    with ties by rising id, or rising ids; then -1.
    """
    count, width = scores.shape[0], min(k, scores.shape[1])
    ids = None
    plan = rounds(scores.shape[1], width, **settings)
    for this in plan:
        out = (count, this.chunks * this.kept)
        operands = (scores, ids, lengths)
        shapes = [lowering.result(out, jnp.int32, operands)]
        if this is not plan[-1] or order == "score":
            shapes.append(lowering.result(out, jnp.int32, operands))
        ids, *values = lowering.call(
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
        scores, lengths = values[0] if values else None, None
    if order == "score":
        # Stable, and equal scores stand in the order of their ids. An absent place has the lowest key.
        _, ids = lax.sort((~scores, ids), dimension=1, num_keys=1, is_stable=True)
    return jnp.pad(ids, [(0, 0), (0, k - width)], constant_values=-1)
