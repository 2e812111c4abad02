"""No selection: every cached token is read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from sparse_jax.paging import PageView
from sparse_jax.selectors.base import Selector, register


@register("dense")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Selector):
    """Reads everything. The common options have no effect; they are accepted so that methods are exchanged by name."""

    def select(
        self, state: Any, q: jax.Array, view: PageView, *, kv_heads: int, page_size: int, plane: Any = 0
    ) -> None:
        """None: dense attention."""
        del state, q, view, kv_heads, page_size, plane
