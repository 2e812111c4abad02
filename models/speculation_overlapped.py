"""Rounds of speculation with the host one round behind the device.

    generation = generate(model, prompts, max_tokens=200)
    first = next(iter(generation))                                       # the prompts, and a token of each
    rounds = Overlapped(model, generation.state, generation.options, Speculation(drafts=3))
    for tokens in rounds:                                                # what each request got in a round
        ...

A round starts from what the last one left on the device, so the host dispatches the next before it has read the last:
the device never waits for it. What the host learns or decides it learns one round late. A request that has ended or was
cancelled may get one round more, whose tokens are dropped; then its pages are given back. Nothing else is lost: stop
tokens, limits and want of pages are seen on the device as well.

With reference correction the references of a round lie in a `ReferenceStore`, in leased slots. Those of the last round
are released in the next one, after it has leased its own: two rounds hold different slots, and a plan or lease of an
older one is stale. Greedy, with all loops.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.decode import DecodeOptions, DecodeState, StepOutput, prefill_batch
from models.executables import executable
from models.generate import check_positions
from models.interface import LoopedModel
from models.speculation import Speculation, leased_round
from sparse_jax import paging, reference_store
from sparse_jax.ops import retained_count
from sparse_jax.reference_store import Lease, ReferenceStore
from sparse_jax.validation import as_int, require


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """Slots of references, and the lease of the round before."""

    store: ReferenceStore
    lease: Lease  # [B, K + 1]


class Report(NamedTuple):
    """What the host reads of a round."""

    tokens: jax.Array  # i32[B, K + 1], -1 none
    accepted: jax.Array  # i32[B], -1 where the request took no part
    drafted: jax.Array  # i32[B]
    done: jax.Array  # bool[B] after the round
    stale: jax.Array  # i32[]

    def packed(self) -> jax.Array:
        """All of it as i32[B, K + 5]: the host waits for one transfer instead of five."""
        columns = [self.accepted, self.drafted, self.done, jnp.broadcast_to(self.stale, self.done.shape)]
        return jnp.concatenate([self.tokens, *(column[:, None].astype(jnp.int32) for column in columns)], axis=1)

    @staticmethod
    def unpacked(numbers: np.ndarray) -> Report:
        """The report of `packed` numbers, on the host."""
        tokens, (accepted, drafted, done, stale) = numbers[:, :-4], numbers[:, -4:].T
        return Report(tokens, accepted, drafted, done.astype(bool), stale[0])  # type: ignore[arg-type]


def create_held(
    model: LoopedModel,
    state: DecodeState,
    options: DecodeOptions,
    speculation: Speculation,
    **memory: int | None,
) -> Held | None:
    """Slots for two rounds of all requests, all free; None without reference correction.

    memory: capacity, initial_capacity and memory_limit of `reference_store.create`. Raises ValueError as it does, and
    for any of them where there is no reference correction.
    """
    if options.reference is None:
        given = {name: size for name, size in memory.items() if size is not None}
        require(not given, f"{', '.join(given)}: sizes of references, but options.reference is None; got {given}")
        return None
    rows, config = (state.tokens.shape[0], speculation.drafts + 1), model.config
    store = reference_store.create(
        slots=2 * rows[0] * rows[1],
        layers=config.num_layers,
        heads=config.num_heads,
        value_width=state.paged.kv.v.shape[-1],
        max_length=_longest(state),
        retention=options.reference.retention,
        **memory,
    )
    return Held(store, Lease(jnp.full(rows, -1, jnp.int32), jnp.full(rows, -1, jnp.int32)))


def _longest(state: DecodeState) -> int:
    """Tokens that a page table holds."""
    return state.paged.table.pages.shape[1] * state.paged.kv.page_size


def overlapped_round(
    model: LoopedModel,
    state: DecodeState,
    held: Held | None,
    ended: jax.Array,
    options: DecodeOptions,
    speculation: Speculation,
) -> tuple[DecodeState, Held | None, Report]:
    """One round, after the requests marked in `ended` bool[B] have ended and given their pages back."""
    state, stale = _end(state, ended)
    store, lease = None, None
    if held is not None:
        running = (state.started & ~state.done)[:, None]
        store, lease, _ = reference_store.reserve(held.store, jnp.broadcast_to(running, held.lease.slots.shape))
    state, out, store = leased_round(model, state, options, speculation, store, lease)
    stale += out.stale
    if held is not None and store is not None and lease is not None:
        # The older round goes when this one has its slots; what of this one was rejected cannot be read any more.
        store, late = reference_store.accept(store, lease, out.accepted)
        store, older = reference_store.release(store, held.lease)
        stale, held = stale + late + older, Held(store, lease)
    return state, held, Report(out.tokens, out.accepted, out.drafted, state.done, stale)


def _end(state: DecodeState, ended: jax.Array) -> tuple[DecodeState, jax.Array]:
    paged, stale = paging.release(state.paged, ended)
    return dataclasses.replace(state, paged=paged, done=state.done | ended), stale


@functools.partial(jax.jit, static_argnames=("graph", "options", "speculation"), donate_argnames=("state", "held"))
def dispatch(params, state, held, ended, graph, options, speculation):
    """`overlapped_round` as a program of its own: (state, held, the packed report)."""
    state, held, report = overlapped_round(nnx.merge(graph, params), state, held, ended, options, speculation)
    return state, held, report.packed()


@functools.partial(jax.jit, donate_argnames=("state", "held"))
def _drain(state: DecodeState, held: Held | None, ended: jax.Array) -> tuple[DecodeState, Held | None, jax.Array]:
    state, stale = _end(state, ended)
    if held is None:
        return state, None, stale
    store, older = reference_store.release(held.store, held.lease)
    nothing = jax.tree.map(lambda x: jnp.full_like(x, -1), held.lease)
    return state, Held(store, nothing), stale + older


@functools.partial(jax.jit, static_argnames=("graph", "options"), donate_argnames="state")
def _begin(params, state: DecodeState, tokens, counts, limits, ended, graph, options) -> tuple[DecodeState, StepOutput]:
    state, stale = _end(state, ended | (counts > 0))
    fresh = counts > 0
    state = dataclasses.replace(
        state,
        generated=jnp.where(fresh, 0, state.generated),
        limits=jnp.where(fresh, limits, state.limits),
        started=state.started & ~fresh,
        done=state.done & ~fresh,
    )
    state, out = prefill_batch(graph, params, tokens, counts, state, options)
    # A prompt that finds no pages leaves its row empty.
    state = dataclasses.replace(state, done=state.done | (fresh & ~state.started))
    return state, out._replace(stale=out.stale + stale)


class Overlapped:
    """A running generation of requests whose prompts are in the cache. Iterating yields list[B] of new tokens a round.

    state: as `prefill_batch` leaves it; the old one is gone then (donated). Rows without a started request are free.
    tokens: what each request has got since it is here, without stop tokens. Iterating ends when all requests have
    ended, with all pages and slots given back. It raises `paging.OutOfPages` when none can go on; nothing is lost then:
    cancel some, and iterate again.
    capacity, initial_capacity, memory_limit: of the references, as for `reference_store.create`. From the initial
    capacity on they grow before a round that may need more room; each step is a compilation. No text depends on them.

    Raises ValueError for sampling or an exit before the last loop, and where `Speculation.check` and
    `reference_store.create` do: a memory limit that is too small for two rounds fails here, with the sizes.
    """

    def __init__(
        self,
        model: LoopedModel,
        state: DecodeState,
        options: DecodeOptions,
        speculation: Speculation,
        *,
        capacity: int | None = None,
        initial_capacity: int | None = None,
        memory_limit: int | None = None,
    ):
        speculation.check(model.config, options.selector, options.reference)
        if speculation.by == "extra":
            raise ValueError("drafts by 'extra' do not run ahead of the host: use `models.speculation.speculate_chunk`")
        threshold, step = options.exit_threshold, options.exit_step
        threshold = model.config.exit_threshold if threshold is None else threshold
        step = model.config.exit_step if step is None else step
        if options.sampling.temperature or threshold < 1 or step is not None:
            raise ValueError(
                "overlapped rounds are greedy and take all loops, got temperature "
                f"{options.sampling.temperature}, exit threshold {threshold} and exit step {step}"
            )
        self._graph, self._params = nnx.split(model)
        self.state, self.options, self.speculation = state, options, speculation
        sizes = {"capacity": capacity, "initial_capacity": initial_capacity, "memory_limit": memory_limit}
        self.held = create_held(model, state, options, speculation, **sizes)
        self._capacities: tuple[int, ...] = ()
        if options.reference is not None:
            most = retained_count(_longest(state), options.reference.retention) if capacity is None else capacity
            self._capacities = reference_store.capacities(most, initial_capacity)
        self._config = model.config
        requests = state.tokens.shape[0]
        self.tokens: list[list[int]] = [[] for _ in range(requests)]
        self.rounds = self.drafted = self.accepted = self.stale = 0
        self._ended = np.array(state.done | ~state.started)  # as far as the host knows
        self._to_release = np.zeros(requests, bool)
        self._flying: collections.deque[jax.Array] = collections.deque()  # packed reports
        self._rounds: dict[int, Callable[..., Any]] = {}  # compiled, by the capacity of the references
        self._none_ended = jnp.zeros(requests, bool)
        self._rounds_read = 0
        self._before = np.array(state.paged.table.lengths, np.int64)  # cached tokens of each request, but for `tokens`
        self._since = np.zeros(requests, np.int64)  # the first round that is about the request in this row

    def cancel(self, requests: Iterable[int]) -> None:
        """End these requests: tokens of rounds that are under way are dropped, pages given back with the next one.

        Raises ValueError for numbers other than 0 .. B - 1, before any is cancelled.
        """
        gone = np.zeros_like(self._ended)
        gone[[self._row("requests", row) for row in requests]] = True
        self._to_release |= gone & ~self._ended
        self._ended |= gone

    def submit(self, prompts: Mapping[int, Sequence[int]], limit: int) -> None:
        """New requests in these rows, of at most `limit` tokens; what is in the rows is cancelled. Waits for prompts.

        The first token of each is in `tokens` then. Raises `paging.OutOfPages` where prompts find no room; their rows
        are empty then, the others go on. Raises ValueError before anything changes: for rows other than 0 .. B - 1, a
        limit below 1, a prompt that is empty or holds ids outside the vocabulary, and one that with its new tokens
        passes the model's positions or its page table.
        """
        texts = self._checked(prompts, limit)
        rows = list(texts)
        self.cancel(rows)
        counts = np.zeros(len(self.tokens), np.int32)
        counts[rows] = [len(texts[row]) for row in rows]
        tokens = np.zeros((len(counts), 1 << int(counts.max() - 1).bit_length()), np.int32)
        for row in rows:
            tokens[row, : counts[row]] = texts[row]
        options = dataclasses.replace(self.options, reference=None)  # prompts are never corrected
        arguments = jnp.array(tokens), jnp.array(counts), jnp.int32(limit), jnp.array(self._to_release)
        self.state, out = _begin(self._params, self.state, *arguments, graph=self._graph, options=options)
        self._to_release[:] = False
        self.stale += int(out.stale)
        started, done, first = np.asarray(out.lengths) > 0, np.asarray(self.state.done), np.asarray(out.tokens)
        for row in rows:
            self.tokens[row] = [int(first[row])] if first[row] >= 0 else []
            self._before[row] = counts[row] - len(self.tokens[row])
            self._since[row] = self._rounds_read + len(self._flying)
            self._ended[row] = done[row]
            self._to_release[row] = done[row]
        if not started[rows].all():
            paging.check(self.state.paged)

    def _row(self, name: str, row: int) -> int:
        number, last = as_int(name, row), len(self.tokens) - 1
        # A mask of requests would pass as the numbers 0 and 1.
        require(not isinstance(row, bool) and 0 <= number <= last, f"{name} must be from 0 to {last}, got {row!r}")
        return number

    def _checked(self, prompts: Mapping[int, Sequence[int]], limit: int) -> dict[int, list[int]]:
        """The prompts by row, as whole numbers; see `submit` for what it raises."""
        texts = {
            self._row("rows of prompts", row): [as_int(f"ids of prompt {row}", token) for token in prompt]
            for row, prompt in prompts.items()
        }
        limit = as_int("limit", limit)
        require(limit >= 1, f"limit must be at least 1, got {limit}")
        require(bool(texts), f"no prompts, got {prompts!r}")
        for row, text in texts.items():
            self._check_prompt(row, text, limit)
        return texts

    def _check_prompt(self, row: int, text: list[int], limit: int) -> None:
        vocabulary, positions = self._config.vocab_size, self._config.max_positions
        require(bool(text), f"prompt {row} is empty; begin it with the model's first token")
        wrong = [token for token in text if not 0 <= token < vocabulary]
        require(not wrong, f"prompt {row} holds the ids {wrong[:4]}; the vocabulary is 0 .. {vocabulary - 1}")
        count, total = len(text), len(text) + limit - 1  # the last token is never written
        check_positions(row, count, limit, positions)
        held, room = self.options.selector.tokens_held(count, total), _longest(self.state)
        require(
            held <= room,
            f"prompt {row} has {count} tokens; with a limit of {limit} it holds {held}, and its page table has room "
            f"for {room}: shorten the prompt, lower the limit or create the state with more pages_per_request",
        )

    def __iter__(self) -> Iterator[list[list[int]]]:
        stuck = 0
        while not self._ended.all():
            fresh = self._to_release.any()
            self._start()
            if len(self._flying) > 1:
                new, went_on = self._read()
                # Pages that come free help one round later.
                stuck = 0 if went_on or fresh else stuck + 1
                if any(new):
                    yield new
                if stuck > 1 and not self._to_release.any() and not self._ended.all():
                    while self._flying:
                        yield self._read()[0]
                    paging.check(self.state.paged)
                    stuck = 0
        self._settle()

    def _start(self) -> None:
        """Dispatch a round; returns before it is done."""
        self._make_room()
        ended = self._none_ended
        if self._to_release.any():
            ended, self._to_release = jnp.array(self._to_release), np.zeros_like(self._to_release)
        capacity = 0 if self.held is None else self.held.store.capacity
        if capacity not in self._rounds:
            self._rounds[capacity] = self._compiled(self._params, self.state, self.held, ended)
        self.state, self.held, report = self._rounds[capacity](self._params, self.state, self.held, ended)
        report.copy_to_host_async()
        self._flying.append(report)

    def _compiled(self, *arguments: Any) -> Callable[..., Any]:
        """The program of a round."""
        static = {"graph": self._graph, "options": self.options, "speculation": self.speculation}
        return executable(dispatch, arguments, **static)

    def _make_room(self) -> None:
        """Let the references grow to what the next round may keep: positions on the host are upper bounds."""
        if self.held is None or self.options.reference is None:
            return
        lengths = self._before + [len(text) for text in self.tokens]
        longest = int(lengths.max(where=~self._ended, initial=0))
        longest += (len(self._flying) + 1) * (self.speculation.drafts + 1)
        count = retained_count(min(longest, _longest(self.state)), self.options.reference.retention)
        capacity = reference_store.capacity_for(count, self._capacities)
        if capacity > self.held.store.capacity:
            self.held = dataclasses.replace(self.held, store=reference_store.grow(self.held.store, capacity))

    def _read(self) -> tuple[list[list[int]], bool]:
        """Wait for the oldest round under way: (new tokens, whether any request went on)."""
        report = Report.unpacked(np.asarray(self._flying.popleft()))
        heard = ~self._ended & (self._since <= self._rounds_read)  # what a cancelled request still got is dropped
        self._rounds_read += 1
        new = [[int(x) for x in row if x >= 0] if keep else [] for row, keep in zip(report.tokens, heard)]
        for all_tokens, more in zip(self.tokens, new):
            all_tokens.extend(more)
        took_part = report.accepted >= 0
        self.rounds += int((took_part & heard).sum())
        self.drafted += int(report.drafted.sum(where=heard))
        self.accepted += int(report.accepted.sum(where=took_part & heard))
        self.stale += int(report.stale)
        done = np.asarray(report.done) & heard
        self._to_release |= done
        self._ended |= done
        return new, bool(took_part.any() or done.any())

    def _settle(self) -> None:
        """Let the rounds under way finish, and give back what they and the ended requests hold."""
        while self._flying:
            self._read()
        self.state, self.held, stale = _drain(self.state, self.held, jnp.array(self._to_release))
        self._to_release[:] = False
        self.stale += int(stale)
