"""What a selector is, and the registry.

A selector decides which part of a KV cache a decode step reads. It is a frozen dataclass of options: hashable, static
under `jax.jit`, without state of its own. What it must remember (summaries of pages, accumulated scores, true
positions) is a pytree that the caller threads through its `lax.scan` beside the paged cache. The caller's side:

    state = selector.init(kv, requests)                                                 # once
    paged, state, room = selector.reserve_prompt(paged, state, counts, width)           # a prompt: room, then plane by
    paged, state, stale = selector.store_prompt(paged, state, plane, room, q, k, v)     # plane its keys and values
    positions = selector.next_positions(paged, state)                                   # a step: where its token stands
    paged, state, room = selector.reserve(paged, state, counts, width)                  # room for it, then by plane
    paged, state, stale = selector.store(paged, state, plane, room, k, v)               # its key and value, and
    attended = selector.attend(state, q, k_pages, v_pages, view, plane=plane)           # choose, attend, hand on state

Most methods need few of these: a page selector (`pages.py`) has a `score`, and `init`, `write` and `copy` if it
remembers something about pages. Callers with a cache of their own use these, and `select`, alone. Methods that forget
tokens (`evicting.py`) take `reserve` and `store` over. docs/selectors.md shows how to write one.
"""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from sparse_jax import paging
from sparse_jax.attention import page_sparse_attention, paged_attention
from sparse_jax.attention_call import AttentionOutput
from sparse_jax.paging import PagedKV, PagedState, PageView
from sparse_jax.selectors import budgets
from sparse_jax.selectors.views import inside_pool, positions_read, tokens_read
from sparse_jax.validation import require

DEFAULT_BUDGET = 1024


