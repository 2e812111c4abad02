"""The body that the decode kernels share: one query tile attends to a range of keys with an online softmax.

For query row r and the keys t of its split, with s[r, t] = soft_cap(scale * q[r] . k[t]):

    m = max_t s[r, t],  l = sum_t exp(s[r, t] - m),  acc = sum_t exp(s[r, t] - m) v[t]
    out = acc / l,  lse = m + log(l)

What differs between the kernels is where key t lies and which rows see it. Each kernel says so in a `locate` function,
which maps the first list position of a block to `Keys`. Everything is float32 except the operands of the two products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lowering
from pallas_kernels.config import Launch, next_power_of_two
from pallas_kernels.decode_call import Program, Shape

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


class Keys(NamedTuple):
    """Where the keys of one block lie, and who sees them. `block` = block_tokens."""

    page: jax.Array  # i32[block], or i32[] when the block lies inside one page; any value where not present
    offset: jax.Array  # i32[block]
    present: jax.Array  # bool[block]: the key may be read
    visible: jax.Array  # bool[block_rows, block] or bool[1, block]: the row sees the key


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


def attend(
    q_ref: Any,  # [groups, Hkv, rows, D]
    k_ref: Any,  # [N, Hkv, P, D], or i16[N, Hkv, P, D / 2] pairs of e4m3
    v_ref: Any,  # [N, Hkv, P, Dv], or i16[N, Hkv, P, Dv / 2]
    scales: dict[str, Any],  # "k", "v": None, f32[1] or f32[N, Hkv, P]
    out_ref: Any,  # [splits, groups, Hkv, rows, Dv]
    lse_ref: Any,  # f32[splits, groups, Hkv, rows]
    scores_ref: Any,  # None or f32[groups, Hkv, rows, list length], in base 2
    *,
    program: Program,
    locate: Callable[[jax.Array], Keys],
    blocks: tuple[jax.Array, jax.Array],
    uniform_until: jax.Array | None,
    shape: Shape,
    launch: Launch,
    kv_head: jax.Array | None = None,
) -> None:
    """Walks the blocks [blocks[0], blocks[1]) and writes this program's part of out and lse.

    In the blocks below `uniform_until` every row sees what any row sees; None means in all of them. kv_head: whose keys
    they are, where q, out, lse and scores have an axis of query heads (`shape.kv_heads` of them) in its place.
    """
    group, head, _, rows = program
    is_row = rows < shape.rows
    compute = product_dtype(q_ref.dtype, k_ref.dtype)
    q = [
        lowering.load(
            q_ref.at[group, head, rows[:, None], cols[None, :]], mask=is_row[:, None] & inside[None, :], other=0.0
        )
        for cols, inside in columns(shape.key_width, k_ref.dtype)
    ]
    common = scales["k"] is not None and scales["k"].ndim == 1
    factor: Any = shape.scale * scales["k"][0] if common else shape.scale  # of the scores: f32[] or f32[block_rows, 1]
    if compute == jnp.float16 and q_ref.dtype != compute:
        q, power = into_range(q)
        factor = factor * power
    q = [part.astype(compute) for part in q]
    step = functools.partial(
        _attend_block, q, factor, k_ref, v_ref, scales, scores_ref,
        program=program, kv_head=program.head if kv_head is None else kv_head, locate=locate, compute=compute,
        shape=shape, launch=launch,
    )  # fmt: skip
    size = launch.block_rows
    carry = (
        jnp.full((size,), -jnp.inf, jnp.float32),
        jnp.zeros((size,), jnp.float32),
        tuple(jnp.zeros((size, cols.size), jnp.float32) for cols, _ in columns(shape.value_width, v_ref.dtype)),
    )
    first, last = blocks
    if uniform_until is None:
        carry = lax.fori_loop(first, last, functools.partial(step, mixed=False), carry)
    else:
        middle = jnp.clip(uniform_until, first, jnp.maximum(first, last))
        carry = lax.fori_loop(first, middle, functools.partial(step, mixed=False), carry)
        carry = lax.fori_loop(middle, last, functools.partial(step, mixed=True), carry)
    v_scale = scales["v"][0] if scales["v"] is not None and scales["v"].ndim == 1 else None
    stored = columns(shape.value_width, v_ref.dtype)
    write_rows(carry, v_scale, stored, out_ref, lse_ref, program=program, shape=shape)


def write_rows(
    carry: Any,
    factor: Any,
    stored: list[tuple[jax.Array, jax.Array]],
    out_ref: Any,
    lse_ref: Any,
    *,
    program: Program,
    shape: Shape,
) -> None:
    """Divides by the softmax sum, multiplies by the scale of all values, and stores the rows that exist.

    stored: ids of the columns of each part of the sums, and whether they lie inside the width.
    """
    group, head, split, rows = program
    is_row = rows < shape.rows
    m, l, acc = carry
    safe_l = jnp.where(l == 0, 1.0, l)
    lowering.store(
        lse_ref.at[split, group, head, rows], jnp.where(l == 0, -jnp.inf, (m + jnp.log2(safe_l)) * LN2), mask=is_row
    )
    for (cols, inside), part in zip(stored, acc, strict=True):
        # Selected, not divided: a padding row next to rows that attend a NaN must still be 0.
        out = jnp.where((l == 0)[:, None], 0.0, part / safe_l[:, None])
        out = (out if factor is None else out * factor).astype(out_ref.dtype)
        lowering.store(
            out_ref.at[split, group, head, rows[:, None], cols[None, :]], out, mask=is_row[:, None] & inside[None, :]
        )


def product_dtype(q_dtype: Any, cache_dtype: Any) -> Any:
    """What keys, values and probabilities are multiplied in.

    Pairs of e4m3 become float16, which holds them exactly and takes one instruction for two; bfloat16 would take six.
    """
    if cache_dtype == jnp.int16:
        return jnp.float32 if q_dtype == jnp.float32 else jnp.float16
    return q_dtype if cache_dtype.itemsize < 2 else jnp.promote_types(q_dtype, cache_dtype)


def into_range(q: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Rows of bfloat16 queries over a power of two that float16 can hold, and that power, f32[rows, 1].

    What is lost is below 2^-24 of the largest number of a row.
    """
    parts = [part.astype(jnp.float32) for part in q]
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(part), axis=1) for part in parts])
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    power = jnp.where((largest > 0) & (power > 0) & (power < jnp.inf), power, 1.0)[:, None]
    return [part / power for part in parts], power


