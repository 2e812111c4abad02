"""Scores of whole pages, in plain jnp."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def page_bounds(
    q: jax.Array,  # [B, Hkv, rows, D]
    lo: jax.Array,  # [N, Hkv, D], the smallest value of each key component of a page
    hi: jax.Array | None,  # [N, Hkv, D], the largest; None: plain products with lo
    page_ids: jax.Array,  # i32[B, Hkv or 1, W]
) -> jax.Array:
    """f32[B, Hkv, rows, W]: sum_d max(q_d lo_d, q_d hi_d), or q . lo; an absent page has the value of page 0."""
    q, (pages, kv_heads, _) = q.astype(jnp.float32), lo.shape
    ids = jnp.where((page_ids >= 0) & (page_ids < pages), page_ids, 0)
    head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    product = functools.partial(jnp.einsum, "bkrd,bkwd->bkrw", precision="highest")

    def of_pages(x: jax.Array) -> jax.Array:
        """f32[B, Hkv, W, D]."""
        return x[ids, head].astype(jnp.float32)

    if hi is None:
        return product(q, of_pages(lo))
    # max(q lo, q hi) is q hi where q is positive and q lo where it is negative, because lo <= hi: two matrix products.
    return product(jnp.maximum(q, 0), of_pages(hi)) + product(jnp.minimum(q, 0), of_pages(lo))
