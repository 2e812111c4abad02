"""Quest (arXiv 2406.10774): pages ranked by an upper bound of their attention scores.

Of every page and KV head the state holds the smallest and the largest value of each key component, lo and hi. No key k
of the page can score higher than

    q . k  <=  sum_d max(q_d * lo_d, q_d * hi_d)

Setting the length back (speculative decoding) does not shrink a box, because minima and maxima cannot be undone:

- A page that keeps tokens keeps the rejected keys in its box, also after other tokens were written at their offsets.
  The bound is still an upper bound for the keys that remain, but looser than had the draft never been written, and the
  pages chosen may differ from those chosen without the draft.
- A page that was empty before the draft is exact again once its offset 0 is written: that begins the box anew.
- To get the very bits of a run without the draft, keep the state from before it (`write` returns a new one; do not
  donate the old) and write the accepted keys to that. A copy of `lo` and `hi` of the touched pages, put back in their
  place, does the same for less memory.
"""

from __future__ import annotations

import dataclasses
import numbers

import jax
import jax.numpy as jnp

import pallas_kernels
from sparse_jax import dispatch, xla
from sparse_jax.paging import PagedKV
from sparse_jax.selectors.base import register
from sparse_jax.selectors.pages import PageSelector
from sparse_jax.selectors.views import Pages
from sparse_jax.validation import as_array, as_ids, require


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Envelope:
    """The box around the keys of each page. Finite always: see `Quest.write`."""

    lo: jax.Array  # f32[planes * N, Hkv, D]
    hi: jax.Array  # f32[planes * N, Hkv, D]
    page_size: int = dataclasses.field(metadata={"static": True})


