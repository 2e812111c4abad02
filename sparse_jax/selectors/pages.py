"""What selectors of whole pages share: a method is its `score`, or where heads are compared by share its `logits`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_jax.ops import top_k
from sparse_jax.paging import PageView
from sparse_jax.selectors import budgets
from sparse_jax.selectors.base import DEFAULT_BUDGET, Selector
from sparse_jax.selectors.summaries import Envelope, Sums, check_fits
from sparse_jax.selectors.views import Pages, recent_tokens
from sparse_jax.validation import as_array, require


class PageSelector(Selector):
    """Sink pages, recent pages, and the best of the others by `score`, as many as the budget holds."""

    def score(self, state: Any, q: jax.Array, pages: Pages) -> jax.Array:
        """Scores of the pages for q [B, T, Hq, D]: f32, broadcastable to [B, Hkv, W]; -inf is never read."""
        raise NotImplementedError

    def token_options(self) -> tuple[Any, int, int | None]:
        """(budget, sinks, recent) with defaults: 1,024 tokens; a recent of None is an eighth of them, at most 32."""
        return DEFAULT_BUDGET if self.budget is None else self.budget, self.sinks, self.recent

    def width(self, *, page_size: int, table_width: int, rows: int = 1) -> int:
        """C, the number of page indices a step of `rows` query tokens returns: what the options ask for, at most W.

        It depends on the options and the shapes, never on the lengths: where fewer pages hold tokens, -1 fills up.
        """
        budget, sinks, recent = self.token_options()
        tokens = budgets.most_tokens(budget, self.most, table_width * page_size)
        window = recent_tokens(budgets.recent_of(tokens) if recent is None else recent, rows)
        # A window that need not begin at a page boundary touches one page more than its size says.
        always = -(-sinks // page_size) + (-(-(window - 1) // page_size) + 1 if window else 0)
        return min(max(-(-tokens // page_size), always), table_width)

    def everything_fits(self, pages: Pages) -> bool:
        """Whether the step reads all pages whatever their scores; not where a smaller budget can come at run time."""
        table_width = pages.ids.shape[-1]
        return isinstance(self.token_options()[0], int) and table_width == self.width(
            page_size=pages.page_size, table_width=table_width, rows=pages.rows
        )

    def always(self, pages: Pages, tokens: Any) -> jax.Array:
        """Which pages are read anyway: bool, broadcastable to [B, Hkv, W].

        tokens: the budget, an int or i32[B, 1 or Hkv].
        """
        _, sinks, recent = self.token_options()
        recent = budgets.recent_of(tokens) if recent is None else recent
        return pages.always(sinks, recent if isinstance(recent, int) else recent[..., None])

    def wanted(self, tokens: jax.Array, always: jax.Array, page_size: int) -> jax.Array:
        """How many pages are read where budgets differ: i32, broadcastable to [B, Hkv]; always bool[B, Hkv, W]."""
        return jnp.maximum(-(-tokens // page_size), always.sum(axis=-1, dtype=jnp.int32))

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
        budget = self.token_options()[0]
        tokens = budgets.tokens(
            budget, self.most, pages.lengths[..., 0], plane, kv_heads=kv_heads, capacity=table_width * page_size
        )
        width = self.width(page_size=page_size, table_width=table_width, rows=pages.rows)
        score = jnp.broadcast_to(self.score(state, q, pages), pages.exists.shape).astype(jnp.float32)
        always = self.always(pages, tokens) & pages.exists
        score = jnp.where(pages.exists, jnp.where(always, jnp.inf, score), -jnp.inf)
        if isinstance(tokens, int) and isinstance(budget, int):
            return top_k(score, width, order="id")
        # Rows differ in how many they may have: the best come first, and each row is cut at its own number.
        wanted = self.wanted(jnp.asarray(tokens, jnp.int32), always, page_size)
        rank = jnp.arange(width, dtype=jnp.int32)
        return jnp.where(rank < wanted[..., None], top_k(score, width), -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShareSelector(PageSelector):
    """Ranks a page by the best share of any query head's attention that it could have.

    Query heads differ in the size of their scores. The largest score of a group would nearly always come from its
    loudest head, even where that head attends evenly and needs nothing in particular. A score less the logsumexp of its
    own head's scores is the logarithm of that head's share, if every page kept its promise; shares of different heads
    (and rows) can be compared.

    scale multiplies the scores before they are compared, as in the attention; D ** -0.5 if None.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("scale", "a finite number (in float32), or None", optional=True)

    def write(self, state: Any, keys: jax.Array, slots: jax.Array) -> Any:
        """See `Selector.write`: the summaries take note themselves."""
        return state.write(keys, slots)

    def copy(self, state: Any, sources: jax.Array, targets: jax.Array) -> Any:
        """See `Selector.copy`."""
        return state.copy(sources, targets)

    def logits(self, state: Any, q: jax.Array, pages: Pages, scale: float) -> jax.Array:
        """What each head and row could make of a page, in its own units: f32[B, Hkv, G, T, W], -inf where unseen."""
        raise NotImplementedError

    def score(self, state: Envelope | Sums, q: jax.Array, pages: Pages) -> jax.Array:
        """The logarithm of the best share, f32[B, Hkv, W]."""
        check_fits(state, q, pages)
        if self.everything_fits(pages):
            return jnp.float32(0)  # nothing to rank
        logits = self.logits(state, q, pages, q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        share = jnp.where(jnp.isneginf(logits), -jnp.inf, logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        # Finite, also where a key or a query is not: a sick head prefers nothing, and any existing page can be chosen.
        return jnp.nan_to_num(share, nan=jnp.finfo(jnp.float32).min).max(axis=(2, 3))
