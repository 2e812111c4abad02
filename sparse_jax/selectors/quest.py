"""Quest (arXiv 2406.10774): pages ranked by an upper bound of their attention scores.

Of every page and KV head the state holds the smallest and the largest value of each key component, lo and hi. No key k
of the page can score higher than

    q . k  <=  sum_d max(q_d * lo_d, q_d * hi_d)

`summaries.py` says how the boxes are kept, and what a rejected draft leaves in them.
"""

from __future__ import annotations

import dataclasses

import jax

from sparse_jax.paging import PagedKV
from sparse_jax.selectors.base import register
from sparse_jax.selectors.pages import ShareSelector
from sparse_jax.selectors.summaries import Envelope as Envelope
from sparse_jax.selectors.views import Pages


@register("quest")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quest(ShareSelector):
    """Keeps the pages whose keys could score highest; one choice per request and KV head.

    Options: those of every selector, and `scale`, see `ShareSelector`. `write`, `copy` and `select` raise ValueError
    for arguments that do not fit each other or the state.
    """

    def init(self, kv: PagedKV, requests: int = 1) -> Envelope:
        """See `Selector.init`."""
        del requests
        return Envelope.init(kv)

    def logits(self, state: Envelope, q: jax.Array, pages: Pages, scale: float) -> jax.Array:
        """The bound of each head."""
        return state.bounds(q, pages, scale)
