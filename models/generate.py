"""Text generation on the host's side: prompts in, tokens out in chunks, and an account of what was read.

    generation = generate(model, prompts, selector=selectors.get("quest", budget=256), max_tokens=200)
    for chunk in generation:                 # one device call each
        print(chunk.tokens)                  # the new tokens of every request
    print(generation.stats())

The device's side, the functions of `models.decode`, is compiled once per shape: prompt widths and page tables are
rounded up, so that prompts of similar length share a compilation.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import speculation_extra
from models.decode import DecodeOptions, DecodeState, StepOutput, decode_chunk, prefill_batch
from models.executables import compilations, executable
from models.exit_gate import chosen_exit
from models.interface import LoopedModel, ModelConfig
from models.reference import ReferenceCorrection
from models.sampling import GREEDY, Sampling, request_keys
from models.speculation import RoundOutput, Speculation, speculate_chunk
from models.stats import Stats, peak_memory
from sparse_jax import paging
from sparse_jax.selectors import Selector


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one device call added: tokens[b] are the new tokens of request b, without the stop token."""

    tokens: list[list[int]]


def generate(
    model: LoopedModel,
    prompts: Sequence[Sequence[int]],
    *,
    selector: Selector | None = None,
    max_tokens: int | Sequence[int] = 128,
    sampling: Sampling = GREEDY,
    seed: int | Sequence[int] = 0,
    stop_ids: Sequence[int] | None = None,
    page_size: int | None = None,
    pages: int | None = None,
    chunk: int = 16,
    cache_dtype: Any = None,
    implementation: str | None = None,
    exit_threshold: float | None = None,
    exit_step: int | None = None,
    reference: ReferenceCorrection | None = None,
    speculation: Speculation | None = None,
) -> "Generation":
    """Continue prompts of token ids; returns an iterator of chunks that also holds the result.

    selector: which part of the cache each step reads (default: all, or the choice of the model's indexer). max_tokens,
    seed: one for all, or one per request. stop_ids: default those of the model. page_size: default 16, or 1 for a
    selector of one-token pages. pages: of the pool, default enough for everything. chunk: tokens per device call.
    cache_dtype: a float type (default the model's), or of latent attention a format of `LatentCache`: "fp8_ds_mla"
    (also "fp8", "fp8_e4m3") or "nvfp4_ds_mla", with the indexer's keys in `IndexKeys`; prompts attend to what they
    stored before it was rounded. exit_threshold, exit_step: default the model's; all loops are computed either way.
    reference: correct the later loops of a looped model from a reference; the selector then serves the loops before the
    first capture, and prompts are read as without it. speculation: a part of the model drafts, all of it verifies, for
    several tokens.

    Raises ValueError for prompts that are empty, hold ids outside the vocabulary, or do not fit the model's positions,
    for a reference or a speculation that the model or the selector cannot work with, for a cache_dtype that the model
    cannot read, and for an exit of a model that has one loop.
    """
    config = model.config
    selector = config.selector_for(selector)
    options = DecodeOptions(
        selector=selector,
        sampling=sampling,
        stop_ids=tuple(config.stop_ids if stop_ids is None else stop_ids),
        implementation=implementation,
        exit_threshold=exit_threshold,
        exit_step=exit_step,
        reference=reference,
    )
    _check_options(options, speculation, config)
    ids, limits = _requests(prompts, max_tokens, chunk, config)
    # The last token of a request is sampled, but never written.
    held = [selector.tokens_held(len(prompt), len(prompt) + limit - 1) for prompt, limit in zip(ids, limits)]
    cache = config.pools(model.dtype if cache_dtype is None else cache_dtype)
    paged = _empty_cache(config, held, page_size or selector.page_size or 16, pages, speculation, cache)
    state = _empty_state(paged, selector, limits, seed)
    if speculation is not None and speculation.by == "extra":
        further = jnp.zeros_like(model.embed(jnp.zeros((len(ids), 1), jnp.int32))[:, 0])
        state = dataclasses.replace(state, further=further)
    return Generation(model, ids, state, options, chunk, speculation)


