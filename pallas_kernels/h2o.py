"""H2O's accumulator: the attention probabilities of one decode step added to decayed sums beside the keys, in place.

For the R query rows of a (request, KV head) and the tokens t of its window, with s[r, t] = scale * q[r] . k[t]:

    lse[r] = log sum_t exp(s[r, t]),   H[t] <- max_r exp(s[r, t] - lse[r]) + decay * H[t]

R is 1 where a group is represented by its mean query. A probability needs the sum over the whole window, so there are
two launches: `h2o_scores` reads each key once and leaves s and a logsumexp for each share of the window, `h2o_update`
reads s back (4 R bytes a token beside the 2 D bytes of its key) and updates H in place.

Source: H2O, arXiv 2306.14048; the decayed window form is that of the H2O flows for vortex_torch.
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
from pallas_kernels.config import Config, Launch, next_power_of_two
from pallas_kernels.decode_call import Shape, split_range, this_program
from pallas_kernels.exact_products import in_parts, load_parts, product, rows_of_product, shape_of
from pallas_kernels.online_softmax import LOG2E, Keys, rows_of
from pallas_kernels.paged_decode import table_pages
from pallas_kernels.pairs import as_pairs
from pallas_kernels.positions import of_head

UPDATE_TOKENS = 1024  # of a program of `h2o_update`


def h2o_scores_kernel(
    # inputs
    parts_ref,  # [parts, B, Hkv, R, D] that add up to the queries
    k_ref,  # [N, Hkv, P, D], or i16[N, Hkv, P, D / 2] pairs of e4m3
    table_ref,  # i32[B, Hkv or 1, W]
    windows_ref,  # i32[B, Hkv, 2], first token and end; equal where nothing is accumulated
    factors_ref,  # f32[2], scale and decay
    # outputs
    s_ref,  # f32[B, Hkv, R, W * P] in base 2; written inside the window only
    lse_ref,  # f32[splits, B, Hkv, R] in base 2
    *,
    shape: Shape,
    launch: Launch,
):
    """One program: a tile of query rows against a share of the window."""
    program = this_program(shape, launch)
    group, head, split, _ = program
    rows, is_row = rows_of_product(program, shape)
    start, end = windows_ref[group, head, 0], windows_ref[group, head, 1]
    parts = load_parts(parts_ref, k_ref.dtype, program, shape)
    factor = factors_ref[0] * LOG2E

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        m, l = carry
        lane = jnp.arange(launch.block_tokens, dtype=jnp.int32)
        page, offset, present = table_pages(table_ref, program, index * launch.block_tokens, lane, shape)
        token = index * launch.block_tokens + lane
        inside = (token >= start) & (token < end)
        present = present & inside
        keys = Keys(page, offset, present, present[None, :])
        k = rows_of(k_ref, keys, head, parts[0][0].dtype, shape.interpret)
        s = product(parts, k, shape)
        s = jnp.where(present[None, :], s * factor, -jnp.inf)
        lowering.store(s_ref.at[group, head, rows[:, None], token[None, :]], s, mask=is_row[:, None] & inside[None, :])
        m_new = jnp.maximum(m, jnp.max(s, axis=1))
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        return m_new, l * jnp.exp2(m - shift) + jnp.sum(jnp.exp2(s - shift[:, None]), axis=1)

    first, last = split_range(start, end, table_ref.shape[-1] * shape.page_size, program, launch)
    nothing = jnp.full(rows.shape, -jnp.inf, jnp.float32), jnp.zeros(rows.shape, jnp.float32)
    m, l = lax.fori_loop(first, last, step, nothing)
    lse = jnp.where(l == 0, -jnp.inf, m + jnp.log2(jnp.where(l == 0, 1.0, l)))
    lowering.store(lse_ref.at[split, group, head, rows], lse, mask=is_row)


def h2o_update_kernel(
    # inputs
    s_ref,  # f32[B, Hkv, R, W * P], in base 2
    lse_ref,  # f32[splits, B, Hkv, R], in base 2
    table_ref,  # i32[B, Hkv or 1, W]
    windows_ref,  # i32[B, Hkv, 2]
    factors_ref,  # f32[2], scale and decay
    scores_ref,  # [N, Hkv, P]
    # outputs
    new_ref,  # like scores, and the same memory
    *,
    kv_heads: int,
    blocks: int,  # programs of a (request, KV head)
):
    """One program: UPDATE_TOKENS tokens of a (request, KV head)."""
    splits, _, _, rows = lse_ref.shape
    pages, _, page_size = new_ref.shape
    rest, block = lax.div(pl.program_id(0), jnp.int32(blocks)), lax.rem(pl.program_id(0), jnp.int32(blocks))
    request, head = lax.div(rest, jnp.int32(kv_heads)), lax.rem(rest, jnp.int32(kv_heads))
    start, end = windows_ref[request, head, 0], windows_ref[request, head, 1]
    size = min(UPDATE_TOKENS, next_power_of_two(s_ref.shape[-1]))
    token = block * size + jnp.arange(size, dtype=jnp.int32)
    inside = (token >= start) & (token < end)
    place = jnp.where(inside, token, 0)
    at = table_ref.at[request, of_head(table_ref, head), lax.div(place, jnp.int32(page_size))]
    page = lowering.load(at, mask=inside, other=-1)
    present = inside & (page >= 0) & (page < pages)
    part = jnp.arange(next_power_of_two(splits), dtype=jnp.int32)

    def one_row(row: jax.Array, p: jax.Array) -> jax.Array:
        shares = lowering.load(
            lse_ref.at[jnp.where(part < splits, part, 0), request, head, row], mask=part < splits, other=-jnp.inf
        )
        top = jnp.max(shares)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        lse = top + jnp.log2(jnp.sum(jnp.exp2(shares - top)))
        s = lowering.load(s_ref.at[request, head, row, token], mask=present, other=-jnp.inf)
        return jnp.maximum(p, jnp.where(s == -jnp.inf, 0.0, jnp.exp2(s - lse)))

    # Where no program has anything to do, nothing is read: no row is walked.
    count = jnp.where((block * size < end) & (block * size + size > start), jnp.int32(rows), jnp.int32(0))
    p = lax.fori_loop(jnp.int32(0), count, one_row, jnp.zeros((size,), jnp.float32))
    p = jnp.where(p < jnp.inf, p, 0.0)  # not NaN either: a sick query or key says nothing
    page, offset = jnp.where(present, page, 0), lax.rem(place, jnp.int32(page_size))
    old = lowering.load(scores_ref.at[page, head, offset], mask=present, other=0.0).astype(jnp.float32)
    new = (p + factors_ref[1] * old).astype(new_ref.dtype)
    # The interpreter writes masked elements back: one past the end is nobody's place.
    lowering.store(new_ref.at[jnp.where(present, page, pages), head, offset], new, mask=present)


def h2o_accumulate(
    scores: jax.Array,
    q: jax.Array,
    k_pages: jax.Array,
    page_table: jax.Array,
    windows: jax.Array,
    factors: jax.Array,
    *,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """One step of the accumulator.

    scores f32 or bf16 [N, Hkv, P]; q [B, Hkv, R, D]; k_pages [N, Hkv, P, D]; page_table i32[B, Hkv or 1, W]; windows
    i32[B, Hkv, 2]; factors f32[2] (scale, decay). Returns the new scores; the old ones' memory is taken over.
    """
    shape = shape_of(q, k_pages.shape[0], k_pages.shape[2], interpret)
    capacity = page_table.shape[-1] * shape.page_size
    launch = shape.launch(config, capacity, k_pages.dtype, by_page=True)
    if config is None or config.splits is None:
        # A key without its value is half the work: twice as many shares as attention makes (H200, 512 programs of
        # 32,768 bf16 keys, D 128, G 4: 1,068 us with 10 splits, 1,131 with 5).
        launch = dataclasses.replace(launch, splits=min(2 * launch.splits, -(-capacity // launch.block_tokens)))
    if config is None or config == Config(exact=config.exact):
        launch = dataclasses.replace(launch, num_warps=2, num_stages=3)  # its blocks are half as large, too
    operands = in_parts(q, k_pages.dtype), as_pairs(k_pages), page_table, windows, factors
    s, lse = _scores(operands, shape, launch, capacity)
    return _update((s, lse, page_table, windows, factors, scores), shape)


def _scores(operands: tuple[Any, ...], shape: Shape, launch: Launch, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Scores f32[B, Hkv, R, W * P] of the window, and the logsumexp f32[splits, B, Hkv, R] of each share of it."""
    rows = shape.groups, shape.kv_heads, shape.rows
    results = [
        lowering.result((*rows, capacity), jnp.float32, operands),
        lowering.result((launch.splits, *rows), jnp.float32, operands),
    ]
    return lowering.call(
        functools.partial(h2o_scores_kernel, shape=shape, launch=launch),
        name="h2o_scores",
        programs=shape.programs(launch),
        in_specs=[lowering.whole(array) for array in operands],
        out_specs=[lowering.whole(array) for array in results],
        out_shape=results,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        interpret=shape.interpret,
    )(*operands)


def _update(operands: tuple[Any, ...], shape: Shape) -> jax.Array:
    """The sums after this step, in the memory of the old ones, the last operand."""
    s, *_, scores = operands
    blocks = -(-s.shape[-1] // min(UPDATE_TOKENS, next_power_of_two(s.shape[-1])))
    new = lowering.result(scores.shape, scores.dtype, operands)
    return lowering.call(
        functools.partial(h2o_update_kernel, kv_heads=shape.kv_heads, blocks=blocks),
        name="h2o_update",
        programs=shape.groups * shape.kv_heads * blocks,
        in_specs=[lowering.whole(array) for array in operands],
        out_specs=lowering.whole(new),
        out_shape=new,
        num_warps=4,
        num_stages=1,
        interpret=shape.interpret,
        aliases={len(operands) - 1: 0},
    )(*operands)
