"""Rows of an MLA cache as the kernels read them: columns, stored types, scales.

A row is d_c latent columns, then d_r rotary ones. It is read in parts, each one array of a block's rows. The columns of
a part need not lie side by side: one-byte numbers come in pairs, four-bit ones in fours, and what is unpacked together
is multiplied together.

Quantised latents become float16 with their scales in them, or float32 for float32 queries. In float16 NVFP4 is exact,
and so is FP8 with scales that are powers of two from 2^-15 to 2^7, which are all that `write_latent` makes by default
of latents up to 57,344; other scales are rounded to float16, and what FP8 rounds to more than 65,504 becomes infinite.
To keep the scales out of the products works for latents of any size and was slower, because each group of columns then
needs probabilities of its own (H200, 128 rows of 2,048 latents, 16 heads: 87 us against 82).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lowering
from pallas_kernels.online_softmax import Keys, pieces

MOST_COLUMNS = 256  # of a part: more do not fit into the registers beside the sums of 64 rows
FP8_GROUP, NVFP4_GROUP = 128, 16  # columns that share a scale


class Columns(NamedTuple):
    """The columns of one part."""

    ids: jax.Array  # i32[size]
    inside: jax.Array  # bool[size]
    is_value: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentRow:
    """How a row is stored: "plain", "fp8_ds_mla" or "nvfp4_ds_mla". Its first `latent_dim` columns are the value."""

    format: str
    latent_dim: int
    rope_dim: int

    def refusal(self) -> str | None:
        """Why the kernel cannot read such rows, if so."""
        group = {"plain": 1, "fp8_ds_mla": FP8_GROUP, "nvfp4_ds_mla": 4 * NVFP4_GROUP}[self.format]
        if self.latent_dim % group or (self.format != "plain" and self.rope_dim % 2):
            return (
                f"the kernel reads {self.format} rows whose latent width is a multiple of {group} and whose rotary "
                f'width is even, got {self.latent_dim} and {self.rope_dim}; use implementation="xla"'
            )
        return None

    def columns(self) -> list[Columns]:
        """Columns of the parts that `load` returns, in its order."""
        d_c, rope = self.latent_dim, self.latent_dim + self.rope_dim
        if self.format == "plain":
            return [*_side_by_side(0, d_c, is_value=True), *_side_by_side(d_c, rope, is_value=False)]
        if self.format == "fp8_ds_mla":
            parts = [
                Columns(start + 2 * _range(FP8_GROUP // 2) + odd, _range(FP8_GROUP // 2) >= 0, True)
                for start in range(0, d_c, FP8_GROUP)
                for odd in (0, 1)
            ]
            return [*parts, *_side_by_side(d_c, rope, is_value=False)]
        parts = [
            Columns(4 * (start + _range(size)) + nibble, 4 * (start + _range(size)) < d_c, True)
            for start, size in _pieces(d_c // 4, MOST_COLUMNS // 4)
            for nibble in range(4)
        ]
        halves = [start + _range(size) for start, size in _pieces(self.rope_dim // 2, MOST_COLUMNS)]
        return parts + [
            Columns(d_c + 2 * half + odd, 2 * half < self.rope_dim, False) for half in halves for odd in (0, 1)
        ]

    def load(self, refs: Any, keys: Keys, compute: Any, interpret: bool) -> list[jax.Array]:
        """Parts [block, size] of the rows of one block, in the types to multiply in; 0 where the key is not present.

        refs: what `operands` gave. compute: of plain rows; float32 there makes all of them float32.
        """
        if self.format == "plain":
            return [_rows(refs[0], keys, c.ids, c.inside).astype(compute) for c in self.columns()]
        wide = jnp.float32 if compute == jnp.float32 else jnp.float16
        parts = (self._fp8 if self.format == "fp8_ds_mla" else self._nvfp4)(refs, keys, wide, interpret)
        # Rotary numbers that are stored as bfloat16 meet bfloat16 queries as they are.
        return [part if part.dtype == compute else part.astype(wide) for part in parts]

    def operands(self, pool: jax.Array) -> tuple[jax.Array, ...]:
        """The views of a pool [N, P, E], or u8[N, P, bytes], that a kernel reads; no copies on a GPU."""
        if self.format == "plain":
            return (pool,)
        words = lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], -1, 2), jnp.int16)
        if self.format == "nvfp4_ds_mla":
            return (words,)
        return words, lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], -1, 4), jnp.float32)

    def _fp8(self, refs: Any, keys: Keys, wide: Any, interpret: bool) -> list[jax.Array]:
        words_ref, scales_ref = refs
        parts = []
        for g in range(self.latent_dim // FP8_GROUP):
            words = _rows(words_ref, keys, g * (FP8_GROUP // 2) + _range(FP8_GROUP // 2))
            at = scales_ref.at[keys.page, keys.offset, self.latent_dim // 4 + g]
            # Nothing else may use the scale, or the compiler widens the rows through shared memory (159 us for 82).
            scale = lowering.load(at, mask=keys.present, other=0.0).astype(wide)[:, None]
            parts += [x.astype(wide) * scale for x in lowering.widen_pairs(words, interpret=interpret)]
        first = self.latent_dim // 2 + self.latent_dim // FP8_GROUP * 2
        for start, size in _pieces(self.rope_dim, MOST_COLUMNS):
            cols = start + _range(size)
            words = _rows(words_ref, keys, first + cols, cols < self.rope_dim)
            parts.append(lax.bitcast_convert_type(words, jnp.bfloat16))
        return parts

    def _nvfp4(self, refs: Any, keys: Keys, wide: Any, interpret: bool) -> list[jax.Array]:
        del wide
        (words_ref,) = refs
        parts = []
        first = (self.latent_dim // 2 + self.rope_dim) // 2  # word of the scales
        for start, size in _pieces(self.latent_dim // 4, MOST_COLUMNS // 4):
            cols = start + _range(size)
            inside = 4 * cols < self.latent_dim
            words = _rows(words_ref, keys, cols, inside).astype(jnp.int32)
            block = lax.div(cols, jnp.int32(NVFP4_GROUP // 4))
            byte = self.latent_dim // (4 * NVFP4_GROUP) * (block & 3) + (block >> 2)
            scales = _rows(words_ref, keys, first + (byte >> 1), inside).astype(jnp.int32)
            scale = _e4m3_to_half(scales >> (8 * (byte & 1))[None, :])
            parts += [_e2m1_to_half(words >> (4 * nibble)) * scale for nibble in range(4)]
        for start, size in _pieces(self.rope_dim // 2, MOST_COLUMNS):
            cols = start + _range(size)
            words = _rows(words_ref, keys, self.latent_dim // 4 + cols, 2 * cols < self.rope_dim)
            parts += lowering.widen_pairs(words, interpret=interpret)
        return parts


def _range(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def _pieces(width: int, most: int) -> list[tuple[int, int]]:
    """`pieces` of any width, none larger than `most`."""
    rest = width % most
    whole = [(start, most) for start in range(0, width - rest, most)]
    return whole + [(width - rest + start, size) for start, size in (pieces(rest) if rest else [])]


def _side_by_side(first: int, end: int, *, is_value: bool) -> list[Columns]:
    parts = []
    for start, size in _pieces(end - first, MOST_COLUMNS):
        cols = first + start + _range(size)
        parts.append(Columns(cols, cols < end, is_value))
    return parts


def _rows(ref: Any, keys: Keys, cols: jax.Array, inside: jax.Array | None = None) -> jax.Array:
    """[block, size] of ref [N, P, width]; 0 where the key is not present."""
    mask = jnp.broadcast_to(keys.present[:, None], (keys.present.size, cols.size))
    mask = mask if inside is None else mask & inside[None, :]
    other = jnp.zeros((), ref.dtype)
    return lowering.load(ref.at[keys.page[:, None], keys.offset[:, None], cols[None, :]], mask=mask, other=other)


def _e2m1_to_half(nibbles: jax.Array) -> jax.Array:
    """The low four bits of int32, sign, two bits of exponent, one of mantissa, as float16: exact.

    They lie in a float16 as they do in themselves, but for its larger bias.
    """
    bits = ((nibbles & 8) << 12) | ((nibbles & 7) << 9)
    return lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16) * jnp.float16(2.0**14)


def _e4m3_to_half(bytes_: jax.Array) -> jax.Array:
    """The low seven bits of int32, a non-negative e4m3, as float16: exact but for NaN, which no scale is."""
    return lax.bitcast_convert_type(((bytes_ & 127) << 7).astype(jnp.int16), jnp.float16) * jnp.float16(2.0**8)
