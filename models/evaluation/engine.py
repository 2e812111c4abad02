"""The host's side of an evaluation: what to run, in which batches, compiled ahead and skipped where it is known.

A row of a batch is one prompt at one budget. At short lengths all budgets of a method run in one batch, at long ones
one after the other. The dense prefill of a batch is kept while methods that keep all tokens take their turns on copies
of it; methods that take part in storing prefill on their own, for each budget.
"""

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.evaluation import run, statistics
from models.evaluation.methods import Method
from models.evaluation.results import Results
from models.evaluation.run import Shape, Steps
from models.evaluation.tasks import Prompt, Writer
from models.interface import LoopedModel
from sparse_jax import paging, retained_count
from sparse_jax.latent_cache import FORMATS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One evaluation. tasks: those that suit the model if empty. budgets: tokens ("256") or shares ("1/64", "0.1").

    batch_tokens: tokens of all requests of a batch at most. attention_rows: see `Shape`. cache_dtype: as for
    `ModelConfig.pools`, default the model's; recorded where it is another. text: a word for the text that was given,
    for the record. workers: threads that compile; None: as many as cores, at most 16.
    """

    model: str
    methods: tuple[Method, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    budgets: tuple[str, ...]
    prompts: int = 64
    seed: int = 0
    batch_tokens: int = 65_536
    dense_layers: int = 0
    diagnostics: bool = True
    implementation: str | None = None
    attention_rows: int | None = None
    cache_dtype: str | None = None
    text: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("batch_tokens", 1), ("dense_layers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("methods", "lengths", "budgets"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        if min(self.lengths) < 1:
            raise ValueError(f"lengths must be at least 1, got {', '.join(map(str, self.lengths))}")
        for length in self.lengths:
            for budget in self.budgets:
                budget_tokens(budget, length)


class Failed(RuntimeError):
    """Methods that could not be run; `reasons` names each, with its length and error."""

    def __init__(self, reasons: list[str]):
        super().__init__("\n".join(reasons))
        self.reasons = reasons


def budget_tokens(budget: str, length: int) -> int:
    """Tokens of a budget at a length: `retained_count` of a share. Raises ValueError for what is neither."""
    number, _, divisor = budget.partition("/")
    try:
        share = float(number) / float(divisor) if divisor else float(number)
        if divisor or "." in number:
            if not 0 < share <= 1:
                raise ValueError
            return retained_count(length, share)
        if int(number) < 1:
            raise ValueError
        return min(int(number), length)
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"a budget is a number of tokens such as 256, or a share such as 1/64; got {budget!r}"
        ) from None


class Programs:
    """Compiled functions by what they depend on, compiled ahead in threads; `compiled` counts them."""

    def __init__(self, model: LoopedModel, workers: int | None):
        self.model, self.heads = model, model.config.num_heads
        self.graph, self.params = nnx.split(model)
        self.pool = ThreadPoolExecutor(workers)
        self.futures: dict[Any, Future] = {}
        self.lock = threading.Lock()

    @property
    def compiled(self) -> int:
        """Functions that were compiled or are being compiled."""
        return len(self.futures)

    def get(self, name: str, shape: Shape, method: Method | None = None) -> Callable:
        """The compiled function; waits for it."""
        return self.ahead(name, shape, method).result()

    def ahead(self, name: str, shape: Shape, method: Method | None = None) -> Future:
        """Begin to compile, unless that has begun already."""
        with self.lock:
            if (name, shape, method) not in self.futures:
                self.futures[name, shape, method] = self.pool.submit(self._compile, name, shape, method)
            return self.futures[name, shape, method]

    def _compile(self, name: str, shape: Shape, method: Method | None) -> Callable:
        return getattr(self, f"_{name}")(shape, method).compile()

    def _prefill(self, shape: Shape, method: Method | None):
        return run.prefill.lower(self.params, *_contexts(shape), graph=self.graph, shape=shape)

    def _begin(self, shape: Shape, method: Method):
        return run.begin.lower(self._cache(shape), _budget(shape), heads=self.heads, method=method, shape=shape)

    def _prefill_own(self, shape: Shape, method: Method):
        arguments = (self.params, *_contexts(shape), _budget(shape))
        return run.prefill_own.lower(*arguments, graph=self.graph, method=method, shape=shape)

    def _advance(self, shape: Shape, method: Method):
        if method.keeps_all:
            paged = self._cache(shape)
            own = functools.partial(run.begin, heads=self.heads, method=method, shape=shape)
            state = jax.eval_shape(own, paged, _budget(shape))
        else:
            own = functools.partial(run.prefill_own, graph=self.graph, method=method, shape=shape)
            paged, state = jax.eval_shape(own, self.params, *_contexts(shape), _budget(shape))
        ids = jax.ShapeDtypeStruct((shape.chunk, shape.rows), jnp.int32)
        arguments = (self.params, paged, state, ids, ids, _budget(shape))
        return run.advance.lower(*arguments, graph=self.graph, method=method, shape=shape)

    def _cache(self, shape: Shape):
        return jax.eval_shape(lambda: run.empty(self.model, shape))


def _contexts(shape: Shape) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (
        jax.ShapeDtypeStruct((shape.rows, shape.length), jnp.int32),
        jax.ShapeDtypeStruct((shape.rows,), jnp.int32),
    )


def _budget(shape: Shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.rows, 1), jnp.int32)


class Evaluation:
    """Runs what `settings` ask for and `results` lack.

    cells() lists it; run() does it, and calls `on_cell` with each finished cell. Raises ValueError for a cache_dtype
    that the model cannot read.
    """

    def __init__(self, model: LoopedModel, writer: Writer, settings: Settings, results: Results | None = None):
        self.writer = writer
        self.results = Results() if results is None else results
        self.programs = Programs(model, settings.workers)
        self.dtype, cache = str(jnp.dtype(model.dtype)), None
        if settings.cache_dtype is not None:
            name = str(model.config.pools(settings.cache_dtype)["dtype"])
            cache = None if name == self.dtype else FORMATS.get(name, name)
        self.settings = dataclasses.replace(
            settings, tasks=settings.tasks or writer.phrasing.default, cache_dtype=cache
        )
        self._kept: tuple[Any, Any] = (None, None)

    def shape(self, method: Method, length: int) -> Shape:
        """The shape of a method's batches at a length; the same for all methods of one page size."""
        s = self.settings
        return Shape(
            length=length,
            rows=rows_of(s.prompts, len(s.budgets), s.batch_tokens // length),
            page_size=method.page_size,
            most=max(budget_tokens(budget, length) for budget in s.budgets),
            dtype=s.cache_dtype,
            diagnostics=s.diagnostics,
            dense_planes=s.dense_layers,
            attention_rows=s.attention_rows,
            implementation=s.implementation,
        )

    def budgets(self, method: Method) -> list[str | None]:
        """The budgets of a method; [None] for one that takes none."""
        return list(self.settings.budgets) if method.takes_budget else [None]

    def cell(self, method: Method, task: str, length: int, budget: str | None) -> dict[str, Any]:
        """The key of a cell, see `results.KEY`."""
        s = self.settings
        settings = {
            "prompts": s.prompts,
            "seed": s.seed,
            "page_size": method.page_size,
            "dense_layers": s.dense_layers if method.keeps_all else 0,
            "diagnostics": s.diagnostics,
            "dtype": self.dtype,
            "text": s.text,
        }
        if s.cache_dtype is not None:  # cells of the model's own type have the keys that they had before this choice
            settings["cache_dtype"] = s.cache_dtype
        return {
            "model": s.model,
            "method": method.name,
            "task": task,
            "length": length,
            "budget": budget,
            "settings": settings,
        }

    def missing(self, method: Method, task: str, length: int) -> list[str | None]:
        """Budgets that the results lack."""
        return [b for b in self.budgets(method) if self.cell(method, task, length, b) not in self.results]

    def cells(self) -> list[dict[str, Any]]:
        """Keys of all cells that are to be run."""
        return [
            self.cell(method, task, length, budget)
            for length, task, method in self._order()
            for budget in self.missing(method, task, length)
        ]

    def _order(self) -> Iterator[tuple[int, str, Method]]:
        """Lengths, then page sizes, then tasks: methods that share a dense prefill come one after the other."""
        s = self.settings
        sizes = list(dict.fromkeys(method.page_size for method in s.methods))
        for length in s.lengths:
            for size in sizes:
                for task in s.tasks:
                    for method in s.methods:
                        if method.page_size == size:
                            yield length, task, method

    def compile_ahead(self) -> None:
        """Begin to compile everything that will be needed, in the order in which it will be."""
        for length, task, method in self._order():
            if self.missing(method, task, length):
                shape = self.shape(method, length)
                names = ("prefill", "begin", "advance") if method.keeps_all else ("prefill_own", "advance")
                for name in names:
                    self.programs.ahead(name, shape, None if name == "prefill" else method)

    def run(self, on_cell: Callable[[dict[str, Any]], None] = lambda cell: None) -> Results:
        """Run all cells that are missing; a cell that is done is in the results at once.

        A method that fails at a length is left out there, and the others go on. Raises `Failed` at the end for these.
        """
        self.compile_ahead()
        failed: dict[tuple[str, int], Exception] = {}
        for length, task, method in self._order():
            budgets = self.missing(method, task, length)
            if not budgets or (method.name, length) in failed:
                continue
            try:
                self._cells(method, task, length, budgets, on_cell)
            except Exception as error:
                failed[method.name, length] = error
                self._kept = (None, None)
        if failed:
            told = [f"{name} at {length} tokens: {type(e).__name__}: {e}" for (name, length), e in failed.items()]
            raise Failed(told) from next(iter(failed.values()))
        return self.results

    def _cells(
        self, method: Method, task: str, length: int, budgets: list[str | None], on_cell: Callable[[dict], None]
    ) -> None:
        prompts = self.writer.prompts(task, length, self.settings.prompts, self.settings.seed)
        for group, outcomes, seconds in self._groups(method, length, prompts, budgets):
            for budget in group:
                found = [outcomes[number, budget] for number in range(len(prompts))]
                cell = self.cell(method, task, length, budget)
                cell["tokens"] = length if budget is None else budget_tokens(budget, length)
                cell["seconds"] = seconds / len(group)
                cell["depths"] = [None if p.depth is None else round(p.depth, 3) for p in prompts]
                self.results.add(cell | statistics.summary(found))
                on_cell(cell)

    def _groups(self, method: Method, length: int, prompts: list[Prompt], budgets: list[str | None]):
        """Yields (budgets, outcome by (prompt, budget), seconds) as budgets get done."""
        shape = self.shape(method, length)
        together = max(1, shape.rows // len(prompts))
        part = min(shape.rows, len(prompts))
        for start in range(0, len(budgets), together):
            group, began = budgets[start : start + together], time.perf_counter()
            outcomes: dict[tuple[int, str | None], dict[str, Any]] = {}
            for first in range(0, len(prompts), part):
                numbers = range(first, min(first + part, len(prompts)))
                rows = [(number, budget) for budget in group for number in numbers]
                # Every batch has the compiled shape, and the same prompts in the same rows whatever the budgets.
                filled = [rows[index % len(rows)] for index in range(shape.rows)]
                found = self._batch(method, shape, [(prompts[n], b) for n, b in filled])
                outcomes |= dict(zip(filled, found))
            yield group, outcomes, time.perf_counter() - began

    def _batch(self, method: Method, shape: Shape, rows: list[tuple[Prompt, str | None]]) -> list[dict[str, Any]]:
        """Outcomes of the rows of one batch."""
        prompts = [prompt for prompt, _ in rows]
        tokens = [1 if budget is None else budget_tokens(budget, shape.length) for _, budget in rows]
        budget = jnp.array(tokens, jnp.int32)[:, None]
        params = self.programs.params
        if method.keeps_all:
            # A copy, because `advance` takes its cache over and the next method needs it again.
            paged = jax.tree.map(jnp.copy, self._dense(shape, prompts))
            state = self.programs.get("begin", shape, method)(paged, budget)
        else:
            self._kept = (None, None)
            paged, state = self.programs.get("prefill_own", shape, method)(params, *contexts(shape, prompts), budget)
        fed, targets = questions(prompts, shape.chunk)
        advance, steps = self.programs.get("advance", shape, method), []
        for start in range(0, len(fed), shape.chunk):
            part = slice(start, start + shape.chunk)
            paged, state, some = advance(params, paged, state, jnp.array(fed[part]), jnp.array(targets[part]), budget)
            steps.append(some)
        steps = jax.tree.map(lambda *parts: np.concatenate(parts), *jax.device_get(steps))
        paging.check(paged)
        return [outcome(steps, targets, row, self.settings.diagnostics) for row in range(shape.rows)]

    def _dense(self, shape: Shape, prompts: Sequence[Prompt]):
        """The cache of a batch after dense prefill; that of the last batch is kept."""
        name = (shape, tuple((prompt.task, prompt.seed) for prompt in prompts))
        if self._kept[0] != name:
            self._kept = (None, None)  # before the new one needs its room
            paged = self.programs.get("prefill", shape)(self.programs.params, *contexts(shape, prompts))
            paging.check(paged)
            self._kept = (name, paged)
        return self._kept[1]


def rows_of(prompts: int, budgets: int, most: int) -> int:
    """Rows of a batch: all prompts at as many budgets as fit into `most` rows, else an even share of the prompts."""
    if prompts >= most:
        return -(-prompts // -(-prompts // max(1, most)))
    groups = -(-budgets // (most // prompts))
    return prompts * -(-budgets // groups)


def contexts(shape: Shape, prompts: Sequence[Prompt]) -> tuple[jax.Array, jax.Array]:
    """Right-padded contexts i32[R, length] and their sizes i32[R]."""
    tokens = np.zeros((len(prompts), shape.length), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt.context)] = prompt.context
    return jnp.array(tokens), jnp.array([len(prompt.context) for prompt in prompts], jnp.int32)


def questions(prompts: Sequence[Prompt], chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """What is fed after the context, and what each step is judged by: both i32[steps, R], -1 is nothing.

    The number of steps is a multiple of `chunk`. The last token of an answer is judged, but never fed. Raises
    ValueError for more tokens than `run.ASKED`.
    """
    steps = max(len(prompt.question) + len(prompt.answer) for prompt in prompts) - 1
    if steps >= run.ASKED:
        raise ValueError(f"question and answer have {steps + 1} tokens, and at most {run.ASKED} may be; take less")
    fed = np.full((math.ceil(steps / chunk) * chunk, len(prompts)), -1, np.int32)
    targets = np.full_like(fed, -1)
    for row, prompt in enumerate(prompts):
        asked, size = len(prompt.question), len(prompt.answer)
        fed[: asked + size - 1, row] = np.concatenate([prompt.question, prompt.answer])[:-1]
        targets[asked - 1 : asked + size - 1, row] = np.where(prompt.scored, prompt.answer, -1)
    return fed, targets


def outcome(steps: Steps, targets: np.ndarray, row: int, diagnostics: bool) -> dict[str, Any]:
    """What came of one row: numbers, and lists by plane; diagnostics over the steps that are judged."""
    judged = targets[:, row] >= 0
    read = steps.read[judged, :, row].mean(axis=1) / steps.length[judged, row]
    found: dict[str, Any] = {
        "exact": float(steps.right[judged, row].all()),
        "margin": float(steps.margin[judged, row].min()),
        "nll": float(steps.nll[judged, row].mean()),
        "read": float(read.mean()),
    }
    if diagnostics:
        by_plane = {name: x[judged, :, row].mean(axis=0) for name, x in steps.found._asdict().items()}
        found |= {name: float(by_plane[name].mean()) for name in ("mass", "recall", "error")}
        found |= {"mass_by_plane": by_plane["mass"], "oracle_by_plane": by_plane["oracle"]}
    return found
