"""Scores of whole pages: upper bounds from the smallest and largest key components, or products with one vector a page.

For query row r and a page with lo <= k <= hi for each of its keys k:

    bound[r] = sum_d max(q[r, d] * lo[d], q[r, d] * hi[d])  >=  q[r] . k

Without hi: bound[r] = q[r] . lo.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import lowering
from pallas_kernels.config import next_power_of_two
from pallas_kernels.positions import of_head

PROGRAM_BYTES = 16 * 1024  # of summaries, in the registers of a program: a multiprocessor holds four such programs
PART_BYTES = 128  # of a summary that neighbouring lanes read together, 16 bytes each
MOST_PARTS = 8
UNROLLED_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageBoundsConfig:
    """Tuning values. pages: of a program, a power of two; None: 16 KB of summaries. num_warps: a power of two."""

    pages: int | None = None
    num_warps: int = 4

    def __post_init__(self) -> None:
        for name in ("pages", "num_warps"):
            value = getattr(self, name)
            if value is not None and (value < 1 or value & (value - 1)):
                raise ValueError(f"{name} must be a power of two, got {value}")


def page_bounds_kernel(
    # inputs
    q_ref,  # f32[B, Hkv, rows, D]
    lo_ref,  # [N, Hkv, D]
    hi_ref,  # [N, Hkv, D], or None
    page_ids_ref,  # i32[B, Hkv or 1, W]
    # outputs
    bounds_ref,  # f32[B, Hkv, rows, W]
    *,
    kv_heads: int,
    pages: int,  # of a program
    blocks: int,  # programs of a (request, KV head)
    part: int,  # columns that are read together
):
    """One program: all query rows of a (request, KV head) against some of its pages, whose summaries are read once."""
    rows, width = q_ref.shape[2:]
    table_width = page_ids_ref.shape[-1]
    rest, block = lax.div(pl.program_id(0), jnp.int32(blocks)), lax.rem(pl.program_id(0), jnp.int32(blocks))
    request, head = lax.div(rest, jnp.int32(kv_heads)), lax.rem(rest, jnp.int32(kv_heads))
    place = block * pages + jnp.arange(pages, dtype=jnp.int32)
    inside = place < table_width
    ids = lowering.load(
        page_ids_ref.at[request, of_head(page_ids_ref, head), jnp.where(inside, place, 0)], mask=inside, other=-1
    )
    ids = jnp.where((ids >= 0) & (ids < lo_ref.shape[0]), ids, 0)
    columns = [first + jnp.arange(part, dtype=jnp.int32) for first in range(0, width, part)]
    masks = [None if width % part == 0 else column < width for column in columns]

    def read(ref: Any) -> list[jax.Array]:
        """Part by part, f32[pages, part]."""
        values = []
        for column, exists in zip(columns, masks):
            mask = inside[:, None] if exists is None else inside[:, None] & exists[None, :]
            index = (ids[:, None], head, column[None, :])
            values.append(lowering.load(ref.at[index], mask=mask, other=0.0).astype(jnp.float32))
        return values

    lows = read(lo_ref)
    highs = lows if hi_ref is None else read(hi_ref)

    def one_row(row: Any, _: Any) -> None:
        total = jnp.zeros((pages, part), jnp.float32)
        for column, exists, lo, hi in zip(columns, masks, lows, highs):
            q = lowering.load(q_ref.at[request, head, row, column], mask=exists, other=None if exists is None else 0.0)
            q = q[None, :]
            # lo <= hi, so the larger product is that with hi where q is positive.
            total = total + q * (lo if hi_ref is None else jnp.where(q > 0, hi, lo))
        # Parts are added within a lane, and only then lane to lane.
        bound = jnp.sum(total, axis=1)
        # The interpreter writes masked elements back: one past the end is nobody's place.
        lowering.store(bounds_ref.at[request, head, row, jnp.where(inside, place, table_width)], bound, mask=inside)

    if rows <= UNROLLED_ROWS:  # the queries of all rows are on their way before the first is needed
        for row in range(rows):
            one_row(row, None)
    else:
        lax.fori_loop(0, rows, one_row, None)


def page_bounds(
    q: jax.Array,
    lo: jax.Array,
    hi: jax.Array | None,
    page_ids: jax.Array,
    *,
    config: PageBoundsConfig | None = None,
    interpret: bool,
) -> jax.Array:
    """Bounds of the scores of pages, or with hi None their products q . lo.

    q f32[B, Hkv, rows, D], scaled; lo, hi [N, Hkv, D] of one dtype, float32 or 16-bit; page_ids i32[B, Hkv or 1, W].
    Returns f32[B, Hkv, rows, W], computed in float32; an absent page has the value of page 0.
    """
    batch, kv_heads, rows, width = q.shape
    config = config or PageBoundsConfig()
    itemsize = lo.dtype.itemsize
    part = min(next_power_of_two(width), max(PART_BYTES // itemsize, next_power_of_two(width) // MOST_PARTS))
    read = -(-width // part) * part * itemsize * (1 if hi is None else 2)  # bytes of a page
    pages = config.pages or max(1, min(64, next_power_of_two(PROGRAM_BYTES // read + 1) // 2))
    blocks = -(-page_ids.shape[-1] // pages)
    operands = (q, lo, hi, page_ids)
    bounds = lowering.result((batch, kv_heads, rows, page_ids.shape[-1]), jnp.float32, operands)
    return lowering.call(
        functools.partial(page_bounds_kernel, kv_heads=kv_heads, pages=pages, blocks=blocks, part=part),
        name="page_bounds",
        programs=batch * kv_heads * blocks,
        in_specs=jax.tree.map(lowering.whole, operands),
        out_specs=lowering.whole(bounds),
        out_shape=bounds,
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
    )(*operands)
