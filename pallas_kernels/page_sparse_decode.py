"""Attention over chosen pages of a paged KV cache, in any order.

List position j of a (row, KV head) is offset j % P of the page `page_table[page_indices[j // P]]`. Causality, window
and length apply by the true position, which is `page_indices[j // P] * P + j % P` unless the keys were moved.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lowering
from pallas_kernels.config import Config, Launch
from pallas_kernels.decode_call import (
    Shape,
    decode_shape,
    from_tiles,
    launch_splits,
    split_range,
    this_program,
    to_tiles,
)
from pallas_kernels.online_softmax import LN2, Keys, attend
from pallas_kernels.pairs import as_pairs
from pallas_kernels.positions import of_head, row_positions, true_positions, visibility


def page_sparse_decode_kernel(
    # inputs
    q_ref,  # [groups, Hkv, rows, D]
    k_ref,  # [N, Hkv, P, D], or i16[N, Hkv, P, D / 2] pairs of e4m3
    v_ref,  # [N, Hkv, P, Dv], or i16[N, Hkv, P, Dv / 2]
    table_ref,  # i32[B, Hkv or 1, W]
    lengths_ref,  # i32[B, Hkv or 1]
    page_indices_ref,  # i32[groups, Hkv, C]
    q_positions_ref,  # None or i32[B, T]
    key_positions_ref,  # None or i32[N, Hkv, P]
    scales,  # {"k", "v"}: None, f32[1] or f32[N, Hkv, P]
    # outputs
    out_ref,  # [splits, groups, Hkv, rows, Dv]
    lse_ref,  # f32[splits, groups, Hkv, rows]
    scores_ref=None,  # f32[groups, Hkv, rows, C * P], in base 2
    *,
    repeat: int,  # groups of one request
    window: int | None,
    shape: Shape,
    launch: Launch,
):
    """One program: a query tile against a share of the chosen pages."""
    program = this_program(shape, launch)
    group, head = program.group, program.head
    request = lax.div(group, jnp.int32(repeat))
    width, page_size, chosen = table_ref.shape[-1], shape.page_size, page_indices_ref.shape[-1]
    length = lengths_ref[request, of_head(lengths_ref, head)]
    row_position = row_positions(program, length, q_positions_ref, shape, repeat)
    table_head = of_head(table_ref, head)

    def locate(start: jax.Array) -> Keys:
        lane = jnp.arange(launch.block_tokens, dtype=jnp.int32)
        if page_size >= launch.block_tokens:
            place, offset = lax.div(start, jnp.int32(page_size)), lax.rem(start, jnp.int32(page_size)) + lane
            page_index = page_indices_ref[group, head, place]
        else:
            place, offset = lax.div(start + lane, jnp.int32(page_size)), lax.rem(start + lane, jnp.int32(page_size))
            page_index = lowering.load(
                page_indices_ref.at[group, head, jnp.where(place < chosen, place, 0)], mask=place < chosen, other=-1
            )
        in_table = (page_index >= 0) & (page_index < width)
        page_index = jnp.where(in_table, page_index, 0)
        page = table_ref[request, table_head, page_index]
        in_pool = in_table & (page >= 0) & (page < shape.pages)
        page = jnp.where(in_pool, page, 0)
        index = page_index * page_size + offset
        present = in_pool & (index < length)
        position = true_positions(key_positions_ref, index, page, offset, present, program)
        visible = visibility(position, present, row_position, window)
        if shape.tokens == 1:
            present = visible[0]
        return Keys(page, offset, present, visible)

    attend(
        q_ref, k_ref, v_ref, scales, out_ref, lse_ref, scores_ref,
        program=program, locate=locate, blocks=split_range(0, chosen * page_size, chosen * page_size, program, launch),
        # Pages come in any order, so a page that only some of the T rows see may stand anywhere.
        uniform_until=None if shape.tokens == 1 else jnp.int32(0), shape=shape, launch=launch,
    )  # fmt: skip


def page_sparse_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    page_indices: jax.Array,
    q_positions: jax.Array | None,
    key_positions: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    return_scores: bool,
    out_dtype: Any,
    config: Config | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Attention over chosen pages.

    Like `paged_decode`, with page_indices i32[B, Tp, Hkv, C], Tp = 1 (shared by the T rows) or T. Also returns scores
    f32[B, T, Hq, C * P] (-inf where the key is absent) if `return_scores`.
    """
    repeat = page_indices.shape[1]
    shape = decode_shape(q, k_pages, v_pages, per_token=repeat > 1, scale=scale, soft_cap=soft_cap, interpret=interpret)
    listed = page_indices.shape[-1] * shape.page_size
    launch = shape.launch(config, listed, k_pages.dtype, by_page=True)
    lists = page_indices.reshape(shape.groups, shape.kv_heads, -1)
    out, lse, scores = launch_splits(
        functools.partial(page_sparse_decode_kernel, repeat=repeat, window=window, shape=shape, launch=launch),
        (
            to_tiles(q, shape),
            as_pairs(k_pages),
            as_pairs(v_pages),
            page_table,
            lengths,
            lists,
            q_positions,
            key_positions,
            {"k": k_scale, "v": v_scale},
        ),
        name="page_sparse_decode",
        shape=shape,
        launch=launch,
        out_dtype=out_dtype,
        scores_width=listed if return_scores else None,
    )
    scores = None if scores is None else from_tiles(scores * LN2, shape, q.shape)
    return from_tiles(out, shape, q.shape), from_tiles(lse, shape, q.shape), scores
