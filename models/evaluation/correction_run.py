"""The host's side of the quality of reference correction: prompts in, one cell for each method, task and retention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.evaluation import correction, run
from models.evaluation.correction import METHODS, Method
from models.evaluation.results import Results
from models.evaluation.statistics import interval, paired
from models.evaluation.tasks import TEXT_TASK, Prompt, Writer
from models.interface import LoopedModel, ModelConfig
from models.reference import ReferenceCorrection
from sparse_jax import retained_count

PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. length: tokens of context, question and answer; prompts: of each task; retentions: as text.

    text: a word for the text that was given, None for the default one: cells of another text are other cells.
    """

    model: str
    tasks: tuple[str, ...] = (TEXT_TASK, "keys8", "chain4", "chain6", "copy16")
    length: int = 512
    prompts: int = 24
    retentions: tuple[str, ...] = ("0.01", "0.02", "0.05", "0.1", "0.25", "1.0")
    seed: int = 0
    attention_rows: int | None = 2
    text: str | None = None

    def __post_init__(self) -> None:
        if not self.tasks or not self.retentions or self.prompts < 1:
            raise ValueError(f"needs a task, a retention and a prompt, got {self}")
        for retention in self.retentions:
            try:
                share = float(retention)
            except ValueError:
                raise ValueError(f"retentions are shares of the keys such as 0.1, got {retention!r}") from None
            ReferenceCorrection(retention=share)


class Batch(NamedTuple):
    """Prompts of one task, R of them."""

    context: np.ndarray  # i32[R, length] right-padded
    counts: np.ndarray  # i32[R]
    tokens: np.ndarray  # i32[steps, R] question and answer but for its last token; -1: takes no part
    targets: np.ndarray  # i32[steps, R] what is judged after each; -1: nothing


def batch_of(prompts: list[Prompt], length: int) -> Batch:
    """The arrays of prompts of `length` tokens at most."""
    steps = max(len(prompt.question) + len(prompt.answer) for prompt in prompts) - 1
    context = np.zeros((len(prompts), length), np.int32)
    tokens, targets = np.full((2, steps, len(prompts)), -1, np.int32)
    for row, prompt in enumerate(prompts):
        context[row, : len(prompt.context)] = prompt.context
        asked = np.concatenate([prompt.question, prompt.answer])
        tokens[: len(asked) - 1, row] = asked[:-1]
        first = len(prompt.question) - 1
        targets[first : first + len(prompt.answer), row] = np.where(prompt.scored, prompt.answer, -1)
    return Batch(context, np.array([len(prompt.context) for prompt in prompts], np.int32), tokens, targets)


