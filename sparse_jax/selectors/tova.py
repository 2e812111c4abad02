"""TOVA (arXiv 2401.06104): while a request is full, the token that the last query attended least is dropped.

The probability is the mean over all query heads of a layer, so the KV heads of a layer hold the same tokens. Nothing is
summed up: what counts is the last query alone, of the prompt and then of each step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_jax.selectors.base import register
from sparse_jax.selectors.observation import prompt_scores
from sparse_jax.selectors.replacing import Replacing


@register("tova")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tova(Replacing):
    """Holds `budget` tokens; recent: None protects the newest alone, as in the paper, which has no sinks either."""

    def prompt_scores(self, q: jax.Array, k: jax.Array, counts: jax.Array) -> jax.Array:
        """See `Evicting.prompt_scores`."""
        scores = prompt_scores(q, k, counts, rows=1, scale=self.scale)
        return jnp.broadcast_to(scores.mean(axis=1, keepdims=True), scores.shape)

    def updated(self, scores: jax.Array, weights: jax.Array) -> jax.Array:
        """See `Replacing.updated`."""
        return jnp.broadcast_to(weights.mean(axis=(1, 2))[:, None], scores.shape)
