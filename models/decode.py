"""Prefill, one decode step, and a chunk of decode steps of a model over a paged cache: pure functions of their state.

Each step writes the new token's keys and values into every plane and attends through a selector:

    the selector reserves room for one token of each request           (lengths grow here)
    for each plane: it stores k and v, chooses what to read, attends
    logits of the exit loop

`decode_chunk` is a `lax.scan` of such steps with sampling between them, jit-compiled by its caller.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.exit_gate import chosen_exit, select_exit
from models.interface import Attend, LoopedModel, LoopOutput
from models.loops import AttendPlane, Cache, Step
from models.loops import attend_by_selector as attend_by_selector
from models.reference import ReferenceCorrection, empty_references, retained_mass
from models.sampling import GREEDY, Sampling, sample
from sparse_jax import Reference, paging
from sparse_jax.paging import PagedState
from sparse_jax.selectors import Selector


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What is fixed for a whole generation; hashable, a static argument of the jitted functions.

    implementation: of the attention operations. exit_threshold and exit_step: None takes those of the model. attend:
    where a method that treats layers differently comes in; it gets the plane `u * L + l`. reference: correct the later
    loops from a reference; then selector and attend serve the loops before its first capture.
    """

    selector: Selector
    sampling: Sampling = GREEDY
    stop_ids: tuple[int, ...] = ()
    implementation: str | None = None
    exit_threshold: float | None = None
    exit_step: int | None = None
    attend: AttendPlane = attend_by_selector
    reference: ReferenceCorrection | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All that changes while B requests are decoded; a `lax.scan` carry whose buffers are donated."""

    paged: PagedState
    selector: Any  # the selector's own pytree
    tokens: jax.Array  # i32[B] the last token of each request: sampled, not in the cache yet
    generated: jax.Array  # i32[B] tokens sampled so far
    limits: jax.Array  # i32[B] tokens to sample at most
    started: jax.Array  # bool[B] the prompt is in the cache
    done: jax.Array  # bool[B] a stop token or the limit was reached
    keys: jax.Array  # u32[B, 2] one random stream per request
    # [B, H] what the extra layer made of the last tokens, where it drafts: the logits of the token after `tokens`
    further: jax.Array | None = None


class DecodeOutput(NamedTuple):
    """Result of one step for B requests."""

    logits: jax.Array  # f32[B, V] for the token after this one
    exit_loop: jax.Array  # i32[B] the loop whose hidden state gave them
    paged: PagedState
    selector_state: Any
    tokens_read: jax.Array  # i32[planes, B] cached tokens that were read, summed over the KV heads
    stale: jax.Array  # i32[] writes and table entries that were ignored because they were stale
    references: Reference | None  # of the last capture, layer * B + request; None without reference correction


class StepOutput(NamedTuple):
    """What one step of a chunk tells the host."""

    tokens: jax.Array  # i32[B] the new token; -1 where there is none (done, stopped here, or out of pages)
    lengths: jax.Array  # i32[B] tokens that the request has had, as a dense step reads; 0 where it took no part
    tokens_read: jax.Array  # i32[planes, B]
    exit_loop: jax.Array  # i32[B], -1 where the request took no part
    stale: jax.Array  # i32[]
    retained: jax.Array | None = None  # f32[2, B] mass of the references: mean and least; 1 where it took no part


def prefill(
    model: LoopedModel,
    tokens: jax.Array,
    counts: jax.Array,
    paged: PagedState,
    selector: Selector,
    selector_state: Any,
    *,
    implementation: str | None = None,
    exit_threshold: float | None = None,
    exit_step: int | None = None,
) -> DecodeOutput:
    """Fill the cache of empty requests: tokens i32[B, S] right-padded prompts, counts i32[B] their lengths, 0 = none.

    Attention is dense and causal inside the prompt; every plane is written. The logits are those after the last token
    of each prompt (undefined for a count of 0). A request that finds no room stays empty and gets its status in
    `paged.table`. tokens_read counts nothing here.
    """

    def last(h):  # [B, S, H] -> [B, 1, H]
        return jnp.take_along_axis(h, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)

    attend, cache = prompt_attend(model, tokens, counts, paged, selector, selector_state, implementation)
    output, cache = model.loops(model.embed(tokens), prompt_positions(tokens), attend, cache, keep=last)
    return _decode_output(model, output, cache, exit_threshold, exit_step)


def prompt_attend(
    model: LoopedModel,
    tokens: jax.Array,
    counts: jax.Array,
    paged: PagedState,
    selector: Selector,
    selector_state: Any,
    implementation: str | None = None,
) -> tuple[Attend, Cache]:
    """What the planes of a prefill do, as in `prefill`, and the cache before the first one."""
    paged, selector_state, room = selector.reserve_prompt(paged, selector_state, counts, tokens.shape[1])

    def attend(plane, q, k, v, cache):
        stored = selector.store_prompt(cache.paged, cache.selector, plane, room, q, k, v)
        return model.causal(plane, q, k, v, cache.after(stored), implementation)

    return attend, Cache.of(paged, selector_state)


def prompt_positions(tokens: jax.Array) -> jax.Array:
    """The positions of prompts i32[B, S]."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def decode_step(
    model: LoopedModel,
    tokens: jax.Array,
    positions: jax.Array,
    paged: PagedState,
    selector: Selector,
    selector_state: Any,
    *,
    implementation: str | None = None,
    exit_threshold: float | None = None,
    exit_step: int | None = None,
    attend: AttendPlane = attend_by_selector,
    reference: ReferenceCorrection | None = None,
) -> DecodeOutput:
    """One token of each request: tokens i32[B] at positions i32[B] (`next_positions`); -1 = takes no part.

    A request that takes no part changes nothing, reads nothing, and its logits are undefined. So are those of a request
    that finds no page; its length, pages and keys stay, and `paged.table.status` says why. All loops are computed; the
    exit only selects whose hidden state gives the logits.
    """
    takes_part = positions >= 0
    paged, selector_state, room = selector.reserve(paged, selector_state, takes_part.astype(jnp.int32), 1)

    references = None
    if reference is not None:
        capacity = paged.table.pages.shape[1] * paged.kv.page_size
        references = empty_references(reference, model.config, tokens.shape[0], capacity)
    step = Step(
        model=model,
        selector=selector,
        room=room,
        takes_part=takes_part,
        implementation=implementation,
        attend=attend,
        reference=reference,
    )
    cache = Cache.of(paged, selector_state, references)
    output, cache = step.run(model.embed(tokens[:, None]), positions[:, None], cache)
    return _decode_output(model, output, cache, exit_threshold, exit_step)


