"""What a training run says while it runs: a bar in a terminal, one line every few seconds elsewhere, and a log file."""

import datetime
import pathlib
import time
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from models.training.objective import LossParts

KINDS = ("text", "answers", "chains", "links")
"""Rows of `LossParts.ce`, in the words of the log."""


OTHERS = ("divergence", "busiest expert")
"""Names of `LossParts.others`."""


class Progress:
    """Collects what steps report; a context manager."""

    def __init__(self, log: pathlib.Path, *, append: bool = False, every: float = 10.0):
        self.every = every
        self.records: list[dict[str, Any]] = []  # one per line, for the curves
        self.log = log.open("a" if append else "w", encoding="utf-8")
        self.console = rich.console.Console(highlight=False)
        self.bar = None
        if self.console.is_terminal:
            columns = (
                rich.progress.BarColumn(),
                rich.progress.TaskProgressColumn(),
                rich.progress.TextColumn("{task.description}"),
            )
            self.bar = rich.progress.Progress(*columns, console=self.console)
            self.task = self.bar.add_task("", total=1.0)
        self.begin()

    def __enter__(self) -> "Progress":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()
        self.log.close()

    def begin(self) -> None:
        """Start the clock of the next line."""
        self.since, self.interval_tokens = time.monotonic(), 0
        self.waiting: list[tuple[LossParts, jax.Array]] = []

    def say(self, line: str) -> None:
        """Print a line and write it to the log."""
        self.log.write(f"{datetime.datetime.now():%H:%M:%S} {line}\n")
        self.log.flush()
        if self.bar:
            self.bar.console.print(line, markup=False)
        else:
            print(line, flush=True)

    def step(
        self,
        step: int,
        seconds: float,
        fraction: float,
        shape: tuple[int, ...],
        rate: float,
        parts: LossParts,
        norm: jax.Array,
    ) -> None:
        """Take note of a step; arrays stay on the device until a line is due."""
        self.waiting.append((parts, norm))
        self.interval_tokens += shape[0] * shape[1]
        self.last = {"fraction": round(fraction, 4), "length": shape[1], "rate": float(f"{rate:.3g}")}
        if self.bar:
            self.bar.update(self.task, completed=fraction)
        if time.monotonic() - self.since >= self.every:
            self.flush(step, seconds)

    def flush(self, step: int, seconds: float) -> None:
        """Say what happened since the last line."""
        if not self.waiting:
            return
        waiting = jax.device_get(self.waiting)
        elapsed = time.monotonic() - self.since
        ce = np.stack([parts.ce for parts, _ in waiting])
        exits = None if waiting[0][0].exits is None else np.stack([parts.exits for parts, _ in waiting])
        record: dict[str, Any] = {"step": step, "seconds": round(seconds, 1), **self.last}
        record["tokens_per_second"] = round(self.interval_tokens / elapsed)
        record["loss"] = round(float(np.mean([parts.loss for parts, _ in waiting])), 4)
        norms = np.array([norm for _, norm in waiting])
        record["gradient"], record["broken"] = round(float(np.mean(norms)), 3), int(np.sum(~np.isfinite(norms)))
        for row, kind in enumerate(KINDS):
            seen = np.isfinite(ce[:, row, 0])
            if seen.any():
                record[kind] = [round(float(v), 3) for v in ce[seen, row].mean(axis=0)]
                if exits is not None:
                    record[f"{kind} exits"] = [round(float(v), 2) for v in exits[seen, row].mean(axis=0)]
        for name in waiting[0][0].others or ():
            record[name] = round(float(np.mean([parts.others[name] for parts, _ in waiting])), 4)
        self.records.append(record)
        self.say(describe(record))
        if self.bar:
            self.bar.update(self.task, description=f"step {step}, {record['tokens_per_second'] / 1e6:.2f} Mtok/s")
        self.begin()

    def look(self, seen: dict[str, Any]) -> None:
        """Say what a quick evaluation gave, loop by loop."""
        parts = [f"{name} {_numbers(value, 3)}" for name, value in seen.items() if isinstance(value, tuple)]
        self.say("  held out: " + " | ".join(parts))


def _numbers(values, digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def describe(record: dict[str, Any]) -> str:
    """One line for one record: losses and exit probabilities are given loop by loop."""
    losses = " | ".join(f"{kind} {_numbers(record[kind], 2)}" for kind in KINDS if kind in record)
    more = [f"{name} {record[name]:.3f}" for name in OTHERS if name in record]
    if exits := " | ".join(_numbers(record[f"{kind} exits"], 2) for kind in KINDS if f"{kind} exits" in record):
        more.append(f"exits {exits}")
    broken = f" BROKEN {record['broken']}" if record["broken"] else ""
    return (
        f"{record['seconds']:6.1f} s {record['fraction']:4.0%} step {record['step']} S {record['length']} "
        f"{record['tokens_per_second'] / 1e6:.2f} Mtok/s rate {record['rate']:.1e} "
        f"norm {record['gradient']:.2f}{broken} "
        f"loss {record['loss']:.3f} | {' | '.join([losses, *more])}"
    )
