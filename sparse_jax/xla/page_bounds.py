"""Upper bounds of the scores of whole pages, in plain jnp."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def page_bounds(
    q: jax.Array,  # f32[B, Hkv, rows, D], scaled
    lo: jax.Array,  # f32[N, Hkv, D], the smallest value of each key component of a page
    hi: jax.Array,  # f32[N, Hkv, D], the largest
    page_ids: jax.Array,  # i32[B, Hkv or 1, W]
) -> jax.Array:
    """f32[B, Hkv, rows, W]: sum_d max(q_d lo_d, q_d hi_d); an absent page has some finite value."""
    pages, kv_heads, _ = lo.shape
    ids = jnp.where((page_ids >= 0) & (page_ids < pages), page_ids, 0)
    head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    # max(q lo, q hi) is q hi where q is positive and q lo where it is negative, because lo <= hi: two matrix products.
    product = functools.partial(jnp.einsum, "bkrd,bkwd->bkrw", precision="highest")
    return product(jnp.maximum(q, 0), hi[ids, head]) + product(jnp.minimum(q, 0), lo[ids, head])
