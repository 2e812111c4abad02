"""Reference capture: dense attention that also keeps, of each row and query head, its k most probable keys.

With z_j = scale * q . k_j, p = softmax(z) over the n keys that a row sees, and sel the k largest p:

    mass = sum over sel of p_j,  contribution = sum over sel of p_j v_j

The dense kernel leaves its scores in memory (4 bytes a query head and key, beside the 2 D + 2 Dv of the key itself),
`top_k` finds sel in them, and the kernel here reads the chosen scores and values. Keys are read once.

Source: reference correction for looped models, the public FlashLoop code and its review.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import lowering
from pallas_kernels.config import INT32_MAX, WAVE, Config, Launch, next_power_of_two
from pallas_kernels.decode_call import Shape, decode_shape, from_tiles, split_range, this_program, to_tiles
from pallas_kernels.merge_splits import columns_of
from pallas_kernels.online_softmax import LOG2E, Keys, columns, rows_of
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.pairs import as_pairs
from pallas_kernels.positions import of_head
from pallas_kernels.top_k import LARGEST_K, MASKED, to_keys, top_k


def reference_capture_kernel(
    # inputs
    scores_ref,  # f32[B, Hkv, T * G, W * P], in base 2
    lse_ref,  # f32[B, Hkv, T * G], natural
    v_ref,  # [N, Hkv, P, Dv], or i16[N, Hkv, P, Dv / 2]
    table_ref,  # i32[B, Hkv or 1, W]
    indices_ref,  # i32[B, Hkv, T * G, capacity]
    counts_ref,  # i32[B, T]
    # outputs
    mass_ref,  # f32[splits, B, Hkv, T * G]
    contribution_ref,  # f32[splits, B, Hkv, T * G, Dv]
    *,
    shape: Shape,
    launch: Launch,
):
    """One program: a share of the chosen keys of one row and query head (`launch.block_rows` is 1)."""
    program = this_program(shape, launch)
    group, head, split, rows = program
    row = jnp.max(rows)
    count = jnp.minimum(counts_ref[group, lax.div(row, jnp.int32(shape.group_size))], indices_ref.shape[-1])
    lse = lse_ref[group, head, row] * LOG2E
    capacity = table_ref.shape[-1] * shape.page_size

    def step(index: jax.Array, carry: tuple[jax.Array, tuple[jax.Array, ...]]) -> tuple[jax.Array, Any]:
        mass, sums = carry
        place = index * launch.block_tokens + jnp.arange(launch.block_tokens, dtype=jnp.int32)
        token = lowering.load(
            indices_ref.at[group, head, row, jnp.where(place < count, place, 0)], mask=place < count, other=-1
        )
        keys = token_places(table_ref, group, of_head(table_ref, head), token, capacity, shape)
        score = lowering.load(
            scores_ref.at[group, head, row, jnp.where(keys.present, token, 0)], mask=keys.present, other=-jnp.inf
        )
        p = jnp.where(keys.present, jnp.exp2(score - lse), 0.0)
        values = rows_of(v_ref, keys, head, jnp.float32, shape.interpret)
        return mass + p, tuple(part + p[:, None] * value for part, value in zip(sums, values, strict=True))

    columns_of = columns(shape.value_width, v_ref.dtype)
    block = launch.block_tokens
    nothing = jnp.zeros((block,), jnp.float32), tuple(jnp.zeros((block, c.size), jnp.float32) for c, _ in columns_of)
    first, last = split_range(0, count, indices_ref.shape[-1], program, launch)
    mass, sums = lax.fori_loop(first, last, step, nothing)
    mass_ref[split, group, head, row] = jnp.sum(mass)
    for (cols, inside), part in zip(columns_of, sums, strict=True):
        lowering.store(
            contribution_ref.at[split, group, head, row, jnp.where(inside, cols, shape.value_width)],
            jnp.sum(part, axis=0),
            mask=inside,
        )


def reference_sum_kernel(
    # inputs
    masses_ref,  # f32[splits, B, Hkv, T * G]
    contributions_ref,  # f32[splits, B, Hkv, T * G, Dv]
    out_ref,  # [B, T, Hq, Dv]
    counts_ref,  # i32[B, T]
    # outputs
    mass_ref,  # f32[B, T, Hq]
    output_ref,  # f32[B, T, Hq, Dv]
    contribution_ref,  # f32[B, T, Hq, Dv]
    *,
    shape: Shape,
    columns: int,
):
    """One program: up to `columns` columns of one row and query head."""
    splits, width = contributions_ref.shape[0], shape.value_width
    heads, blocks = shape.kv_heads * shape.group_size, -(-width // columns)
    index, block = lax.div(pl.program_id(0), jnp.int32(blocks)), lax.rem(pl.program_id(0), jnp.int32(blocks))
    row, head = lax.div(index, jnp.int32(heads)), lax.rem(index, jnp.int32(heads))
    request, token = lax.div(row, jnp.int32(shape.tokens)), lax.rem(row, jnp.int32(shape.tokens))
    kv_head = lax.div(head, jnp.int32(shape.group_size))
    tile = token * shape.group_size + lax.rem(head, jnp.int32(shape.group_size))

    part = jnp.arange(next_power_of_two(splits), dtype=jnp.int32)
    exists, column = part < splits, block * columns + jnp.arange(columns, dtype=jnp.int32)
    part, inside = jnp.where(exists, part, 0), column < width
    at = jnp.where(inside, column, 0)
    masses = lowering.load(masses_ref.at[part, request, kv_head, tile], mask=exists, other=0.0)
    contributions = lowering.load(
        contributions_ref.at[part[:, None], request, kv_head, tile, at[None, :]],
        mask=exists[:, None] & inside[None, :],
        other=0.0,
    )
    # Nothing is published for a row that keeps no key.
    keeps = inside & (counts_ref[request, token] > 0)
    output = lowering.load(out_ref.at[request, token, head, at], mask=keeps, other=0.0).astype(jnp.float32)
    to = jnp.where(inside, column, width)
    mass_ref[request, token, head] = jnp.sum(masses)
    lowering.store(output_ref.at[request, token, head, to], output, mask=inside)
    lowering.store(contribution_ref.at[request, token, head, to], jnp.sum(contributions, axis=0), mask=inside)


def token_places(
    table_ref: Any, request: jax.Array, table_head: Any, token: jax.Array, capacity: Any, shape: Shape
) -> Keys:
    """Where tokens i32[block] of a request lie; absent are those below 0 or from `capacity` on, and absent pages."""
    present = (token >= 0) & (token < capacity)
    token = jnp.where(present, token, 0)
    page = lowering.load(
        table_ref.at[request, table_head, lax.div(token, jnp.int32(shape.page_size))], mask=present, other=-1
    )
    present = present & (page >= 0) & (page < shape.pages)
    return Keys(jnp.where(present, page, 0), lax.rem(token, jnp.int32(shape.page_size)), present, present[None, :])


def reference_capture(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    seen: jax.Array,
    counts: jax.Array,
    *,
    capacity: int,
    scale: float,
    config: Config | None,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Dense attention, and of each row its `counts` most probable keys.

    q [B, T, Hq, D]; k_pages [N, Hkv, P, D]; v_pages [N, Hkv, P, Dv]; page_table i32[B, Hkv or 1, W]; lengths i32[B, 1];
    seen, counts i32[B, T], counts at most seen and capacity. Returns out [B, T, Hq, Dv] in the dtype of q, lse f32[B,
    T, Hq], indices i32[B, T, Hq, capacity], mass f32[B, T, Hq], output and contribution f32[B, T, Hq, Dv]; output is
    out, or 0 where the count is.
    """
    out, lse, scores = paged_decode(
        q, k_pages, v_pages, page_table, lengths, None, None, None, None,
        scale=scale, window=None, soft_cap=None, out_dtype=q.dtype, config=config, interpret=interpret,
        return_scores=True,
    )  # fmt: skip
    assert scores is not None
    shape = decode_shape(q, k_pages, v_pages, per_token=False, scale=scale, soft_cap=None, interpret=interpret)
    ids = _chosen(scores, seen, counts, capacity, shape)
    exact = config is not None and config.exact
    parts = _of_chosen(scores, lse, v_pages, page_table, ids, counts, shape, exact)
    mass, output, contribution = _sum((*parts, out, counts), shape)
    return out, lse, from_tiles(ids, shape, q.shape), mass, output, contribution


