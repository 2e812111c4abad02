"""Quantisation: the rules of rounding that all quantised caches share, and scales for eight-bit keys and values.

Scales come from finite values only. What is too large for an element, infinities included, becomes its largest value,
and NaN stays NaN. Rounding is to nearest, ties to even. Zeros get the least scale and read back as 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_jax.validation import INT32_MAX, as_array, as_float, as_int, check_shape, debug_ids, require

SCALES = ("power_of_two", "raw")
E4M3_MAX = 448.0
# Of FlashMLA's quantiser and of vLLM's cache writer.
LEAST_SCALE = {"power_of_two": 1e-4, "raw": float(np.finfo(np.float32).tiny)}


def quantize_kv(
    x: Any, *, per: str = "token", scales: str = "power_of_two", valid: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Keys or values x [..., D] as e4m3 and their scales, which are the `k_scale` or `v_scale` of the attentions.

    per="token": f32[...], one for each vector, so a pool [N, Hkv, P, D] gets f32[N, Hkv, P]. per="tensor": f32[].
    A stored value times its scale is the real one. scales: "power_of_two" rounds amax / 448 up to the next one, "raw"
    does not. valid: bool[...], which vectors count for the scale; the others saturate. Raises ValueError for shapes,
    dtypes and options that do not fit.
    """
    x = as_float("x", x)
    require(x.ndim > 0 and x.shape[-1] > 0, f"x must be [..., D] with D at least 1, got {list(x.shape)}")
    require(per in ("token", "tensor"), f"per must be 'token' or 'tensor', got {per!r}")
    check_scales(scales)
    if valid is not None:
        valid = as_array("valid", valid)
        require(valid.dtype == jnp.bool_, f"valid must be bool, got {valid.dtype} {list(valid.shape)}")
        check_shape("valid", valid, x.shape[:-1])
    return _quantize_kv(x, valid, per, scales)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _quantize_kv(x: jax.Array, valid: jax.Array | None, per: str, scales: str) -> tuple[jax.Array, jax.Array]:
    counted = x if valid is None else jnp.where(valid[..., None], x, 0)
    scale = e4m3_scale(finite_amax(counted, -1 if per == "token" else None), scales, LEAST_SCALE[scales])
    return to_e4m3(x, scale[..., None] if per == "token" else scale, scales), scale


def check_scales(scales: str) -> None:
    """Raises ValueError for a rule that does not exist."""
    require(scales in SCALES, f"scales must be one of {SCALES}, got {scales!r}")


def finite_amax(x: jax.Array, axis: Any = -1) -> jax.Array:
    """f32: the largest |x| along the axes, of the finite values only."""
    x = jnp.abs(x.astype(jnp.float32))
    return jnp.max(x, axis=axis, initial=0.0, where=jnp.isfinite(x))


def e4m3_scale(amax: jax.Array, scales: str, least: float) -> jax.Array:
    """max(amax / 448, least) in float32, for "power_of_two" rounded up to the next one."""
    if scales == "raw":
        return jnp.maximum(_divide(amax, jnp.float32(E4M3_MAX)), least)
    # 448 = 1.75 * 2^8. Adding all mantissas above that of 1.75 carries into the exponent just where amax is above
    # 1.75 * 2^e: no division, so no rounding, and amax = 448 * 2^k gives 2^k on every platform.
    least = 2.0 ** math.ceil(math.log2(least))
    bits = lax.bitcast_convert_type(jnp.maximum(amax, E4M3_MAX * least), jnp.int32)
    exponent = ((bits + 0x1FFFFF) >> 23) - 8
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def to_e4m3(x: jax.Array, scale: jax.Array | None = None, scales: str = "power_of_two") -> jax.Array:
    """x / scale as e4m3: clipped first, because a plain cast of what is above 464 gives NaN."""
    x = x.astype(jnp.float32)
    if scale is not None:
        x = _divide(x, scale) if scales == "raw" else x * _reciprocal(scale)
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def _divide(x: jax.Array, y: jax.Array) -> jax.Array:
    # XLA makes a product with the reciprocal of a division by something broadcast, which rounds twice.
    return x / lax.optimization_barrier(jnp.broadcast_to(y, x.shape))


def _reciprocal(scale: jax.Array) -> jax.Array:
    # Of a power of two: the exponent, negated. Exact where division is not.
    return lax.bitcast_convert_type((254 << 23) - lax.bitcast_convert_type(scale, jnp.int32), jnp.float32)


def places(slots: jax.Array, pages: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Pages i32[M] and offsets i32[M] of slots i32[M] for a scatter that drops; all differ if the valid slots do."""
    debug_ids("slots", slots, min(pages * page_size, INT32_MAX))
    inside = (slots >= 0) & (slots // page_size < pages)
    # Absent ones each past the end in a page of its own: a promise of unique indices spares a GPU the atomics.
    absent = pages + jnp.arange(slots.size, dtype=jnp.int32)
    return jnp.where(inside, slots // page_size, absent), jnp.where(inside, slots % page_size, 0)


def check_pool(pages: int, page_size: int) -> tuple[int, int]:
    """Both as ints. Raises ValueError for pages that are no power of two, and for slots that are no int32."""
    pages, page_size = as_int("pages", pages), as_int("page_size", page_size)
    require(pages > 0, f"pages must be at least 1, got {pages}")
    power = page_size > 0 and page_size & (page_size - 1) == 0
    require(power, f"page_size must be a power of two, got {page_size}")
    require(pages * page_size <= INT32_MAX, f"slots are int32: {pages} pages * {page_size} is above {INT32_MAX}")
    return pages, page_size


def bytes_of(x: jax.Array) -> jax.Array:
    """u8[..., D * itemsize] of x [..., D]."""
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw if raw.ndim == x.ndim else raw.reshape(*x.shape[:-1], -1)


def from_bytes(raw: jax.Array, dtype: Any) -> jax.Array:
    """[..., bytes / itemsize] of raw u8[..., bytes]."""
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(raw if size == 1 else raw.reshape(*raw.shape[:-1], -1, size), dtype)


def register_pool(cls: type) -> None:
    """Makes a dataclass a pytree whose one leaf is its first field `data`; the others are static.

    Trees are not put together through the constructor: they may hold None, a sharding, or a stack of pools.
    """
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(pool: Any) -> tuple[Any, Any]:
        return ((jax.tree_util.GetAttrKey("data"), pool.data),), tuple(getattr(pool, name) for name in names[1:])

    def unflatten(static: Any, leaves: Iterable[Any]) -> Any:
        pool: Any = object.__new__(cls)
        for name, value in zip(names, (*leaves, *static), strict=True):
            object.__setattr__(pool, name, value)
        return pool

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
