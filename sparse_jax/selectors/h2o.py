"""H2O as a selector: tokens ranked by decayed sums of their attention probabilities, all keys and values kept.

The sums lie beside the tokens, addressed like the pool, so this works at any page size. Each step reads every key of
the window once (`h2o_accumulate`) and then attends to few tokens: it saves value reads, at most half of all. The form
that drops tokens for good, and reads nothing more than it keeps, is `get("h2o", form="evict")`.

Source: H2O, arXiv 2306.14048, ranks by sums over all queries; the window and the decay are those of the H2O flows for
vortex_torch, whose two token-level flows are here under their names.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from sparse_jax.h2o import DECAY, GROUPS, h2o_accumulate
from sparse_jax.paged_kv import PagedKV, key_shape
from sparse_jax.paging import PageView
from sparse_jax.selectors.base import Selector, make, register
from sparse_jax.selectors.h2o_evicting import H2OEvicting
from sparse_jax.selectors.tokens import TokenSelector
from sparse_jax.validation import as_array, as_ids, require

STATE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(TokenSelector):
    """Keeps the tokens of the largest sums H_t <- p_t + decay * H_t; rules in `h2o_accumulate`.

    sinks, recent: the reserved first and last tokens, which gain and lose nothing. group: "mean" (softmax of the mean
    query) or "max" (the largest probability of a group). decay in (0, 1]; scale D ** -0.5 if None. state_dtype:
    "bfloat16" halves the state, and loses mass for a decay above 1 - 2**-6. Raises ValueError for bad options.
    """

    group: str = "mean"
    decay: float = DECAY
    scale: float | None = None
    state_dtype: str = "float32"

    shareable: ClassVar[bool] = False
    accumulates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.group not in GROUPS:
            raise ValueError(f"{name}: group must be one of {GROUPS}, got {self.group!r}.")
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(f"{name}: state_dtype must be one of {STATE_DTYPES}, got {self.state_dtype!r}.")
        self.check_number("decay", "above 0 and at most 1", lambda x: 0 < x <= 1)
        self.check_number("scale", "a finite number (in float32), or None", optional=True)

    def softmax_scale(self, width: int) -> float:
        """What q . k of D = width columns is multiplied by before the softmax."""
        return width**-0.5 if self.scale is None else self.scale

    def init(self, kv: PagedKV, requests: int = 1) -> jax.Array:
        """See `Selector.init`: the sums, [planes * N, Hkv, P]."""
        del requests
        planes, pages, kv_heads, page_size, _ = key_shape(kv)
        self.check_page_size(page_size)
        return jnp.zeros((planes * pages, kv_heads, page_size), self.state_dtype)

    def write(self, state: jax.Array, keys: jax.Array, slots: jax.Array) -> jax.Array:
        """See `Selector.write`: a written slot begins at 0, whoever had it before."""
        pages, kv_heads, page_size = state.shape
        slots = as_ids("slots", slots)
        require(
            keys.shape[: slots.ndim + 1] == (*slots.shape, kv_heads),
            f"keys must be [..., Hkv, D] with the shape of slots {list(slots.shape)} and {kv_heads} KV heads in front, "
            f"got {list(keys.shape)}",
        )
        # The zeros wait for the keys. Otherwise this write could run before the previous layer's reads of the sums, and
        # XLA would copy all of them in every layer to allow that.
        state, _ = lax.optimization_barrier((state, keys))
        slots = slots.reshape(-1)
        valid = (slots >= 0) & (slots < pages * page_size)
        page, offset = jnp.where(valid, slots // page_size, pages), jnp.where(valid, slots % page_size, 0)
        head = jnp.arange(kv_heads, dtype=jnp.int32)
        return state.at[page[:, None], head, offset[:, None]].set(jnp.zeros((), state.dtype), mode="drop")

    def copy(self, state: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
        """See `Selector.copy`."""
        pages = state.shape[0]
        sources, targets = as_ids("sources", sources), as_ids("targets", targets)
        require(
            sources.shape == targets.shape,
            f"sources and targets must have one shape, got {list(sources.shape)} and {list(targets.shape)}",
        )
        valid = (sources >= 0) & (sources < pages) & (targets >= 0)
        rows = state[jnp.where(valid, sources, 0)]
        return state.at[jnp.where(valid, targets, pages)].set(rows, mode="drop")

    def rank(
        self, state: jax.Array, q: jax.Array, k_pages: jax.Array, view: PageView, *, k: Any, reserved: tuple[int, Any]
    ) -> tuple[jax.Array, jax.Array]:
        """See `TokenSelector.rank`: accumulates, then ranks by the sums."""
        self.check_page_size(k_pages.shape[2])
        table = as_array("view.page_table", view.page_table)
        state = h2o_accumulate(
            state,
            q,
            k_pages,
            table,
            view.lengths,
            k=k,
            reserved=reserved,
            decay=self.decay,
            scale=self.softmax_scale(k_pages.shape[-1]),
            group=self.group,
        )
        return of_tokens(state, table), state

    def check_page_size(self, page_size: int) -> None:
        """Raises ValueError where a flow for pages of one token meets larger ones."""
        if self.page_size not in (None, page_size):
            token_flow, page_flow = FLOWS[type(self)]
            raise ValueError(
                f"{token_flow} works on pages of one token, got pages of {page_size}; {page_flow} is its page-level "
                'flow, and "h2o" ranks tokens in pages of any size.'
            )


def of_tokens(scores: jax.Array, page_table: jax.Array) -> jax.Array:
    """Scores [N, Hkv, P] in the order of a table i32[B, W] or [B, Hkv, W]: f32[B, Hkv, W * P]; absent: any value."""
    pages, kv_heads, _ = scores.shape
    table = page_table if page_table.ndim == 3 else page_table[:, None]
    table = jnp.broadcast_to(table, (table.shape[0], kv_heads, table.shape[-1]))
    rows = scores[jnp.where((table >= 0) & (table < pages), table, 0), jnp.arange(kv_heads)[:, None]]
    return rows.reshape(*table.shape[:2], -1).astype(jnp.float32)


@register("h2o_token_sparse_attention")
@dataclasses.dataclass(frozen=True, kw_only=True)
class H2OToken(H2O):
    """The token-level flow with the mean of the group's queries: pages of one token."""

    page_size: ClassVar[int | None] = 1


@register("gqa_h2o_token_sparse_attention")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GQAH2OToken(H2O):
    """The token-level flow with the largest probability of the group's heads: pages of one token."""

    group: str = "max"
    page_size: ClassVar[int | None] = 1


FLOWS = {
    H2OToken: ("h2o_token_sparse_attention", "h2o_sparse_attention"),
    GQAH2OToken: ("gqa_h2o_token_sparse_attention", "gqa_h2o_sparse_attention"),
}


@register("h2o")
def h2o(*, form: str = "select", **options: Any) -> Selector:
    """H2O with token scores at any page size.

    form: "select" keeps all keys and values and reads few (`H2O`); "evict" drops tokens for good (`H2OEvicting`).
    Options are those of the class. Raises ValueError for another form or unknown options.
    """
    forms: dict[str, type[Selector]] = {"select": H2O, "evict": H2OEvicting}
    if form not in forms:
        raise ValueError(f"h2o: form must be one of {', '.join(map(repr, forms))}, got {form!r}.")
    return make("h2o", forms[form], options, more=("form",))
