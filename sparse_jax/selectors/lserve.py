"""The page selection of LServe (arXiv 2502.14866): boxes around parts of a page, for tight bounds of large pages."""

from __future__ import annotations

import dataclasses

from sparse_jax.paged_kv import PagedKV, key_shape
from sparse_jax.selectors.base import register
from sparse_jax.selectors.quest import Quest
from sparse_jax.selectors.summaries import Envelope

BOX_TOKENS = 16


@register("lserve")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LServe(Quest):
    """Ranks a page by the largest bound of its parts of 16 tokens; at page sizes up to 16 it is `quest`.

    What is read is still whole pages. LServe's other half, heads that see a window only, is a budget by KV head.
    """

    def init(self, kv: PagedKV, requests: int = 1) -> Envelope:
        """See `Selector.init`; lo and hi are [planes * N * P / 16, Hkv, D]."""
        del requests
        return Envelope.init(kv, boxes=max(1, key_shape(kv)[3] // BOX_TOKENS))
