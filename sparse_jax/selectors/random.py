"""Random pages: what a method must beat. For evaluation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_jax.selectors.base import register
from sparse_jax.selectors.pages import PageSelector
from sparse_jax.selectors.views import Pages


@register("random")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(PageSelector):
    """Reads pages drawn anew in each step, plane and KV head, besides the sinks and the recent ones.

    The draw is a hash of (seed, position of the step, KV head, plane, page in the request) and of nothing else: it
    repeats, and depends on no other request and on no placement.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_whole("seed", 0)

    def score(self, state: Any, q: jax.Array, pages: Pages) -> jax.Array:
        """24 bits of the hash: f32[B, Hkv, W]."""
        del state, q
        mixed = jnp.uint32(self.seed & 0xFFFFFFFF)
        head = jnp.arange(pages.exists.shape[1], dtype=jnp.int32)[:, None]
        page = jnp.arange(pages.exists.shape[2], dtype=jnp.int32)
        for part in (pages.lengths, head, jnp.asarray(pages.plane, jnp.int32), page):
            mixed = _mix(mixed ^ part.astype(jnp.uint32))
        return (mixed >> 8).astype(jnp.float32)


def _mix(x: jax.Array) -> jax.Array:
    """Uint32 to uint32, one to one, each bit of the result depending on all (lowbias32, found by Chris Wellons)."""
    x = x + jnp.uint32(0x9E3779B9)  # 0 must not stay 0
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
