"""What selectors of whole pages share: a method is its `score`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparse_jax.ops import top_k
from sparse_jax.paging import PageView
from sparse_jax.selectors import budgets
from sparse_jax.selectors.base import DEFAULT_BUDGET, Selector
from sparse_jax.selectors.views import Pages, recent_tokens
from sparse_jax.validation import as_array, require


class PageSelector(Selector):
    """Sink pages, recent pages, and the best of the others by `score`, as many as the budget holds."""

    def score(self, state: Any, q: jax.Array, pages: Pages) -> jax.Array:
        """Scores of the pages for q [B, T, Hq, D]: f32, broadcastable to [B, Hkv, W]; -inf is never read."""
        raise NotImplementedError

    def token_options(self) -> tuple[Any, int, int]:
        """(budget, sinks, recent) with defaults: 1,024 tokens, an eighth of them recent ones but at most 32."""
        budget = DEFAULT_BUDGET if self.budget is None else self.budget
        recent = self.recent
        if recent is None:
            recent = min(32, max(1, budget // 8)) if isinstance(budget, int) else 32
        return budget, self.sinks, recent

    def width(self, *, page_size: int, table_width: int, rows: int = 1) -> int:
        """C, the number of page indices a step of `rows` query tokens returns: what the options ask for, at most W.

        It depends on the options and the shapes, never on the lengths: where fewer pages hold tokens, -1 fills up.
        """
        budget, sinks, recent = self.token_options()
        tokens = budgets.most_tokens(budget, self.most, table_width * page_size)
        window = recent_tokens(recent, rows)
        # A window that need not begin at a page boundary touches one page more than its size says.
        always = -(-sinks // page_size) + (-(-(window - 1) // page_size) + 1 if window else 0)
        return min(max(-(-tokens // page_size), always), table_width)

    def select(
        self, state: Any, q: jax.Array, view: PageView, *, kv_heads: int, page_size: int, plane: Any = 0
    ) -> jax.Array:
        """See `Selector.select`. Raises ValueError for a q or a view of another shape."""
        q = as_array("q", q)
        require(
            q.ndim in (3, 4) and q.shape[-2] % kv_heads == 0,
            f"q must be [B, T, Hq, D] or [B, Hq, D] with Hq a multiple of {kv_heads} KV heads, got {list(q.shape)}",
        )
        q = q[:, None] if q.ndim == 3 else q
        pages = Pages.of(view, kv_heads=kv_heads, page_size=page_size, rows=q.shape[1], plane=plane)
        batch, _, table_width = pages.exists.shape
        require(
            q.shape[0] == batch, f"q must have the {batch} requests of view.page_table, got {q.shape[0]} in its shape"
        )
        budget, sinks, recent = self.token_options()
        width = self.width(page_size=page_size, table_width=table_width, rows=pages.rows)
        score = jnp.broadcast_to(self.score(state, q, pages), pages.exists.shape).astype(jnp.float32)
        always = pages.always(sinks, recent) & pages.exists
        score = jnp.where(pages.exists, jnp.where(always, jnp.inf, score), -jnp.inf)
        tokens = budgets.tokens(
            budget, self.most, pages.lengths[..., 0], plane, kv_heads=kv_heads, capacity=table_width * page_size
        )
        if isinstance(tokens, int) and isinstance(budget, int):
            return top_k(score, width, order="id")
        # Rows differ in how many they may have: the best come first, and each row is cut at its own number.
        wanted = jnp.maximum(-(-tokens // page_size), always.sum(axis=-1, dtype=jnp.int32))
        rank = jnp.arange(width, dtype=jnp.int32)
        return jnp.where(rank < wanted[..., None], top_k(score, width), -1)
