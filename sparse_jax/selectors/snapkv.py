"""SnapKV (arXiv 2404.14469): a prompt shrinks once, when it is in; what comes later is kept.

The last `window` queries of the prompt vote for the keys before them: probabilities, summed over these queries, mean
over the query heads of a group, averaged over `kernel` neighbouring positions, so that what surrounds an important
token is kept with it. Each KV head keeps the best and the window. Decoding appends and reads everything that is held.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_jax import compaction, paging
from sparse_jax.attention import paged_attention
from sparse_jax.paging import PagedState, PageView, Reservation
from sparse_jax.selectors import budgets
from sparse_jax.selectors.base import Attended, register
from sparse_jax.selectors.evicting import Evicting, Kept, after, check_requests, compacted, positions_held
from sparse_jax.selectors.observation import pooled, prompt_scores
from sparse_jax.validation import INT32_MAX, as_array


@register("snapkv")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(Evicting):
    """Keeps `budget` tokens of a prompt, the window among them, and every later token.

    window: queries that vote, and tokens that are kept for certain (a larger `recent` keeps more). kernel: an odd
    number. A prompt of no more tokens than the budget is kept whole.
    """

    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "kernel"):
            self.check_whole(name, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"{type(self).__name__}: kernel is an odd number of tokens; got {self.kernel!r}.")

    def recent_of(self, limit: jax.Array) -> jax.Array:
        """See `Evicting.recent_of`."""
        return jnp.clip(min(max(self.window, self.recent or 0), INT32_MAX), 1, limit)

    def prompt_scores(self, q: jax.Array, k: jax.Array, counts: jax.Array) -> jax.Array:
        """See `Evicting.prompt_scores`."""
        votes = prompt_scores(q, k, counts, rows=self.window, scale=self.scale)
        before = jnp.arange(k.shape[1], dtype=jnp.int32) < (counts - min(self.window, INT32_MAX))[:, None, None]
        return pooled(jnp.where(before, votes, 0.0), self.kernel)

    def tokens_held(self, prompt: int, total: int) -> int:
        """See `Selector.tokens_held`."""
        kept = min(prompt, budgets.most_tokens(self.held_budget(), self.most, max(prompt, 1)))
        return kept + total - prompt

    def reserve(
        self, paged: PagedState, state: Kept, counts: jax.Array, width: int
    ) -> tuple[PagedState, Kept, Reservation]:
        """See `Selector.reserve`."""
        check_requests(paged, state)
        cache, reservation = compaction.reserve(compacted(paged, state), counts, width)
        return cache.paged, after(state, cache), reservation

    def store(
        self, paged: PagedState, state: Kept, plane: Any, reservation: Reservation, k: jax.Array, v: jax.Array
    ) -> tuple[PagedState, Kept, jax.Array]:
        """See `Selector.store`."""
        paged, stale = paging.write(paged, plane, reservation, k, v)
        return paged, state, stale

    def attend(
        self,
        state: Kept,
        q: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        view: PageView,
        *,
        plane: Any = 0,
        **options: Any,
    ) -> Attended:
        """See `Selector.attend`; `options` go to `paged_attention`."""
        del plane
        q = as_array("q", q)
        options = self.attention_options(state, view, 1 if q.ndim == 3 else q.shape[1], options)
        output = paged_attention(q, k_pages, v_pages, view.page_table, view.lengths, **options)
        positions = positions_held(state, view)
        return Attended(output, state, jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32), positions)
