"""Reference consume: a later loop's attention from few keys, as a correction of what an earlier loop captured.

    out = output + mass * a - contribution,   a = attention over the reference's keys alone, at this loop

A row that kept every key it sees is not corrected: it is dense attention, with the bits of `paged_decode`. Both kinds
of row share the two launches here, because a second launch would cost as much as a short correction: the first programs
walk the page tables of the rows that are dense (most often none, and then they end at once), the others the references.

Source: reference correction for looped models, the public FlashLoop code and its review.
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
from pallas_kernels.config import WAVE, Config, Launch, resolve
from pallas_kernels.decode_call import Program, Shape, decode_shape, split_range, this_program, to_tiles
from pallas_kernels.merge_splits import columns_of, merge_columns
from pallas_kernels.online_softmax import Keys, attend
from pallas_kernels.paged_decode import attend_pages
from pallas_kernels.pairs import as_pairs
from pallas_kernels.positions import of_head
from pallas_kernels.reference_capture import token_places


def reference_consume_kernel(
    # inputs
    tiles_ref,  # [B, Hkv, T * G, D], the queries as the dense programs take them
    q_ref,  # [B * T, Hq, 1, D], the same as the others do
    k_ref,  # [N, Hkv, P, D], or i16[N, Hkv, P, D / 2] pairs of e4m3
    v_ref,  # [N, Hkv, P, Dv], or i16[N, Hkv, P, Dv / 2]
    table_ref,  # i32[B, Hkv or 1, W]
    lengths_ref,  # i32[B, 1]
    seen_ref,  # i32[B * T]
    rows_ref,  # i32[B * T], one of R references; -1 none
    indices_ref,  # i32[R, Hq, C]
    count_ref,  # i32[R]
    # outputs
    dense_ref,  # [splits, B, Hkv, T * G, Dv]
    dense_lse_ref,  # f32[splits, B, Hkv, T * G]
    sparse_ref,  # f32[splits, B * T, Hq, 1, Dv]
    sparse_lse_ref,  # f32[splits, B * T, Hq, 1]
    *,
    dense: tuple[Shape, Launch],
    sparse: tuple[Shape, Launch],
):
    """One program: a query tile against a share of its pages, or one row and head against a share of its reference."""
    index, first = pl.program_id(0), dense[0].programs(dense[1])
    scales = {"k": None, "v": None}

    @pl.when(index < first)
    def _():
        shape, launch = dense
        program = this_program(shape, launch, index)
        wanted = _any_dense(program, rows_ref, count_ref, seen_ref, shape)
        attend_pages(
            tiles_ref, k_ref, v_ref, table_ref, lengths_ref, None, None, scales, dense_ref, dense_lse_ref, None,
            program=program, window=None, shape=shape, launch=launch, wanted=wanted,
        )  # fmt: skip

    @pl.when(index >= first)
    def _():
        shape, launch = sparse
        program = this_program(shape, launch, index - first)
        reference, count = _reference(rows_ref, count_ref, program.group)
        seen = seen_ref[program.group]
        count = jnp.where(count == seen, 0, jnp.minimum(count, indices_ref.shape[-1]))
        tokens, group_size = dense[0].tokens, dense[0].group_size
        request, kv_head = lax.div(program.group, jnp.int32(tokens)), lax.div(program.head, jnp.int32(group_size))

        def locate(start: jax.Array) -> Keys:
            place = start + jnp.arange(launch.block_tokens, dtype=jnp.int32)
            at = indices_ref.at[reference, program.head, jnp.where(place < count, place, 0)]
            token = lowering.load(at, mask=place < count, other=-1)
            return token_places(table_ref, request, of_head(table_ref, kv_head), token, seen, shape)

        attend(
            q_ref, k_ref, v_ref, scales, sparse_ref, sparse_lse_ref, None,
            program=program, locate=locate, blocks=split_range(0, count, indices_ref.shape[-1], program, launch),
            uniform_until=None, shape=shape, launch=launch, kv_head=kv_head,
        )  # fmt: skip


def _any_dense(program: Program, rows_ref: Any, count_ref: Any, seen_ref: Any, shape: Shape) -> jax.Array:
    """bool[]: some row of the tile kept all that it sees. The others are computed along and not used."""
    token = lax.div(program.rows, jnp.int32(shape.group_size))
    is_row = program.rows < shape.rows
    row = program.group * shape.tokens + jnp.where(is_row, token, 0)
    reference = lowering.load(rows_ref.at[row], mask=is_row, other=-1)
    known = (reference >= 0) & (reference < count_ref.shape[0])
    count = lowering.load(count_ref.at[jnp.where(known, reference, 0)], mask=known, other=0)
    seen = lowering.load(seen_ref.at[row], mask=is_row, other=-1)
    return jnp.max(jnp.where((count == seen) & (count > 0), 1, 0).astype(jnp.int32)) > 0


def reference_merge_kernel(
    # inputs
    dense_ref,  # [splits, B * Hkv * T * G, Dv]
    dense_lse_ref,  # f32[splits, B * Hkv * T * G]
    sparse_ref,  # f32[splits, B * T * Hq, Dv]
    sparse_lse_ref,  # f32[splits, B * T * Hq]
    seen_ref,  # i32[B * T]
    rows_ref,  # i32[B * T]
    count_ref,  # i32[R]
    mass_ref,  # f32[R, Hq]
    output_ref,  # f32[R, Hq, Dv]
    contribution_ref,  # f32[R, Hq, Dv]
    # outputs
    out_ref,  # [B * T * Hq, Dv]
    *,
    shape: Shape,  # of the dense programs
    columns: int,
):
    """One program: up to `columns` columns of one row and query head, merged and corrected."""
    heads, width = mass_ref.shape[1], out_ref.shape[-1]
    blocks = -(-width // columns)
    index, block = lax.div(pl.program_id(0), jnp.int32(blocks)), lax.rem(pl.program_id(0), jnp.int32(blocks))
    row, head = lax.div(index, jnp.int32(heads)), lax.rem(index, jnp.int32(heads))
    reference, count = _reference(rows_ref, count_ref, row)
    full = (count > 0) & (count == seen_ref[row])
    column = block * columns + jnp.arange(columns, dtype=jnp.int32)
    inside = column < width

    tokens, group_size = shape.tokens, shape.group_size
    request, token = lax.div(row, jnp.int32(tokens)), lax.rem(row, jnp.int32(tokens))
    kv_head, member = lax.div(head, jnp.int32(group_size)), lax.rem(head, jnp.int32(group_size))
    tile = ((request * shape.kv_heads + kv_head) * tokens + token) * group_size + member
    exact, _ = merge_columns(dense_ref, dense_lse_ref, tile, column, inside)
    a, _ = merge_columns(sparse_ref, sparse_lse_ref, index, column, inside)

    at = jnp.where(inside, column, 0)
    output = lowering.load(output_ref.at[reference, head, at], mask=inside, other=0.0)
    contribution = lowering.load(contribution_ref.at[reference, head, at], mask=inside, other=0.0)
    corrected = output + mass_ref[reference, head] * a - contribution
    out = jnp.where(full, exact, jnp.where(count > 0, corrected, 0.0))
    lowering.store(out_ref.at[index, jnp.where(inside, column, width)], out.astype(out_ref.dtype), mask=inside)


def _reference(rows_ref: Any, count_ref: Any, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(a reference that exists, its count): 0 and 0 where the row has none."""
    reference = rows_ref[row]
    known = (reference >= 0) & (reference < count_ref.shape[0])
    reference = jnp.where(known, reference, 0)
    return reference, jnp.where(known, count_ref[reference], 0)


