"""Dense attention over a page table, split over the sequence.

Key j of a request lies at offset j % P of page `page_table[j // P]`. Row t of a request sees the keys j < length whose
true position is at most its own, and with a window only the last `window` of those.
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
    Program,
    Shape,
    decode_shape,
    from_tiles,
    launch_splits,
    split_range,
    this_program,
    to_tiles,
)
from pallas_kernels.online_softmax import Keys, attend
from pallas_kernels.pairs import as_pairs
from pallas_kernels.positions import of_head, row_positions, true_positions, visibility


def paged_decode_kernel(
    # inputs
    q_ref,  # [B, Hkv, T * G, D]
    k_ref,  # [N, Hkv, P, D], or i16[N, Hkv, P, D / 2] pairs of e4m3
    v_ref,  # [N, Hkv, P, Dv], or i16[N, Hkv, P, Dv / 2]
    table_ref,  # i32[B, Hkv or 1, W]
    lengths_ref,  # i32[B, Hkv or 1]
    q_positions_ref,  # None or i32[B, T]
    key_positions_ref,  # None or i32[N, Hkv, P]
    scales,  # {"k", "v"}: None, f32[1] or f32[N, Hkv, P]
    # outputs
    out_ref,  # [splits, B, Hkv, T * G, Dv]
    lse_ref,  # f32[splits, B, Hkv, T * G]
    scores_ref=None,  # f32[B, Hkv, T * G, W * P], in base 2; written where some row of the tile sees the key
    *,
    window: int | None,
    shape: Shape,
    launch: Launch,
):
    """One program: a query tile against a share of the keys of its page table."""
    program = this_program(shape, launch)
    attend_pages(
        q_ref, k_ref, v_ref, table_ref, lengths_ref, q_positions_ref, key_positions_ref, scales, out_ref, lse_ref,
        scores_ref, program=program, window=window, shape=shape, launch=launch,
    )  # fmt: skip


def attend_pages(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    lengths_ref: Any,
    q_positions_ref: Any,
    key_positions_ref: Any,
    scales: dict[str, Any],
    out_ref: Any,
    lse_ref: Any,
    scores_ref: Any,
    *,
    program: Program,
    window: int | None,
    shape: Shape,
    launch: Launch,
    wanted: jax.Array | None = None,
) -> None:
    """The work of one program of `paged_decode_kernel`.

    wanted bool[]: False walks over no key and writes the empty row.
    """
    width, page_size = table_ref.shape[-1], shape.page_size
    length = lengths_ref[program.group, of_head(lengths_ref, program.head)]
    row_position = row_positions(program, length, q_positions_ref, shape)
    end = jnp.clip(length, 0, width * page_size)

    def locate(start: jax.Array) -> Keys:
        lane = jnp.arange(launch.block_tokens, dtype=jnp.int32)
        page, offset, present = table_pages(table_ref, program, start, lane, shape)
        index = start + lane
        present = present & (index < end)
        position = true_positions(key_positions_ref, index, page, offset, present, program)
        visible = visibility(position, present, row_position, window)
        if shape.tokens == 1:
            present = visible[0]
        return Keys(page, offset, present, visible)

    # Only where the place is the position can rows bound the walk. (min first: a position may be the largest int32)
    begin, uniform_until = jnp.int32(0), None if shape.tokens == 1 else jnp.int32(0)
    if key_positions_ref is None:
        end = jnp.minimum(end - 1, jnp.max(row_position)) + 1
        first_row = jnp.min(
            jnp.where(row_position >= 0, jnp.minimum(row_position, width * page_size), width * page_size)
        )
        if window is not None:
            begin = jnp.clip(first_row + 1 - window, 0, end)
        elif shape.tokens > 1:
            uniform_until = lax.div(jnp.minimum(first_row + 1, end), jnp.int32(launch.block_tokens))
    first, last = split_range(begin, end, width * page_size, program, launch)
    blocks = first, last if wanted is None else jnp.where(wanted, last, first)
    attend(
        q_ref, k_ref, v_ref, scales, out_ref, lse_ref, scores_ref,
        program=program, locate=locate, blocks=blocks, uniform_until=uniform_until, shape=shape, launch=launch,
    )  # fmt: skip


def table_pages(
    table_ref: Any, program: Program, start: jax.Array, lane: jax.Array, shape: Shape
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(page, offset, present) of the keys start + lane; one scalar page where the block lies inside a page."""
    request, head = program.group, of_head(table_ref, program.head)
    page_size, width = shape.page_size, table_ref.shape[-1]
    if page_size >= lane.size:
        page = table_ref[request, head, lax.div(start, jnp.int32(page_size))]
        offset = lax.rem(start, jnp.int32(page_size)) + lane
    else:
        index = start + lane
        in_table = index < width * page_size
        page = lowering.load(
            table_ref.at[request, head, jnp.where(in_table, lax.div(index, jnp.int32(page_size)), 0)],
            mask=in_table,
            other=-1,
        )
        offset = lax.rem(index, jnp.int32(page_size))
    present = (page >= 0) & (page < shape.pages)
    return jnp.where(present, page, 0), offset, jnp.broadcast_to(present, lane.shape)


def paged_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    q_positions: jax.Array | None,
    key_positions: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out_dtype: Any,
    config: Config | None,
    interpret: bool,
    return_scores: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Dense paged attention.

    q [B, T, Hq, D]; k_pages [N, Hkv, P, D]; v_pages [N, Hkv, P, Dv]; page_table i32[B, Hkv or 1, W]; lengths i32[B, Hkv
    or 1]; q_positions None or i32[B, T]; key_positions None or i32[N, Hkv, P]; k_scale, v_scale None, f32[1] or f32[N,
    Hkv, P].
    Returns out [B, T, Hq, Dv] of out_dtype, lse f32[B, T, Hq] and, if `return_scores`, the scores f32[B, Hkv, T * G, W
    * P] of the kernel: in base 2, with anything where the row does not see the key. They change no bit of the others.
    """
    shape = decode_shape(q, k_pages, v_pages, per_token=False, scale=scale, soft_cap=soft_cap, interpret=interpret)
    capacity = page_table.shape[-1] * shape.page_size
    launch = shape.launch(config, capacity, k_pages.dtype, by_page=True)
    out, lse, scores = launch_splits(
        functools.partial(paged_decode_kernel, window=window, shape=shape, launch=launch),
        (
            to_tiles(q, shape),
            as_pairs(k_pages),
            as_pairs(v_pages),
            page_table,
            lengths,
            q_positions,
            key_positions,
            {"k": k_scale, "v": v_scale},
        ),
        name="paged_decode",
        shape=shape,
        launch=launch,
        out_dtype=out_dtype,
        scores_width=capacity if return_scores else None,
    )
    return from_tiles(out, shape, q.shape), from_tiles(lse, shape, q.shape), scores