@register("quest")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quest(PageSelector):
    """Keeps the pages whose keys could score highest; one choice per request and KV head.

    scale multiplies the scores before they are compared over heads, as in the attention; D ** -0.5 if None.
    `write`, `copy` and `select` raise ValueError for arguments that do not fit each other or the state.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is None:
            return
        is_number = isinstance(self.scale, numbers.Real) and not isinstance(self.scale, bool)
        limit = float(jnp.finfo(jnp.float32).max)  # NaN is not within it either
        if not is_number or not -limit <= self.scale <= limit:
            raise ValueError(f"Quest: scale is a finite number (in float32), or None; got {self.scale!r}.")
        object.__setattr__(self, "scale", float(self.scale))

    def init(self, kv: PagedKV, requests: int = 1) -> Envelope:
        """See `Selector.init`."""
        del requests
        planes, pages, kv_heads, page_size, width = kv.k.shape
        shape = (planes * pages, kv_heads, width)
        # Two arrays: one shared by both fields could not be donated.
        return Envelope(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32), page_size)

    def write(self, state: Envelope, keys: jax.Array, slots: jax.Array) -> Envelope:
        """See `Selector.write`. NaN in a key counts as 0, infinity as the largest float: a sick key spreads no NaN.

        The bound holds for the keys as given here; where the pool rounds them, it holds up to that rounding.
        """
        pages, page_size = state.lo.shape[0], state.page_size
        keys, slots = as_array("keys", keys), as_ids("slots", slots)
        require(
            keys.shape == (*slots.shape, *state.lo.shape[1:]),
            f"keys must have the shape {[*slots.shape, *state.lo.shape[1:]]}, that of slots and then [Hkv, D] of the "
            f"pool, got {list(keys.shape)}",
        )
        slots = slots.reshape(-1)
        keys = jnp.nan_to_num(keys.reshape(-1, *state.lo.shape[1:]).astype(jnp.float32))
        # -0 and +0 are equal to min and max: with one of them only, the bits do not depend on the order of the writes.
        keys = jnp.where(keys == 0, 0, keys)
        valid = (slots >= 0) & (slots < pages * page_size)
        # `pages` is out of range, so mode="drop" drops it; -1 would wrap.
        page = jnp.where(valid, slots // page_size, pages)
        # The key at offset 0 begins its page anew. Not infinity: such a write would not depend on the keys, so it could
        # run before the previous layer's reads, and XLA would copy the whole envelope in every layer to allow that.
        first = jnp.where(slots % page_size == 0, page, pages)
        lo = state.lo.at[first].set(keys, mode="drop").at[page].min(keys, mode="drop")
        hi = state.hi.at[first].set(keys, mode="drop").at[page].max(keys, mode="drop")
        return dataclasses.replace(state, lo=lo, hi=hi)

    def copy(self, state: Envelope, sources: jax.Array, targets: jax.Array) -> Envelope:
        """See `Selector.copy`."""
        pages = state.lo.shape[0]
        sources, targets = as_ids("sources", sources), as_ids("targets", targets)
        require(
            sources.shape == targets.shape,
            f"sources and targets must have one shape, got {list(sources.shape)} and {list(targets.shape)}",
        )
        sources, targets = sources.reshape(-1), targets.reshape(-1)
        valid = (sources >= 0) & (sources < pages) & (targets >= 0)
        source, target = jnp.where(valid, sources, 0), jnp.where(valid, targets, pages)
        lo = state.lo.at[target].set(state.lo[source], mode="drop")
        hi = state.hi.at[target].set(state.hi[source], mode="drop")
        return dataclasses.replace(state, lo=lo, hi=hi)

    def score(self, state: Envelope, q: jax.Array, pages: Pages) -> jax.Array:
        """The best share of any query head's attention that a page could have, as a logarithm: f32[B, Hkv, W]."""
        _, kv_heads, width = state.lo.shape
        require(q.shape[-1] == width, f"q must have the key width D = {width} of the pool, got {list(q.shape)}")
        require(
            (pages.exists.shape[1], pages.page_size) == (kv_heads, state.page_size),
            f"kv_heads and page_size must be those of the pool, {kv_heads} and {state.page_size}, "
            f"got {pages.exists.shape[1]} and {pages.page_size}",
        )
        table_width = pages.ids.shape[-1]
        if self.width(page_size=pages.page_size, table_width=table_width, rows=pages.rows) == table_width:
            return jnp.float32(0)  # everything fits: nothing to rank
        # [B, Hkv, 1, W] and [B, Hkv or 1, T, 1]: a row sees the pages that begin at or before its own position.
        position = pages.lengths - pages.rows + jnp.arange(pages.rows, dtype=jnp.int32)
        # An id past the pool counts as absent.
        visible = (pages.exists & (pages.ids < state.lo.shape[0]))[:, :, None] & (pages.first <= position[..., None])
        bound = page_bounds(state, q, pages.ids, self.scale)  # [B, Hkv, G, T, W]
        bound = jnp.where(visible[:, :, None], bound, -jnp.inf)
        # Query heads differ in the size of their scores. The largest raw bound of a group would nearly always come from
        # its loudest head, even where that head attends evenly and needs nothing in particular. A bound less the
        # logsumexp of its own head's bounds is the logarithm of that head's share, if every page kept its promise;
        # shares of different heads (and rows) can be compared.
        total = jax.nn.logsumexp(bound, axis=-1, keepdims=True)
        share = jnp.where(jnp.isneginf(bound), -jnp.inf, bound - total)
        # Finite, also where a key or a query is not: a sick head prefers nothing, and any existing page can be chosen.
        return jnp.nan_to_num(share, nan=jnp.finfo(jnp.float32).min).max(axis=(2, 3))


def page_bounds(state: Envelope, q: jax.Array, page_ids: jax.Array, scale: float | None = None) -> jax.Array:
    """Upper bounds of scale * (q . k) over the keys of each page.

    q [B, T, Hq, D]; page_ids i32[B, Hkv or 1, W]. Returns f32[B, Hkv, G, T, W]; an absent page has some finite value.
    """
    batch, rows, heads, width = q.shape
    kv_heads = state.lo.shape[1]
    q = q.astype(jnp.float32).reshape(batch, rows, kv_heads, heads // kv_heads, width)
    q = q * (width**-0.5 if scale is None else scale)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, width)
    operands = (q, state.lo, state.hi, page_ids)
    bounds = dispatch.run(None, operands, xla=xla.page_bounds, kernel=pallas_kernels.page_bounds)
    return bounds.reshape(batch, kv_heads, -1, rows, page_ids.shape[-1])
