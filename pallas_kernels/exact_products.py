"""Products of queries with keys or summaries that are as exact as float32 ones, on matrix units for 16-bit numbers.

A 16-bit number is exact in its own type, and so is the product of two in float32. A query of more digits is cut into
three bfloat16 parts that add up to it; where a program has one row only, its parts take the place of other rows, which
the matrix units would multiply anyway. Other types are multiplied in float32, without matrix units.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lowering
from pallas_kernels.decode_call import Program, Shape
from pallas_kernels.online_softmax import columns

PARTS = 3


def shape_of(q: jax.Array, pages: int, page_size: int, interpret: bool) -> Shape:
    """The static shape of a call that multiplies q [B, Hkv, rows, D] with a pool of `pages` pages."""
    batch, kv_heads, rows, width = q.shape
    return Shape(
        groups=batch,
        kv_heads=kv_heads,
        rows=rows,
        group_size=rows,
        pages=pages,
        page_size=page_size,
        key_width=width,
        value_width=width,
        scale=1.0,
        soft_cap=None,
        interpret=interpret,
    )


def in_parts(q: jax.Array, stored: Any) -> jax.Array:
    """Queries [...] as [parts, ...] in the dtype in which they are multiplied with numbers that are stored as `stored`.

    e4m3 is exact in bfloat16.
    """
    narrow = jnp.dtype(jnp.bfloat16 if stored == jnp.float8_e4m3fn else stored)
    if narrow.itemsize == 2 and q.dtype == narrow:
        return q[None]
    if narrow != jnp.bfloat16:
        return q.astype(jnp.float32)[None]
    rest, parts = q.astype(jnp.float32), []
    for _ in range(PARTS):
        # reduce_precision: XLA may simplify a plain cast there and back away, and with it what is left over.
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return jnp.stack(parts)


def load_parts(parts_ref: Any, stored: Any, program: Program, shape: Shape) -> list[list[jax.Array]]:
    """The query tile of a program from [parts, groups, Hkv, rows, D]: of each part its pieces, as keys come in them.

    Of a single row all parts are one tile.
    """
    group, head, _, rows = program
    count, alone = parts_ref.shape[0], shape.rows == 1
    exists = rows < (count if alone else shape.rows)

    def piece(part: Any, cols: jax.Array, inside: jax.Array) -> jax.Array:
        at = (rows[:, None], group, head, 0) if alone else (part, group, head, rows[:, None])
        return lowering.load(parts_ref.at[*at, cols[None, :]], mask=exists[:, None] & inside[None, :], other=0.0)

    pieces = columns(shape.key_width, stored)
    return [[piece(part, *columns) for columns in pieces] for part in range(1 if alone else count)]


def product(parts: list[list[jax.Array]], keys: list[jax.Array], shape: Shape) -> jax.Array:
    """f32[block_rows, block], or f32[1, block] of a single row: what the queries make of the keys [block, piece]."""
    dots = [lowering.dot(q, k.T) for part in parts for q, k in zip(part, keys, strict=True)]
    total = functools.reduce(jnp.add, dots)
    return jnp.sum(total, axis=0)[None, :] if shape.rows == 1 else total


def rows_of_product(program: Program, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """(row numbers, which of them exist) of what `product` returns."""
    rows = jnp.zeros((1,), jnp.int32) if shape.rows == 1 else program.rows
    return rows, rows < shape.rows
