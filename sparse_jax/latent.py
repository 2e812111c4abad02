"""Operations of sparse MLA: attention over chosen latents, and the lightning indexer that scores them.

The way of a call: here (contract, checks), then `pallas_kernels/` or `xla/`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import Config
from pallas_kernels.latent_rows import LatentRow
from sparse_jax import dispatch, xla
from sparse_jax.attention_call import AttentionOutput
from sparse_jax.dispatch import IMPLEMENTATIONS
from sparse_jax.index_keys import IndexKeys
from sparse_jax.latent_cache import LatentCache, dequantize_latent
from sparse_jax.validation import (
    INT32_MAX,
    as_array,
    as_float,
    as_ids,
    as_int,
    check_shape,
    debug_ids,
    require,
    require_kept,
)


def mla_sparse_attention(
    q: Any,
    latent_pages: Any,
    slots: Any,
    *,
    scale: float | None = None,
    value_dim: int = 512,
    sinks: Any = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> AttentionOutput:
    """Absorbed MLA over chosen tokens: a cached row is the key of all heads, and its first columns are the value.

    q: [B, Hq, E] or [B, T, Hq, E], float32, bfloat16 or float16; E columns: value_dim of the latent, then the rotary
    ones (none: E = value_dim).
    latent_pages: [N, P, E] of such a dtype, or a `LatentCache` of quantised rows; P a power of two.
    slots: i32[B, C] (shared by the T rows) or i32[B, T, C], physical slots `page id * P + offset`; -1 or out of range
    is absent, a slot that stands twice counts twice. The caller chose the tokens, so there is no causal mask.
    scale: of the scores. Required: it is (d_n + d_r) ** -0.5 of the un-absorbed model (times YaRN's factor), which the
    widths here do not tell.
    sinks: f32[Hq], one more term of each softmax sum.

    Returns AttentionOutput: out like q, value_dim wide, in the dtype of q; lse natural, without sinks; no weights.
    Raises ValueError (with the values) for shapes, dtypes and options that do not fit, NotImplementedError where only
    another implementation supports them. Source: DeepSeek-V2, arXiv 2405.04434, and DeepSeek-V3.2.
    """
    q = as_float("q", q)
    require(q.ndim in (3, 4), f"q must be [B, Hq, E] or [B, T, Hq, E], got {list(q.shape)}")
    require(min(q.shape) >= 1, f"no axis may be empty, got q {list(q.shape)}")
    value_dim = as_int("value_dim", value_dim)
    require(1 <= value_dim <= q.shape[-1], f"value_dim must be from 1 to E = {q.shape[-1]} (q), got {value_dim}")
    pool, row = _stored(latent_pages, q.shape[-1], value_dim)
    _check_pool("latent_pages", *pool.shape[:2])
    batch, t_rows = q.shape[0], 1 if q.ndim == 3 else q.shape[1]
    slots = as_ids("slots", slots)
    check_shape("slots", slots, (batch, None), *([(batch, t_rows, None)] if q.ndim == 4 else []))
    require(slots.shape[-1] >= 1, f"slots must have at least one column, got {list(slots.shape)}")
    slots = slots if slots.ndim == 3 else slots[:, None]
    if sinks is not None:
        sinks = as_array("sinks", sinks).astype(jnp.float32)
        check_shape("sinks", sinks, (q.shape[-2],))
    required = "scale is required: (d_n + d_r) ** -0.5 of the un-absorbed model, which the widths of q do not tell"
    require(scale is not None, f"{required}, got None")
    scale = _finite("scale", scale)
    _check_static(implementation, config)
    single = q.ndim == 3
    result = _attend(
        (q[:, None] if single else q, pool, slots), sinks, row=row, scale=scale,
        implementation=implementation, config=config,
    )  # fmt: skip
    return jax.tree.map(lambda x: x[:, 0], result) if single else result


def indexer_scores(
    q: Any,
    weights: Any,
    key_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    q_positions: Any = None,
    k: int | None = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Scores of the lightning indexer: `sum_j weights[j] * ReLU(q[j] . key)` of every token that a row sees.

    q: [B, heads, d] or [B, T, heads, d], float32, bfloat16 or float16. weights: [B, heads] or [B, T, heads], of any
    sign, with the factors heads ** -0.5 * d ** -0.5 (and the scales of quantised queries) in them.
    key_pages: [N, P, d] of such a dtype, or `IndexKeys` of e4m3 keys with a scale each; P a power of two.
    page_table: i32[B, W]; lengths: i32[B] tokens in the cache, this step's included. Row t is the token at position
    `length - T + t` and sees up to itself; q_positions i32[B] or i32[B, T] gives other positions, -1 a padding row.
    k: how many tokens will be chosen: a row that sees no more scores them all 0 without reading them.

    Returns f32[B, W * P] or f32[B, T, W * P] by token id, -inf where the row sees nothing: what `top_k` takes.
    Raises ValueError (with the values) for shapes, dtypes and options that do not fit, NotImplementedError where only
    another implementation supports them. Source: DeepSeek-V3.2 (lightning indexer).
    """
    q, weights = as_float("q", q), as_float("weights", weights).astype(jnp.float32)
    require(q.ndim in (3, 4), f"q must be [B, heads, d] or [B, T, heads, d], got {list(q.shape)}")
    require(min(q.shape) >= 1, f"no axis may be empty, got q {list(q.shape)}")
    check_shape("weights", weights, q.shape[:-1])
    keys, pool = _index_keys(key_pages, q.shape[-1])
    _check_pool("key_pages", *pool)
    page_table, lengths = as_ids("page_table", page_table), as_ids("lengths", lengths)
    check_shape("page_table", page_table, (q.shape[0], None))
    require(page_table.shape[1] >= 1, f"page_table must have at least one column, got {list(page_table.shape)}")
    width, page_size = page_table.shape[1], pool[1]
    require(width * page_size <= INT32_MAX, f"W * P must fit in 32 bits, got {width} * {page_size}")
    check_shape("lengths", lengths, (q.shape[0],))
    single, t_rows = q.ndim == 3, 1 if q.ndim == 3 else q.shape[1]
    if q_positions is not None:
        q_positions = as_ids("q_positions", q_positions)
        allowed = [(q.shape[0], t_rows)] + [(q.shape[0],)] * (t_rows == 1)
        check_shape("q_positions", q_positions, *allowed)
        q_positions = q_positions.reshape(q.shape[0], t_rows)
    if k is not None:
        k = as_int("k", k)
        require(k >= 1, f"k must be at least 1, got {k}")
    _check_static(implementation, config)
    operands = (q[:, None], weights[:, None], keys, page_table) if single else (q, weights, keys, page_table)
    scores = _score(operands, lengths, q_positions, k=k, implementation=implementation, config=config)
    return scores[:, 0] if single else scores


def _stored(latent_pages: Any, width: int, value_dim: int) -> tuple[jax.Array, LatentRow]:
    """The pool, and how its rows are stored."""
    if isinstance(latent_pages, LatentCache):
        cache = latent_pages
        fits = (cache.latent_dim, cache.latent_dim + cache.rope_dim) == (value_dim, width)
        require(
            fits,
            f"latent_pages hold {cache.latent_dim} latent and {cache.rope_dim} rotary columns; value_dim must be the "
            f"first, got {value_dim}, and E (q) their sum, got {width}",
        )
        row = LatentRow(format=cache.format, latent_dim=cache.latent_dim, rope_dim=cache.rope_dim)
        return as_array("latent_pages.data", cache.data), row
    pool = as_float("latent_pages", latent_pages)
    check_shape("latent_pages", pool, (None, None, width))
    return pool, LatentRow(format="plain", latent_dim=value_dim, rope_dim=width - value_dim)


def _reader(row: LatentRow) -> Callable[[jax.Array], jax.Array]:
    """Stored rows to rows [..., E]."""
    if row.format == "plain":
        return lambda rows: rows
    return functools.partial(
        dequantize_latent, dtype=jnp.float32, format=row.format, latent_dim=row.latent_dim, rope_dim=row.rope_dim
    )


def _index_keys(key_pages: Any, width: int) -> tuple[Any, tuple[int, int]]:
    """The keys, an array or IndexKeys, and (pages, page size)."""
    if isinstance(key_pages, IndexKeys):
        require_kept("key_pages", key_pages)
        require(key_pages.dim == width, f"key_pages.dim must be the width of q, {width}, got {key_pages.dim}")
        return key_pages, (key_pages.pages, key_pages.page_size)
    keys = as_float("key_pages", key_pages)
    check_shape("key_pages", keys, (None, None, width))
    return keys, (keys.shape[0], keys.shape[1])


def _check_pool(name: str, pages: int, page_size: int) -> None:
    require(pages >= 1, f"{name} must have a page, got {pages}")
    good = page_size >= 1 and page_size & (page_size - 1) == 0
    require(good, f"the page size of {name} must be a power of two, got {page_size}")


def _check_static(implementation: str | None, config: Config | None) -> None:
    require(
        implementation in IMPLEMENTATIONS, f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}"
    )
    require(config is None or isinstance(config, Config), f"config must be a sparse_jax.Config, got {config!r}")


