"""What selectors of single tokens share: a method is its `rank`."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from sparse_jax.attention import token_sparse_attention
from sparse_jax.ops import to_slots, top_k
from sparse_jax.paging import PageView
from sparse_jax.selectors import budgets
from sparse_jax.selectors.base import DEFAULT_BUDGET, Attended, Selector
from sparse_jax.selectors.views import Pages, inside_pool
from sparse_jax.validation import as_array, require


class TokenSelector(Selector):
    """The first `sinks` tokens, the last `recent` ones, and the best of the others by `rank`, each KV head its own.

    A request of no more tokens than the budget is attended whole. One query token a step (T = 1).
    """

    reads_all_keys: ClassVar[bool] = True

    def rank(
        self, state: Any, q: jax.Array, k_pages: jax.Array, view: PageView, *, k: Any, reserved: tuple[int, Any]
    ) -> tuple[jax.Array, Any]:
        """Scores of the tokens f32[B, Hkv, W * P] in the order of the table, and the new state.

        q [B, Hq, D]; reserved: how many first and last tokens are read anyway; k: how many between them the budget
        holds, an int or i32 that is broadcastable to [B, Hkv].
        """
        raise NotImplementedError

    def reserved(self, tokens: Any, capacity: int) -> tuple[int, Any]:
        """First and last tokens that are read anyway; a recent of None follows the budget, see `budgets.recent_of`.

        tokens: the budget, an int or i32[B, 1 or Hkv], and so is the second result.
        """
        last = budgets.recent_of(tokens) if self.recent is None else self.recent
        last = min(last, capacity) if isinstance(last, int) else jnp.minimum(last, capacity)
        return min(self.sinks, capacity), last

    def attend(
        self,
        state: Any,
        q: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        view: PageView,
        *,
        plane: Any = 0,
        **options: Any,
    ) -> Attended:
        """See `Selector.attend`; `options` go to `token_sparse_attention`.

        Raises ValueError for several query rows, and for options that change scores.
        """
        q = as_array("q", q)
        require(k_pages.ndim == 4, f"k_pages must be [planes * N, Hkv, P, D], got {list(k_pages.shape)}")
        require(
            q.ndim == 3 or (q.ndim == 4 and q.shape[1] == 1),
            f"{type(self).__name__} takes one query token of each request a step: q [B, Hq, D] or [B, 1, Hq, D], "
            f"got {list(q.shape)}",
        )
        refused = sorted({"scale", "soft_cap", "k_scale"} & set(options))
        require(
            not refused,
            f"{type(self).__name__} ranks by plain scores at a scale of its own, so attention has the same: give "
            f"`scale` to the selector; got {', '.join(refused)} for the attention",
        )
        scale = getattr(self, "scale", None)
        options |= {} if scale is None else {"scale": scale}
        pool, kv_heads, page_size, _ = k_pages.shape
        view = inside_pool(view, pool)
        pages = Pages.of(view, kv_heads=kv_heads, page_size=page_size, plane=plane)
        capacity = pages.ids.shape[-1] * page_size
        budget = DEFAULT_BUDGET if self.budget is None else self.budget
        tokens = budgets.tokens(budget, self.most, pages.lengths[..., 0], plane, kv_heads=kv_heads, capacity=capacity)
        first, last = self.reserved(tokens, capacity)
        k = max(1, tokens - first - last) if isinstance(tokens, int) else jnp.maximum(1, tokens - first - last)
        q3 = q.reshape(q.shape[0], *q.shape[-2:])
        scores, state = self.rank(state, q3, k_pages, view, k=k, reserved=(first, last))

        token = jnp.arange(capacity, dtype=jnp.int32)
        always = token >= pages.lengths - (last if isinstance(last, int) else last[..., None])
        always |= token < first  # [B, Hkv or 1, W * P]
        exists = jnp.repeat(pages.exists, page_size, axis=-1) & (token < pages.lengths)
        scores = jnp.where(exists, jnp.where(always, jnp.inf, jnp.nan_to_num(scores)), -jnp.inf)
        most = budgets.most_tokens(budget, self.most, capacity)
        width = min(max(most, sum(self.reserved(most, capacity)) + 1), capacity)
        if isinstance(tokens, int) and isinstance(budget, int):
            chosen = top_k(scores, width, order="id")
        else:  # rows differ in how many they may have
            rank = jnp.arange(width, dtype=jnp.int32)
            chosen = jnp.where(rank < jnp.asarray(first + last + k)[..., None], top_k(scores, width), -1)
        requests = jnp.arange(q.shape[0], dtype=jnp.int32)
        slots = to_slots(chosen, view.page_table, requests, page_size=page_size)
        output = token_sparse_attention(q, k_pages, v_pages, slots, **options)
        return Attended(output, state, (chosen >= 0).sum(axis=-1, dtype=jnp.int32), chosen)
