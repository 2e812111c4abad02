"""Scores of the lightning indexer over a paged cache of its keys: every head's product, rectified, weighted, summed.

For row t and key s, with the key's scale c[s] (1 for keys that are not quantised):

    score[t, s] = c[s] * sum_j w[t, j] * max(q[t, j] . key[s], 0)

and -inf where the row does not see the key. A block of keys is read once for all rows of a tile; heads are summed in
registers.

Source: DeepSeek-V3.2 (DeepSeek sparse attention).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import lowering
from pallas_kernels.config import Config, next_power_of_two
from pallas_kernels.online_softmax import into_range, pieces

MOST_ROWS = 2  # of a tile: their products are unrolled
AT_ONCE = 512  # programs that run at once, four on a multiprocessor: with a few more, most would wait for the last ones
MOST_STEPS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan:
    """Static shapes and tuning of one call. `flat`: pages of P * d bytes of e4m3, then P * 4 of scales."""

    batch: int
    rows: int  # T
    heads: int
    width: int  # d
    pages: int
    page_size: int
    capacity: int  # W * P
    k: int | None
    flat: bool
    block_rows: int
    block_tokens: int
    together: int  # blocks whose keys are on their way at once
    steps: int  # of so many blocks, of a program
    interpret: bool

    @property
    def tiles(self) -> int:
        """Row tiles of a request."""
        return -(-self.rows // self.block_rows)

    @property
    def chunks(self) -> int:
        """Programs that share the keys of a row tile."""
        return -(-self.capacity // (self.block_tokens * self.together * self.steps))


def indexer_scores_kernel(
    # inputs
    q_ref,  # [B, T, heads, d]
    weights_ref,  # f32[B, T, heads]
    key_refs,  # ([N, P, d],) or (i16[N, P * (d + 4) / 2], f32[N, P * (d + 4) / 4])
    table_ref,  # i32[B, W]
    seen_ref,  # i32[B, T]
    # outputs
    scores_ref,  # f32[B, T, W * P]
    *,
    scan: Scan,
):
    """One program: a tile of query rows against some blocks of one request's keys."""
    index, tile = lax.div(pl.program_id(0), jnp.int32(scan.tiles)), lax.rem(pl.program_id(0), jnp.int32(scan.tiles))
    request, chunk = lax.div(index, jnp.int32(scan.chunks)), lax.rem(index, jnp.int32(scan.chunks))
    rows = [tile * scan.block_rows + i for i in range(scan.block_rows)]
    queries = [_query(q_ref, weights_ref, request, row, key_refs[0].dtype, scan) for row in rows]
    seen = [jnp.where(row < scan.rows, seen_ref[request, jnp.minimum(row, scan.rows - 1)], 0) for row in rows]
    # Of rows that take all they see, nothing is read.
    wanted = [n if scan.k is None else jnp.where(n > scan.k, n, 0) for n in seen]
    most, read = functools.reduce(jnp.maximum, seen), functools.reduce(jnp.maximum, wanted)
    size, together = scan.block_tokens, scan.together
    first = chunk * scan.steps
    end = jnp.minimum(first + scan.steps, -(-scan.capacity // (size * together)))
    last = jnp.clip(lax.div(most + (size * together - 1), jnp.int32(size * together)), first, end)

    def store(place: jax.Array, row: jax.Array, scores: jax.Array) -> None:
        inside = (place < scan.capacity) & (row < scan.rows)
        at = scores_ref.at[request, jnp.minimum(row, scan.rows - 1), jnp.where(inside, place, scan.capacity)]
        lowering.store(at, scores, mask=inside)

    def starts(index: jax.Array) -> list[jax.Array]:
        return [(index * together + i) * size for i in range(together)]

    def step(index: jax.Array, carry: None) -> None:
        blocks = [_block(key_refs, table_ref, request, start, most, read, queries, scan) for start in starts(index)]
        for block in blocks:
            for row, n, wants, (q, weights) in zip(rows, seen, wanted, queries, strict=True):
                s = functools.reduce(
                    jnp.add, [lowering.dot(key, part.T) for key, part in zip(block.keys, q, strict=True)]
                )
                s = jnp.where(s <= 0, 0.0, s) * weights[None, :]  # NaN stays
                if weights.size > scan.heads:
                    s = jnp.where(jnp.arange(weights.size)[None, :] < scan.heads, s, 0.0)
                s = jnp.sum(s, axis=1)
                s = s if block.scale is None else s * block.scale
                s = jnp.where(wants > 0, s, 0.0)
                store(block.place, row, jnp.where(block.held & (block.place < n), s, -jnp.inf))

    def skip(index: jax.Array, carry: None) -> None:
        for start in starts(index):
            for row in rows:
                store(start + jnp.arange(size, dtype=jnp.int32), row, jnp.full((size,), -jnp.inf, jnp.float32))

    lax.fori_loop(first, last, step, None)
    lax.fori_loop(last, end, skip, None)


class Block(NamedTuple):
    """The keys of one block."""

    place: jax.Array  # i32[block] token ids
    held: jax.Array  # bool[block]: some row sees the token, and its page is there
    keys: list[jax.Array]  # [block, piece]
    scale: jax.Array | None  # f32[block]


def _block(
    refs: Any,
    table_ref: Any,
    request: jax.Array,
    start: jax.Array,
    most: jax.Array,
    read: jax.Array,
    queries: list[Any],
    scan: Scan,
) -> Block:
    place = start + jnp.arange(scan.block_tokens, dtype=jnp.int32)
    page, held = _pages(table_ref, request, start, place, most, scan)
    offset = lax.rem(place, jnp.int32(scan.page_size))
    return Block(place, held, *_keys(refs, page, offset, held & (place < read), queries[0][0], scan))


def _query(q_ref: Any, weights_ref: Any, request: jax.Array, row: jax.Array, stored: Any, scan: Scan) -> Any:
    """(parts [heads, piece] of a row's query, its weights f32[heads]), heads padded."""
    heads = jnp.arange(max(16, next_power_of_two(scan.heads)), dtype=jnp.int32)
    exists = (heads < scan.heads) & (row < scan.rows)
    at, head = jnp.minimum(row, scan.rows - 1), jnp.where(exists, heads, 0)
    parts = []
    for cols in _columns(scan):
        inside = cols < scan.width
        ref = q_ref.at[request, at, head[:, None], jnp.where(inside, cols, 0)[None, :]]
        parts.append(lowering.load(ref, mask=exists[:, None] & inside[None, :], other=0.0))
    weights = lowering.load(weights_ref.at[request, at, head], mask=exists, other=0.0)
    if scan.flat and q_ref.dtype == jnp.bfloat16:
        parts, power = into_range(parts)
        weights = weights * jnp.sum(power, axis=1)
    compute = _compute(q_ref.dtype, stored, scan)
    return [part.astype(compute) for part in parts], weights


def _compute(q_dtype: Any, stored: Any, scan: Scan) -> Any:
    """What keys and queries are multiplied in."""
    if scan.flat:
        return jnp.float32 if q_dtype == jnp.float32 else jnp.float16
    return jnp.promote_types(q_dtype, stored)


def _columns(scan: Scan) -> list[jax.Array]:
    """Column ids of each part; pairs come apart as even and odd columns."""
    if not scan.flat:
        return [start + jnp.arange(size, dtype=jnp.int32) for start, size in pieces(scan.width)]
    halves = [start + jnp.arange(size, dtype=jnp.int32) for start, size in pieces(scan.width // 2)]
    return [2 * half + odd for half in halves for odd in (0, 1)]


def _pages(
    table_ref: Any, request: jax.Array, start: jax.Array, place: jax.Array, most: jax.Array, scan: Scan
) -> tuple[jax.Array, jax.Array]:
    """(pages i32[block] or i32[], whether the tokens at these places, from `start` on, exist: bool[block])."""
    inside = place < most
    if scan.page_size >= scan.block_tokens:  # a block lies in one page
        column = lax.div(start, jnp.int32(scan.page_size))
        page = table_ref[request, jnp.minimum(column, scan.capacity // scan.page_size - 1)]  # the last may lie beyond
    else:
        at = table_ref.at[request, jnp.where(inside, lax.div(place, jnp.int32(scan.page_size)), 0)]
        page = lowering.load(at, mask=inside, other=-1)
    held = (page >= 0) & (page < scan.pages)
    return jnp.where(held, page, 0), held & inside


def _keys(
    refs: Any, page: jax.Array, offset: jax.Array, present: jax.Array, like: list[jax.Array], scan: Scan
) -> tuple[list[jax.Array], jax.Array | None]:
    """(parts [block, piece] of the keys, None or their scales f32[block]); 0 where not present."""
    column = page if page.ndim == 0 else page[:, None]
    width = scan.width // 2 if scan.flat else scan.width
    parts = []
    for start, size in pieces(width):
        cols = start + jnp.arange(size, dtype=jnp.int32)
        mask = jnp.broadcast_to(present[:, None], (present.size, cols.size)) & (cols < width)[None, :]
        if scan.flat:
            at = refs[0].at[column, offset[:, None] * width + cols[None, :]]
            parts += lowering.widen_pairs(lowering.load(at, mask=mask, other=0), interpret=scan.interpret)
        else:
            at = refs[0].at[column, offset[:, None], cols[None, :]]
            parts.append(lowering.load(at, mask=mask, other=0.0))
    parts = [part.astype(q.dtype) for part, q in zip(parts, like, strict=True)]
    if not scan.flat:
        return parts, None
    at = refs[1].at[page, scan.page_size * scan.width // 4 + offset]
    return parts, lowering.load(at, mask=present, other=0.0)


def indexer_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    page_table: jax.Array,
    seen: jax.Array,
    *,
    k: int | None,
    page_size: int,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """Scores of all tokens that each row sees, f32[B, T, W * P]; -inf elsewhere.

    q [B, T, heads, d]; weights f32[B, T, heads]; keys [N, P, d], or u8[N, P * (d + 4)] of e4m3 keys and then their
    scales; page_table i32[B, W]; seen i32[B, T]. A row that sees at most k tokens scores them 0, unread.
    """
    batch, rows, heads, width = q.shape
    config, flat = config or Config(), keys.dtype == jnp.uint8
    capacity = page_table.shape[1] * page_size
    block_rows = min(MOST_ROWS, next_power_of_two(rows))
    block_tokens, together = config.block_tokens or 64, 2 if flat else 1
    total = batch * -(-rows // block_rows) * -(-capacity // (block_tokens * together))
    scan = Scan(
        batch=batch,
        rows=rows,
        heads=heads,
        width=width,
        pages=keys.shape[0],
        page_size=page_size,
        capacity=capacity,
        k=k,
        flat=flat,
        block_rows=block_rows,
        block_tokens=block_tokens,
        together=together,
        steps=min(MOST_STEPS, -(-total // AT_ONCE)),
        interpret=interpret,
    )
    views: tuple[jax.Array, ...] = (keys,)
    if flat:
        words = lax.bitcast_convert_type(keys.reshape(keys.shape[0], -1, 2), jnp.int16)
        views = words, lax.bitcast_convert_type(keys.reshape(keys.shape[0], -1, 4), jnp.float32)
    operands = q, weights, views, page_table, seen
    result = lowering.result((batch, rows, capacity), jnp.float32, operands)
    return lowering.call(
        functools.partial(indexer_scores_kernel, scan=scan),
        name="indexer_scores",
        programs=batch * scan.tiles * scan.chunks,
        in_specs=jax.tree.map(lowering.whole, list(operands)),
        out_specs=lowering.whole(result),
        out_shape=result,
        num_warps=config.num_warps or 4,
        num_stages=config.num_stages or 3,
        interpret=interpret,
    )(*operands)
