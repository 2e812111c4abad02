"""One-byte numbers in pairs: how the kernels read and move pools of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def as_pairs(pool: jax.Array) -> jax.Array:
    """A one-byte array [..., D] of even D as int16[..., D / 2]; any other array as it is.

    On a GPU this is no copy. Pairs travel through shared memory like 16-bit numbers, which the matrix units can
    transpose, and their offsets stay below 2^31 in any array of less than 2^32 bytes.
    """
    if pool.dtype.itemsize > 1 or pool.shape[-1] % 2:
        return pool
    return lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], -1, 2), jnp.int16)


def offsets_wrap(pool: jax.Array) -> bool:
    """Whether a kernel cannot address `as_pairs(pool)`.

    The lowering takes 64-bit offsets only above 2^32 bytes; between, a 32-bit offset of one-byte elements wraps.
    """
    return pool.dtype.itemsize == 1 and pool.shape[-1] % 2 == 1 and 2**31 < pool.size <= 2**32
