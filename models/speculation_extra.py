"""Drafts by a model's extra layer, which predicts one token further than the model; `models.speculation` verifies them.

The extra layer joins the hidden state at a position with the token after it (`Deepseek.predict`) and has a plane of the
cache of its own, `num_layers`, of which a request knows as many rows as of the others. Between rounds it holds

    further    what the layer made of the last cached token and of the one that is sampled, but not cached yet

    draft      candidate 1 from `further`; each next one from the layer again, given its own output and the candidate
               before: K - 1 steps of one token
    verify     the whole model, K + 1 rows at once
    catch up   the layer once more over these rows, with the hidden states and tokens of the model: its plane is then as
               if nothing had been drafted, and the row of the last token that stays is the new `further`

Rows of rejected tokens go with their pages, as everywhere. Source: DeepSeek-V3, arXiv 2412.19437.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import speculation_accept
from models.decode import DecodeOptions, DecodeState, StepOutput, choose, prompt_attend, prompt_positions
from models.interface import LoopedModel
from models.loops import Cache, Step
from sparse_jax import paging
from sparse_jax.paging import Reservation

if TYPE_CHECKING:
    from models.speculation import Room


def prefill_batch(
    graph: nnx.GraphDef,
    params: nnx.State,
    tokens: jax.Array,
    counts: jax.Array,
    state: DecodeState,
    options: DecodeOptions,
) -> tuple[DecodeState, StepOutput]:
    """As `models.decode.prefill_batch`, and the extra layer reads the prompt too: `state.further` is made."""
    model: Any = nnx.merge(graph, params)
    attend, cache = prompt_attend(
        model, tokens, counts, state.paged, options.selector, state.selector, options.implementation
    )
    output, cache = model.loops(model.embed(tokens), prompt_positions(tokens), attend, cache)
    hidden, last = output.hidden[-1], jnp.maximum(counts - 1, 0)
    ready = (counts > 0) & (cache.paged.table.status == paging.OK)
    state = dataclasses.replace(state, started=state.started | ready)
    state, emitted = choose(model.logits(_at(hidden, last)), state, ready, options)

    following = jnp.roll(tokens, -1, axis=1).at[jnp.arange(last.size), last].set(state.tokens)
    further, cache = model.predict(hidden, following, prompt_positions(tokens), attend, cache)
    assert state.further is not None
    further = jnp.where(ready[:, None], _at(further, last), state.further)
    state = dataclasses.replace(state, paged=cache.paged, selector=cache.selector, further=further)
    lengths = jnp.where(ready, counts, 0)
    return state, StepOutput(emitted, lengths, cache.reads, jnp.where(ready, 0, -1), cache.stale)


def draft(
    model: LoopedModel, state: DecodeState, options: DecodeOptions, room: Room, cache: Cache
) -> tuple[jax.Array, jax.Array | None, Cache]:
    """Candidates i32[B, K], their probabilities f32[B, K, V] unless greedy, the cache."""
    nothing = jnp.full_like(room.base, -1)

    def proposed(hidden: jax.Array, i: Any) -> tuple[jax.Array, jax.Array | None]:
        return speculation_accept.propose(model.logits(hidden), state.keys, state.generated + i, options.sampling)

    def row(carry: tuple[jax.Array, jax.Array, Cache], x: tuple[jax.Array, ...]) -> Any:
        (token, hidden, cache), (i, real, slot, incarnation) = carry, x
        step = Step(
            model=model,
            selector=options.selector,
            room=Reservation(slot[:, None], incarnation[:, None], nothing, nothing),
            takes_part=real,
            lengths=room.base + i + 1,
            implementation=options.implementation,
            attend=options.attend,
        )
        positions = jnp.where(real, room.base + i, -1)[:, None]
        hidden, cache = step.further(hidden[:, None], token[:, None], positions, cache)
        token, q = proposed(hidden[:, 0], i + 1)
        return (token, hidden[:, 0], cache), (token, q)

    assert state.further is not None
    first = proposed(state.further, 0)
    by_row = room.real, room.reservation.slots, room.reservation.incarnations
    count = room.real.shape[1] - 2  # the first candidate is there; the last row is no draft's input
    xs = jnp.arange(count, dtype=jnp.int32), *(x.T[:count] for x in by_row)
    (_, _, cache), others = jax.lax.scan(row, (first[0], state.further, cache), xs)
    tokens, q = jax.tree.map(lambda one, more: jnp.moveaxis(jnp.concatenate([one[None], more]), 0, 1), first, others)
    return tokens, q, cache


def catch_up(
    model: LoopedModel,
    state: DecodeState,
    options: DecodeOptions,
    room: Room,
    cache: Cache,
    hidden: jax.Array,
    tokens: jax.Array,
    accepted: jax.Array,
) -> tuple[DecodeState, Cache]:
    """The extra layer over the rows of a round: hidden [B, K + 1, H] of the model, tokens i32[B, K + 1] that follow."""
    rows = jnp.arange(room.real.shape[1], dtype=jnp.int32)
    positions = jnp.where(room.real, room.base[:, None] + rows, -1)
    step = Step(
        model=model,
        selector=options.selector,
        room=room.reservation,
        takes_part=room.granted,
        lengths=room.base + rows.size,
        implementation=options.implementation,
        attend=options.attend,
        seen=positions + 1,
    )
    assert state.further is not None
    further, cache = step.further(hidden, tokens, positions, cache)
    further = jnp.where(room.granted[:, None], _at(further, accepted), state.further)
    return dataclasses.replace(state, further=further), cache


def _at(hidden: jax.Array, rows: jax.Array) -> jax.Array:
    """One row of each request: hidden [B, S, H], rows i32[B] -> [B, H]."""
    return jnp.take_along_axis(hidden, rows[:, None, None], axis=1)[:, 0]
