"""Upper bounds of the scores of whole pages, from the smallest and largest value of each key component.

For query row r and a page with lo <= k <= hi for each of its keys k:

    bound[r] = sum_d max(q[r, d] * lo[d], q[r, d] * hi[d])  >=  q[r] . k
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import lowering
from pallas_kernels.config import next_power_of_two
from pallas_kernels.positions import of_head

BOX_NUMBERS = 4096  # of lo, and as many of hi, in the registers of a program


def page_bounds_kernel(
    # inputs
    q_ref,  # f32[B, Hkv, rows, D]
    lo_ref,  # f32[N, Hkv, D]
    hi_ref,  # f32[N, Hkv, D]
    page_ids_ref,  # i32[B, Hkv or 1, W]
    # outputs
    bounds_ref,  # f32[B, Hkv, rows, W]
    *,
    kv_heads: int,
    pages: int,  # of a program
    blocks: int,  # programs of a (request, KV head)
):
    """One program: all query rows of a (request, KV head) against some of its pages, whose boxes are read once."""
    rows, width = q_ref.shape[2:]
    table_width = page_ids_ref.shape[-1]
    rest, block = lax.div(pl.program_id(0), jnp.int32(blocks)), lax.rem(pl.program_id(0), jnp.int32(blocks))
    request, head = lax.div(rest, jnp.int32(kv_heads)), lax.rem(rest, jnp.int32(kv_heads))
    place = block * pages + jnp.arange(pages, dtype=jnp.int32)
    inside = place < table_width
    at = jnp.where(inside, place, 0)
    ids = lowering.load(page_ids_ref.at[request, of_head(page_ids_ref, head), at], mask=inside, other=-1)
    ids = jnp.where((ids >= 0) & (ids < lo_ref.shape[0]), ids, 0)
    column = jnp.arange(next_power_of_two(width), dtype=jnp.int32)
    exists = column < width
    mask = inside[:, None] & exists[None, :]
    lo = lowering.load(lo_ref.at[ids[:, None], head, column[None, :]], mask=mask, other=0.0)
    hi = lowering.load(hi_ref.at[ids[:, None], head, column[None, :]], mask=mask, other=0.0)

    def one_row(row: jax.Array, _: Any) -> None:
        q = lowering.load(q_ref.at[request, head, row, column], mask=exists, other=0.0)[None, :]
        # lo <= hi, so the larger product is that with hi where q is positive.
        bound = jnp.sum(q * jnp.where(q > 0, hi, lo), axis=1)
        # The interpreter writes masked elements back: one past the end is nobody's place.
        lowering.store(bounds_ref.at[request, head, row, jnp.where(inside, place, table_width)], bound, mask=inside)

    lax.fori_loop(0, rows, one_row, None)


def page_bounds(q: jax.Array, lo: jax.Array, hi: jax.Array, page_ids: jax.Array, *, interpret: bool) -> jax.Array:
    """Bounds of the scores of pages.

    q f32[B, Hkv, rows, D], scaled; lo, hi f32[N, Hkv, D]; page_ids i32[B, Hkv or 1, W]. Returns f32[B, Hkv, rows, W];
    an absent page has some finite value.
    """
    batch, kv_heads, rows, width = q.shape
    pages = max(1, min(64, BOX_NUMBERS // next_power_of_two(width)))
    blocks = -(-page_ids.shape[-1] // pages)
    operands = (q, lo, hi, page_ids)
    bounds = lowering.result((batch, kv_heads, rows, page_ids.shape[-1]), jnp.float32, operands)
    return lowering.call(
        functools.partial(page_bounds_kernel, kv_heads=kv_heads, pages=pages, blocks=blocks),
        name="page_bounds",
        programs=batch * kv_heads * blocks,
        in_specs=[lowering.whole(array) for array in operands],
        out_specs=lowering.whole(bounds),
        out_shape=bounds,
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(*operands)
