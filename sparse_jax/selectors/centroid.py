"""Page centroids: pages ranked by the attention that the mean of their keys would get.

The block mean of MoBA (arXiv 2502.13189), NSA (arXiv 2502.11089, where it is learned) and Kinetics (arXiv 2506.05333).
Half the reads of `quest`, but one key that stands out is averaged away.
"""

from __future__ import annotations

import dataclasses

import jax

from sparse_jax.paging import PagedKV
from sparse_jax.selectors.base import register
from sparse_jax.selectors.pages import ShareSelector
from sparse_jax.selectors.summaries import Sums
from sparse_jax.selectors.views import Pages


@register("centroid")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Centroid(ShareSelector):
    """Keeps the pages of the largest max over heads of softmax over pages of (scale * q . mean key).

    The mean of the queries of a group, which some implementations take instead, lets heads that look for different
    things cancel out. Options: those of every selector, and `scale`, see `ShareSelector`.
    """

    def init(self, kv: PagedKV, requests: int = 1) -> Sums:
        """See `Selector.init`."""
        del requests
        return Sums.init(kv)

    def logits(self, state: Sums, q: jax.Array, pages: Pages, scale: float) -> jax.Array:
        """The score of the mean key, for each head."""
        return state.means(q, pages, scale)