def reference_consume(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    seen: jax.Array,
    rows: jax.Array,
    indices: jax.Array,
    count: jax.Array,
    mass: jax.Array,
    output: jax.Array,
    contribution: jax.Array,
    *,
    scale: float,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """The correction of references, or dense attention where a reference holds all that its row sees.

    q [B, T, Hq, D]; k_pages [N, Hkv, P, D]; v_pages [N, Hkv, P, Dv]; page_table i32[B, Hkv or 1, W]; lengths i32[B, 1];
    seen, rows i32[B, T], rows one of R references or -1; indices i32[R, Hq, C]; count i32[R]; mass f32[R, Hq]; output,
    contribution f32[R, Hq, Dv]. Returns out [B, T, Hq, Dv] in the dtype of q.
    """
    batch, t_rows, heads, width = q.shape
    value_width = v_pages.shape[-1]
    shape = decode_shape(q, k_pages, v_pages, per_token=False, scale=scale, soft_cap=None, interpret=interpret)
    launch = shape.launch(config, page_table.shape[-1] * shape.page_size, k_pages.dtype, by_page=True)
    sparse = sparse_call(shape, launch, batch * t_rows, heads, indices.shape[-1], k_pages.dtype)
    flat = (-1, heads, 1, width)
    seen, rows = seen.reshape(-1), rows.reshape(-1)
    operands = (
        to_tiles(q, shape), q.reshape(flat), as_pairs(k_pages), as_pairs(v_pages), page_table, lengths, seen, rows,
        indices, count,
    )  # fmt: skip
    dense_dtype = jnp.float32 if launch.splits > 1 else q.dtype
    parts = [(launch.splits, shape.groups, shape.kv_heads, shape.rows), (sparse[1].splits, batch * t_rows, heads, 1)]
    results = [
        lowering.result((*part, *last), dtype, operands)
        for part, first in zip(parts, (dense_dtype, jnp.float32), strict=True)
        for last, dtype in (((value_width,), first), ((), jnp.float32))
    ]
    found = lowering.call(
        functools.partial(reference_consume_kernel, dense=(shape, launch), sparse=sparse),
        name="reference_consume",
        programs=shape.programs(launch) + sparse[0].programs(sparse[1]),
        in_specs=[lowering.whole(array) for array in operands],
        out_specs=[lowering.whole(array) for array in results],
        out_shape=results,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        interpret=interpret,
    )(*operands)
    found = [x.reshape(x.shape[0], -1, *x.shape[4:]) for x in found]
    merged = _merge((*found, seen, rows, count, mass, output, contribution), shape, q.dtype)
    return merged.reshape(batch, t_rows, heads, value_width)


def sparse_call(shape: Shape, launch: Launch, rows: int, heads: int, capacity: int, dtype: Any) -> tuple[Shape, Launch]:
    """Shape and launch of the corrected rows, beside dense programs of `shape` and `launch` in the same kernel."""
    alone = dataclasses.replace(shape, groups=rows, kv_heads=heads, rows=1, group_size=1)
    config = Config(block_tokens=launch.block_tokens, num_warps=launch.num_warps, exact=launch.exact)
    chosen = resolve(
        config,
        groups=rows * heads,
        rows=1,
        tokens=capacity,
        key_width=shape.key_width,
        value_width=shape.value_width,
        dtype=dtype,
        page_size=1,
    )
    blocks = -(-capacity // chosen.block_tokens)
    if not chosen.exact and rows * heads * chosen.splits > WAVE:
        # What does not run at once anyway is cut into shares of at least three blocks, so that loads follow each other
        # (H200, 16 heads of 3,277 keys: 17.0 us with 18 shares, 18.9 with 33).
        chosen = dataclasses.replace(chosen, splits=min(chosen.splits, -(-blocks // 3)))
    return alone, chosen


def _merge(operands: tuple[jax.Array, ...], shape: Shape, dtype: Any) -> jax.Array:
    """out [B * T * Hq, Dv] of the parts and the references."""
    dense, _, sparse, sparse_lse, *_ = operands
    rows, width = sparse_lse.shape[1], sparse.shape[-1]
    columns = columns_of(width, dense.shape[0])  # as the merge of dense attention cuts them, for its bits
    result = lowering.result((rows, width), dtype, operands)
    return lowering.call(
        functools.partial(reference_merge_kernel, shape=shape, columns=columns),
        name="reference_merge",
        programs=rows * -(-width // columns),
        in_specs=[lowering.whole(array) for array in operands],
        out_specs=lowering.whole(result),
        out_shape=result,
        num_warps=4 if dense.shape[0] > 8 else 1,
        num_stages=1,
        interpret=shape.interpret,
    )(*operands)
