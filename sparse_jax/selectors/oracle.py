"""The oracle: the tokens of the largest true attention mass. It reads every key; it is for evaluation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_jax.paging import PageView
from sparse_jax.selectors.base import register
from sparse_jax.selectors.tokens import TokenSelector
from sparse_jax.selectors.views import Pages, inside_pool


@register("oracle")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(TokenSelector):
    """Keeps the tokens that dense attention gives most, as a mean over the group: no choice of as many retains more.

    sinks and recent are 0 unless given: they would only take places. scale: D ** -0.5 if None.
    """

    sinks: int = 0
    recent: int | None = 0
    scale: float | None = None

    def rank(
        self, state: Any, q: jax.Array, k_pages: jax.Array, view: PageView, *, k: Any, reserved: tuple[int, Any]
    ) -> tuple[jax.Array, Any]:
        """See `TokenSelector.rank`."""
        del k, reserved
        return dense_probabilities(q, k_pages, view, self.scale).mean(axis=2), state


def dense_probabilities(q: jax.Array, k_pages: jax.Array, view: PageView, scale: float | None = None) -> jax.Array:
    """What dense attention gives each token: f32[B, Hkv, G, W * P] in the order of the table, 0 where none is.

    q [B, Hq, D]; k_pages [planes * N, Hkv, P, D]; scale: D ** -0.5 if None.
    """
    pool, kv_heads, page_size, width = k_pages.shape
    pages = Pages.of(inside_pool(view, pool), kv_heads=kv_heads, page_size=page_size)
    q = q.reshape(q.shape[0], kv_heads, -1, width)
    exists = pages.exists
    at = jnp.where(exists, jnp.broadcast_to(pages.ids, exists.shape), 0)
    keys = k_pages[at, jnp.arange(kv_heads, dtype=jnp.int32)[:, None]]  # [B, Hkv, W, P, D]
    keys = keys.reshape(*exists.shape[:2], -1, width)
    dtype = jnp.promote_types(q.dtype, jnp.bfloat16 if keys.dtype.itemsize == 1 else keys.dtype)
    s = jnp.einsum(
        "bkgd,bktd->bkgt",
        q.astype(dtype),
        keys.astype(dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    visible = jnp.repeat(exists, page_size, axis=-1) & (
        jnp.arange(exists.shape[-1] * page_size, dtype=jnp.int32) < pages.lengths
    )
    s = jnp.where(visible[:, :, None], s * (width**-0.5 if scale is None else scale), -jnp.inf)
    top = s.max(axis=-1, keepdims=True)
    weight = jnp.exp(s - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weight.sum(axis=-1, keepdims=True)
    return weight / jnp.where(total == 0, 1.0, total)
