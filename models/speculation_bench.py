"""The bench suite `speculation`: the shipped model decoding plainly, and by drafts of its first loops.

A case of Ouro-1.4B with random weights, whose drafts mean nothing, shows how busy overlapped rounds keep the device
when a round is as long as that of a released model.

It is a suite like those of `sparse_jax.bench`; the console app adds it to them, because the library knows no model.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import checkpoints
from models.generate import Generation, generate
from models.ouro import OuroConfig
from models.reference import ReferenceCorrection
from models.speculation import Speculation
from models.speculation_overlapped import Overlapped, create_held, dispatch, overlapped_round
from models.step_bench import random_ouro
from sparse_jax.bench.entries import Candidate, Entry, measure
from sparse_jax.bench.profiler import profile
from sparse_jax.bench.report import Row
from sparse_jax.bench.step import WATCHED
from sparse_jax.bench.timing import Effort, Plan, Timing

WATCHED_ROUNDS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationShape:
    """`batch` pieces of text, of which `prompt` bytes are given and `tokens` more are written."""

    name: str
    model: str = "ouro-tiny"  # or "ouro-1.4b", random
    batch: int
    prompt: int = 512
    tokens: int = 512
    drafts: int = 3
    draft_loops: int = 2


CASES = (
    SpeculationShape(name="b1", batch=1),
    SpeculationShape(name="b8", batch=8),
    SpeculationShape(name="b32", batch=32, prompt=256, tokens=256),
    SpeculationShape(name="1.4b-b8", model="ouro-1.4b", batch=8, tokens=192),
)
CASES_CPU = (SpeculationShape(name="cpu-b2", batch=2, prompt=32, tokens=16),)
QUICK = ("b8", "cpu-b2")


class Way(NamedTuple):
    """How texts are continued."""

    speculation: Speculation | None = None
    reference: ReferenceCorrection | None = None
    overlapped: bool = False
    queued: bool = False  # rounds are dispatched, and none is read


class Watched(Overlapped):
    """Rounds that are launched in the same way whether a profiler watches or not."""

    def _compiled(self, *arguments: Any) -> Callable[..., Any]:
        static = {"graph": self._graph, "options": self.options, "speculation": self.speculation}
        return dispatch.lower(*arguments, **static).compile(compiler_options=dict(WATCHED))


class Run:
    """Continues the texts of a case in one way; times are microseconds of one token of one request."""

    def __init__(self, case: SpeculationShape, way: Way) -> None:
        self.case, self.way = case, way
        self.details: dict[str, float] = {}

    def compile(self) -> None:
        """Loads the model; what runs is compiled in its first, uncounted run."""
        config, self.model = _model(self.case.model)
        text = importlib.resources.files("models.pretrained.ouro_tiny").joinpath("excerpt.txt").read_bytes()
        size = self.case.prompt - 1
        starts = np.linspace(0, len(text) - size, self.case.batch).astype(int)
        self.prompts = [[config.bos_id, *text[start : start + size]] for start in starts]

    def time(self, effort: Effort) -> Timing:
        """The median of some runs after a first one."""
        self._run()
        # Each run tells details of its own; those of the median belong beside it.
        runs = sorted(((self._run(), self.details) for _ in range(min(effort.repeats, 5))), key=lambda run: run[0])
        median, self.details = runs[len(runs) // 2]
        if self.way.overlapped and jax.default_backend() == "gpu":
            self.details |= self._watch()
        return Timing(median, runs[0][0], runs[-1][0])

    def _begin(self) -> Generation:
        """The prompts are in the cache, and each text has its first token."""
        generation = generate(
            self.model, self.prompts, max_tokens=self.case.tokens, stop_ids=(), reference=self.way.reference,
            speculation=self.way.speculation,
        )  # fmt: skip
        next(iter(generation))
        return generation

    def _run(self) -> float:
        way, generation = self.way, self._begin()
        if way.queued:
            return self._queue(generation)
        if way.overlapped:
            assert way.speculation is not None
            rounds = Overlapped(self.model, generation.state, generation.options, way.speculation)
            count, times = 0, [time.perf_counter()]
            for news in rounds:
                count += sum(map(len, news))
                times.append(time.perf_counter())
            seconds = time.perf_counter() - times[0]
            self._tell(seconds, count, rounds.rounds, rounds.accepted / rounds.drafted)
            if len(times) > 2:
                self.details["us between rounds"] = float(np.median(np.diff(times[1:]))) * 1e6
        else:
            start = time.perf_counter()
            count = sum(len(new) for chunk in generation for new in chunk.tokens)
            seconds, stats = time.perf_counter() - start, generation.stats()
            rounds_of_all = count / (stats.tokens_per_round or 1)
            self._tell(seconds, count, rounds_of_all, stats.acceptance)
        return seconds / count * 1e6

    def _watch(self) -> dict[str, float]:
        """Whether the device waits for the host, as a profiler sees it in the midst of a generation."""
        generation = self._begin()
        assert self.way.speculation is not None
        rounds = iter(Watched(self.model, generation.state, generation.options, self.way.speculation))
        next(rounds)
        seen = profile(lambda: [next(rounds, None) for _ in range(WATCHED_ROUNDS)], WATCHED_ROUNDS, runs=1)
        return {
            "kernel us a round": seen.microseconds,
            # A watched host is slower: for short rounds, compare the kernels' time with that between rounds.
            "busy, watched": seen.busy,
        }

    def _tell(self, seconds: float, tokens: int, rounds: float, acceptance: float | None) -> None:
        self.details = {"tokens/s": tokens / seconds, "us a round": seconds / rounds * self.case.batch * 1e6}
        if acceptance is not None:
            self.details |= {"acceptance": acceptance, "tokens a round": tokens / rounds}

    def _queue(self, generation: Generation) -> float:
        """What the device needs for a round when nobody waits for it: the bound of overlapped rounds."""
        speculation = self.way.speculation or Speculation()
        graph, params = nnx.split(self.model)
        state, options = generation.state, generation.options
        held = create_held(self.model, state, options, speculation)
        none = jnp.zeros(self.case.batch, bool)
        # As many as the fastest text takes, so that no request ends.
        count = self.case.tokens // (speculation.drafts + 1) - 1
        start = 0.0
        for i in range(count):
            if i == 1:  # the first one may have to be compiled
                jax.block_until_ready(state)
                start = time.perf_counter()
            state, held = _round(params, state, held, none, graph=graph, options=options, speculation=speculation)
        jax.block_until_ready(state)
        microseconds = (time.perf_counter() - start) / (count - 1) * 1e6
        self.details = {"us a round": microseconds}
        return microseconds


@functools.partial(jax.jit, static_argnames=("graph", "options", "speculation"), donate_argnames=("state", "held"))
def _round(params, state, held, none, graph, options, speculation):
    return overlapped_round(nnx.merge(graph, params), state, held, none, options, speculation)[:2]


@functools.cache
def _model(name: str) -> tuple[Any, Any]:
    if name == "ouro-tiny":
        return checkpoints.load(name)
    config = OuroConfig.ouro_1_4b()
    return config, random_ouro(config, jnp.dtype(jnp.bfloat16))


def ways(case: SpeculationShape) -> dict[str, Way]:
    """The rows of a case."""
    drafts = Speculation(drafts=case.drafts, draft_loops=case.draft_loops)
    corrected = ReferenceCorrection(retention=0.1)
    if case.model != "ouro-tiny":
        return {"rounds, overlapped": Way(drafts, overlapped=True), "rounds, none read": Way(drafts, queued=True)}
    return {
        "plain": Way(),
        "rounds in one jit": Way(drafts),
        "rounds, overlapped": Way(drafts, overlapped=True),
        "rounds, none read": Way(drafts, queued=True),
        "reference 0.1, plain": Way(None, corrected),
        "reference 0.1, overlapped": Way(drafts, corrected, overlapped=True),
    }


def rows(case: SpeculationShape, plan: Plan) -> Iterator[Row]:
    """Measures one case. A row's time is that of a token of one request; of "none read", that of a round."""
    for name, way in ways(case).items():
        run = Run(case, way)
        row = Row(
            case=case.name, op=name, implementation="triton" if jax.default_backend() == "gpu" else "xla", bytes=0
        )

        def finish(timing: Timing, run: Run = run) -> dict[str, Any]:
            del timing
            return {"details": run.details}

        candidates = [Candidate(run)]
        entry = Entry(row, functools.partial(tuple, candidates), finish, plan.effort)
        yield from measure([entry], plan._replace(copy_bandwidth=None))