def _empty_cache(
    config: ModelConfig,
    held: list[int],
    page_size: int,
    pages: int | None,
    speculation: Speculation | None,
    cache: dict[str, Any],
) -> paging.PagedState:
    """For requests that keep at most so many tokens each; cache: what `ModelConfig.pools` says."""
    needed = [-(-tokens // page_size) for tokens in held]
    return paging.create(
        planes=config.planes + (speculation is not None and speculation.by == "extra"),  # its layer has a plane
        pages=_rounded_up(sum(needed)) if pages is None else pages,
        page_size=page_size,
        requests=len(held),
        # The rows of a round may look past the last token, but have no page there.
        pages_per_request=_rounded_up(max(needed) + (-(-speculation.drafts // page_size) if speculation else 0)),
        **cache,
    )


def _empty_state(
    paged: paging.PagedState, selector: Selector, limits: list[int], seed: int | Sequence[int]
) -> DecodeState:
    """Before the first token of one request for each of the limits."""
    requests = len(limits)
    return DecodeState(
        paged=paged,
        selector=selector.init(paged.kv, requests),
        tokens=jnp.zeros(requests, jnp.int32),
        generated=jnp.zeros(requests, jnp.int32),
        limits=jnp.array(limits, jnp.int32),
        started=jnp.zeros(requests, bool),
        done=jnp.zeros(requests, bool),
        keys=request_keys(seed, requests),
    )


def _check_options(options: DecodeOptions, speculation: Speculation | None, config: ModelConfig) -> None:
    reference, selector = options.reference, options.selector
    chosen_exit(config, options.exit_threshold, options.exit_step)
    for name, value, kind in (("reference", reference, ReferenceCorrection), ("speculation", speculation, Speculation)):
        if not isinstance(value, kind | None):
            raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")
    if speculation is not None:
        speculation.check(config, selector)
    if reference is not None:
        reference.check(config.loops)
    if reference is not None and not selector.shareable:
        raise ValueError(
            f"reference correction cannot be combined with the selector {type(selector).__name__}: it learns from what "
            "each loop attends to, and the corrected loops would not tell it"
        )


def _requests(
    prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], chunk: int, config: ModelConfig
) -> tuple[list[list[int]], list[int]]:
    """The prompts, and how many tokens each may get, as plain numbers that the model has room for."""
    ids = [[int(token) for token in prompt] for prompt in prompts]
    limits = (
        [max_tokens] * len(ids) if isinstance(max_tokens, int | np.integer) else [int(limit) for limit in max_tokens]
    )
    vocabulary, positions = config.vocab_size, config.max_positions
    if not ids:
        raise ValueError("no prompts")
    if len(limits) != len(ids):
        raise ValueError(f"need one max_tokens or one for each of {len(ids)} prompts, got {len(limits)}")
    if min(limits) < 1 or chunk < 1:
        raise ValueError(f"max_tokens and chunk must be at least 1, got {min(limits)} and {chunk}")
    for request, (prompt, limit) in enumerate(zip(ids, limits)):
        if not prompt:
            raise ValueError(f"prompt {request} is empty; begin it with the model's first token")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < vocabulary)
            raise ValueError(f"prompt {request} holds the id {wrong}; the vocabulary is 0 .. {vocabulary - 1}")
        check_positions(request, len(prompt), limit, positions)
    return ids, limits


def check_positions(request: int, count: int, limit: int, positions: int) -> None:
    """Raises ValueError for a prompt of `count` tokens whose `limit` new ones, the last never written, do not fit."""
    if count > positions:
        raise ValueError(
            f"prompt {request} has {count} tokens, which alone pass the {positions} positions of the model: "
            "shorten the prompt"
        )
    if count + limit - 1 > positions:
        raise ValueError(
            f"prompt {request} has {count} tokens; with {limit} new ones it passes the {positions} positions of the "
            f"model: shorten the prompt or ask for at most {positions - count + 1} tokens"
        )


def _rounded_up(n: int, least: int = 16) -> int:
    """The next size in steps of a quarter of a power of two, at least of `least`: few shapes to compile for."""
    step = max(least, (1 << (n - 1).bit_length()) // 8)
    return -(-n // step) * step


class Generation:
    """A running generation. Iterating goes on until every request is done; iterating again goes on where it stopped.

    A prompt that finds too few free pages waits while the others go on, and so does a request that needs one more page.
    When no request can go on, the iterator raises `paging.OutOfPages` with the numbers of those that wait. Nothing is
    lost: after `release` of some requests, the ended ones too, iterate again.
    """

    def __init__(
        self,
        model: LoopedModel,
        prompts: list[list[int]],
        state: DecodeState,
        options: DecodeOptions,
        chunk: int,
        speculation: Speculation | None = None,
    ):
        self.prompts, self.state, self.options, self.chunk = prompts, state, options, chunk
        self.tokens: list[list[int]] = [[] for _ in prompts]
        """What each request has generated so far, without the stop token."""
        self.finished: list[str | None] = [None] * len(prompts)
        """Why each request ended: "stop", "length" or "released"; None while it runs."""
        self._graph, self._params = nnx.split(model)
        self._config = model.config
        self._decoder: Callable[..., Any] | None = None
        self._compile_seconds = self._prefill_seconds = self._decode_seconds = 0.0
        self._decoded = self._read = self._dense = self._stale = 0
        self._exit_loops = np.zeros(model.config.loops, np.int64)
        self._retained, self._retained_least = 0.0, 1.0
        self.speculation = speculation
        self._rounds = self._drafted = self._accepted = 0

    def __iter__(self) -> Iterator[Chunk]:
        while not all(self.finished):
            new, went_on = self._advance()
            if any(new):
                yield Chunk(new)
            if not went_on:
                paging.check(self.state.paged)

    def release(self, requests: Sequence[int]) -> None:
        """End these requests now and give their pages back; what they generated stays in `tokens`."""
        ended = np.zeros(len(self.prompts), bool)
        ended[list(requests)] = True
        marked = jnp.array(ended)
        paged, stale = paging.release(self.state.paged, marked)
        self._stale += int(stale)
        self.state = dataclasses.replace(self.state, paged=paged, done=self.state.done | marked)
        self.finished = [reason or ("released" if end else None) for reason, end in zip(self.finished, ended)]

    def stats(self) -> Stats:
        """The account so far."""
        peak, source = peak_memory()
        corrected = self.options.reference is not None
        return Stats(
            prompt_tokens=sum(map(len, self.prompts)),
            tokens=int(np.asarray(self.state.generated).sum()),
            compile_seconds=self._compile_seconds,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            tokens_per_second=self._decoded / self._decode_seconds if self._decode_seconds else None,
            kv_tokens_read=self._read,
            kv_tokens_dense=self._dense,
            exit_loops=tuple(self._exit_loops.tolist()),
            stale=self._stale,
            peak_memory_bytes=peak,
            peak_memory_of=source,
            retained_mass=self._retained / self._decoded if corrected and self._decoded else None,
            retained_mass_least=self._retained_least if corrected and self._decoded else None,
            acceptance=self._accepted / self._drafted if self._drafted else None,
            tokens_per_round=self._decoded / self._rounds if self._rounds else None,
        )

    def _waiting(self) -> np.ndarray:
        """Requests whose prompt is not in the cache yet, bool[B]."""
        return ~np.asarray(self.state.started) & ~np.asarray(self.state.done)

    def _advance(self) -> tuple[list[list[int]], bool]:
        """Call the device for the prompts that find pages, else for a chunk: (new tokens, whether any request went on).

        When none did, the status of every request that wants pages says so.
        """
        waiting = self._waiting()
        held = [self.options.selector.tokens_held(len(prompt), len(prompt)) for prompt in self.prompts]
        pages = [-(-tokens // self.state.paged.kv.page_size) for tokens in held]
        if np.any(waiting & (np.array(pages) <= int(self.state.paged.pool.free_count))):
            return self._prefill()
        if np.any(np.asarray(self.state.started) & ~np.asarray(self.state.done)):
            new, went_on = self._decode()
            if went_on or not waiting.any():
                return new, went_on
        return self._prefill()

    def _prefill(self) -> tuple[list[list[int]], bool]:
        waiting = self._waiting()
        counts = np.where(waiting, [len(prompt) for prompt in self.prompts], 0).astype(np.int32)
        tokens = np.zeros((len(self.prompts), _rounded_up(int(counts.max()))), np.int32)
        for row, prompt, wanted in zip(tokens, self.prompts, waiting):
            row[: len(prompt) * wanted] = prompt[: len(prompt) * wanted]
        # Copies, because a call may still read its arguments after it returned.
        arguments = self._params, jnp.array(tokens), jnp.array(counts), self.state
        # A prompt is never corrected, so all references share a compilation.
        call = self._executable(_prefill, arguments, options=dataclasses.replace(self.options, reference=None))
        start = time.perf_counter()
        self.state, out = call(*arguments)
        new = self._take(out.tokens[None])
        self._prefill_seconds += time.perf_counter() - start
        self._stale += int(out.stale)
        return new, bool(np.any(np.asarray(out.lengths)))

    def _decode(self) -> tuple[list[list[int]], bool]:
        if self._decoder is None:  # the shapes of the state never change
            static = {"steps": self.chunk, "speculation": self.speculation}
            self._decoder = self._executable(_decode, (self._params, self.state), **static)
        start = time.perf_counter()
        self.state, out, rounds = self._decoder(self._params, self.state)
        new = self._take(out.tokens)
        self._decode_seconds += time.perf_counter() - start
        self._account(out, rounds)
        return new, bool(np.any(np.asarray(out.lengths)))

    def _take(self, emitted: jax.Array) -> list[list[int]]:
        """Append the tokens that a call emitted, i32[steps, B] with -1 for none, and see who is done."""
        new = [[int(token) for token in column if token >= 0] for column in np.asarray(emitted).T]
        for all_tokens, more in zip(self.tokens, new):
            all_tokens.extend(more)
        done, generated = np.asarray(self.state.done), np.asarray(self.state.generated)
        for request in np.flatnonzero(done):
            # A stop token is counted as generated, but not handed out.
            stopped = generated[request] > len(self.tokens[request])
            self.finished[request] = self.finished[request] or ("stop" if stopped else "length")
        return new

    def _account(self, out: StepOutput, rounds: RoundOutput | None = None) -> None:
        """Add up, in Python's integers, what a chunk read: per plane and KV head, requests that took part only."""
        lengths, loops = np.asarray(out.lengths), np.asarray(out.exit_loop)
        self._read += int(np.asarray(out.tokens_read).sum(dtype=np.int64))
        self._dense += int(lengths.sum(dtype=np.int64)) * self._config.planes * self._config.num_kv_heads
        self._decoded += int((lengths > 0).sum())
        self._exit_loops += np.bincount(loops[loops >= 0], minlength=self._config.loops)
        self._stale += int(np.asarray(out.stale).sum())
        if out.retained is not None:
            retained = np.asarray(out.retained)  # f32[steps, 2, B]
            self._retained += float(retained[:, 0].sum(dtype=np.float64, where=lengths > 0))
            self._retained_least = min(self._retained_least, float(retained[:, 1].min()))
        if rounds is not None:
            accepted = np.asarray(rounds.accepted)
            self._rounds += int((accepted >= 0).sum())
            self._drafted += int(np.asarray(rounds.drafted).sum())
            self._accepted += int(accepted.sum(where=accepted >= 0))

    def _executable(self, function: Callable, arguments: tuple, **static: Any) -> Callable:
        start, before = time.perf_counter(), compilations()
        call = executable(function, arguments, graph=self._graph, **({"options": self.options} | static))
        if compilations() > before:
            self._compile_seconds += time.perf_counter() - start
        return call


# The state is donated: no call copies the pool.
_prefill = jax.jit(
    lambda params, tokens, counts, state, graph, options: (
        prefill_batch if state.further is None else speculation_extra.prefill_batch
    )(graph, params, tokens, counts, state, options),
    static_argnames=("graph", "options"),
    donate_argnames="state",
)


@functools.partial(jax.jit, static_argnames=("graph", "options", "steps", "speculation"), donate_argnames="state")
def _decode(params, state, graph, options, steps, speculation):
    if speculation is None:
        return *decode_chunk(graph, params, state, options, steps), None
    rounds = -(-steps // (speculation.drafts + 1))
    state, out = speculate_chunk(graph, params, state, options, speculation, rounds)
    return state, out.steps(), out
