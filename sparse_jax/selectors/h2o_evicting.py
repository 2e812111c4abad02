"""H2O as in its paper (arXiv 2306.14048): what is not a heavy hitter and not recent is dropped for good.

A token's score is the sum of its attention probabilities over all queries so far, those of the prompt included, mean
over the query heads of a group (the paper has one query head per KV head). While a request is full, each new token
takes the place of the token of lowest score among those that are not recent.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparse_jax.selectors.observation import prompt_scores
from sparse_jax.selectors.replacing import Replacing
from sparse_jax.validation import INT32_MAX


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2OEvicting(Replacing):
    """Heavy hitters and recent tokens, `budget` together: `get("h2o", form="evict")`.

    budget: the paper's heavy_ratio + recent_ratio is a share of the prompt, 0.2 for its 0.1 + 0.1. recent: None is half
    of the budget, as there. sinks: none, as there. decay: old sums are multiplied by it in each step; 1 in the paper.
    prompt_queries: whether the queries of the prompt count. If not, nothing is known when the prompt is in: it keeps
    its sinks and its last tokens, and all scores begin at 0.
    """

    decay: float = 1.0
    prompt_queries: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("decay", "above 0 and at most 1", lambda x: 0 < x <= 1)

    def recent_of(self, limit: jax.Array) -> jax.Array:
        """See `Evicting.recent_of`."""
        recent = limit // 2 if self.recent is None else min(self.recent, INT32_MAX)
        return jnp.clip(recent, 1, limit)

    def prompt_scores(self, q: jax.Array, k: jax.Array, counts: jax.Array) -> jax.Array:
        """See `Evicting.prompt_scores`."""
        if not self.prompt_queries:
            return jnp.zeros((k.shape[0], k.shape[2], k.shape[1]), jnp.float32)
        return prompt_scores(q, k, counts, decay=self.decay, scale=self.scale)

    def updated(self, scores: jax.Array, weights: jax.Array) -> jax.Array:
        """See `Replacing.updated`."""
        return scores * self.decay + weights.mean(axis=2)