def _finite(name: str, value: Any) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    require(good, f"{name} must be a finite number known on the host, got {value!r}")
    return float(value)


@functools.partial(jax.jit, static_argnames=("row", "scale", "implementation", "config"))
def _attend(
    operands: tuple[jax.Array, ...],
    sinks: jax.Array | None,
    *,
    row: LatentRow,
    scale: float,
    implementation: str | None,
    config: Config | None,
) -> AttentionOutput:
    q, pool, slots = operands
    debug_ids("slots", slots, min(pool.shape[0] * pool.shape[1], INT32_MAX))

    def finish(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> AttentionOutput:
        if sinks is not None:
            out, lse = xla.merge_attention(out[None], lse[None], sinks)
        return AttentionOutput(out.astype(q.dtype), lse)

    # Everything that is differentiated is an argument, none is captured.
    def meaning(q: jax.Array, pool: jax.Array, slots: jax.Array, sinks: jax.Array | None) -> AttentionOutput:
        found = xla.mla_sparse_attention(q, pool, slots, scale=scale, value_dim=row.latent_dim, read=_reader(row))
        return finish(*found, sinks)

    def kernel(q: jax.Array, pool: jax.Array, slots: jax.Array, sinks: jax.Array | None, *, interpret: bool):
        out_dtype = q.dtype if sinks is None else jnp.float32
        found = pallas_kernels.mla_sparse_decode(
            q, pool, slots, row=row, scale=scale, out_dtype=out_dtype, config=config, interpret=interpret
        )
        return finish(*found, sinks)

    return dispatch.run(implementation, (*operands, sinks), xla=meaning, kernel=kernel, refusal=row.refusal())


@functools.partial(jax.jit, static_argnames=("k", "implementation", "config"))
def _score(
    operands: tuple[Any, ...],
    lengths: jax.Array,
    q_positions: jax.Array | None,
    *,
    k: int | None,
    implementation: str | None,
    config: Config | None,
) -> jax.Array:
    q, _, keys, page_table = operands
    quantised = isinstance(keys, IndexKeys)
    pages, page_size = (keys.pages, keys.page_size) if quantised else keys.shape[:2]
    capacity = page_table.shape[1] * page_size
    debug_ids("page_table", page_table, pages)
    length = jnp.clip(lengths, 0, capacity)[:, None]
    if q_positions is None:
        # Of the length as it is given, as in `paged_attention`: rows of a length above the table see all of it.
        q_positions = lengths[:, None] - q.shape[1] + jnp.arange(q.shape[1], dtype=jnp.int32)
    seen = jnp.clip(jnp.minimum(jnp.minimum(q_positions, INT32_MAX - 1) + 1, length), 0, capacity)

    def meaning(q, weights, keys, page_table, seen) -> jax.Array:
        stored, scale = keys.parts() if quantised else (keys, None)
        return xla.indexer_scores(q, weights, stored, scale, page_table, seen, k=k)

    def kernel(q, weights, keys, page_table, seen, *, interpret: bool) -> jax.Array:
        stored = keys.data if quantised else keys
        return pallas_kernels.indexer_scores(
            q, weights, stored, page_table, seen, k=k, page_size=page_size, config=config, interpret=interpret
        )

    return dispatch.run(implementation, (*operands, seen), xla=meaning, kernel=kernel)