def _chosen(scores: jax.Array, seen: jax.Array, counts: jax.Array, capacity: int, shape: Shape) -> jax.Array:
    """Ids of the counts[b, t] largest scores of each row, rising, i32[B, Hkv, T * G, capacity]."""

    def of_rows(x: jax.Array) -> jax.Array:  # i32[B, T] -> i32[B * Hkv * T * G]
        return jnp.broadcast_to(jnp.repeat(x, shape.group_size, axis=1)[:, None], scores.shape[:3]).reshape(-1)

    rows = scores.reshape(-1, scores.shape[-1])
    small = min(capacity, rows.shape[1]) <= LARGEST_K
    if shape.tokens == 1 and small:
        seen, counts = seen[:, 0], counts[:, 0]  # one for all heads of a request, which lie together
    else:
        seen, counts = of_rows(seen), of_rows(counts)
    if small:
        ids = top_k(rows, capacity, seen, order="id", interpret=shape.interpret, counts=counts)
    else:
        # Such counts are for tests of full retention, and for contexts above 8,192 keys at high retention: a sort.
        place = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
        keys = jnp.where(place < seen[:, None], to_keys(rows), MASKED)
        falling, ids = lax.sort((~keys, place), dimension=1, num_keys=1, is_stable=True)
        ids = jnp.where((place < counts[:, None]) & (falling < ~MASKED), ids, INT32_MAX)
        ids = jnp.pad(ids[:, :capacity], ((0, 0), (0, max(0, capacity - ids.shape[1]))), constant_values=INT32_MAX)
        ids = jnp.sort(ids, axis=1)
        ids = jnp.where(ids == INT32_MAX, -1, ids)
    return ids.reshape(*scores.shape[:3], capacity)


