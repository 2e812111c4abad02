"""What a selector remembers after a round: its state from before, told of the tokens that stay as plain steps would.

Summaries of pages learn from keys, so those of the round are written again. What accumulates (H2O's sums) learns from
queries and the cache as well: each row attends once more in every plane, at its own length. Only the new state of that
is used, so nothing of the attention itself is left in the compiled program. Rejected rows take no part.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from models.decode import DecodeOptions
from models.loops import Cache
from sparse_jax import paging
from sparse_jax.paging import PagedState, Reservation


def told_again(options: DecodeOptions, before: Any, cache: Cache, reservation: Reservation, lengths: jax.Array) -> Any:
    """The selector's state of a run that was only ever given the rows that stay.

    before: the state with room for the rows, and nothing of them. cache: after the round, with keys and queries of its
    K + 1 rows as far as the selector learns from them. reservation: of the rows. lengths i32[B, K + 1]: tokens that a
    row sees, itself included; 0 for one that does not stay.
    """
    if cache.keys is None:
        return before
    kv, selector = cache.paged.kv, options.selector
    slots = paging.flat_slots(cache.paged, jnp.int32(0), reservation)
    slots = jnp.where(lengths > 0, slots, -1).T[:, None]  # [K + 1, 1, B]
    first = jnp.arange(kv.planes, dtype=jnp.int32)[:, None] * (kv.pages * kv.page_size)

    def row(state: Any, x: Any) -> tuple[Any, None]:
        keys, queries, slots, lengths = x
        slots = jnp.where(slots >= 0, first + slots, -1)[..., None]
        state = selector.write(state, keys[:, :, None], slots)
        return state if queries is None else _attended(options, cache.paged, state, queries, lengths), None

    of_rows = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), (cache.keys, cache.queries))
    return jax.lax.scan(row, before, (*of_rows, slots, lengths.T))[0]


def _attended(options: DecodeOptions, paged: PagedState, state: Any, queries: jax.Array, lengths: jax.Array) -> Any:
    """The state after all planes have attended: queries [planes, B, Hq, D] that see lengths i32[B] tokens."""

    def plane(state: Any, x: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        plane, q = x
        view = dataclasses.replace(paging.view(paged, plane), lengths=lengths)
        arguments = plane, q[:, None], *paging.flat(paged.kv), view
        return options.attend(options.selector, state, *arguments, implementation=options.implementation).state, None

    return jax.lax.scan(plane, state, (jnp.arange(paged.kv.planes, dtype=jnp.int32), queries))[0]
