"""Scores of whole pages: upper bounds from the smallest and largest key components, or products with one vector a page.

For query row r and a page with lo <= k <= hi for each of its keys k:

    bound[r] = sum_d max(q[r, d] * lo[d], q[r, d] * hi[d])  >=  q[r] . k

The larger product is that with hi where q is positive and that with lo where it is negative, so a bound is two products
of matrices, max(q, 0) hi + min(q, 0) lo. Without hi: bound[r] = q[r] . lo.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lowering
from pallas_kernels.config import Config, Launch
from pallas_kernels.decode_call import Shape, split_range, this_program
from pallas_kernels.exact_products import in_parts, load_parts, product, rows_of_product, shape_of
from pallas_kernels.online_softmax import Keys, rows_of
from pallas_kernels.positions import of_head


def page_bounds_kernel(
    # inputs
    terms,  # one or two pairs of ([parts, B, Hkv, rows, D] that add up to the queries, [N, Hkv, 1, D])
    page_ids_ref,  # i32[B, Hkv or 1, W]
    # outputs
    bounds_ref,  # f32[B, Hkv, rows, W]
    *,
    shape: Shape,
    launch: Launch,
):
    """One program: a tile of query rows against a share of the pages of a (request, KV head)."""
    program = this_program(shape, launch)
    group, head, _, _ = program
    rows, is_row = rows_of_product(program, shape)
    table_width = page_ids_ref.shape[-1]
    queries = [load_parts(parts_ref, summary_ref.dtype, program, shape) for parts_ref, summary_ref in terms]

    def step(index: jax.Array, carry: None) -> None:
        place = index * launch.block_tokens + jnp.arange(launch.block_tokens, dtype=jnp.int32)
        inside = place < table_width
        at = page_ids_ref.at[group, of_head(page_ids_ref, head), jnp.where(inside, place, 0)]
        ids = lowering.load(at, mask=inside, other=-1)
        page = jnp.where((ids >= 0) & (ids < shape.pages), ids, 0)
        keys = Keys(page, jnp.zeros_like(page), inside, inside[None, :])
        total: Any = 0.0
        for parts, (_, summary_ref) in zip(queries, terms, strict=True):
            summaries = rows_of(summary_ref, keys, head, parts[0][0].dtype, shape.interpret)
            total = total + product(parts, summaries, shape)
        at = bounds_ref.at[group, head, rows[:, None], place[None, :]]
        lowering.store(at, total, mask=is_row[:, None] & inside[None, :])

    first, last = split_range(0, table_width, table_width, program, launch)
    lax.fori_loop(first, last, step, None)


def page_bounds(
    q: jax.Array,
    lo: jax.Array,
    hi: jax.Array | None,
    page_ids: jax.Array,
    *,
    config: Config | None = None,
    interpret: bool,
) -> jax.Array:
    """Bounds of the scores of pages, or with hi None their products q . lo.

    q [B, Hkv, rows, D]; lo, hi [N, Hkv, D] of one dtype, float32 or 16-bit; page_ids i32[B, Hkv or 1, W]. Returns
    f32[B, Hkv, rows, W]; an absent page has the value of page 0.
    """
    batch, kv_heads, rows, _ = q.shape
    shape = shape_of(q, lo.shape[0], 1, interpret)
    launch = shape.launch(config, page_ids.shape[-1], lo.dtype, by_page=False)
    pairs = [(q, lo)] if hi is None else [(jnp.maximum(q, 0), hi), (jnp.minimum(q, 0), lo)]
    operands = [(in_parts(side, lo.dtype), summary[:, :, None]) for side, summary in pairs], page_ids
    bounds = lowering.result((batch, kv_heads, rows, page_ids.shape[-1]), jnp.float32, operands)
    return lowering.call(
        functools.partial(page_bounds_kernel, shape=shape, launch=launch),
        name="page_bounds",
        programs=shape.programs(launch),
        in_specs=jax.tree.map(lowering.whole, operands),
        out_specs=lowering.whole(bounds),
        out_shape=bounds,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        interpret=interpret,
    )(*operands)