def _of_chosen(
    scores: jax.Array,
    lse: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    ids: jax.Array,
    counts: jax.Array,
    shape: Shape,
    exact: bool,
) -> tuple[jax.Array, jax.Array]:
    """Parts of the mass, f32[splits, B, Hkv, T * G], and of the contribution, f32[splits, B, Hkv, T * G, Dv]."""
    rows, capacity = ids.size // ids.shape[-1], ids.shape[-1]
    block = 32
    blocks = -(-capacity // block)
    splits = max(1, min(blocks, 16 if exact else 4 * WAVE // rows))
    launch = Launch(block_tokens=block, block_rows=1, num_warps=4, num_stages=2, splits=splits, exact=exact)
    lse = to_tiles(lse[..., None], shape)[..., 0]
    operands = scores, lse, as_pairs(v_pages), page_table, ids, counts
    results = [
        lowering.result((splits, *ids.shape[:3]), jnp.float32, operands),
        lowering.result((splits, *ids.shape[:3], v_pages.shape[-1]), jnp.float32, operands),
    ]
    mass, contribution = lowering.call(
        functools.partial(reference_capture_kernel, shape=shape, launch=launch),
        name="reference_capture",
        programs=shape.programs(launch),
        in_specs=[lowering.whole(array) for array in operands],
        out_specs=[lowering.whole(array) for array in results],
        out_shape=results,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        interpret=shape.interpret,
    )(*operands)
    return mass, contribution


def _sum(operands: tuple[jax.Array, ...], shape: Shape) -> tuple[jax.Array, ...]:
    """Mass f32[B, T, Hq], output and contribution f32[B, T, Hq, Dv] of all parts."""
    masses, _, out, _ = operands
    columns = columns_of(shape.value_width, masses.shape[0])
    results = [lowering.result(x, jnp.float32, operands) for x in (out.shape[:3], out.shape, out.shape)]
    mass, output, contribution = lowering.call(
        functools.partial(reference_sum_kernel, shape=shape, columns=columns),
        name="reference_sum",
        programs=masses[0].size * -(-shape.value_width // columns),
        in_specs=[lowering.whole(array) for array in operands],
        out_specs=[lowering.whole(array) for array in results],
        out_shape=results,
        num_warps=4 if masses.shape[0] > 8 else 1,
        num_stages=1,
        interpret=shape.interpret,
    )(*operands)
    return mass, output, contribution
