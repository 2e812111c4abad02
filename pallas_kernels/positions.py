"""Whose keys a row sees: which table row of a head, true positions of queries and keys, and the mask made from them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lowering
from pallas_kernels.decode_call import Program, Shape


def of_head(ref: Any, head: jax.Array) -> jax.Array | int:
    """The head axis of a table or of lengths may be shared by all KV heads."""
    return 0 if ref.shape[1] == 1 else head


def row_positions(
    program: Program, length: jax.Array, q_positions_ref: Any, shape: Shape, repeat: int = 1
) -> jax.Array:
    """True position of each query row: i32[block_rows], or i32[1] when all rows are one token. -1 or less sees nothing.

    repeat: consecutive groups of one request, each with its own token (t is the group within the request).
    """
    if shape.tokens == 1:
        t = lax.rem(program.group, jnp.int32(repeat))
        if q_positions_ref is None:
            return jnp.broadcast_to(length - repeat + t, (1,))
        return jnp.broadcast_to(q_positions_ref[lax.div(program.group, jnp.int32(repeat)), t], (1,))
    t = lax.div(program.rows, jnp.int32(shape.group_size))
    is_row = program.rows < shape.rows
    if q_positions_ref is None:
        return jnp.where(is_row, length - shape.tokens + t, -1)
    return lowering.load(q_positions_ref.at[program.group, jnp.where(is_row, t, 0)], mask=is_row, other=-1)


def true_positions(
    key_positions_ref: Any, index: jax.Array, page: jax.Array, offset: jax.Array, present: jax.Array, program: Program
) -> jax.Array:
    """i32[block] true positions: the place in the table, unless the keys were moved."""
    if key_positions_ref is None:
        return index
    return lowering.load(key_positions_ref.at[page, program.head, offset], mask=present, other=-1)


def visibility(position: jax.Array, present: jax.Array, row_position: jax.Array, window: int | None) -> jax.Array:
    """Which row sees which key: present ones up to its own position, and with a window only that many of them.

    position i32[block], present bool[block], row_position i32[rows] or i32[1]; negative positions mean absent, on both
    sides. Returns bool[rows, block] or bool[1, block].
    """
    visible = (present & (position >= 0))[None, :] & (position[None, :] <= row_position[:, None])
    return visible if window is None else visible & (position[None, :] > row_position[:, None] - window)
