"""Public attention operations over a paged KV cache: dense, chosen pages, chosen tokens.

The way of a call: here (contract and names), `attention_call.py` (checks, dispatch, sinks, cast), then
`pallas_kernels/`, which merges its splits itself, or `xla/`.
"""

from __future__ import annotations

from typing import Any

import jax

import pallas_kernels
from pallas_kernels import Config
from sparse_jax import xla
from sparse_jax.attention_call import AttentionOutput, Call, Operation
from sparse_jax.tuning import Tuning
from sparse_jax.validation import INT32_MAX, debug_ids, debug_lengths


def _check_paged(k_pages: jax.Array, page_table: jax.Array, lengths: jax.Array, *positions: jax.Array | None) -> None:
    debug_ids("page_table", page_table, k_pages.shape[0])
    debug_lengths("lengths", lengths, page_table.shape[-1] * k_pages.shape[2])
    for name, array in zip(("q_positions", "key_positions"), positions, strict=True):
        if array is not None:
            debug_ids(name, array, INT32_MAX)


def _check_page_sparse(
    k_pages: jax.Array, page_table: jax.Array, lengths: jax.Array, page_indices: jax.Array, *positions: jax.Array | None
) -> None:
    _check_paged(k_pages, page_table, lengths, *positions)
    debug_ids("page_indices", page_indices, page_table.shape[-1])


def _check_token_sparse(k_pages: jax.Array, slots: jax.Array) -> None:
    debug_ids("slots", slots, min(k_pages.shape[0] * k_pages.shape[2], INT32_MAX))


PAGED = Operation(
    name="paged_attention",
    meaning=xla.paged_attention,
    kernel=pallas_kernels.paged_decode,
    check=_check_paged,
    windowed=True,
    weighted=False,
    listing=0,
    by_page=True,
)
_PAGE_SPARSE = Operation(
    name="page_sparse_attention",
    meaning=xla.page_sparse_attention,
    kernel=pallas_kernels.page_sparse_decode,
    check=_check_page_sparse,
    windowed=True,
    weighted=True,
    listing=2,
    by_page=True,
)
_TOKEN_SPARSE = Operation(
    name="token_sparse_attention",
    meaning=xla.token_sparse_attention,
    kernel=pallas_kernels.token_sparse_decode,
    check=_check_token_sparse,
    windowed=False,
    weighted=True,
    listing=0,
    by_page=False,
)


def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    q_positions: Any = None,
    key_positions: Any = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out_dtype: Any = None,
    out_scale: Any = None,
    implementation: str | None = None,
    config: Config | Tuning | None = None,
) -> AttentionOutput:
    """Dense attention of one or more query tokens per request over its pages.

    q: [B, Hq, D] or [B, T, Hq, D], float32, bfloat16, float16 or float8_e4m3fn (widened to bfloat16, exactly). Row t is
    the token at position `length - T + t` and sees up to itself.
    k_pages [N, Hkv, P, D], v_pages [N, Hkv, P, Dv]: both of one of these dtypes; P a power of two.
    page_table: i32[B, W] or i32[B, Hkv, W] page ids; -1 is absent, and so is any id out of range.
    lengths: i32[B] or i32[B, Hkv] tokens in the cache, this step's included.
    q_positions: i32[B] or i32[B, T], other positions of the rows; -1 makes a padding row, which sees nothing.
    key_positions: i32[N, Hkv, P] true positions of the keys where they are not the place in the table.
    scale: default D ** -0.5. window: sees that many tokens, its own included. soft_cap: cap * tanh(score / cap).
    sinks: f32[Hq], one more term of each softmax sum.
    k_scale, v_scale: f32[] or f32[N, Hkv, P], multiply the stored values.
    out_dtype: default that of q, bfloat16 for float8_e4m3fn queries. out_scale: f32[], the stored result times it is
    the real one.
    implementation: None (best for the platform), "xla", "triton" or "interpret".
    config: tuning values of the kernel, or a Tuning, which has those measured on this GPU for some shapes.

    float32 operands are multiplied in full precision. Raises ValueError (with the values) for shapes, dtypes and
    options that do not fit, NotImplementedError where only another implementation supports them. Source: Kwon et al.,
    PagedAttention, arXiv 2309.06180; split over the sequence: Dao et al., Flash-Decoding.
    """
    call = Call.of(q, k_pages, v_pages, sinks, k_scale, v_scale, out_scale)
    page_table, lengths = call.table(page_table, lengths)
    positions = call.positions(q_positions, key_positions)
    options = call.options(scale, soft_cap, out_dtype, implementation, config, window=window)
    return call.run(PAGED, (page_table, lengths, *positions), options)


def page_sparse_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    page_indices: Any,
    *,
    q_positions: Any = None,
    key_positions: Any = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out_dtype: Any = None,
    out_scale: Any = None,
    return_weights: bool = False,
    implementation: str | None = None,
    config: Config | Tuning | None = None,
) -> AttentionOutput:
    """Attention over chosen pages of each request; the other arguments are those of `paged_attention`.

    page_indices: i32[B, Hkv, C] (shared by the T rows) or i32[B, T, Hkv, C], pages inside the request (0 .. W-1) in any
    order; -1 or out of range is absent, a page that stands twice counts twice. Causality, window and length still apply
    by true position; no page is added.
    return_weights: also return the probabilities [..., Hq, C * P].

    Raises as `paged_attention` does. Source: page-level selection as in Quest, arXiv 2406.10774.
    """
    call = Call.of(q, k_pages, v_pages, sinks, k_scale, v_scale, out_scale)
    page_table, lengths = call.table(page_table, lengths)
    page_indices = call.lists("page_indices", page_indices)
    positions = call.positions(q_positions, key_positions)
    options = call.options(
        scale, soft_cap, out_dtype, implementation, config, window=window, return_weights=return_weights
    )
    return call.run(_PAGE_SPARSE, (page_table, lengths, page_indices, *positions), options)


def token_sparse_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    slots: Any,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out_dtype: Any = None,
    out_scale: Any = None,
    return_weights: bool = False,
    implementation: str | None = None,
    config: Config | Tuning | None = None,
) -> AttentionOutput:
    """Attention over chosen tokens; the other arguments are those of `paged_attention`.

    slots: i32[B, Hkv, C] (shared by the T rows) or i32[B, T, Hkv, C], physical slots `page id * P + offset`; -1 or out
    of range is absent, a slot that stands twice counts twice. The caller chose the tokens, so there is no causal mask.
    `to_slots` makes slots from token ids.
    return_weights: also return the probabilities [..., Hq, C].

    Raises as `paged_attention` does. Source: token-level selection as in H2O, arXiv 2306.14048, and DeepSeek-V3.2.
    """
    call = Call.of(q, k_pages, v_pages, sinks, k_scale, v_scale, out_scale)
    slots = call.lists("slots", slots)
    options = call.options(scale, soft_cap, out_dtype, implementation, config, return_weights=return_weights)
    return call.run(_TOKEN_SPARSE, (slots,), options)