def _decode_output(model: LoopedModel, output: LoopOutput, cache: Cache, threshold, step) -> DecodeOutput:
    exits = chosen_exit(model.config, threshold, step)
    hidden, loop = select_exit(output.hidden[:, :, 0], output.gate_logits[:, :, 0], **exits)
    state: Any = cache.paged, cache.selector, cache.reads, cache.stale, cache.references
    return DecodeOutput(model.logits(hidden), loop, *state)


def stops(tokens: jax.Array, options: DecodeOptions) -> jax.Array:
    """Which tokens i32[...] end a text, bool[...]."""
    return jnp.isin(tokens, jnp.asarray(options.stop_ids, jnp.int32))


def choose(logits, state: DecodeState, ready: jax.Array, options: DecodeOptions) -> tuple[DecodeState, jax.Array]:
    """Sample for the requests that are `ready` -> (state, emitted i32[B]: the new tokens, -1 for none or a stop)."""
    tokens = sample(logits, state.keys, state.generated, options.sampling)
    stopped = stops(tokens, options)
    generated = state.generated + ready
    state = dataclasses.replace(
        state,
        tokens=jnp.where(ready, tokens, state.tokens),
        generated=generated,
        done=state.done | (ready & (stopped | (generated >= state.limits))),
    )
    return state, jnp.where(ready & ~stopped, tokens, -1)


def prefill_batch(
    graph: nnx.GraphDef,
    params: nnx.State,
    tokens: jax.Array,
    counts: jax.Array,
    state: DecodeState,
    options: DecodeOptions,
) -> tuple[DecodeState, StepOutput]:
    """Prefill the requests with a count above 0 and sample their first token; the others are left alone.

    graph, params: `nnx.split(model)`. tokens i32[B, S], counts i32[B]. For `jax.jit` with static graph and options.
    """
    out = prefill(
        nnx.merge(graph, params),
        tokens,
        counts,
        state.paged,
        options.selector,
        state.selector,
        implementation=options.implementation,
        exit_threshold=options.exit_threshold,
        exit_step=options.exit_step,
    )
    ready = (counts > 0) & (out.paged.table.status == paging.OK)
    state = dataclasses.replace(state, paged=out.paged, selector=out.selector_state, started=state.started | ready)
    state, emitted = choose(out.logits, state, ready, options)
    loops = jnp.where(ready, out.exit_loop, -1)
    return state, StepOutput(emitted, jnp.where(ready, counts, 0), out.tokens_read, loops, out.stale)


def decode_chunk(
    graph: nnx.GraphDef, params: nnx.State, state: DecodeState, options: DecodeOptions, steps: int
) -> tuple[DecodeState, StepOutput]:
    """Run `steps` decode steps in one `lax.scan`; returns (state, StepOutput with a leading axis of steps).

    A request that is done takes no part; one that finds no page tries again in the next step and keeps all it has.
    For `jax.jit` with static graph, options and steps, and a donated state: then no step copies the pool.
    """
    model = nnx.merge(graph, params)

    def step(state: DecodeState, _):
        takes_part = state.started & ~state.done
        out = decode_step(
            model,
            state.tokens,
            jnp.where(takes_part, options.selector.next_positions(state.paged, state.selector), -1),
            state.paged,
            options.selector,
            state.selector,
            implementation=options.implementation,
            exit_threshold=options.exit_threshold,
            exit_step=options.exit_step,
            attend=options.attend,
            reference=options.reference,
        )
        ready = takes_part & (out.paged.table.status == paging.OK)
        state = dataclasses.replace(state, paged=out.paged, selector=out.selector_state)
        state, emitted = choose(out.logits, state, ready, options)
        had = options.selector.next_positions(out.paged, out.selector_state)
        lengths = jnp.where(ready, had, 0)
        read = jnp.where(ready, out.tokens_read, 0)
        retained = None if out.references is None else jnp.where(ready, retained_mass(out.references, ready.size), 1.0)
        return state, StepOutput(emitted, lengths, read, jnp.where(ready, out.exit_loop, -1), out.stale, retained)

    return jax.lax.scan(step, state, None, length=steps)