def columns(width: int, stored: Any) -> list[tuple[jax.Array, jax.Array]]:
    """Column ids of each piece, and whether they lie inside the width. Stored pairs: even and odd columns apart."""
    if stored != jnp.int16:
        ids = [start + jnp.arange(size, dtype=jnp.int32) for start, size in pieces(width)]
    else:
        halves = [start + jnp.arange(size, dtype=jnp.int32) for start, size in pieces(width // 2)]
        ids = [2 * half + odd for half in halves for odd in (0, 1)]
    return [(cols, cols < width) for cols in ids]


def rows_of(ref: Any, keys: Keys, head: jax.Array, compute: Any, interpret: bool) -> list[jax.Array]:
    """The [block, piece] parts of the keys or values of one block; 0 where the key is not present."""
    page = keys.page if keys.page.ndim == 0 else keys.page[:, None]
    width = ref.shape[-1]  # of what is stored: half as many where it is pairs
    padded = sum(size for _, size in pieces(width)) > width
    parts = []
    for start, size in pieces(width):
        cols = start + jnp.arange(size, dtype=jnp.int32)
        mask = jnp.broadcast_to(keys.present[:, None], (keys.present.size, cols.size))
        mask = mask & (cols < width)[None, :] if padded else mask
        at = ref.at[page, head, keys.offset[:, None], cols[None, :]]
        if ref.dtype == jnp.int16:
            parts += lowering.widen_pairs(lowering.load(at, mask=mask, other=0), interpret=interpret)
        else:
            parts.append(lowering.load(at, mask=mask, other=0.0))
    return [part.astype(compute) for part in parts]


def _token_scale(ref: Any, keys: Keys, head: jax.Array) -> jax.Array:
    """f32[block] multipliers of the stored values."""
    return lowering.load(ref.at[keys.page, head, keys.offset], mask=keys.present, other=0.0)


def _attend_block(
    q: list[jax.Array],
    factor: Any,
    k_ref: Any,
    v_ref: Any,
    scales: dict[str, Any],
    scores_ref: Any,
    index: jax.Array,
    carry: tuple[jax.Array, jax.Array, tuple[jax.Array, ...]],
    *,
    mixed: bool,
    program: Program,
    kv_head: jax.Array,
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
    k = rows_of(k_ref, keys, kv_head, compute, shape.interpret)
    v = rows_of(v_ref, keys, kv_head, compute, shape.interpret)
    s = functools.reduce(jnp.add, [lowering.dot(q_part, k_part.T) for q_part, k_part in zip(q, k, strict=True)])
    # An if for each option keeps the common loop as short as it can be.
    if scales["k"] is not None and scales["k"].ndim > 1:
        factor = factor * _token_scale(scales["k"], keys, kv_head)
    if shape.soft_cap is None:
        s = s * (factor * LOG2E)
    else:
        s = (shape.soft_cap * LOG2E) * jnp.tanh(s * factor * (1.0 / shape.soft_cap))
    s = jnp.where(keys.visible, s, -jnp.inf)
    if scores_ref is not None:
        position = index * launch.block_tokens + jnp.arange(launch.block_tokens, dtype=jnp.int32)
        mask = (program.rows < shape.rows)[:, None] & (position < scores_ref.shape[-1])[None, :]
        lowering.store(
            scores_ref.at[program.group, program.head, program.rows[:, None], position[None, :]], s, mask=mask
        )

    m_new, l, p, decay = softmax_step(s, m, l)
    after = None
    if scales["v"] is not None and scales["v"].ndim > 1:
        p = p * _token_scale(scales["v"], keys, kv_head)
        p = jnp.where(keys.visible, p, 0.0) if mixed else p
        if compute == jnp.float16:
            p, after = _into_unit(p)
    sums = [_weighted_sum(p, value, keys, compute, mixed) for value in v]
    sums = sums if after is None else [part * after for part in sums]
    return m_new, l, tuple(part * decay[:, None] + new for part, new in zip(acc, sums, strict=True))


def softmax_step(s: jax.Array, m: jax.Array, l: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(new m, new l, probabilities over exp2(new m), what older sums decay by) for scores s [rows, block] in base 2."""
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    # A row that has seen no key yet keeps m = -inf; subtracting 0 instead leaves exp2(-inf) = 0 and makes no NaN.
    shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    decay = jnp.exp2(m - shift)
    p = jnp.exp2(s - shift[:, None])
    return m_new, l * decay + jnp.sum(p, axis=1), p, decay


def _into_unit(p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of scaled probabilities over the largest of each, and that, f32[rows, 1]: float16 may not hold the scale.

    Row by row, because what one row does not see must not change it.
    """
    size = jnp.abs(p)
    largest = jnp.max(jnp.where(size < jnp.inf, size, 0.0), axis=1)[:, None]
    largest = jnp.where(largest > 0, largest, 1.0)
    return p / largest, largest


def _weighted_sum(p: jax.Array, v: jax.Array, keys: Keys, compute: Any, mixed: bool) -> jax.Array:
    """The product p @ v.

    With `mixed`, a non-finite value reaches only the rows that see it (as NaN): 0 * NaN must not poison the others.
    """
    if not mixed:
        return lowering.dot(p.astype(compute), v)
    finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
    clean = lowering.dot(p.astype(compute), jnp.where(finite, v, jnp.zeros_like(v)))
    sees = jnp.broadcast_to(keys.visible, p.shape).astype(jnp.bfloat16)
    poisoned = lowering.dot(sees, (~finite).astype(jnp.bfloat16))
    return jnp.where(poisoned > 0, jnp.nan, clean)