class Attended(NamedTuple):
    """What `Selector.attend` returns. Under `jax.jit`, what is not used costs nothing."""

    output: AttentionOutput
    state: Any  # the selector's new state
    tokens_read: jax.Array  # i32[B, Hkv], cached tokens whose keys and values were read
    positions: jax.Array  # i32[B, Hkv, C], their true positions in any order; -1 absent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selector:
    """Options of a selector; the methods here are those of one that remembers nothing and reads everything chosen.

    budget: tokens to read per step, request and KV head (see `budgets`); of whole pages `ceil(budget / page_size)`, at
    least those always kept and at most those of the table. sinks: the first tokens, whose pages are always kept.
    recent: the last tokens (the query's own included), likewise. A budget or recent of None is the method's own
    default. Any whole number is allowed, however large: beyond the tokens that the table can hold it means all of them.
    most: where the budget is an array, the largest it can be.
    """

    budget: Any = None
    sinks: int = 4
    recent: int | None = None
    most: int | None = None

    shareable: ClassVar[bool] = True
    """Whether two requests may hold the same page: not where the state of a page belongs to one request."""
    accumulates: ClassVar[bool] = False
    """Whether `attend` adds to the state what a step showed, and changes nothing else.

    Such a state follows from an older one by `write` and `attend` with the same keys and queries, token by token. So
    drafts can be taken back, though the pages belong to one request.
    """
    page_size: ClassVar[int | None] = None
    """The only page size it works with; None: any."""
    reads_all_keys: ClassVar[bool] = False
    """Whether choosing reads the key of every token, beside what `tokens_read` counts."""

    def __post_init__(self) -> None:
        if self.budget is not None:
            object.__setattr__(self, "budget", budgets.checked(type(self).__name__, self.budget, self.most))
        for name, least in (("sinks", 0), ("recent", 0), ("most", 1)):
            self.check_whole(name, least, optional=name != "sinks")

    def check_whole(self, name: str, least: int, optional: bool = False) -> None:
        """Raises ValueError unless the option is a whole number of at least `least`, or None where that is allowed."""
        value = getattr(self, name)
        if value is None and optional:
            return
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool) or number < least:
            raise ValueError(
                f"{type(self).__name__}: {name} is a whole number of tokens, at least {least}; got {value!r}."
            )
        object.__setattr__(self, name, number)

    def check_number(
        self, name: str, wanted: str, good: Callable[[float], bool] = lambda x: True, optional: bool = False
    ) -> None:
        """Raises ValueError, saying what is `wanted`, unless the option is a number that float32 holds and is good."""
        value = getattr(self, name)
        if value is None and optional:
            return
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        # NaN is within no limit.
        if not is_number or not abs(value) <= float(jnp.finfo(jnp.float32).max) or not good(value):
            raise ValueError(f"{type(self).__name__}: {name} is {wanted}; got {value!r}.")
        object.__setattr__(self, name, float(value))

    # What it remembers

    def init(self, kv: PagedKV, requests: int = 1) -> Any:
        """The state for an empty cache `kv` of B = `requests` requests: a pytree, () when there is nothing to remember.

        Methods that remember something about pages only may ignore `requests`.
        """
        del kv, requests
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

    # The cache

    def reserve(
        self, paged: PagedState, state: Any, counts: jax.Array, width: int
    ) -> tuple[PagedState, Any, paging.Reservation]:
        """Room for counts[b] <= width new tokens of each request, as `paging.reserve`; the state follows its pages."""
        paged, reservation = paging.reserve(paged, counts, width)
        return paged, self.copy(state, *paging.flat_copies(paged, reservation)), reservation

    def store(
        self, paged: PagedState, state: Any, plane: Any, reservation: Any, k: jax.Array, v: jax.Array
    ) -> tuple[PagedState, Any, jax.Array]:
        """Writes the new tokens of one plane, k [B, width, Hkv, D], v [B, width, Hkv, Dv], as `paging.write`.

        Returns (paged, state, stale i32[]).
        """
        paged, stale = paging.write(paged, plane, reservation, k, v)
        return paged, self.write(state, k, paging.flat_slots(paged, plane, reservation)), stale

    def reserve_prompt(
        self, paged: PagedState, state: Any, counts: jax.Array, width: int
    ) -> tuple[PagedState, Any, Any]:
        """`reserve` for the prompts of empty requests, of counts[b] <= width tokens; the room is for `store_prompt`."""
        return self.reserve(paged, state, counts, width)

    def store_prompt(
        self, paged: PagedState, state: Any, plane: Any, room: Any, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[PagedState, Any, jax.Array]:
        """`store` of prompts, with their queries q [B, width, Hq, D] for methods that learn from them."""
        del q
        return self.store(paged, state, plane, room, k, v)

    def next_positions(self, paged: PagedState, state: Any) -> jax.Array:
        """The position of the next token of each request, i32[B]: how many tokens it has had."""
        del state
        return paged.table.lengths

    def tokens_held(self, prompt: int, total: int) -> int:
        """The most tokens a request keeps in the cache whose prompt has `prompt` and that grows to `total` tokens."""
        del prompt
        return total

    # A step

    def select(
        self, state: Any, q: jax.Array, view: PageView, *, kv_heads: int, page_size: int, plane: Any = 0
    ) -> jax.Array | None:
        """The pages to read for q [B, T, Hq, D] or [B, Hq, D], shared by the T rows.

        Returns page indices inside the request, i32[B, Hkv, C] in any order, -1 absent, with C at most the W pages of
        the table; or None: dense attention.
        """
        raise NotImplementedError(f"{type(self).__name__} does not choose pages; its whole step is `attend`")

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
        """One decode step in one plane: choose, attend.

        q [B, T, Hq, D] or [B, Hq, D]; k_pages, v_pages: the flattened pools [planes * N, Hkv, P, D]; plane: an int or
        i32[], for budgets by plane; `options` go to `paged_attention` or `page_sparse_attention`: an `implementation`
        among them governs the attention only, the choice of pages runs what the platform has.
        """
        require(jnp.ndim(k_pages) == 4, f"k_pages must be [planes * N, Hkv, P, D], got {list(jnp.shape(k_pages))}")
        view = inside_pool(view, k_pages.shape[0])
        sizes = {"kv_heads": k_pages.shape[1], "page_size": k_pages.shape[2]}
        page_indices = self.select(state, q, view, plane=plane, **sizes)
        arguments = (q, k_pages, v_pages, view.page_table, view.lengths)
        if page_indices is None:
            output = paged_attention(*arguments, **options)
        else:
            output = page_sparse_attention(*arguments, page_indices, **options)
        read = tokens_read(page_indices, view, **sizes)
        return Attended(output, state, read, positions_read(page_indices, view, **sizes))


def share(
    selector: Selector, paged: PagedState, source: jax.Array, target: jax.Array, tokens: jax.Array
) -> tuple[PagedState, jax.Array]:
    """`paging.share` where the selector allows it.

    Raises ValueError for a selector whose state belongs to one request (`shareable` is False).
    """
    if not selector.shareable:
        raise ValueError(
            f"{type(selector).__name__} keeps scores or positions of one request beside each page, so its pages cannot "
            "be shared between requests; prefill the prefix for each request, or use a selector that can share."
        )
    return paging.share(paged, source, target, tokens)


_registry: dict[str, Callable[..., Selector]] = {}
_Class = TypeVar("_Class", bound=Callable[..., Selector])


def register(name: str) -> Callable[[_Class], _Class]:
    """Decorator of a class, or of a function with keyword options: makes a selector known to `get` under `name`."""

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
    if isinstance(selector, type):
        return make(name, selector, options)
    return selector(**options)  # a function that passes its options to `make`


def make(name: str, selector: type[Selector], options: dict[str, Any], more: tuple[str, ...] = ()) -> Selector:
    """A selector of this class; `more` are options that the caller has taken.

    Raises ValueError, speaking of `name`, for an unknown option or a bad value.
    """
    known = [*more, *(field.name for field in dataclasses.fields(selector))]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"Selector {name!r} has no option {', '.join(map(repr, unknown))}; its options: {', '.join(known)}."
        )
    return selector(**options)
