"""The body that the decode kernels share: one query tile attends to a range of keys with an online softmax.

For query row r and the keys t of its split, with s[r, t] = soft_cap(scale * q[r] . k[t]):

    m = max_t s[r, t],  l = sum_t exp(s[r, t] - m),  acc = sum_t exp(s[r, t] - m) v[t]
    out = acc / l,  lse = m + log(l)

What differs between the kernels is where key t lies and which rows see it. Each kernel says so in a `locate` function,
which maps the first list position of a block to `Keys`. Everything is float32 except the operands of the two products.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import lowering
from pallas_kernels.config import Launch, next_power_of_two

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


class Keys(NamedTuple):
    """Where the keys of one block lie, and who sees them. `block` = block_tokens."""

    page: jax.Array  # i32[block], or i32[] when the block lies inside one page; any value where not present
    offset: jax.Array  # i32[block]
    present: jax.Array  # bool[block]: the key may be read
    visible: jax.Array  # bool[block_rows, block] or bool[1, block]: the row sees the key


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

    def tiles(self, launch: Launch) -> int:
        """Programs that share the query rows of one (group, KV head)."""
        return -(-self.rows // launch.block_rows)

    def programs(self, launch: Launch) -> int:
        """Programs of the whole call."""
        return self.groups * self.kv_heads * launch.splits * self.tiles(launch)


def pieces(width: int) -> list[tuple[int, int]]:
    """Cuts a width into (start, power-of-two size) pieces: two that fill it where they can, else one padded piece.

    A dot needs at least 16 columns.
    """
    high = 1 << (width.bit_length() - 1)
    rest = width - high
    if width >= 16 and rest == 0:
        return [(0, width)]
    if rest >= 16 and rest & (rest - 1) == 0:
        return [(0, high), (high, rest)]
    return [(0, max(16, next_power_of_two(width)))]


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


def this_program(shape: Shape, launch: Launch) -> Program:
    """Row tiles of a head run side by side (they read the same keys), then the heads (they share pages)."""
    tiles = shape.tiles(launch)
    index = pl.program_id(0)
    rest, tile = lax.div(index, jnp.int32(tiles)), lax.rem(index, jnp.int32(tiles))
    rest, head = lax.div(rest, jnp.int32(shape.kv_heads)), lax.rem(rest, jnp.int32(shape.kv_heads))
    group, split = lax.div(rest, jnp.int32(launch.splits)), lax.rem(rest, jnp.int32(launch.splits))
    return Program(group, head, split, tile * launch.block_rows + jnp.arange(launch.block_rows, dtype=jnp.int32))


def attend(
    q_ref: Any,  # [groups, Hkv, rows, D]
    k_ref: Any,  # [N, Hkv, P, D]
    v_ref: Any,  # [N, Hkv, P, Dv]
    scales: dict[str, Any],  # "k", "v": None, f32[1] or f32[N, Hkv, P]
    out_ref: Any,  # [splits, groups, Hkv, rows, Dv]
    lse_ref: Any,  # f32[splits, groups, Hkv, rows]
    scores_ref: Any,  # None or f32[groups, Hkv, rows, list length]
    *,
    program: Program,
    locate: Callable[[jax.Array], Keys],
    blocks: tuple[jax.Array, jax.Array],
    uniform_until: jax.Array | None,
    shape: Shape,
    launch: Launch,
) -> None:
    """Walks the blocks [blocks[0], blocks[1]) and writes this program's part of out and lse.

    In the blocks below `uniform_until` every row sees what any row sees; None means in all of them.
    """
    group, head, split, rows = program
    is_row = rows < shape.rows
    compute = q_ref.dtype if k_ref.dtype.itemsize < 2 else jnp.promote_types(q_ref.dtype, k_ref.dtype)
    q = [
        lowering.load(
            q_ref.at[group, head, rows[:, None], cols[None, :]], mask=is_row[:, None] & inside[None, :], other=0.0
        ).astype(compute)
        for cols, inside in _columns(shape.key_width)
    ]
    step = functools.partial(
        _attend_block,
        q,
        k_ref,
        v_ref,
        scales,
        scores_ref,
        program=program,
        locate=locate,
        compute=compute,
        shape=shape,
        launch=launch,
    )
    size = launch.block_rows
    carry = (
        jnp.full((size,), -jnp.inf, jnp.float32),
        jnp.zeros((size,), jnp.float32),
        tuple(jnp.zeros((size, cols.size), jnp.float32) for cols, _ in _columns(shape.value_width)),
    )
    first, last = blocks
    if uniform_until is None:
        carry = lax.fori_loop(first, last, functools.partial(step, mixed=False), carry)
    else:
        middle = jnp.clip(uniform_until, first, jnp.maximum(first, last))
        carry = lax.fori_loop(first, middle, functools.partial(step, mixed=False), carry)
        carry = lax.fori_loop(middle, last, functools.partial(step, mixed=True), carry)

    m, l, acc = carry
    safe_l = jnp.where(l == 0, 1.0, l)
    lowering.store(
        lse_ref.at[split, group, head, rows], jnp.where(l == 0, -jnp.inf, (m + jnp.log2(safe_l)) * LN2), mask=is_row
    )
    for (cols, inside), part in zip(_columns(shape.value_width), acc, strict=True):
        # Selected, not divided: a padding row next to rows that attend a NaN must still be 0.
        out = jnp.where((l == 0)[:, None], 0.0, part / safe_l[:, None]).astype(out_ref.dtype)
        lowering.store(
            out_ref.at[split, group, head, rows[:, None], cols[None, :]], out, mask=is_row[:, None] & inside[None, :]
        )


def _columns(width: int) -> list[tuple[jax.Array, jax.Array]]:
    """Column ids of each piece and whether they lie inside the width."""
    ids = [start + jnp.arange(size, dtype=jnp.int32) for start, size in pieces(width)]
    return [(cols, cols < width) for cols in ids]


def _rows_of(ref: Any, keys: Keys, head: jax.Array, width: int, compute: Any) -> list[jax.Array]:
    """The [block, piece] parts of the keys or values of one block; 0 where the key is not present."""
    page = keys.page if keys.page.ndim == 0 else keys.page[:, None]
    padded = sum(size for _, size in pieces(width)) > width
    parts = []
    for cols, inside in _columns(width):
        mask = jnp.broadcast_to(keys.present[:, None], (keys.present.size, cols.size))
        mask = mask & inside[None, :] if padded else mask
        parts.append(
            lowering.load(ref.at[page, head, keys.offset[:, None], cols[None, :]], mask=mask, other=0.0).astype(compute)
        )
    return parts


def _token_scale(ref: Any, keys: Keys, head: jax.Array) -> jax.Array:
    """f32[] or f32[block] multiplier of the stored values."""
    if ref.ndim == 1:
        return ref[0]
    return lowering.load(ref.at[keys.page, head, keys.offset], mask=keys.present, other=0.0)


def _attend_block(
    q: list[jax.Array],
    k_ref: Any,
    v_ref: Any,
    scales: dict[str, Any],
    scores_ref: Any,
    index: jax.Array,
    carry: tuple[jax.Array, jax.Array, tuple[jax.Array, ...]],
    *,
    mixed: bool,
    program: Program,
    locate: Callable[[jax.Array], Keys],
    compute: Any,
    shape: Shape,
    launch: Launch,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """One step of the online softmax, in base 2.

    mixed: some row may not see a key of the block that another row sees.
    """
    m, l, acc = carry
    keys = locate(index * launch.block_tokens)
    k = _rows_of(k_ref, keys, program.head, shape.key_width, compute)
    v = _rows_of(v_ref, keys, program.head, shape.value_width, compute)
    s = functools.reduce(jnp.add, [lowering.dot(q_part, k_part.T) for q_part, k_part in zip(q, k, strict=True)])
    # An if for each option keeps the common loop as short as it can be.
    factor = shape.scale if scales["k"] is None else shape.scale * _token_scale(scales["k"], keys, program.head)
    if shape.soft_cap is None and scores_ref is None:
        s = s * (factor * LOG2E)
    else:
        s = s * factor
        s = s if shape.soft_cap is None else shape.soft_cap * jnp.tanh(s * (1.0 / shape.soft_cap))
    s = jnp.where(keys.visible, s, -jnp.inf)
    if scores_ref is not None:
        position = index * launch.block_tokens + jnp.arange(launch.block_tokens, dtype=jnp.int32)
        mask = (program.rows < shape.rows)[:, None] & (position < scores_ref.shape[-1])[None, :]
        lowering.store(
            scores_ref.at[program.group, program.head, program.rows[:, None], position[None, :]], s, mask=mask
        )
    if shape.soft_cap is not None or scores_ref is not None:
        s = s * LOG2E

    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    # A row that has seen no key yet keeps m = -inf; subtracting 0 instead leaves exp2(-inf) = 0 and makes no NaN.
    shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    decay = jnp.exp2(m - shift)
    p = jnp.exp2(s - shift[:, None])
    l = l * decay + jnp.sum(p, axis=1)
    p = p if scales["v"] is None else p * _token_scale(scales["v"], keys, program.head)
    acc = tuple(
        part * decay[:, None] + _weighted_sum(p, value, keys, compute, mixed)
        for part, value in zip(acc, v, strict=True)
    )
    return m_new, l, acc


def _weighted_sum(p: jax.Array, v: jax.Array, keys: Keys, compute: Any, mixed: bool) -> jax.Array:
    """The product p @ v.

    With `mixed`, a non-finite value reaches only the rows that see it (as NaN): 0 * NaN must not poison the others.
    """
    if not mixed:
        return lowering.dot(p.astype(compute), v)
    finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
    clean = lowering.dot(p.astype(compute), jnp.where(finite, v, jnp.zeros_like(v)))
    sees = jnp.broadcast_to(keys.visible, p.shape).astype(jnp.bfloat16)
    poisoned = lowering.dot(sees, jnp.where(finite, 0.0, 1.0).astype(jnp.bfloat16))
    return jnp.where(poisoned > 0, jnp.nan, clean)


def visibility(position: jax.Array, present: jax.Array, row_position: jax.Array, window: int | None) -> jax.Array:
    """Which row sees which key: present ones up to its own position, and with a window only that many of them.

    position i32[block], present bool[block], row_position i32[rows] or i32[1]; negative positions mean absent, on both
    sides. Returns bool[rows, block] or bool[1, block].
    """
    visible = (present & (position >= 0))[None, :] & (position[None, :] <= row_position[:, None])
    return visible if window is None else visible & (position[None, :] > row_position[:, None] - window)


def launch_splits(
    kernel: Callable[..., None],
    operands: tuple[Any, ...],
    *,
    name: str,
    shape: Shape,
    launch: Launch,
    out_dtype: Any,
    scores_width: int | None = None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The one `pallas_call`: every operand as a whole, because programs follow ids through them.

    operands is a pytree whose first leaf is q [groups, Hkv, rows, D]. Returns out [splits, groups, Hkv, rows, Dv], lse
    and scores.
    """

    def whole(array: Any) -> pl.BlockSpec:
        rank = len(array.shape)
        return pl.BlockSpec(array.shape, lambda _: (0,) * rank)

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
        in_specs=jax.tree.map(whole, list(operands)),
        out_specs=[whole(array) for array in out_shape],
        out_shape=out_shape,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        interpret=interpret,
    )(*operands)
    return out, lse, scores[0] if scores else None


def decode_shape(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, *, per_token: bool, scale: float, soft_cap: float | None
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
    )


def to_tiles(q: jax.Array, shape: Shape) -> jax.Array:
    """[B, T, Hq, D] -> [groups, Hkv, rows, D]. No copy where T is 1 or each t is a group of its own."""
    tiles = q.reshape(shape.groups, -1, shape.kv_heads, shape.group_size, q.shape[-1])
    return tiles.swapaxes(1, 2).reshape(shape.groups, shape.kv_heads, shape.rows, q.shape[-1])


def from_tiles(tiles: jax.Array, shape: Shape, q_shape: tuple[int, ...], *, lead: int) -> jax.Array:
    """[*lead, groups, Hkv, rows, *rest] -> [*lead, B, T, Hq, *rest]; `lead` counts the axes in front."""
    front, rest = tiles.shape[:lead], tiles.shape[lead + 3 :]
    split = tiles.reshape(*front, shape.groups, shape.kv_heads, -1, shape.group_size, *rest)
    return split.swapaxes(lead + 1, lead + 2).reshape(*front, *q_shape[:3], *rest)
