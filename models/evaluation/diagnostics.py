"""What a step missed: the tokens it read, held against the dense probabilities of the very same queries.

With p the dense probabilities of a query head, averaged over the heads of a KV group, and R the tokens that were read:

    mass    sum of p over R
    oracle  sum of the |R| largest p: no choice of as many tokens could have more
    recall  share of those |R| tokens that are in R
    error   |out - dense out| / |dense out|, over all heads

All are averaged over KV heads. Ties at the edge of the oracle's choice count in favour of the method.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_jax.paging import PageView


class Diagnosis(NamedTuple):
    """What a step of one plane (or of all) read and missed."""

    mass: jax.Array  # f32[B], or [planes, B]
    oracle: jax.Array
    recall: jax.Array
    error: jax.Array


def nothing(*shape: int) -> Diagnosis:
    """Zeros f32[shape]."""
    return Diagnosis(*(jnp.zeros(shape, jnp.float32) for _ in Diagnosis._fields))


def diagnose(
    q: jax.Array, out: jax.Array, k_pages: jax.Array, v_pages: jax.Array, view: PageView, read: jax.Array
) -> Diagnosis:
    """Compare one step with dense attention.

    q, out [B, Hq, D]: queries and what the method made of them. k_pages, v_pages, view: a cache of every token. read
    bool[B, Hkv, S or more]: the tokens that were read. A request without tokens gives 0.
    """
    p, dense = dense_attention(q, k_pages, v_pages, view)
    share = p.mean(axis=2)  # [B, Hkv, S]
    read = read[..., : share.shape[-1]] & (share >= 0)
    share = jnp.maximum(share, 0)
    count = read.sum(axis=-1, dtype=jnp.int32)[..., None]
    falling = -jnp.sort(-share, axis=-1)
    last = jnp.maximum(count - 1, 0)
    best = jnp.where(count > 0, jnp.take_along_axis(jnp.cumsum(falling, axis=-1), last, axis=-1), 0)
    edge = jnp.take_along_axis(falling, last, axis=-1)
    above, tied = share > edge, share == edge
    found = (read & above).sum(-1) + jnp.minimum((read & tied).sum(-1), count[..., 0] - above.sum(-1))
    difference = out.astype(jnp.float32) - dense
    scale = jnp.sqrt((dense * dense).sum(axis=(1, 2)))
    error = jnp.sqrt((difference * difference).sum(axis=(1, 2))) / jnp.where(scale == 0, 1, scale)
    return Diagnosis(
        jnp.where(read, share, 0).sum(axis=-1).mean(axis=-1),
        best[..., 0].mean(axis=-1),
        (found / jnp.maximum(count[..., 0], 1)).mean(axis=-1),
        jnp.where(scale == 0, 0, error),
    )


def dense_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, view: PageView
) -> tuple[jax.Array, jax.Array]:
    """Probabilities f32[B, Hkv, G, S] of q [B, Hq, D] over every cached token, and their output f32[B, Hq, Dv].

    Places that hold no token get -1, so that they are told from tokens nobody looks at.
    """
    batch, heads, width = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    page = jnp.maximum(view.page_table, 0)  # [B, W]
    place = jnp.arange(page.shape[1] * page_size, dtype=jnp.int32).reshape(-1, page_size)
    holds = (view.page_table >= 0)[..., None] & (place < view.lengths[:, None, None])  # [B, W, P]
    holds = holds[:, None, None]
    # Numbers of eight bits are exact in 16; queries and probabilities are not to be rounded to eight.
    dtype = jnp.bfloat16 if k_pages.dtype.itemsize == 1 else k_pages.dtype
    groups = q.reshape(batch, kv_heads, -1, width).astype(dtype)
    k = jnp.where(holds[:, 0, 0, :, None, :, None], k_pages[page], 0).astype(dtype)  # [B, W, Hkv, P, D]
    scores = jnp.einsum("bkgd,bwkpd->bkgwp", groups, k, preferred_element_type=jnp.float32)
    scores = jnp.where(holds, scores * width**-0.5, -jnp.inf)
    m = jnp.max(scores, axis=(-2, -1), keepdims=True, initial=jnp.finfo(jnp.float32).min)
    weight = jnp.where(holds, jnp.exp(scores - m), 0)
    p = weight / jnp.maximum(weight.sum(axis=(-2, -1), keepdims=True), jnp.finfo(jnp.float32).tiny)
    v = jnp.where(holds[:, 0, 0, :, None, :, None], v_pages[page], 0).astype(dtype)
    out = jnp.einsum("bkgwp,bwkpd->bkgd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    p = jnp.where(holds, p, -1).reshape(*groups.shape[:3], -1)
    return p, out.reshape(batch, heads, -1)


def read_mask(positions: jax.Array, tokens: int) -> jax.Array:
    """bool[B, Hkv, tokens] of positions i32[B, Hkv, C]; -1 and what is out of range is nothing."""
    batch, kv_heads, _ = positions.shape
    inside = (positions >= 0) & (positions < tokens)
    at = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)[:, None], jnp.where(inside, positions, tokens)
    return jnp.zeros((batch, kv_heads, tokens), bool).at[at].set(True, mode="drop")
