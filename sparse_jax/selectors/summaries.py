"""What page selectors remember of the keys of each page: the box around them, or their sum.

A summary is updated when keys are written, any number of them at once, and covers partly filled pages too. The key at
offset 0 begins its page anew, so a page that changes hands carries nothing over. NaN in a key counts as 0 and infinity
as the largest number that fits: a sick request spreads no NaN.

The requests of one write, along the leading axes of its slots, write to pages of their own, each slot once; the cache
sees to that (a shared page is copied before it is written).

Setting the length back (speculative decoding) does not take keys out of a summary:

- A page that keeps tokens keeps the rejected keys in its box, which stays a bound but a looser one, and in its sum,
  also after other tokens were written at their offsets.
- A page that was empty before the draft is right again once its offset 0 is written.
- To get the very bits of a run without the draft, keep the state from before it (`write` returns a new one; do not
  donate the old) and write the accepted keys to that. Putting the touched pages' entries back does the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from sparse_jax import dispatch, xla
from sparse_jax.paged_kv import PagedKV, key_shape
from sparse_jax.selectors.views import Pages
from sparse_jax.validation import as_array, as_ids, require


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Envelope:
    """The box around the keys of each page, or of each of its `boxes` equal parts. Always finite.

    In the type of the pool: the smallest and largest of its keys are among them. Of one-byte pools in bfloat16.
    """

    lo: jax.Array  # [planes * N * boxes, Hkv, D]
    hi: jax.Array  # [planes * N * boxes, Hkv, D]
    page_size: int = dataclasses.field(metadata={"static": True})
    boxes: int = dataclasses.field(default=1, metadata={"static": True})

    @classmethod
    def init(cls, kv: PagedKV, boxes: int = 1) -> Envelope:
        """Of an empty cache."""
        planes, pages, kv_heads, page_size, width = key_shape(kv)
        shape = (planes * pages * boxes, kv_heads, width)
        dtype = summary_dtype(kv)
        # Two arrays: one shared by both fields could not be donated.
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), page_size, boxes)

    def write(self, keys: jax.Array, slots: jax.Array) -> Envelope:
        """See `Selector.write`. The keys are rounded to the type of the box, as the pool rounds them.

        The bound holds for the rounded keys; for a one-byte pool, which rounds more, up to that rounding.
        """
        writes = Writes.of(keys, slots, self.lo, self.page_size // self.boxes)
        new = _finite(writes.keys, float(jnp.finfo(self.lo.dtype).max)).astype(self.lo.dtype)
        # -0 and +0 are equal to min and max: with one of them only, the bits do not depend on the order of the writes.
        new = jnp.where(new == 0, 0, new)

        def joined(old: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
            most = writes.fold(new, combine)
            most = jnp.where(writes.fresh, most, combine(_get(old, writes.targets), most))
            return _put(old, writes.targets, most)

        return dataclasses.replace(self, lo=joined(self.lo, jnp.minimum), hi=joined(self.hi, jnp.maximum))

    def copy(self, sources: jax.Array, targets: jax.Array) -> Envelope:
        """See `Selector.copy`."""
        return _copied(self, sources, targets, self.boxes)

    def bounds(self, q: jax.Array, pages: Pages, scale: float = 1.0) -> jax.Array:
        """Upper bounds of scale * (q . k) over the keys of each page: f32[B, Hkv, G, T, W].

        q [B, T, Hq, D]. A part of a page that a row does not see counts for nothing, a page -inf if it sees none.
        """
        ids = jnp.where((pages.ids >= 0) & (pages.ids < self.lo.shape[0] // self.boxes), pages.ids, -1)
        if self.boxes > 1:
            parts = ids[..., None] * self.boxes + jnp.arange(self.boxes, dtype=jnp.int32)
            ids = jnp.where(ids[..., None] >= 0, parts, -1).reshape(*ids.shape[:2], -1)
        bounds = _products(self.lo, self.hi, q, ids, scale)
        bounds = jnp.where(visible(pages, self.lo.shape[0] // self.boxes, self.boxes)[:, :, None], bounds, -jnp.inf)
        return bounds.reshape(*bounds.shape[:-1], -1, self.boxes).max(axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """The sum of the keys of each page, in float32, how many they are, and their mean. Always finite.

    The mean, which is all that scoring reads, is in the type of the pool; of one-byte pools in bfloat16.
    """

    total: jax.Array  # f32[planes * N, Hkv, D]
    count: jax.Array  # i32[planes * N]
    mean: jax.Array  # [planes * N, Hkv, D]
    page_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(cls, kv: PagedKV) -> Sums:
        """Of an empty cache."""
        planes, pages, kv_heads, page_size, width = key_shape(kv)
        shape = (planes * pages, kv_heads, width)
        zeros = jnp.zeros(shape, jnp.float32), jnp.zeros(shape[0], jnp.int32), jnp.zeros(shape, summary_dtype(kv))
        return cls(*zeros, page_size)

    def write(self, keys: jax.Array, slots: jax.Array) -> Sums:
        """See `Selector.write`. Tokens one by one or at once make a difference in the rounding of the sum only."""
        writes = Writes.of(keys, slots, self.total, self.page_size)
        new = writes.fold(_finite(writes.keys, float(jnp.finfo(jnp.float32).max) / self.page_size), jnp.add)
        total = jnp.where(writes.fresh, 0, _get(self.total, writes.targets)) + new
        count = writes.fold(jnp.ones_like(writes.fresh, jnp.int32), jnp.add)[..., 0, 0]
        count = count + jnp.where(writes.fresh[..., 0, 0], 0, _get(self.count, writes.targets))
        total, count = lax.optimization_barrier((total, count))  # the count waits for the keys, see `_put`
        mean = total / jnp.maximum(count, 1)[..., None, None]
        mean = _finite(mean, float(jnp.finfo(self.mean.dtype).max)).astype(self.mean.dtype)
        new = (total, count, mean)
        old = (self.total, self.count, self.mean)
        put = [_put(array, writes.targets, rows) for array, rows in zip(old, new, strict=True)]
        return dataclasses.replace(self, total=put[0], count=put[1], mean=put[2])

    def copy(self, sources: jax.Array, targets: jax.Array) -> Sums:
        """See `Selector.copy`."""
        return _copied(self, sources, targets)

    def means(self, q: jax.Array, pages: Pages, scale: float = 1.0) -> jax.Array:
        """Products scale * (q . mean of the keys of a page), -inf where a row sees none of them: f32[B, Hkv, G, T, W].

        q [B, T, Hq, D].
        """
        products = _products(self.mean, None, q, pages.ids, scale)
        return jnp.where(visible(pages, self.count.shape[0])[:, :, None], products, -jnp.inf)


def summary_dtype(kv: PagedKV) -> Any:
    """What summaries of keys are kept in."""
    return jnp.dtype(jnp.bfloat16) if kv.k.dtype.itemsize == 1 else kv.k.dtype


def visible(pages: Pages, pool: int, parts: int = 1) -> jax.Array:
    """Which row sees which page, or which of its equal `parts`: bool[B, Hkv, T, W * parts].

    A row sees what begins at or before its own position. An id at or past `pool` counts as absent.
    """
    exists = jnp.repeat(pages.exists & (pages.ids < pool), parts, axis=-1)
    first = jnp.arange(exists.shape[-1], dtype=jnp.int32) * (pages.page_size // parts)
    position = pages.lengths - pages.rows + jnp.arange(pages.rows, dtype=jnp.int32)  # [B, Hkv or 1, T]
    return exists[:, :, None] & (first <= position[..., None])


def check_fits(state: Envelope | Sums, q: jax.Array, pages: Pages) -> None:
    """Raises ValueError unless q [B, T, Hq, D] and the pages go with the pool that the state is about."""
    _, kv_heads, width = (state.lo if isinstance(state, Envelope) else state.total).shape
    require(q.shape[-1] == width, f"q must have the key width D = {width} of the pool, got {list(q.shape)}")
    require(
        (pages.exists.shape[1], pages.page_size) == (kv_heads, state.page_size),
        f"kv_heads and page_size must be those of the pool, {kv_heads} and {state.page_size}, "
        f"got {pages.exists.shape[1]} and {pages.page_size}",
    )


def _products(summary: jax.Array, hi: jax.Array | None, q: jax.Array, ids: jax.Array, scale: float) -> jax.Array:
    """f32[B, Hkv, G, T, W] for q [B, T, Hq, D], ids i32[B, Hkv or 1, W]; some number for an absent page."""
    batch, rows, heads, width = q.shape
    kv_heads = summary.shape[1]
    # Not scaled yet: a 16-bit query is exact as it is.
    q = (q if scale >= 0 else -q).reshape(batch, rows, kv_heads, heads // kv_heads, width)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, width)
    found = dispatch.run(None, (q, summary, hi, ids), xla=xla.page_bounds, kernel=pallas_kernels.page_bounds)
    return abs(scale) * found.reshape(batch, kv_heads, -1, rows, ids.shape[-1])


class Writes(NamedTuple):
    """The keys of one write in the order of their slots, so that those of a page are neighbours."""

    keys: jax.Array  # [R, T, Hkv, D]
    pages: jax.Array  # i32[R, T], the page of each key
    targets: jax.Array  # i32[R, T], the same at the first key of a page; elsewhere, and for absent slots, past the end
    fresh: jax.Array  # bool[R, T, 1, 1], whether the key begins its page
    most: int  # keys of a page in one write

    @classmethod
    def of(cls, keys: Any, slots: Any, summary: jax.Array, page_size: int) -> Writes:
        """See `Selector.write`; raises ValueError for keys that do not go with the slots or the summary."""
        keys, slots = as_array("keys", keys), as_ids("slots", slots)
        expected = [*slots.shape, *summary.shape[1:]]
        require(
            list(keys.shape) == expected,
            f"keys must have the shape {expected}, that of slots and then [Hkv, D] of the pool, got {list(keys.shape)}",
        )
        rows = slots.shape[:-1], slots.shape[-1] if slots.ndim else 1
        slots = slots.reshape(math.prod(rows[0]), rows[1])
        keys = keys.reshape(*slots.shape, *summary.shape[1:])
        end = summary.shape[0] * page_size
        slots = jnp.where((slots >= 0) & (slots < end), slots, end)
        if slots.shape[1] > 1:
            order = jnp.argsort(slots, axis=1)
            slots = jnp.take_along_axis(slots, order, axis=1)
            keys = jnp.take_along_axis(keys, order[..., None, None], axis=1)
        pages = slots // page_size
        first = jnp.concatenate([jnp.ones_like(pages[:, :1], bool), pages[:, 1:] != pages[:, :-1]], axis=1)
        targets = jnp.where(first, pages, summary.shape[0])
        return cls(keys, pages, targets, (slots % page_size == 0)[..., None, None], min(page_size, slots.shape[1]))

    def fold(self, values: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        """Of values [R, T, 1 or Hkv, 1 or D], one of each key: those of a page combined, at its first key."""
        step = 1
        while step < self.most:  # after this step a value stands for `2 * step` keys, as far as they are of its page
            same = jnp.pad(self.pages[:, step:] == self.pages[:, :-step], ((0, 0), (0, step)))[..., None, None]
            values = jnp.where(same, combine(values, jnp.roll(values, -step, axis=1)), values)
            step *= 2
        return values


def _finite(keys: jax.Array, largest: float) -> jax.Array:
    keys = keys.astype(jnp.float32)
    return jnp.where(jnp.isnan(keys), 0, jnp.clip(keys, -largest, largest))


_State = TypeVar("_State", Envelope, Sums)


def _copied(state: _State, sources: Any, targets: Any, boxes: int = 1) -> _State:
    """The state after pages were copied; entries of a page lie side by side, `boxes` of them."""
    sources, targets = as_ids("sources", sources), as_ids("targets", targets)
    require(
        sources.shape == targets.shape,
        f"sources and targets must have one shape, got {list(sources.shape)} and {list(targets.shape)}",
    )
    entries = jax.tree.leaves(state)[0].shape[0]
    pages = entries // boxes
    sources, targets = sources.reshape(-1, 1), targets.reshape(-1, 1)
    valid = (sources >= 0) & (sources < pages) & (targets >= 0) & (targets < pages)
    box = jnp.arange(boxes, dtype=jnp.int32)
    source = jnp.where(valid, sources, 0) * boxes + box
    target = jnp.where(valid, jnp.where(valid, targets, 0) * boxes + box, entries)
    return jax.tree.map(lambda x: _put(x, target, _get(x, source)), state)


def _get(array: jax.Array, at: jax.Array) -> jax.Array:
    """Rows `at` of an array; some row for an index past the end."""
    return array.at[at].get(mode="clip")


def _put(array: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    """Overwrites rows `at`, each at most once, none for an index past the end.

    The rows must be made of the keys. A write of something else, zeros say, could run before the previous layer's
    reads, and XLA would copy the whole array in every layer to allow that.
    """
    if array.dtype != jnp.bfloat16 or jax.__version_info__ >= (0, 11):
        return _put_scatter(array, at, rows)
    # XLA's CPU backend of that time computes a scatter of this type in float32, on a copy of the array.
    return lax.platform_dependent(array, at, rows, cpu=_put_loop, default=_put_scatter)


def _put_scatter(array: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    return array.at[at].set(rows, mode="drop")


def _put_loop(array: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    at, flat = at.reshape(-1), array.reshape(array.shape[0], -1)
    new = lax.bitcast_convert_type(rows.reshape(at.size, -1), jnp.uint16)
    (which,) = jnp.nonzero(at < array.shape[0], size=at.size, fill_value=0)

    def put_one(i: jax.Array, flat: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(flat, jnp.uint16)
        row = lax.dynamic_slice_in_dim(new, which[i], 1)
        bits = lax.dynamic_update_slice_in_dim(bits, row, at[which[i]], axis=0)
        return lax.bitcast_convert_type(bits, flat.dtype)

    count = jnp.sum(at < array.shape[0], dtype=jnp.int32)
    return lax.fori_loop(jnp.int32(0), count, put_one, flat).reshape(array.shape)
