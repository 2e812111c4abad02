"""The lightning indexer's keys: eight bits and one scale for each token, page by page, and what is done to queries.

A page of `IndexKeys` holds P * d bytes of e4m3, token after token, and then P float32 scales: 8,448 bytes for P = 64
and d = 128. The rules of `quantization.py` hold. Layout: DeepSeek-V3.2 and vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_jax.quantization import (
    E4M3_MAX,
    bytes_of,
    check_pool,
    check_scales,
    e4m3_scale,
    finite_amax,
    from_bytes,
    places,
    register_pool,
    to_e4m3,
)
from sparse_jax.validation import as_float, as_ids, as_int, check_shape, require, require_kept

LEAST_AMAX = 1e-4


@dataclasses.dataclass(frozen=True)
class IndexKeys:
    """Quantised index keys: data u8[N, P * (d + 4)], P = `page_size` tokens of d = `dim` columns in each page.

    A pytree whose one leaf is `data`. Raises ValueError for data that do not fit; the checks are for who constructs
    one: trees of it may hold anything.
    """

    data: jax.Array  # u8[N, P * (d + 4)]
    page_size: int
    dim: int = 128

    pages = property(lambda self: self.data.shape[0])

    def __post_init__(self):
        check_pool(1, self.page_size)
        size = self.page_size * index_key_bytes(self.dim)
        if isinstance(self.data, np.ndarray):
            object.__setattr__(self, "data", jnp.array(self.data))
        if hasattr(self.data, "shape"):
            require(
                self.data.dtype == jnp.uint8 and self.data.ndim == 2 and self.data.shape[1] == size,
                f"data must be uint8 [N, {size}] for page_size {self.page_size} and dim {self.dim}, "
                f"got {self.data.dtype} {list(self.data.shape)}",
            )

    def parts(self) -> tuple[jax.Array, jax.Array]:
        """The keys e4m3 [N, P, d] and their scales f32[N, P]."""
        end = self.page_size * self.dim
        keys = from_bytes(self.data[:, :end].reshape(-1, self.page_size, self.dim), jnp.float8_e4m3fn)
        return keys, from_bytes(self.data[:, end:], jnp.float32)


register_pool(IndexKeys)


def index_key_bytes(dim: int) -> int:
    """Bytes of one key and its scale, d + 4. Raises ValueError for columns that would leave the scales unaligned."""
    dim = as_int("dim", dim)
    require(dim > 0 and dim % 4 == 0, f"dim must be a positive multiple of 4, so that scales align, got {dim}")
    return dim + 4


def create_index_keys(pages: int, page_size: int, dim: int = 128) -> IndexKeys:
    """Empty pages of zero bytes, which read back as 0. ValueError for sizes that do not fit."""
    pages, page_size = check_pool(pages, page_size)
    return IndexKeys(jnp.zeros((pages, page_size * index_key_bytes(dim)), jnp.uint8), page_size, dim)


def quantize_index_keys(x: Any, *, scales: str = "power_of_two") -> tuple[jax.Array, jax.Array]:
    """Keys x [..., d] as e4m3 [..., d] with one scale each, f32[...]: max(amax, 1e-4) / 448.

    x is float32, bfloat16 or float16. scales: "power_of_two" rounds up to the next one; "raw" does not, and has the
    bytes of other writers where division is rounded correctly, as on CPUs. Raises ValueError for other arguments.
    """
    x = as_float("x", x)
    require(x.ndim > 0 and x.shape[-1] > 0, f"x must be [..., d] with d at least 1, got {list(x.shape)}")
    check_scales(scales)
    return _quantize(x, scales)


def quantize_index_query(q: Any, *, scales: str = "power_of_two") -> tuple[jax.Array, jax.Array]:
    """Queries q [..., H, d] as e4m3 [..., H, d] with one scale for each head, f32[..., H], by the rule of the keys.

    The scales belong into the head weights: w * scale. Raises ValueError for other arguments.
    """
    q = as_float("q", q)
    require(q.ndim > 1, f"q must be [..., H, d], got {list(q.shape)}")
    return quantize_index_keys(q, scales=scales)


def write_index_keys(keys: IndexKeys, slots: Any, x: Any, *, scales: str = "power_of_two") -> IndexKeys:
    """Quantises M keys x [M, d] into slots i32[M] and returns the new pool; in place where it is donated.

    A slot is page * P + offset. -1 and slots out of range are not written; the others differ from each other. Raises
    ValueError for shapes and dtypes that do not fit.
    """
    require_kept("keys", keys)
    slots = as_ids("slots", slots)
    check_shape("slots", slots, (None,))
    x = as_float("x", x)
    check_shape("x", x, (slots.size, keys.dim))
    values, scale = quantize_index_keys(x, scales=scales)
    page, offset = places(slots, keys.pages, keys.page_size)
    end = keys.page_size * keys.dim
    data = _put(keys.data, page, offset * keys.dim, bytes_of(values))
    return dataclasses.replace(keys, data=_put(data, page, end + 4 * offset, bytes_of(scale[:, None])))


def dequantize_index_keys(keys: IndexKeys, dtype: Any = jnp.float32) -> jax.Array:
    """The keys [N, P, d] of `dtype`, times their scales."""
    require_kept("keys", keys)
    values, scale = keys.parts()
    return (values.astype(jnp.float32) * scale[..., None]).astype(dtype)


@jax.jit
def hadamard(x: Any) -> jax.Array:
    """y = H x * d^-0.5 along the last axis of x [..., d], d a power of two, in the dtype of x; float32 inside.

    H is Sylvester's matrix, H[i, j] = -1 to the power of the ones in i & j. Orthogonal and its own inverse, so products
    of two transformed vectors are those of the plain ones. Raises ValueError for another width.
    """
    x = as_float("x", x)
    width = x.shape[-1] if x.ndim else 0
    require(width > 0 and width & (width - 1) == 0, f"x must have a power of two columns, got {list(x.shape)}")
    y, half = x.astype(jnp.float32), 1
    while half < width:
        pairs = y.reshape(*x.shape[:-1], -1, 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y, half = jnp.stack([a + b, a - b], axis=-2), 2 * half
    return (y.reshape(x.shape) * width**-0.5).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _quantize(x: jax.Array, scales: str) -> tuple[jax.Array, jax.Array]:
    amax = jnp.maximum(finite_amax(x), LEAST_AMAX)
    scale = e4m3_scale(amax, scales, LEAST_AMAX / E4M3_MAX)
    return to_e4m3(x, scale[..., None], scales), scale


def _put(data: jax.Array, page: jax.Array, start: jax.Array, rows: jax.Array) -> jax.Array:
    """data u8[N, bytes] with rows u8[M, n] at byte start[i] of page[i]; nothing for a page past the end."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    at = jnp.stack([page, start], axis=-1)
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(data, at, rows, numbers, unique_indices=True, mode=mode)
