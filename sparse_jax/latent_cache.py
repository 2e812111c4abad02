"""Quantised latents of MLA, byte by byte.

One token of a `LatentCache`, d_c latent and d_r rotary columns:

    fp8_ds_mla     d_c e4m3 | one float32 scale for each 128 columns | d_r bfloat16
    nvfp4_ds_mla   d_c e2m1, the even column in the low nibble | d_r e4m3 | one e4m3 scale for each 16 columns

512 and 64 columns take 656 and 352 bytes. The last group of 128 may be smaller: a latent of 32 columns has one scale.
The scale of NVFP4 block s lies at byte n/4 * (s % 4) + s // 4 of the n, in plain order where n is no multiple of 4, and
zeros fill the record up to a multiple of 16 bytes.

The rules of `quantization.py` hold. e2m1 has no NaN, so that becomes 0. There are no further scales: global ones, as
serving engines keep for keys and queries, have no effect on these layouts. Source: FlashMLA and vLLM, DeepSeek-V3.2.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_jax.quantization import (
    E4M3_MAX,
    LEAST_SCALE,
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
from sparse_jax.validation import as_array, as_float, as_ids, as_int, check_shape, require, require_kept

FORMATS = {
    "fp8_ds_mla": "fp8_ds_mla",
    "fp8": "fp8_ds_mla",
    "fp8_e4m3": "fp8_ds_mla",
    "nvfp4_ds_mla": "nvfp4_ds_mla",
}
FP8_GROUP = 128  # columns for each scale
NVFP4_BLOCK = 16
LEAST_NVFP4_SCALE = 2.0**-9  # the smallest e4m3 above 0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True)
class LatentCache:
    """Quantised MLA latents: data u8[N, P, bytes], one record for each token.

    format: "fp8_ds_mla" (also "fp8", "fp8_e4m3") or "nvfp4_ds_mla"; the columns are `latent_dim`, then `rope_dim`. A
    pytree whose one leaf is `data`. Raises ValueError for data that do not fit; the checks are for who constructs a
    cache: trees of it may hold anything.
    """

    data: jax.Array  # u8[N, P, bytes]
    format: str = "fp8_ds_mla"
    latent_dim: int = 512
    rope_dim: int = 64

    pages = property(lambda self: self.data.shape[0])
    page_size = property(lambda self: self.data.shape[1])
    width = property(lambda self: self.latent_dim + self.rope_dim)

    def __post_init__(self):
        size = latent_bytes(self.format, self.latent_dim, self.rope_dim)
        object.__setattr__(self, "format", FORMATS[self.format])
        if isinstance(self.data, np.ndarray):
            object.__setattr__(self, "data", jnp.array(self.data))
        if hasattr(self.data, "shape"):
            what = f"{self.format} of latent_dim {self.latent_dim} and rope_dim {self.rope_dim}"
            require(
                self.data.dtype == jnp.uint8 and self.data.ndim == 3 and self.data.shape[2] == size,
                f"data must be uint8 [N, P, {size}] for {what}, got {self.data.dtype} {list(self.data.shape)}",
            )


register_pool(LatentCache)


def latent_bytes(format: str, latent_dim: int = 512, rope_dim: int = 64) -> int:
    """Bytes of one token: 656 for "fp8_ds_mla" and 352 for "nvfp4_ds_mla" of 512 and 64 columns.

    fp8: d_c + 4 ceil(d_c / 128) + 2 d_r, so 16 bytes of scales for 512 columns. nvfp4: d_c/2 + d_r + d_c/16, rounded up
    to 16. Raises ValueError for another format, and for columns that would leave scales or rotary columns unaligned.
    """
    require(format in FORMATS, f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    latent_dim, rope_dim = as_int("latent_dim", latent_dim), as_int("rope_dim", rope_dim)
    fp8 = FORMATS[format] == "fp8_ds_mla"
    step, rope_step = (4, 2) if fp8 else (NVFP4_BLOCK, 1)
    require(
        latent_dim > 0 and latent_dim % step == 0 and rope_dim >= 0 and rope_dim % rope_step == 0,
        f"{format} needs latent_dim a positive multiple of {step} and rope_dim a multiple of {rope_step}, "
        f"got {latent_dim} and {rope_dim}",
    )
    if fp8:
        return latent_dim + 4 * -(-latent_dim // FP8_GROUP) + 2 * rope_dim
    return -(-(latent_dim // 2 + rope_dim + latent_dim // NVFP4_BLOCK) // 16) * 16


def create_latent_cache(
    pages: int, page_size: int, format: str = "fp8_ds_mla", *, latent_dim: int = 512, rope_dim: int = 64
) -> LatentCache:
    """An empty cache of zero bytes, which read back as 0. ValueError for sizes that do not fit."""
    pages, page_size = check_pool(pages, page_size)
    data = jnp.zeros((pages, page_size, latent_bytes(format, latent_dim, rope_dim)), jnp.uint8)
    return LatentCache(data, format, latent_dim, rope_dim)


def quantize_latent(x: Any, format: str, *, scales: str = "power_of_two", latent_dim: int = 512) -> jax.Array:
    """The records u8[..., bytes] of latents x [..., d_c + d_r], float32, bfloat16 or float16.

    latent_dim: d_c; the columns after it are rotary and have no scale. scales, of fp8: "power_of_two" rounds amax / 448
    (1e-4 if that is more) up to a power of two, so that readers of float32 and of e8m0 scales agree. "raw" keeps it, at
    least the smallest normal number; its bytes are those of other writers where division is rounded correctly, as on
    CPUs. NVFP4 has one rule whatever `scales` says: max(amax / 6, 2^-9) rounded up to the next e4m3, at most 448.
    Raises ValueError for shapes, dtypes and options that do not fit.
    """
    x = as_float("x", x)
    check_scales(scales)
    latent_dim = as_int("latent_dim", latent_dim)
    require(
        x.ndim > 0 and x.shape[-1] >= latent_dim,
        f"x must have latent_dim = {latent_dim} columns and then rotary ones, got {list(x.shape)}",
    )
    latent_bytes(format, latent_dim, x.shape[-1] - latent_dim)
    return _quantize_latent(x, FORMATS[format], scales, latent_dim)


def dequantize_latent(
    cache: LatentCache | jax.Array,
    dtype: Any = jnp.float32,
    *,
    format: str | None = None,
    latent_dim: int = 512,
    rope_dim: int = 64,
) -> jax.Array:
    """Latents [..., d_c + d_r] of `dtype`: of a LatentCache, [N, P, d_c + d_r], or of records u8[..., bytes].

    Records need the `format` and their columns; a cache knows them. Exact in float32; in bfloat16 too, if fp8 scales
    are powers of two. Raises ValueError for records that do not have the bytes of the format.
    """
    require_kept("cache", cache)
    if isinstance(cache, LatentCache):
        records, format, latent_dim, rope_dim = cache.data, cache.format, cache.latent_dim, cache.rope_dim
    else:
        records = as_array("cache", cache)
        require(format is not None, f"format is required for records {list(records.shape)} that are no LatentCache")
    size = latent_bytes(str(format), latent_dim, rope_dim)
    require(
        records.dtype == jnp.uint8 and records.ndim > 0 and records.shape[-1] == size,
        f"records must be uint8 [..., {size}] for {format} of latent_dim {latent_dim} and rope_dim {rope_dim}, "
        f"got {records.dtype} {list(records.shape)}",
    )
    return _dequantize_latent(records, FORMATS[str(format)], latent_dim, rope_dim).astype(dtype)


def write_latent(cache: LatentCache, slots: Any, x: Any, *, scales: str = "power_of_two") -> LatentCache:
    """Quantises M latents x [M, d_c + d_r] into slots i32[M] and returns the new cache; in place where it is donated.

    A slot is page * P + offset. -1 and slots out of range are not written; the others differ from each other. `scales`
    as in `quantize_latent`. Raises ValueError for shapes and dtypes that do not fit.
    """
    require_kept("cache", cache)
    slots = as_ids("slots", slots)
    check_shape("slots", slots, (None,))
    x = as_float("x", x)
    check_shape("x", x, (slots.size, cache.width))
    records = quantize_latent(x, cache.format, scales=scales, latent_dim=cache.latent_dim)
    page, offset = places(slots, cache.pages, cache.page_size)
    data = cache.data.at[page, offset].set(records, mode="drop", unique_indices=True)
    return dataclasses.replace(cache, data=data)


def _groups(x: jax.Array, size: int) -> jax.Array:
    """[..., groups, size] of x [..., columns]; the last group is filled up with zeros, which change no maximum."""
    lack = -x.shape[-1] % size
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, lack)])
    return x.reshape(*x.shape[:-1], -1, size)


def _spread(scale: jax.Array, size: int, columns: int) -> jax.Array:
    return jnp.repeat(scale, size, axis=-1)[..., :columns]  # one for each column


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize_latent(x: jax.Array, format: str, scales: str, latent_dim: int) -> jax.Array:
    latent, rope = x[..., :latent_dim].astype(jnp.float32), x[..., latent_dim:]
    size = latent_bytes(format, latent_dim, rope.shape[-1])
    if format == "fp8_ds_mla":
        scale = e4m3_scale(finite_amax(_groups(latent, FP8_GROUP)), scales, LEAST_SCALE[scales])
        values = to_e4m3(latent, _spread(scale, FP8_GROUP, latent_dim), scales)
        return jnp.concatenate([bytes_of(part) for part in (values, scale, rope.astype(jnp.bfloat16))], axis=-1)
    scale = _nvfp4_scale(finite_amax(_groups(latent, NVFP4_BLOCK)))
    code = _e2m1_code(latent, _spread(scale.astype(jnp.float32), NVFP4_BLOCK, latent_dim))
    parts = [code[..., 0::2] | code[..., 1::2] << 4, bytes_of(to_e4m3(rope)), _permuted(bytes_of(scale))]
    record = jnp.concatenate(parts, axis=-1)
    return jnp.pad(record, [(0, 0)] * (x.ndim - 1) + [(0, size - record.shape[-1])])


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _dequantize_latent(records: jax.Array, format: str, latent_dim: int, rope_dim: int) -> jax.Array:
    if format == "fp8_ds_mla":
        start = records.shape[-1] - 2 * rope_dim
        latent = from_bytes(records[..., :latent_dim], jnp.float8_e4m3fn)
        scale = from_bytes(records[..., latent_dim:start], jnp.float32)
        rope, group = from_bytes(records[..., start:], jnp.bfloat16), FP8_GROUP
    else:
        start = latent_dim // 2
        packed = records[..., :start]
        code = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
        latent = jnp.asarray(E2M1 + tuple(-x for x in E2M1), jnp.float32)[code]
        scale = from_bytes(records[..., start + rope_dim :][..., : latent_dim // NVFP4_BLOCK], jnp.float8_e4m3fn)
        scale = _permuted(scale, undo=True)
        rope, group = from_bytes(records[..., start : start + rope_dim], jnp.float8_e4m3fn), NVFP4_BLOCK
    scale = _spread(scale.astype(jnp.float32), group, latent_dim)
    return jnp.concatenate([latent.astype(jnp.float32) * scale, rope.astype(jnp.float32)], axis=-1)


def _nvfp4_scale(amax: jax.Array) -> jax.Array:
    """The least e4m3 whose sixfold is at least amax, from 2^-9 to 448: e4m3 like amax."""
    amax = jnp.clip(amax, 6 * LEAST_NVFP4_SCALE, 6 * E4M3_MAX)
    scale = (amax / 6).astype(jnp.float8_e4m3fn)
    low = scale.astype(jnp.float32) * 6 < amax  # exact, so a rounded quotient does no harm
    return lax.bitcast_convert_type(bytes_of(scale) + low.astype(jnp.uint8), jnp.float8_e4m3fn)


def _e2m1_code(x: jax.Array, scale: jax.Array) -> jax.Array:
    """u8: the nibble nearest to x / scale, found without division: limits times a scale of four bits are exact."""
    size, code = jnp.abs(x), jnp.zeros(x.shape, jnp.uint8)
    for above, (low, high) in enumerate(itertools.pairwise(E2M1)):
        limit = (low + high) / 2 * scale
        passed = size > limit if above % 2 == 0 else size >= limit  # a tie goes to the even code
        code += passed.astype(jnp.uint8)
    return jnp.where(jnp.signbit(x) & ~jnp.isnan(x), code | 8, code)


def _permuted(scale: jax.Array, undo: bool = False) -> jax.Array:
    count = scale.shape[-1]
    if count % 4:
        return scale
    rows = (4, count // 4) if undo else (count // 4, 4)
    return jnp.swapaxes(scale.reshape(*scale.shape[:-1], *rows), -1, -2).reshape(scale.shape)
