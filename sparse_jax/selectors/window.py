"""Attention sinks and a window of recent tokens (StreamingLLM, arXiv 2309.17453), in whole pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_jax.selectors.base import DEFAULT_BUDGET, register
from sparse_jax.selectors.pages import PageSelector
from sparse_jax.selectors.views import Pages


@register("window")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Window(PageSelector):
    """Keeps the pages of the first `sinks` and the last `recent` tokens: all of the window, at any page size.

    `recent` alone keeps just that. A budget spends what is left of it on the pages before the window; so does the
    default, a budget of 1,024 tokens. Keys keep their true positions, and pages are read whole: give the attention
    `window=` as well to cut at the token.
    """

    def token_options(self) -> tuple[Any, int, int]:
        """See `PageSelector.token_options`."""
        if self.recent is None:
            return DEFAULT_BUDGET if self.budget is None else self.budget, self.sinks, 1
        return 1 if self.budget is None else self.budget, self.sinks, self.recent

    def score(self, state: Any, q: jax.Array, pages: Pages) -> jax.Array:
        """The later the better."""
        del state, q
        spend = self.budget is not None or self.recent is None
        return (pages.first // pages.page_size).astype(jnp.float32) if spend else jnp.float32(-jnp.inf)
