"""The two page-level H2O flows for vortex_torch: pages ranked by a weighted sum of their mean and their peak relevance.

Of a page the state holds the mean c of its keys and their smallest and largest components m and M. With q_h the query
heads of a KV head and qbar their mean, the score is

    h2o_sparse_attention       w_avg * (qbar . c)       + w_peak * sum_d max(qbar_d M_d, qbar_d m_d)
    gqa_h2o_sparse_attention   w_avg * max_h (q_h . c)  + w_peak * max_h sum_d max(q_hd M_d, q_hd m_d)

No softmax and no scale: one that multiplies one term only would make the two incomparable. The peak term is an upper
bound and systematically the larger; hence the weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse_jax.paging import PagedKV
from sparse_jax.selectors import budgets
from sparse_jax.selectors.base import register
from sparse_jax.selectors.pages import PageSelector
from sparse_jax.selectors.summaries import Envelope, Sums, check_fits, visible
from sparse_jax.selectors.views import Pages


class Statistics(NamedTuple):
    """What is kept of each page."""

    box: Envelope
    sums: Sums


@register("gqa_h2o_sparse_attention")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedH2OPages(PageSelector):
    """The best pages by mean and peak relevance; the two maxima over a group may come from different heads.

    Read are the first b = ceil(sinks / P) pages of the table, the last e = max(1, ceil(recent / P)) and, of those
    between, the best k = ceil(budget / P) - b - e, at least 1; all of them where they are not more than k.
    """

    w_avg: float = 1.0
    w_peak: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("w_avg", "w_peak"):
            self.check_number(name, "a finite number")

    def init(self, kv: PagedKV, requests: int = 1) -> Statistics:
        """See `Selector.init`."""
        del requests
        return Statistics(Envelope.init(kv), Sums.init(kv))

    def write(self, state: Statistics, keys: jax.Array, slots: jax.Array) -> Statistics:
        """See `Selector.write`."""
        return Statistics(state.box.write(keys, slots), state.sums.write(keys, slots))

    def copy(self, state: Statistics, sources: jax.Array, targets: jax.Array) -> Statistics:
        """See `Selector.copy`."""
        return Statistics(state.box.copy(sources, targets), state.sums.copy(sources, targets))

    def reserved(self, tokens: Any, page_size: int, table_width: int, rows: int = 1) -> tuple[int, Any]:
        """(b, e), the first and the last pages that are read anyway; tokens, and so e: an int or i32 array."""
        _, sinks, recent = self.token_options()
        recent = budgets.recent_of(tokens) if recent is None else recent
        if rows > 1:  # those of every row, whose windows need not begin with a page; the flows know one row
            recent = recent + rows - 1 + page_size - 1
        last = -(-recent // page_size)
        last = min(max(last, 1), table_width) if isinstance(last, int) else jnp.clip(last, 1, table_width)
        return min(-(-sinks // page_size), table_width), last

    def width(self, *, page_size: int, table_width: int, rows: int = 1) -> int:
        """b + k + e, at most W."""
        tokens = budgets.most_tokens(self.token_options()[0], self.most, table_width * page_size)
        return min(
            max(-(-tokens // page_size), sum(self.reserved(tokens, page_size, table_width, rows)) + 1), table_width
        )

    def always(self, pages: Pages, tokens: Any) -> jax.Array:
        """The first b and the last e pages of each request."""
        first, last = self.reserved(tokens, pages.page_size, pages.ids.shape[-1], pages.rows)
        index = jnp.arange(pages.ids.shape[-1], dtype=jnp.int32)
        held = -(-pages.lengths // pages.page_size)  # [B, Hkv or 1, 1]
        return (index < first) | (index >= held - (last if isinstance(last, int) else last[..., None]))

    def wanted(self, tokens: jax.Array, always: jax.Array, page_size: int) -> jax.Array:
        """b + k + e of each request."""
        return jnp.maximum(-(-tokens // page_size), always.sum(axis=-1, dtype=jnp.int32) + 1)

    def queries(self, q: jax.Array, kv_heads: int) -> jax.Array:
        """The queries that are compared with pages, [B, T, a multiple of Hkv, D]."""
        del kv_heads
        return q

    def score(self, state: Statistics, q: jax.Array, pages: Pages) -> jax.Array:
        """The weighted sum, of several rows the largest: f32[B, Hkv, W]."""
        check_fits(state.box, q, pages)
        if self.everything_fits(pages):
            return jnp.float32(0)  # nothing to rank
        q = self.queries(q, pages.exists.shape[1])
        mean, peak = state.sums.means(q, pages).max(axis=2), state.box.bounds(q, pages).max(axis=2)  # [B, Hkv, T, W]
        # Finite, also where a key or a query is not: any existing page can be chosen.
        score = jnp.nan_to_num(self.w_avg * mean + self.w_peak * peak, nan=jnp.finfo(jnp.float32).min)
        return jnp.where(visible(pages, state.sums.count.shape[0]), score, jnp.finfo(jnp.float32).min).max(axis=2)


@register("h2o_sparse_attention")
@dataclasses.dataclass(frozen=True, kw_only=True)
class H2OPages(GroupedH2OPages):
    """The same with the mean of the query heads of a KV head in place of maxima over them."""

    def queries(self, q: jax.Array, kv_heads: int) -> jax.Array:
        """The mean of each group, f32[B, T, Hkv, D]."""
        return q.astype(jnp.float32).reshape(*q.shape[:2], kv_heads, -1, q.shape[-1]).mean(axis=3)
