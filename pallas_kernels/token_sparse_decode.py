"""Attention over chosen tokens, given as physical slots.

List position j of a (row, KV head) is the token at offset slots[j] % P of page slots[j] // P. The caller chose the
tokens, so nothing else is masked.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lowering
from pallas_kernels.config import INT32_MAX, Config, Launch
from pallas_kernels.decode_call import (
    Shape,
    decode_shape,
    from_tiles,
    launch_splits,
    split_range,
    this_program,
    to_tiles,
)
from pallas_kernels.online_softmax import LN2, Keys, attend
from pallas_kernels.pairs import as_pairs


def token_sparse_decode_kernel(
    # inputs
    q_ref,  # [groups, Hkv, rows, D]
    k_ref,  # [N, Hkv, P, D], or i16[N, Hkv, P, D / 2] pairs of e4m3
    v_ref,  # [N, Hkv, P, Dv], or i16[N, Hkv, P, Dv / 2]
    slots_ref,  # i32[groups, Hkv, C]
    scales,  # {"k", "v"}: None, f32[1] or f32[N, Hkv, P]
    # outputs
    out_ref,  # [splits, groups, Hkv, rows, Dv]
    lse_ref,  # f32[splits, groups, Hkv, rows]
    scores_ref=None,  # f32[groups, Hkv, rows, C], in base 2
    *,
    shape: Shape,
    launch: Launch,
):
    """One program: a query tile against a share of the chosen tokens."""
    program = this_program(shape, launch)
    chosen, page_size = slots_ref.shape[-1], shape.page_size
    pool_end = min(shape.pages * page_size, INT32_MAX)

    def locate(start: jax.Array) -> Keys:
        place = start + jnp.arange(launch.block_tokens, dtype=jnp.int32)
        slot = lowering.load(
            slots_ref.at[program.group, program.head, jnp.where(place < chosen, place, 0)],
            mask=place < chosen,
            other=-1,
        )
        present = (slot >= 0) & (slot < pool_end)
        slot = jnp.where(present, slot, 0)
        return Keys(lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size)), present, present[None, :])

    attend(
        q_ref, k_ref, v_ref, scales, out_ref, lse_ref, scores_ref,
        program=program, locate=locate, blocks=split_range(0, chosen, chosen, program, launch),
        uniform_until=None, shape=shape, launch=launch,
    )  # fmt: skip


def token_sparse_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slots: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    scale: float,
    soft_cap: float | None,
    return_scores: bool,
    out_dtype: Any,
    config: Config | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Attention over chosen tokens.

    q [B, T, Hq, D]; k_pages [N, Hkv, P, D]; v_pages [N, Hkv, P, Dv]; slots i32[B, Tp, Hkv, C], Tp = 1 (shared by the T
    rows) or T; k_scale, v_scale None, f32[1] or f32[N, Hkv, P]. Returns out [B, T, Hq, Dv] of out_dtype, lse f32[B,
    T, Hq] and, if `return_scores`, scores f32[B, T, Hq, C] (-inf where absent).
    """
    shape = decode_shape(
        q, k_pages, v_pages, per_token=slots.shape[1] > 1, scale=scale, soft_cap=soft_cap, interpret=interpret
    )
    launch = shape.launch(config, slots.shape[-1], k_pages.dtype, by_page=False)
    out, lse, scores = launch_splits(
        functools.partial(token_sparse_decode_kernel, shape=shape, launch=launch),
        (
            to_tiles(q, shape),
            as_pairs(k_pages),
            as_pairs(v_pages),
            slots.reshape(shape.groups, shape.kv_heads, -1),
            {"k": k_scale, "v": v_scale},
        ),
        name="token_sparse_decode",
        shape=shape,
        launch=launch,
        out_dtype=out_dtype,
        scores_width=slots.shape[-1] if return_scores else None,
    )
    scores = None if scores is None else from_tiles(scores * LN2, shape, q.shape)
    return from_tiles(out, shape, q.shape), from_tiles(lse, shape, q.shape), scores
