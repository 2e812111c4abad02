"""H2O's accumulator as a public operation: decayed sums of attention probabilities beside the keys."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import Config
from pallas_kernels.pairs import offsets_wrap
from sparse_jax import dispatch, xla
from sparse_jax.dispatch import IMPLEMENTATIONS
from sparse_jax.validation import (
    CACHE_DTYPES,
    as_array,
    as_float,
    as_ids,
    check_shape,
    debug_ids,
    debug_lengths,
    require,
)

DECAY = 1 - 2**-6  # exact in bfloat16
GROUPS = ("mean", "max")


def h2o_accumulate(
    scores: Any,
    q: Any,
    k_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    k: Any,
    reserved: tuple[Any, Any],
    decay: Any = DECAY,
    scale: Any = None,
    group: str = "mean",
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Adds the attention probabilities of one decode step to decayed sums, for the tokens between reserved ones.

    With S the length, (first, last) = reserved and the window of the tokens first .. S - last - 1:

        H_t <- p_t + decay * H_t    inside the window, if it has more than k tokens; nothing changes elsewhere

    p is a softmax over the window of scale * q . k_t: of the group's mean query ("mean"), or the largest over the heads
    of the group of their probabilities ("max").

    scores: f32 or bf16 [N, Hkv, P], the sums H, addressed like the pool. q: [B, Hq, D]. k_pages: [N, Hkv, P, D].
    page_table: i32[B, W] or i32[B, Hkv, W]; -1 or out of range is absent: its tokens are left out of the softmax.
    lengths: i32[B] or i32[B, Hkv], cut to the table. k: at least 1, an int or i32 broadcastable to [B, Hkv]. reserved:
    two numbers of tokens. decay: in (0, 1], 1 - 2**-6 unless given. scale: D ** -0.5 unless given. Both, k and reserved
    may be traced; changing them compiles nothing anew; out of range, a traced one counts as the nearest that is not.
    Requests must not share the pages of their windows. Probabilities that are not finite, because a query or a key is
    not, count as 0: the sums only decay in such a step.

    Returns the new scores, in the dtype of the old; float32 inside. Raises ValueError for arguments that do not fit
    each other. Source: H2O, arXiv 2306.14048, in the decayed form of the H2O flows for vortex_torch.
    """
    scores, q = as_float("scores", scores, (jnp.float32, jnp.bfloat16)), as_float("q", q)
    k_pages = as_float("k_pages", k_pages, CACHE_DTYPES)
    check_shape("k_pages", k_pages, (None, None, None, None))
    pages, kv_heads, page_size, width = k_pages.shape
    check_shape("scores", scores, (pages, kv_heads, page_size))
    check_shape("q", q, (None, None, width))
    batch, heads = q.shape[:2]
    require(
        heads % kv_heads == 0 and heads > 0, f"q must have a multiple of {kv_heads} KV heads, got {heads} query heads"
    )
    page_table, lengths = as_ids("page_table", page_table), as_ids("lengths", lengths)
    check_shape("page_table", page_table, (batch, None), (batch, kv_heads, None))
    check_shape("lengths", lengths, (batch,), (batch, kv_heads))
    require(page_table.shape[-1] >= 1, f"page_table must have a column, got {list(page_table.shape)}")
    require(group in GROUPS, f"group must be one of {GROUPS}, got {group!r}")
    require(
        implementation in IMPLEMENTATIONS, f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}"
    )
    scale = width**-0.5 if scale is None else scale
    _check_known("decay", decay, lambda x: 0 < x <= 1, "above 0 and at most 1")
    require(np.shape(scale) == np.shape(decay) == (), f"scale and decay must be numbers, got {scale!r} and {decay!r}")
    _check_known("scale", scale, lambda x: abs(x) <= np.finfo(np.float32).max, "finite (in float32)")
    factors = jnp.stack([jnp.asarray(scale, jnp.float32), jnp.asarray(decay, jnp.float32)])
    arrays = scores, q, k_pages, page_table, lengths, factors, *_numbers(k, reserved)
    return _accumulate(arrays, group=group, implementation=implementation, config=config)


def _numbers(k: Any, reserved: tuple[Any, Any]) -> list[jax.Array]:
    """The numbers k, first and last as i32; raises ValueError for those that are known and too small."""
    require(len(reserved) == 2, f"reserved must be two numbers, of first and last tokens, got {reserved!r}")
    found = []
    for name, value, least in (("k", k, 1), ("reserved", reserved[0], 0), ("reserved", reserved[1], 0)):
        found.append(as_ids(name, value))
        _check_known(name, found[-1], lambda x, least=least: (x >= least).all(), f"at least {least}")
    return found


def _check_known(name: str, value: Any, good: Any, wanted: str) -> None:
    """A value that is known when the function is traced must be good."""
    if not isinstance(value, jax.core.Tracer) and not bool(good(np.asarray(value))):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


@functools.partial(jax.jit, static_argnames=("group", "implementation", "config"))
def _accumulate(arrays: tuple[Any, ...], *, group: str, implementation: str | None, config: Config | None) -> jax.Array:
    scores, q, k_pages, page_table, lengths, factors, *numbers = arrays
    pages, kv_heads, page_size, width = k_pages.shape
    capacity = page_table.shape[-1] * page_size
    debug_ids("page_table", page_table, pages)
    debug_lengths("lengths", lengths, capacity)
    q = q.reshape(q.shape[0], kv_heads, -1, width)
    if group == "mean" and q.shape[2] > 1:
        q = q.astype(jnp.float32).mean(axis=2, keepdims=True)
    operands = (
        scores,
        q,
        k_pages,
        page_table if page_table.ndim == 3 else page_table[:, None],
        windows(lengths, *numbers, kv_heads=kv_heads, capacity=capacity),
        factors,
    )
    wraps = "k_pages of an odd number of one-byte columns between 2^31 and 2^32 elements"
    return dispatch.run(
        implementation,
        operands,
        xla=xla.h2o_accumulate,
        kernel=functools.partial(pallas_kernels.h2o_accumulate, config=config),
        refusal=wraps if offsets_wrap(k_pages) else None,
    )


def windows(
    lengths: jax.Array, k: jax.Array, first: jax.Array, last: jax.Array, *, kv_heads: int, capacity: int
) -> jax.Array:
    """The window of each request and KV head, i32[B, Hkv, 2]: first token and end; (0, 0) where everything is attended.

    One predicate for scoring, softmax, accumulation and selection. lengths i32[B] or i32[B, Hkv].
    """
    lengths = as_array("lengths", lengths)
    lengths = jnp.clip(lengths if lengths.ndim == 2 else lengths[:, None], 0, capacity)
    # In range, whatever was traced: nothing below leaves the tokens of the request, or int32.
    k, first, last = (jnp.clip(x, least, capacity) for x, least in ((k, 1), (first, 0), (last, 0)))
    first, end = jnp.broadcast_arrays(first, lengths - last)
    active = end - first > k
    window = jnp.stack([jnp.where(active, first, 0), jnp.where(active, end, 0)], axis=-1)
    return jnp.broadcast_to(window, (lengths.shape[0], kv_heads, 2)).astype(jnp.int32)
