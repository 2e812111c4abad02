"""What a selector is, the part that all page selectors share, and the registry.

A selector chooses which pages of a paged KV cache a decode step reads. It is a frozen dataclass of options: hashable,
static under `jax.jit`, without state of its own. What it must remember about the cache (a summary of each page) is a
pytree that the caller threads through its `lax.scan` beside the cache. The caller's side of the protocol:

    state = selector.init(kv)                                      # once
    state = selector.copy(state, sources, targets)                 # after pages were copied or moved
    state = selector.write(state, keys, slots)                     # after keys were written
    attended = selector.attend(state, q, k_pages, v_pages, view)   # one step: choose, attend, hand on the state

`attend` is the whole step, so a method that learns from attention probabilities, or that works on tokens instead of
pages, overrides it and no model changes. `select` is its choosing half, for callers who attend on their own.

A new page selector is one file: a frozen dataclass derived from `PageSelector` with a `score`, decorated with
`register(name)`; and one import line in `__init__.py`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from sparse_jax.attention import page_sparse_attention, paged_attention
from sparse_jax.attention_call import AttentionOutput
from sparse_jax.ops import top_k
from sparse_jax.paging import PagedKV, PageView
from sparse_jax.validation import as_array, as_ids, require


class Attended(NamedTuple):
    """What `Selector.attend` returns: attention output, the selector's new state, KV tokens read i32[B, Hkv]."""

    output: AttentionOutput
    state: Any
    tokens_read: jax.Array


DEFAULT_BUDGET = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selector:
    """Options of a selector; the methods here are those of one that remembers nothing.

    budget: tokens to read per step, request and KV head; the kept pages are `ceil(budget / page_size)`, at least those
    always kept and at most those of the table. sinks: the first tokens, whose pages are always kept. recent: the last
    tokens (the query's own included), likewise. A budget or recent of None is the method's own default. Any whole
    number is allowed, however large: beyond the tokens that the table can hold it means all of them.
    """

    budget: int | None = None
    sinks: int = 4
    recent: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("sinks", 0), ("recent", 0)):
            value = getattr(self, name)
            if value is None and name != "sinks":
                continue
            try:
                number = operator.index(value)
            except TypeError:
                number = None
            if number is None or isinstance(value, bool) or number < least:
                raise ValueError(
                    f"{type(self).__name__}: {name} is a whole number of tokens, at least {least}; got {value!r}."
                )
            object.__setattr__(self, name, number)

    def init(self, kv: PagedKV) -> Any:
        """The state for an empty cache `kv`: a pytree, () when there is nothing to remember."""
        del kv
        return ()

    def write(self, state: Any, keys: jax.Array, slots: jax.Array) -> Any:
        """Takes note of keys [..., Hkv, D] written at slots i32[...] of the flattened pool.

        A slot of -1 or out of range is ignored. Writing offset 0 of a page begins its summary anew, so a page that
        changes hands carries nothing over.
        """
        del keys, slots
        return state

    def copy(self, state: Any, sources: jax.Array, targets: jax.Array) -> Any:
        """Lets side data follow its page.

        sources, targets: page ids i32[...] of the flattened pool; a pair with -1 or an id out of range is ignored.
        """
        del sources, targets
        return state

    def select(self, state: Any, q: jax.Array, view: PageView, *, kv_heads: int, page_size: int) -> jax.Array | None:
        """The pages to read for q [B, T, Hq, D] or [B, Hq, D], shared by the T rows.

        Returns page indices inside the request, i32[B, Hkv, C] by rising index, then -1, with C at most the W pages of
        the table; or None: dense attention.
        """
        raise NotImplementedError

    def attend(
        self, state: Any, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, view: PageView, **options: Any
    ) -> Attended:
        """One decode step: choose pages, attend to them.

        q [B, T, Hq, D] or [B, Hq, D]; k_pages, v_pages: the flattened pools [planes * N, Hkv, P, D]; `options` go to
        `paged_attention` or `page_sparse_attention`: an `implementation` among them governs the attention only, the
        choice of pages runs what the platform has.
        """
        require(jnp.ndim(k_pages) == 4, f"k_pages must be [planes * N, Hkv, P, D], got {list(jnp.shape(k_pages))}")
        kv_heads, page_size = k_pages.shape[1:3]
        page_indices = self.select(state, q, view, kv_heads=kv_heads, page_size=page_size)
        arguments = (q, k_pages, v_pages, view.page_table, view.lengths)
        if page_indices is None:
            output = paged_attention(*arguments, **options)
        else:
            output = page_sparse_attention(*arguments, page_indices, **options)
        return Attended(output, state, tokens_read(page_indices, view, kv_heads=kv_heads, page_size=page_size))


