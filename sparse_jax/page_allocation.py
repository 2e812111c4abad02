"""Which requests of a step get room, which pages must be new for them, and where their tokens then go.

The part of `paging.reserve` that decides. B requests, each with the K pages that its new tokens can touch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

MOST_COLUMNS = 3  # touched pages of a request up to which no loop is needed


def grant(
    eligible: jax.Array, touched: jax.Array, pages: jax.Array, holders: jax.Array, free_count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First fit in request order: (granted bool[B], fresh bool[B, K], the touched pages that must be new ones).

    eligible bool[B], touched bool[B, K], pages i32[B, K] with holders i32[B, K] before the step (0: no page there, or
    a stale one), free_count i32[]. A granted request writes only into pages of its own. All who touch a shared page
    want another one, but each that gets it lets go of the shared page, so the last holder may keep it.
    """
    earlier = _count_earlier(pages, holders > 0)

    def fresh_pages(granted):
        return touched & granted[:, None] & (holders - earlier(granted) != 1)

    def too_much(granted):
        need = jnp.sum(fresh_pages(granted), axis=1, dtype=jnp.int32)
        return (need > 0) & (jnp.cumsum(need, dtype=jnp.int32) > free_count)

    if touched.shape[1] == 1:
        # The decode step, without a loop, which a GPU would have to ask the host about. Who needs pages needs one, so
        # the first that is turned away leaves none: all before it are granted, and after it those who need none.
        before = eligible & (jnp.cumsum(too_much(eligible), dtype=jnp.int32) == 0)
        sole = holders - earlier(before) == 1
        granted = before | (eligible & touched[:, 0] & sole[:, 0])
        granted &= ~too_much(granted)  # two rows of an outdated table can name one page with one holder
        return granted, fresh_pages(granted)

    def turn_away(granted):
        # What is left at the first that needs too much never grows again, and nobody later needs less once fewer go
        # before: all from there on who need more than that are turned away at once.
        need = jnp.sum(fresh_pages(granted), axis=1, dtype=jnp.int32)
        upto = jnp.cumsum(need, dtype=jnp.int32)
        over = (need > 0) & (upto > free_count)
        left = jnp.max(jnp.where(over & (jnp.cumsum(over, dtype=jnp.int32) == 1), free_count - (upto - need), -1))
        return granted & ~((jnp.cumsum(over, dtype=jnp.int32) > 0) & (need > left))

    columns = touched.shape[1]
    if columns <= MOST_COLUMNS:
        # Drafts, without a loop. What is left falls with each turn, from `columns - 1` to 0, or a shared page went to
        # nobody and the next holder now needs one of his own: twice as many turns are enough unless requests share
        # several of these pages in a chain, and then who is over in the end tries again in the next step.
        granted = eligible
        for _ in range(2 * columns):
            granted = turn_away(granted)
        granted &= ~too_much(granted)
    else:
        granted = lax.while_loop(lambda granted: jnp.any(too_much(granted)), turn_away, eligible)
    return granted, fresh_pages(granted)


def _count_earlier(pages: jax.Array, alive: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function of granted bool[B]: how many granted requests before each one touch the same page, i32[B, K].

    pages i32[B, K]; only those that are `alive` bool[B, K] count.
    """
    # Sorted by page, the requests of one page are neighbours in request order: a running sum counts them.
    flat_pages, entries = pages.reshape(-1), jnp.arange(pages.size, dtype=jnp.int32)
    order = jnp.argsort(flat_pages, stable=True).astype(jnp.int32)
    ordered = flat_pages[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    first = lax.cummax(jnp.where(is_first, entries, 0))  # of the same page
    place = jnp.zeros_like(entries).at[order].set(entries, unique_indices=True)

    def earlier(granted):
        counted = (granted[:, None] & alive).reshape(-1)[order].astype(jnp.int32)
        before = jnp.cumsum(counted, dtype=jnp.int32) - counted
        return (before - before[first])[place].reshape(pages.shape)

    return earlier


def slots_of(
    pages: jax.Array, incarnations: jax.Array, offset: jax.Array, counts: jax.Array, width: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Slots i32[B, width] and their incarnations of counts i32[B] tokens from `offset` on in pages i32[B, K]; -1 none.

    offset i32[B] counts from the start of each request's first page here.
    """
    token = jnp.arange(width, dtype=jnp.int32)
    place, valid = offset[:, None] + token, token < counts[:, None]
    page = jnp.take_along_axis(pages, place // page_size, axis=1)
    slots = jnp.where(valid, page * page_size + place % page_size, -1)
    return slots, jnp.where(valid, jnp.take_along_axis(incarnations, place // page_size, axis=1), -1)
