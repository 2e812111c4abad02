"""How the decode kernels are called: the shape of a call, which program does what, and the one `pallas_call`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import lowering
from pallas_kernels.config import Config, Launch, resolve
from pallas_kernels.merge_splits import merge_splits


class Program(NamedTuple):
    """Which part of the work a program does."""

    group: jax.Array  # request, or (request, t) where each t has its own list
    head: jax.Array  # KV head
    split: jax.Array
    rows: jax.Array  # i32[block_rows] query rows of this tile; those from `Shape.rows` up do not exist


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Static shapes and options of one call."""

    groups: int
    kv_heads: int
    rows: int  # query rows of a (group, KV head): T * G, or G where each t has its own list
    group_size: int  # G
    pages: int
    page_size: int
    key_width: int
    value_width: int
    scale: float
    soft_cap: float | None
    interpret: bool

    def launch(self, config: Config | None, tokens: int, dtype: Any, *, by_page: bool) -> Launch:
        """Decides the tuning values; tokens is the static bound of a row's keys, dtype that of the cache."""
        return resolve(
            config,
            groups=self.groups * self.kv_heads,
            rows=self.rows,
            tokens=tokens,
            key_width=self.key_width,
            value_width=self.value_width,
            dtype=dtype,
            page_size=self.page_size if by_page else 1,
        )

    @property
    def tokens(self) -> int:
        """Query tokens whose rows share a program's keys: T, or 1 where each t has its own list."""
        return self.rows // self.group_size

    def tiles(self, launch: Launch) -> int:
        """Programs that share the query rows of one (group, KV head)."""
        return -(-self.rows // launch.block_rows)

    def programs(self, launch: Launch) -> int:
        """Programs of the whole call."""
        return self.groups * self.kv_heads * launch.splits * self.tiles(launch)


def split_range(begin: Any, end: Any, capacity: int, program: Program, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """First and last-plus-one block of this program's share of the list positions [begin, end).

    They lie in [0, capacity), a static bound.
    """
    block = launch.block_tokens
    first, last = lax.div(jnp.int32(begin), jnp.int32(block)), lax.div(jnp.int32(end) + (block - 1), jnp.int32(block))
    if launch.exact:
        share = pl.cdiv(pl.cdiv(capacity, block), launch.splits)
        start = program.split * share
        return jnp.maximum(first, start), jnp.minimum(last, start + share)
    share = lax.div(last - first + (launch.splits - 1), jnp.int32(launch.splits))
    start = first + program.split * share
    return start, jnp.minimum(last, start + share)


def this_program(shape: Shape, launch: Launch, index: jax.Array | None = None) -> Program:
    """Row tiles of a head run side by side (they read the same keys), then the heads (they share pages).

    index: the program's number among those of this call, where the kernel has others too.
    """
    tiles = shape.tiles(launch)
    index = pl.program_id(0) if index is None else index
    rest, tile = lax.div(index, jnp.int32(tiles)), lax.rem(index, jnp.int32(tiles))
    rest, head = lax.div(rest, jnp.int32(shape.kv_heads)), lax.rem(rest, jnp.int32(shape.kv_heads))
    group, split = lax.div(rest, jnp.int32(launch.splits)), lax.rem(rest, jnp.int32(launch.splits))
    return Program(group, head, split, tile * launch.block_rows + jnp.arange(launch.block_rows, dtype=jnp.int32))


def launch_splits(
    kernel: Callable[..., None],
    operands: tuple[Any, ...],
    *,
    name: str,
    shape: Shape,
    launch: Launch,
    out_dtype: Any,
    scores_width: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The one `pallas_call` of a decode kernel, and the merge of its splits.

    Returns out [groups, Hkv, rows, Dv] of out_dtype, lse f32[groups, Hkv, rows] and scores, None or f32[groups, Hkv,
    rows, scores_width].
    """
    parts = (launch.splits, shape.groups, shape.kv_heads, shape.rows)
    out_shape = [
        lowering.result((*parts, shape.value_width), jnp.float32 if launch.splits > 1 else out_dtype, operands),
        lowering.result(parts, jnp.float32, operands),
    ]
    if scores_width is not None:
        out_shape.append(lowering.result((*parts[1:], scores_width), jnp.float32, operands))
    out, lse, *scores = lowering.call(
        kernel,
        name=name,
        programs=shape.programs(launch),
        in_specs=jax.tree.map(lowering.whole, list(operands)),
        out_specs=[lowering.whole(array) for array in out_shape],
        out_shape=out_shape,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        interpret=shape.interpret,
    )(*operands)
    if launch.splits == 1:
        out, lse = out[0], lse[0]
    else:
        out, lse = merge_splits(out, lse, out_dtype=out_dtype, interpret=shape.interpret)
    return out, lse, scores[0] if scores else None


def decode_shape(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    per_token: bool,
    scale: float,
    soft_cap: float | None,
    interpret: bool,
) -> Shape:
    """The static shape of a call with q [B, T, Hq, D].

    per_token: each t has its own list of keys, so it becomes a group of its own.
    """
    batch, t_rows, heads, key_width = q.shape
    pages, kv_heads, page_size, value_width = v_pages.shape
    group_size = heads // kv_heads
    return Shape(
        groups=batch * t_rows if per_token else batch,
        kv_heads=kv_heads,
        rows=group_size if per_token else t_rows * group_size,
        group_size=group_size,
        pages=pages,
        page_size=page_size,
        key_width=key_width,
        value_width=value_width,
        scale=scale,
        soft_cap=soft_cap,
        interpret=interpret,
    )


def to_tiles(q: jax.Array, shape: Shape) -> jax.Array:
    """[B, T, Hq, D] -> [groups, Hkv, rows, D]. No copy where T is 1 or each t is a group of its own."""
    tiles = q.reshape(shape.groups, -1, shape.kv_heads, shape.group_size, q.shape[-1])
    return tiles.swapaxes(1, 2).reshape(shape.groups, shape.kv_heads, shape.rows, q.shape[-1])


def from_tiles(tiles: jax.Array, shape: Shape, q_shape: tuple[int, ...]) -> jax.Array:
    """[groups, Hkv, rows, *rest] -> [B, T, Hq, *rest]."""
    rest = tiles.shape[3:]
    split = tiles.reshape(shape.groups, shape.kv_heads, -1, shape.group_size, *rest)
    return split.swapaxes(1, 2).reshape(*q_shape[:3], *rest)
