"""Merges what the programs that shared the keys of a row found, in one kernel.

With w_i = exp(lse_i - max lse):  lse = max + log(sum_i w_i),  out = sum_i w_i out_i / sum_i w_i.
The same in plain jnp is `merge_attention`; XLA makes three kernels of it, which cost a small batch as much again as its
attention.
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

MOST_COLUMNS = 128  # of a program
MOST_NUMBERS = 8192  # of all parts together: they are read at once, into half of the registers of four warps


def merge_splits_kernel(
    # inputs
    outs_ref,  # f32[splits, rows, Dv]
    lses_ref,  # f32[splits, rows]
    # outputs
    out_ref,  # [rows, Dv]
    lse_ref,  # f32[rows]
    *,
    columns: int,
):
    """One program: up to `columns` columns of one row."""
    _, _, width = outs_ref.shape
    blocks = -(-width // columns)
    row, block = lax.div(pl.program_id(0), jnp.int32(blocks)), lax.rem(pl.program_id(0), jnp.int32(blocks))
    column = block * columns + jnp.arange(columns, dtype=jnp.int32)
    inside = column < width
    out, lse = merge_columns(outs_ref, lses_ref, row, column, inside)
    lowering.store(out_ref.at[row, jnp.where(inside, column, width)], out.astype(out_ref.dtype), mask=inside)
    lse_ref[row] = lse


def merge_columns(
    outs_ref: Any, lses_ref: Any, row: jax.Array, column: jax.Array, inside: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out f32[columns], lse f32[]) of one row of outs [splits, rows, Dv] and lses f32[splits, rows]."""
    splits = outs_ref.shape[0]
    part = jnp.arange(next_power_of_two(splits), dtype=jnp.int32)
    exists = part < splits
    part = jnp.where(exists, part, 0)
    lses = lowering.load(lses_ref.at[part, row], mask=exists, other=-jnp.inf)
    top = jnp.max(lses)
    weights = jnp.exp(lses - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights)
    safe = jnp.where(total == 0, 1.0, total)
    # A part of weight 0 is not read: it may hold anything.
    mask = (weights > 0)[:, None] & inside[None, :]
    outs = lowering.load(outs_ref.at[part[:, None], row, jnp.where(inside, column, 0)[None, :]], mask=mask, other=0.0)
    # A reciprocal, or the compiler of the interpreter would choose between the two by who else uses the sum.
    out = jnp.sum(outs * (weights * (1.0 / safe))[:, None], axis=0)
    return out, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))


def columns_of(width: int, splits: int) -> int:
    """Columns of a program that merges `splits` parts."""
    return min(MOST_COLUMNS, next_power_of_two(width), max(16, MOST_NUMBERS // next_power_of_two(splits)))


def merge_splits(outs: jax.Array, lses: jax.Array, *, out_dtype: Any, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """outs f32[splits, ..., Dv], lses f32[splits, ...] -> out [..., Dv] of out_dtype, lse f32[...]."""
    splits, width = outs.shape[0], outs.shape[-1]
    operands = outs.reshape(splits, -1, width), lses.reshape(splits, -1)
    rows = operands[1].shape[1]
    columns = columns_of(width, splits)
    shapes = [lowering.result((rows, width), out_dtype, operands), lowering.result((rows,), jnp.float32, operands)]
    out, lse = lowering.call(
        functools.partial(merge_splits_kernel, columns=columns),
        name="merge_splits",
        programs=rows * -(-width // columns),
        in_specs=[lowering.whole(array) for array in operands],
        out_specs=[lowering.whole(shape) for shape in shapes],
        out_shape=shapes,
        num_warps=4 if splits > 8 else 1,
        num_stages=1,
        interpret=interpret,
    )(*operands)
    return out.reshape(*outs.shape[1:]), lse.reshape(lses.shape[1:])
