"""Sparse MLA decode: attention of all heads over chosen latents, each of them key and value of every head.

For row r, the chosen latents x[t] and their first d_c columns v[t]:

    s[r, t] = scale * q[r] . x[t],  out[r] = sum_t softmax(s[r])[t] v[t],  lse[r] = log sum_t exp(s[r, t])

A latent is read once, for the score and for the sum.

Source: DeepSeek-V2 (arXiv 2405.04434) for the absorbed form, DeepSeek-V3.2 for the sparse one; FlashMLA's formats.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lowering
from pallas_kernels.config import INT32_MAX, Config, Launch, next_power_of_two
from pallas_kernels.decode_call import Program, Shape, from_tiles, launch_splits, split_range, this_program, to_tiles
from pallas_kernels.latent_rows import LatentRow
from pallas_kernels.online_softmax import LOG2E, Keys, into_range, softmax_step, write_rows

SHARES = 32  # of one list: where so many of each tile find a place at once, there are few programs
STAGE_BYTES = 64 * 576 * 2  # of rows: two stages and a tile of 64 queries fill a multiprocessor's 227 KB


def mla_sparse_decode_kernel(
    # inputs
    q_ref,  # [groups, 1, rows, E]
    pool_refs,  # views of the pool, see LatentRow.operands
    slots_ref,  # i32[groups, C]
    # outputs
    out_ref,  # [splits, groups, 1, rows, d_c]
    lse_ref,  # f32[splits, groups, 1, rows]
    *,
    row: LatentRow,
    shape: Shape,
    launch: Launch,
):
    """One program: a tile of heads against a share of the chosen latents."""
    program = this_program(shape, launch)
    chosen, columns = slots_ref.shape[-1], row.columns()
    compute = q_ref.dtype if row.format != "plain" else jnp.promote_types(q_ref.dtype, pool_refs[0].dtype)
    is_row = program.rows < shape.rows
    q = [
        lowering.load(
            q_ref.at[program.group, 0, program.rows[:, None], c.ids[None, :]],
            mask=is_row[:, None] & c.inside[None, :],
            other=0.0,
        )
        for c in columns
    ]
    factor: Any = shape.scale * LOG2E
    if row.format != "plain" and q_ref.dtype == jnp.bfloat16:  # float16 holds less than bfloat16
        q, power = into_range(q)
        factor = factor * power

    def step(index: jax.Array, carry: Any) -> Any:
        m, l, sums = carry
        keys = _locate(slots_ref, program, index * launch.block_tokens, chosen, shape, launch)
        parts = row.load(pool_refs, keys, compute, shape.interpret)
        products = [lowering.dot(a.astype(b.dtype), b.T) for a, b in zip(q, parts, strict=True)]
        s = jnp.where(keys.visible, functools.reduce(jnp.add, products) * factor, -jnp.inf)
        m, l, p, decay = softmax_step(s, m, l)
        values = [part for part, c in zip(parts, columns, strict=True) if c.is_value]
        new = [lowering.dot(p.astype(value.dtype), value) for value in values]
        return m, l, tuple(old * decay[:, None] + more for old, more in zip(sums, new, strict=True))

    size, values = launch.block_rows, [c for c in columns if c.is_value]
    carry = (
        jnp.full((size,), -jnp.inf, jnp.float32),
        jnp.zeros((size,), jnp.float32),
        tuple(jnp.zeros((size, c.ids.size), jnp.float32) for c in values),
    )
    first, last = split_range(0, chosen, chosen, program, launch)
    carry = lax.fori_loop(first, last, step, carry)
    write_rows(carry, None, [(c.ids, c.inside) for c in values], out_ref, lse_ref, program=program, shape=shape)


def _locate(slots_ref: Any, program: Program, start: jax.Array, chosen: int, shape: Shape, launch: Launch) -> Keys:
    """Where the latents of the block from list position `start` on lie."""
    place = start + jnp.arange(launch.block_tokens, dtype=jnp.int32)
    listed = place < chosen
    slot = lowering.load(slots_ref.at[program.group, jnp.where(listed, place, 0)], mask=listed, other=-1)
    present = (slot >= 0) & (slot < min(shape.pages * shape.page_size, INT32_MAX))
    slot = jnp.where(present, slot, 0)
    page, offset = lax.div(slot, jnp.int32(shape.page_size)), lax.rem(slot, jnp.int32(shape.page_size))
    return Keys(page, offset, present, present[None, :])


def resolve_mla(
    config: Config | None, *, groups: int, rows: int, chosen: int, width: int, itemsize: int, packed: bool
) -> Launch:
    """Decides every field of a config from shapes.

    groups: lists of `chosen` latents of `width` columns, for `rows` query rows each. itemsize: of what is multiplied.
    packed: the latents are quantised. H200, 2,048 of 576 bfloat16 columns: 128 lists for 128, 64 and 16 heads in 335,
    179 and 85 + 6 us (with the merge), 8 for 128 heads in 31 + 4, one in 10 + 3.
    """
    config = config or Config()
    # Two tiles of 64 heads read a latent twice, from the L2 cache, which is cheaper than sums of 128 rows in registers.
    # Widened latents would pass through shared memory once more there, and float32 takes no matrix unit.
    most = 16 if itemsize > 2 else 32 if packed else 64
    block_rows = config.block_rows or min(most, max(16, next_power_of_two(rows)))
    few = groups * -(-rows // block_rows) * SHARES <= lowering.MULTIPROCESSORS
    if config.block_rows is None and few and not config.exact:
        # All programs run at once, so more and smaller ones are sooner done, and there is less to merge.
        block_rows = 16
    programs = groups * -(-rows // block_rows)
    fits = next_power_of_two(STAGE_BYTES // (width * itemsize) + 1) // 2
    block_tokens = config.block_tokens or max(16, min(32 if packed and block_rows > 16 else 64, fits))
    blocks = -(-chosen // block_tokens)
    wanted = lowering.MULTIPROCESSORS * (1 if few or block_rows == 64 else 2) // programs
    return Launch(
        block_tokens=block_tokens,
        block_rows=block_rows,
        num_warps=config.num_warps or (8 if block_rows == 64 else 4),
        num_stages=config.num_stages or (3 if packed else 2),
        splits=config.splits or max(1, min(16 if config.exact else wanted, blocks)),
        exact=config.exact,
    )


def mla_sparse_decode(
    q: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    *,
    row: LatentRow,
    scale: float,
    out_dtype: Any,
    config: Config | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention over chosen latents.

    q [B, T, Hq, E]; pool [N, P, E], or u8[N, P, bytes] in the format of `row`; slots i32[B, Tp, C], Tp = 1 (shared by
    the T rows) or T. Returns out [B, T, Hq, d_c] of out_dtype and lse f32[B, T, Hq].
    """
    batch, t_rows, heads, width = q.shape
    per_token = slots.shape[1] > 1
    rows = heads if per_token else t_rows * heads
    shape = Shape(
        groups=batch * t_rows if per_token else batch,
        kv_heads=1,
        rows=rows,
        group_size=heads,
        pages=pool.shape[0],
        page_size=pool.shape[1],
        key_width=width,
        value_width=row.latent_dim,
        scale=scale,
        soft_cap=None,
        interpret=interpret,
    )
    chosen = slots.shape[-1]
    packed = row.format != "plain"
    launch = resolve_mla(
        config,
        groups=shape.groups,
        rows=rows,
        chosen=chosen,
        width=width,
        itemsize=max(q.dtype.itemsize, 2 if packed else pool.dtype.itemsize),
        packed=packed,
    )
    out, lse, _ = launch_splits(
        functools.partial(mla_sparse_decode_kernel, row=row, shape=shape, launch=launch),
        (to_tiles(q, shape), row.operands(pool), slots.reshape(shape.groups, chosen)),
        name="mla_sparse_decode",
        shape=shape,
        launch=launch,
        out_dtype=out_dtype,
    )
    return from_tiles(out, shape, q.shape), from_tiles(lse, shape, q.shape)