class Evaluation:
    """Runs what `results` lack. Raises ValueError for a model that has too few loops."""

    def __init__(self, model: LoopedModel, writer: Writer, settings: Settings, results: Results):
        self.model, self.writer, self.settings, self.results = model, writer, settings, results
        config = model.config
        if settings.length > config.max_positions:
            raise ValueError(f"length: the model has {config.max_positions} positions, got {settings.length}")
        self.methods = [method for method in METHODS if all(loop < config.loops - 1 for loop in method.captures)]
        if len(self.methods) == 1:
            ReferenceCorrection().check(config.loops)  # says why
        self.graph, self.params = nnx.split(model)

    def cells(self) -> list[dict[str, Any]]:
        """What to run, without numbers."""
        s = self.settings
        return [
            self._cell(task, method, retention)
            for task in s.tasks
            for method in self.methods
            for retention in (s.retentions if method.takes_retention else (None,))
        ]

    def run(self, on_cell: Callable[[dict[str, Any]], None] = lambda cell: None) -> None:
        """Run them task by task; `on_cell` gets each cell that is done or was there."""
        for task in self.settings.tasks:
            cells = [cell for cell in self.cells() if cell["task"] == task]
            if all(cell in self.results for cell in cells):
                for cell in cells:
                    on_cell(cell)
                continue
            batch = batch_of(
                self.writer.prompts(task, self.settings.length, self.settings.prompts, self.settings.seed),
                self.settings.length,
            )
            paged, dense = self._prefilled(batch), None
            for cell in cells:
                method = next(method for method in self.methods if method.name == cell["method"])
                if dense is None or cell not in self.results:
                    outcomes = self._outcomes(batch, paged, method, float(cell["budget"] or 1.0), dense)
                    dense = outcomes if dense is None else dense
                    self.results.add(cell | summary(outcomes, dense, task, method))
                on_cell(cell)

    def _cell(self, task: str, method: Method, retention: str | None) -> dict[str, Any]:
        s = self.settings
        text = {} if s.text is None else {"text": s.text}  # runs from before it was told have the default text
        return {
            "model": s.model, "method": method.name, "task": task, "length": s.length, "budget": retention,
            "tokens": retained_count(s.length, float(retention or 1.0)),
            "settings": {"prompts": s.prompts, "seed": s.seed, "dtype": str(self.model.dtype)} | text,
            "read": reads(self.model.config, method, s.length, float(retention or 1.0)),
        }  # fmt: skip

    def _prefilled(self, batch: Batch) -> Any:
        shape = run.Shape(
            length=self.settings.length, rows=len(batch.counts), page_size=PAGE_SIZE, most=1,
            diagnostics=False, attention_rows=self.settings.attention_rows,
        )  # fmt: skip
        return run.prefill(self.params, batch.context, batch.counts, graph=self.graph, shape=shape)

    def _outcomes(
        self, batch: Batch, paged: Any, method: Method, retention: float, dense: dict[str, Any] | None
    ) -> dict[str, Any]:
        """What each prompt gave. dense: that of dense attention, None if this is it."""
        tokens = -(-self.settings.length // PAGE_SIZE) * PAGE_SIZE
        held = correction.begin(self.model.config, len(batch.counts), tokens, method, retention)
        paged = jax.tree.map(jnp.copy, paged)  # the step writes in place
        _, _, steps = correction.advance(self.params, paged, held, batch.tokens, batch.targets, graph=self.graph)
        steps = jax.tree.map(np.asarray, steps)
        return outcomes(steps, batch.targets >= 0, self.model.config, None if dense is None else dense["logits"])


def reads(config: ModelConfig, method: Method, tokens: int, retention: float) -> float:
    """Share of the cache that a token reads at a length; every query head of a group reads keys of its own."""
    if not method.captures:
        return 1.0
    kept = 0 if method.form == "frozen" else retained_count(tokens, retention)
    heads = config.num_kv_heads if kept == tokens else config.num_heads
    corrected = [loop for loop in range(config.loops) if loop not in method.captures and loop > min(method.captures)]
    share = kept * heads / (tokens * config.num_kv_heads)
    return 1 - len(corrected) / config.loops * (1 - share)


def outcomes(
    steps: correction.Steps, judged: np.ndarray, config: ModelConfig, dense_logits: np.ndarray | None
) -> dict[str, Any]:
    """Per prompt, of the judged steps bool[steps, R]: means, and what tells them from dense attention."""
    logits = steps.logits
    dense_logits = logits if dense_logits is None else dense_logits
    moved = logits - dense_logits
    moved = np.sqrt(np.square(moved - moved.mean(axis=-1, keepdims=True)).mean(axis=-1))
    agree = logits.argmax(axis=-1) == dense_logits.argmax(axis=-1)
    loops, layers = config.loops, config.num_layers

    def mean(x: Any) -> np.ndarray:  # over the judged steps: [steps, R, ...] -> [R, ...]
        weight = judged.reshape(*judged.shape, *(1,) * (x.ndim - 2))
        return (x * weight).sum(axis=0) / np.maximum(weight.sum(axis=0), 1)

    masses = mean(steps.masses.swapaxes(1, 2))  # [R, planes, Hq]
    masses = masses.reshape(len(masses), loops, layers, -1)
    errors = mean(steps.errors.swapaxes(1, 2)).reshape(-1, loops, layers)
    return {
        "logits": logits,
        "nll": mean(steps.nll),
        "margin": mean(steps.margin),
        "least_margin": np.where(judged, steps.margin, np.inf).min(axis=0),
        "exact": np.where(judged, steps.right, True).all(axis=0).astype(np.float64),
        "agree": mean(agree.astype(np.float64)),
        "logit_error": mean(moved),
        "errors": errors.mean(axis=2),  # [R, U]
        "masses": masses.mean(axis=(2, 3)),  # [R, U]
        "worst": masses.mean(axis=0).min(axis=(1, 2)),  # [U] the head with the least mass, over all prompts
    }


def summary(found: dict[str, Any], dense: dict[str, Any], task: str, method: Method) -> dict[str, Any]:
    """The numbers of a cell: [mean, low, high] over prompts, lists of them by loop.

    "nll" (nats a token; of a text also "nlls", of each prompt), "more" (the same, less that of dense attention),
    "margin" (of an answer its smallest), "exact" (no text), "agree" (share of the arg maxima of dense attention),
    "logit_error" (root mean square over the vocabulary), "errors" of attention outputs by loop, "masses" and "worst" by
    loop: what the chosen keys hold (None before the capture).
    """
    text = task == TEXT_TASK
    cell: dict[str, Any] = {
        "nll": interval(found["nll"]),
        "more": paired(found["nll"], dense["nll"]),
        "margin": interval(found["margin" if text else "least_margin"]),
        "agree": interval(found["agree"]),
        "logit_error": interval(found["logit_error"]),
        "errors": [interval(found["errors"][:, loop]) for loop in range(found["errors"].shape[1])],
    }
    if text:
        cell["nlls"] = found["nll"].tolist()
    else:
        cell["exact"] = interval(found["exact"])
    if method.takes_retention:
        first = min(method.captures)  # before it the keys are still those of the token before
        cell["masses"] = [
            interval(of_loop) if loop >= first else None for loop, of_loop in enumerate(found["masses"].T)
        ]
        cell["worst"] = [None] * first + found["worst"][first:].tolist()
    return cell