class PageSelector(Selector):
    """Sink pages, recent pages, and the best of the others by `score`, as many as the budget holds."""

    def score(self, state: Any, q: jax.Array, pages: Pages) -> jax.Array:
        """Scores of the pages for q [B, T, Hq, D]: f32, broadcastable to [B, Hkv, W]; -inf is never read."""
        raise NotImplementedError

    def token_options(self) -> tuple[int, int, int]:
        """(budget, sinks, recent) with defaults: 1,024 tokens, an eighth of them recent ones but at most 32."""
        budget = DEFAULT_BUDGET if self.budget is None else self.budget
        recent = min(32, max(1, budget // 8)) if self.recent is None else self.recent
        return budget, self.sinks, recent

    def width(self, *, page_size: int, table_width: int, rows: int = 1) -> int:
        """C, the number of page indices a step of `rows` query tokens returns: what the options ask for, at most W.

        It depends on the options and the shapes, never on the lengths: where fewer pages hold tokens, -1 fills up.
        """
        budget, sinks, recent = self.token_options()
        window = recent_tokens(recent, rows)
        # A window that need not begin at a page boundary touches one page more than its size says.
        always = -(-sinks // page_size) + (-(-(window - 1) // page_size) + 1 if window else 0)
        return min(max(-(-budget // page_size), always), table_width)

    def select(self, state: Any, q: jax.Array, view: PageView, *, kv_heads: int, page_size: int) -> jax.Array:
        """See `Selector.select`. Raises ValueError for a q or a view of another shape."""
        q = as_array("q", q)
        require(
            q.ndim in (3, 4) and q.shape[-2] % kv_heads == 0,
            f"q must be [B, T, Hq, D] or [B, Hq, D] with Hq a multiple of {kv_heads} KV heads, got {list(q.shape)}",
        )
        q = q[:, None] if q.ndim == 3 else q
        pages = Pages.of(view, kv_heads=kv_heads, page_size=page_size, rows=q.shape[1])
        batch, _, table_width = pages.exists.shape
        require(
            q.shape[0] == batch, f"q must have the {batch} requests of view.page_table, got {q.shape[0]} in its shape"
        )
        _, sinks, recent = self.token_options()
        width = self.width(page_size=page_size, table_width=table_width, rows=pages.rows)
        score = jnp.broadcast_to(self.score(state, q, pages), pages.exists.shape).astype(jnp.float32)
        score = jnp.where(pages.always(sinks, recent), jnp.inf, score)
        return top_k(jnp.where(pages.exists, score, -jnp.inf), width, order="id")


class Pages(NamedTuple):
    """The pages of a view as a page selector needs them, per KV head."""

    ids: jax.Array  # i32[B, Hkv or 1, W] in the flattened pool, -1 absent
    lengths: jax.Array  # i32[B, Hkv or 1, 1], cut to the table
    exists: jax.Array  # bool[B, Hkv, W], has an id and holds tokens
    page_size: int
    rows: int  # T, the query tokens of this step

    @classmethod
    def of(cls, view: PageView, *, kv_heads: int, page_size: int, rows: int) -> Pages:
        """The pages of `view`, for a step of `rows` query tokens. Raises ValueError for a view of another shape."""
        ids, lengths = as_ids("view.page_table", view.page_table), as_ids("view.lengths", view.lengths)
        require(
            ids.ndim in (2, 3) and ids.shape[-1] >= 1 and (ids.ndim == 2 or ids.shape[1] in (1, kv_heads)),
            f"view.page_table must be [B, W] or [B, {kv_heads}, W] with W at least 1, got {list(ids.shape)}",
        )
        require(
            lengths.ndim in (1, 2)
            and lengths.shape[0] == ids.shape[0]
            and lengths.shape[1:] in ((), (1,), (kv_heads,)),
            f"view.lengths must be [{ids.shape[0]}] or [{ids.shape[0]}, {kv_heads}], got {list(lengths.shape)}",
        )
        ids = ids if ids.ndim == 3 else ids[:, None]
        lengths = lengths if lengths.ndim == 2 else lengths[:, None]
        capacity = ids.shape[-1] * page_size
        lengths = jnp.clip(lengths, 0, capacity).astype(jnp.int32)[:, :, None]
        first = jnp.arange(ids.shape[-1], dtype=jnp.int32) * page_size
        exists = jnp.broadcast_to((ids >= 0) & (first < lengths), (ids.shape[0], kv_heads, ids.shape[-1]))
        return cls(ids, lengths, exists, page_size, rows)

    @property
    def first(self) -> jax.Array:
        """Position of the first token of each page, i32[W]."""
        return jnp.arange(self.ids.shape[-1], dtype=jnp.int32) * self.page_size

    def always(self, sinks: int, recent: int) -> jax.Array:
        """Which pages hold a sink token or a recent token of any of the rows; bool, broadcastable to [B, Hkv, W]."""
        capacity = self.ids.shape[-1] * self.page_size  # more tokens than this are all tokens, and might not be int32
        sinks, window = min(sinks, capacity), recent_tokens(min(recent, capacity), self.rows)
        holds_recent = (
            (self.first + self.page_size > self.lengths - window) & (self.first < self.lengths) & (window > 0)
        )
        return (self.first < sinks) | holds_recent


def recent_tokens(recent: int, rows: int) -> int:
    """Tokens in the union of the recent windows of the last `rows` positions; each counts its own token."""
    return recent + rows - 1 if recent else 0


def tokens_read(page_indices: jax.Array | None, view: PageView, *, kv_heads: int, page_size: int) -> jax.Array:
    """Counts the cached tokens of the chosen pages, i32[B, Hkv]; `page_indices` None counts all (dense attention)."""
    pages = Pages.of(view, kv_heads=kv_heads, page_size=page_size, rows=1)
    held = jnp.where(pages.exists, jnp.clip(pages.lengths - pages.first, 0, page_size), 0)  # [B, Hkv, W]
    if page_indices is not None:
        inside = (page_indices >= 0) & (page_indices < held.shape[-1])
        held = jnp.where(inside, jnp.take_along_axis(held, jnp.where(inside, page_indices, 0), axis=-1), 0)
    return held.sum(axis=-1, dtype=jnp.int32)


_registry: dict[str, type[Selector]] = {}
_Class = TypeVar("_Class", bound=type[Selector])


def register(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: makes a selector known to `get` under `name`."""

    def add(selector: _Class) -> _Class:
        if name in _registry:
            raise ValueError(f"The selector name {name!r} is already taken by {_registry[name].__name__}.")
        _registry[name] = selector
        return selector

    return add


def names() -> tuple[str, ...]:
    """The names that `get` knows, in alphabetical order."""
    return tuple(sorted(_registry))


def get(name: str, **options: Any) -> Selector:
    """Makes a selector by name.

    Options are those of its class (`budget`, `sinks`, `recent`, all in tokens, and what the class adds); every name
    works without any. Raises ValueError for an unknown name or option, listing the known ones, and for a bad value.
    """
    if not isinstance(name, str) or name not in _registry:
        raise ValueError(f"Unknown selector {name!r}; known selectors: {', '.join(names())}.")
    selector = _registry[name]
    known = [field.name for field in dataclasses.fields(selector)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"Selector {name!r} has no option {', '.join(map(repr, unknown))}; its options: {', '.join(known)}."
        )
    return selector(**options)
