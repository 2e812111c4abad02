"""Public operations around attention: ids, selection, merging."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from pallas_kernels.top_k import LARGEST_K
from sparse_jax import dispatch, xla
from sparse_jax.attention_call import AttentionOutput
from sparse_jax.dispatch import IMPLEMENTATIONS
from sparse_jax.validation import (
    INT32_MAX,
    QUERY_DTYPES,
    as_array,
    as_float,
    as_ids,
    as_int,
    check_shape,
    debug_ids,
    require,
)


def to_slots(
    token_ids: Any,
    page_table: Any,
    request_ids: Any,
    *,
    page_size: int,
    lengths: Any = None,
    page_stride: int | None = None,
    workspace_request_ids: Any = None,
    workspace_starts: Any = None,
    compact: bool = False,
) -> Any:
    """Token ids of requests to physical slots `page id * page_stride + token id % page_size`.

    token_ids: i32[R, C] or i32[R, Hkv, C], positions inside the request; -1 is absent.
    page_table: i32[B, W] or i32[B, Hkv, W] page ids.
    request_ids: i32[R], R rows of any number for a request: the table row of each; one out of range gives -1.
    lengths: i32[B]; ids at or beyond the length are absent.
    page_stride: rows from one page to the next, default page_size.
    workspace_request_ids: i32[R], -1 = ordinary row; workspace_starts: i32[workspaces]. Such a row gives `start + id`.
    compact: move the valid slots of a row to the front, in their order.

    Returns i32[R, C], or i32[R, Hkv, C] if ids or table have heads; with compact=True also their counts, without the
    last axis. Ids beyond the table, absent pages and padding rows give -1. Raises ValueError for shapes that do not fit
    and a page_stride below page_size. Source: the slot mapping of vLLM's sparse MLA.
    """
    token_ids, page_table = as_ids("token_ids", token_ids), as_ids("page_table", page_table)
    request_ids = as_ids("request_ids", request_ids)
    check_shape("token_ids", token_ids, (None, None), (None, None, None))
    heads = [a.shape[1] for a in (token_ids, page_table) if a.ndim == 3]
    check_shape("page_table", page_table, (None, None), (None, heads[0] if heads else None, None))
    rows = token_ids.shape[0]
    require(min(page_table.shape) >= 1, f"page_table must have no empty axis, got {list(page_table.shape)}")
    require(
        request_ids.shape == (rows,),
        f"request_ids must cover the rows of token_ids, [{rows}], got {list(request_ids.shape)}",
    )
    page_size = as_int("page_size", page_size)
    require(page_size >= 1 and page_size & (page_size - 1) == 0, f"page_size must be a power of two, got {page_size}")
    page_stride = page_size if page_stride is None else as_int("page_stride", page_stride)
    require(page_stride <= INT32_MAX - page_size, f"page_stride must fit in 32 bits, got {page_stride} + {page_size}")
    require(page_stride >= page_size, f"page_stride must be at least page_size, got {page_stride} and {page_size}")
    given = (workspace_request_ids is not None, workspace_starts is not None)
    require(given[0] == given[1], f"workspace_request_ids and workspace_starts go together, got {given}")
    if given[0]:
        workspace_request_ids, workspace_starts = (
            as_ids("workspace_request_ids", workspace_request_ids),
            as_ids("workspace_starts", workspace_starts),
        )
        check_shape("workspace_request_ids", workspace_request_ids, (rows,))
        check_shape("workspace_starts", workspace_starts, (None,))
        require(workspace_starts.size >= 1, "workspace_starts must not be empty, got [0]")
    if lengths is not None:
        lengths = as_ids("lengths", lengths)
        check_shape("lengths", lengths, (page_table.shape[0],))
    arrays = (token_ids, page_table, request_ids, lengths, workspace_request_ids, workspace_starts)
    return _to_slots(arrays, page_size=page_size, page_stride=page_stride, packed=compact)


@functools.partial(jax.jit, static_argnames=("page_size", "page_stride", "packed"))
def _to_slots(arrays: tuple[Any, ...], *, page_size: int, page_stride: int, packed: bool) -> Any:
    token_ids, page_table, request_ids, *rest = arrays
    debug_ids("token_ids", token_ids, page_table.shape[-1] * page_size)
    debug_ids("page_table", page_table, INT32_MAX)
    debug_ids("request_ids", request_ids, page_table.shape[0])
    if rest[1] is not None:
        debug_ids("workspace_request_ids", rest[1], rest[2].shape[0])
    has_heads = token_ids.ndim == 3 or page_table.ndim == 3
    token_ids = token_ids if token_ids.ndim == 3 else token_ids[:, None]
    page_table = page_table if page_table.ndim == 3 else page_table[:, None]
    slots = xla.to_slots(token_ids, page_table, request_ids, *rest, page_size=page_size, page_stride=page_stride)
    slots = slots if has_heads else slots[:, 0]
    return xla.compact(slots) if packed else slots


def merge_attention(outs: Any, lses: Any, *, sinks: Any = None) -> AttentionOutput:
    """Attention over the union of disjoint sets of keys, from the results over each set.

    outs: [parts, ..., Hq, Dv], computed without sinks. lses: f32[parts, ..., Hq], natural logarithm. sinks: f32[Hq] or
    None.
    Returns AttentionOutput with out in the dtype of outs and lse without sinks. Float32 inside. A part with lse = -inf
    is selected away, whatever its out holds; if all are, out is 0 and lse -inf. An lse of NaN or +inf, which other
    kernels give an empty row, counts as -inf; so a part that attended a NaN is left out, too. Raises ValueError for
    shapes that do not fit.
    """
    outs, lses = as_float("outs", outs), as_array("lses", lses)
    require(outs.ndim >= 3 and outs.shape[0] >= 1, f"outs must be [parts, ..., Hq, Dv], got {list(outs.shape)}")
    check_shape("lses", lses, outs.shape[:-1])
    if sinks is not None:
        sinks = as_array("sinks", sinks)
        check_shape("sinks", sinks, (outs.shape[-2],))
    return _merge_attention(outs, lses.astype(jnp.float32), None if sinks is None else sinks.astype(jnp.float32))


@jax.jit
def _merge_attention(outs: jax.Array, lses: jax.Array, sinks: jax.Array | None) -> AttentionOutput:
    # Here and not in the meaning: the splits of our own kernels keep the NaN of a row that attends one.
    lses = jnp.where(lses < jnp.inf, lses, -jnp.inf)
    out, lse = xla.merge_attention(outs, lses, sinks)
    return AttentionOutput(out.astype(outs.dtype), lse)


def top_k(
    scores: Any, k: int, lengths: Any = None, *, order: str = "score", implementation: str | None = None
) -> jax.Array:
    """Ids of the k largest scores of each row: exact, deterministic, compared in float32.

    scores: [..., S], any float dtype. lengths: i32[...] or None; scores at or beyond the length are masked (above S
    counts as S, below 0 as 0).
    order: "score" (falling score, ties by rising id) or "id" (rising id). Returns i32[..., k]: min(k, valid) ids, then
    -1; of equal scores the lowest ids are kept. NaN and -inf are masked and never chosen; +0 and -0 are equal; denormal
    numbers count. Ids have no derivative: nothing flows back into scores, whatever the implementation.
    Raises ValueError for a k below 1, another order, or lengths of another shape, and NotImplementedError where the
    kernel is asked for more than 8,192 ids of a row. Source: our own kernel, a tournament of chunks in
    `pallas_kernels/top_k.py`.
    """
    scores = as_array("scores", scores)
    require(
        jnp.issubdtype(scores.dtype, jnp.floating) and scores.ndim >= 1,
        f"scores must be floating [..., S], got {scores.dtype} {list(scores.shape)}",
    )
    k = as_int("k", k)
    require(k >= 1, f"k must be at least 1, got {k}")
    require(order in ("score", "id"), f'order must be "score" or "id", got {order!r}')
    require(
        implementation in IMPLEMENTATIONS, f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}"
    )
    if lengths is not None:
        lengths = as_ids("lengths", lengths)
        check_shape("lengths", lengths, scores.shape[:-1])
    scores = scores if scores.dtype in QUERY_DTYPES else scores.astype(jnp.float32)
    return _top_k(lax.stop_gradient(scores), lengths, k=k, order=order, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("k", "order", "implementation"))
def _top_k(
    scores: jax.Array, lengths: jax.Array | None, *, k: int, order: str, implementation: str | None
) -> jax.Array:
    if scores.size == 0:
        return jnp.full((*scores.shape[:-1], k), -1, jnp.int32)

    def meaning(scores: jax.Array, lengths: jax.Array | None) -> jax.Array:
        return xla.top_k(scores, k, lengths, order=order)

    def kernel(scores: jax.Array, lengths: jax.Array | None, *, interpret: bool) -> jax.Array:
        rows, lengths = scores.reshape(-1, scores.shape[-1]), None if lengths is None else lengths.reshape(-1)
        ids = pallas_kernels.top_k(rows, k, lengths, order=order, interpret=interpret)
        return ids.reshape(*scores.shape[:-1], k)

    refusal = None
    if min(k, scores.shape[-1]) > LARGEST_K:
        refusal = f'the kernel of top_k finds at most {LARGEST_K} ids of a row, got k = {k}; use implementation="xla"'
    return dispatch.run(implementation, (scores, lengths), xla=meaning, kernel=kernel, refusal=refusal)


def retained_count(length: Any, retention: float) -> Any:
    """How many of `length` tokens a retention keeps: min(length, max(1, ceil(length * retention))).

    length: an int or an integer array on the host; retention: in [0, 1], or above 1 for all. The ceiling is that of the
    product in double precision, so it is taken on the host: float32 gives other counts. Returns int or an int32 array.
    Raises ValueError for other inputs.
    """
    require(not isinstance(length, jax.core.Tracer), "length must be known on the host, got a traced value")
    lengths = np.asarray(length)
    require(
        np.issubdtype(lengths.dtype, np.integer) and bool((lengths >= 0).all()),
        f"length must be integers of at least 0, got {length!r}",
    )
    require(retention >= 0, f"retention must be at least 0, got {retention}")
    wanted = np.ceil(lengths.astype(np.float64) * float(retention)).clip(max=2**62).astype(np.int64)
    counts = np.minimum(lengths, np.maximum(1, wanted))
    if lengths.ndim == 0:
        return int(counts)
    require(bool((counts <= INT32_MAX).all()), f"length must fit in 32 bits, got {length!r}")
    return counts.astype(np.int32)
