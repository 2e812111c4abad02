"""How good a model is, without a decode loop: exact match of the tasks and cross entropy of held-out text.

Greedy decoding gives the right answer exactly when every byte of it is the arg max given the bytes before, so one
forward pass judges all loops at once. A model without loops is judged in its ways to read instead: dense, then sparse.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import tasks
from models.training import families

LENGTHS = (512, 1024, 2048, 4096)


class Scorer:
    """Scores token batches with one compiled function per length; `params` can be exchanged without compiling again."""

    def __init__(self, model: families.Model, tokens_per_batch: int = 32_768):
        graph, self.params = nnx.split(model)
        family = families.of(model.config)
        self.tokens_per_batch = tokens_per_batch
        self.compiled: dict[int, Any] = {}  # length -> compiled function, for those who compile ahead

        def score(params, tokens):
            return family.judged(nnx.merge(graph, params), tokens)

        self.score = jax.jit(score)

    def rows(self, length: int) -> int:
        """Rows of a batch of this length."""
        return max(1, self.tokens_per_batch // length)

    def lower(self, length: int):
        """Trace the scoring of a batch; what `.compile()` of the result returns may be put into `compiled[length]`."""
        return self.score.lower(self.params, jax.ShapeDtypeStruct((self.rows(length), length), jnp.int32))

    def __call__(self, sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Score up to `rows(S)` sequences i32[S] -> ce f32, correct bool, exits f32, each [U, B, S - 1].

        Entry s is about token s + 1; `exits` are exit probabilities.
        """
        length, count = len(sequences[0]), len(sequences)
        padding = [sequences[-1]] * (self.rows(length) - count)  # every batch has the compiled shape
        tokens = jnp.asarray(np.stack(sequences + padding), jnp.int32)
        ce, correct, exits = jax.device_get(self.compiled.get(length, self.score)(self.params, tokens))
        return ce[:, :count, :-1], correct[:, :count, :-1], exits[:, :count, :-1]


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """Accuracy of one task at one length; each tuple has one number per loop, or per way to read."""

    count: int
    exact: tuple[float, ...]
    exits: tuple[float, ...]  # mean exit probabilities where the answer's first byte is predicted


@dataclasses.dataclass(frozen=True)
class TextResult:
    """Cross entropy of held-out text in nats per byte; each tuple has one number per loop, or per way to read."""

    bytes: int
    ce: tuple[float, ...]
    exits: tuple[float, ...]


def _rounded(values: np.ndarray, digits: int = 4) -> tuple[float, ...]:
    return tuple(round(float(value), digits) for value in values)


def task(
    score: Scorer,
    name: str,
    length: int,
    filler: list[np.ndarray],
    *,
    count: int = 128,
    seed: int = 0,
) -> TaskResult:
    """Score `count` instances of a task; `filler` texts take turns."""
    rows = score.rows(length)
    made = [
        tasks.instance(name, (seed, length, number), length, filler[number % len(filler)]) for number in range(count)
    ]
    exact, exits = [], []
    for start in range(0, count, rows):
        part = made[start : start + rows]
        _, correct, leave = score([item.tokens() for item in part])
        for row, item in enumerate(part):
            exact.append(correct[:, row, -len(item.answer) :].all(axis=1))
            exits.append(leave[:, row, -len(item.answer)])
    return TaskResult(count, *(_rounded(np.mean(values, axis=0)) for values in (exact, exits)))


def text(score: Scorer, data: np.ndarray, length: int, *, limit: int | None = None) -> TextResult:
    """Score u8[bytes] in windows of BOS and `length - 1` bytes; the incomplete last window is left out.

    `limit` takes that many windows, spread over the text. Raises ValueError for a text below one window.
    """
    windows = len(data) // (length - 1)
    if windows == 0:
        raise ValueError(f"held-out text of {len(data)} bytes is shorter than one window of {length - 1}")
    rows = score.rows(length)
    chosen = np.unique(np.linspace(0, windows - 1, min(limit or windows, windows)).astype(int))
    ce, exits = [], []
    for start in range(0, len(chosen), rows):
        part = [
            np.concatenate([[tasks.BOS], data[at * (length - 1) : (at + 1) * (length - 1)]])
            for at in chosen[start : start + rows].tolist()
        ]
        loss, _, leave = score(part)
        ce.append(loss.sum(axis=(1, 2)))
        exits.append(leave.sum(axis=(1, 2)))
    total = len(chosen) * (length - 1)
    return TextResult(total, *(_rounded(np.sum(values, axis=0) / total) for values in (ce, exits)))


def report(
    score: Scorer,
    held_out: dict[str, np.ndarray],
    *,
    names: Iterable[str] = tasks.EVALUATION_TASKS,
    lengths: Iterable[int] = LENGTHS,
    count: int = 128,
    seed: int = 0,
) -> dict[str, Any]:
    """Everything the model card tells: tasks[name][length] and text[corpus][length], as plain dictionaries."""
    filler, lengths = list(held_out.values()), list(lengths)
    measured = {
        name: {
            str(length): dataclasses.asdict(task(score, name, length, filler, count=count, seed=seed))
            for length in lengths
        }
        for name in names
    }
    texts = {
        name: {
            str(length): dataclasses.asdict(text(score, data, length)) for length in lengths if len(data) >= length - 1
        }
        for name, data in held_out.items()
    }
    return {"tasks": measured, "text": texts}
