"""What a suite measures, one entry for each row: all are compiled side by side, then timed one after the other."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from sparse_jax.bench.report import Row
from sparse_jax.bench.timing import BRIEF, DEFAULT_EFFORT, Effort, Plan, Timing, short_message


class Compiled(Protocol):
    """Something to compile before anything is timed."""

    def compile(self) -> None:
        """Runs in a thread beside others."""


class Timed(Compiled, Protocol):
    """Something to time: `timing.Chain`, or a peer's likeness of it."""

    def time(self, effort: Effort) -> Timing:
        """Runs alone."""


class Candidate(NamedTuple):
    """One way to run an implementation."""

    chain: Timed
    settings: dict[str, Any] = {}  # noqa: RUF012, never written


def _nothing(timing: Timing) -> dict[str, Any]:
    return {}


class Entry(NamedTuple):
    """A row to be measured."""

    row: Row
    candidates: Callable[[], Sequence[Candidate]]  # the fastest of these counts; may raise
    finish: Callable[[Timing], dict[str, Any]] = _nothing  # more fields of the row, such as its error
    effort: Effort = DEFAULT_EFFORT
    beside: Sequence[Compiled] = ()  # what `finish` needs


def measure(entries: Sequence[Entry], plan: Plan) -> Iterator[Row]:
    """Measures the entries that the plan asks for, row by row. One that fails becomes a row that says why."""
    entries = [entry for entry in entries if plan.only in entry.row.op]
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        prepared = [(entry, _started(pool, entry)) for entry in entries]
    for entry, candidates in prepared:
        yield _row(entry, candidates, plan)


def _started(
    pool: concurrent.futures.Executor, entry: Entry
) -> list[tuple[Candidate, concurrent.futures.Future]] | Exception:
    for other in entry.beside:
        pool.submit(other.compile)
    try:
        return [(candidate, pool.submit(candidate.chain.compile)) for candidate in entry.candidates()]
    except Exception as error:
        return error


def _row(entry: Entry, candidates: list[tuple[Candidate, concurrent.futures.Future]] | Exception, plan: Plan) -> Row:
    try:
        if isinstance(candidates, Exception):
            raise candidates
        candidate = _best(candidates)
        timing = candidate.chain.time(entry.effort)
    except ImportError as error:
        return dataclasses.replace(entry.row, note=f"not installed: {error.name}")
    except Exception as error:  # one failure must not cost the other rows of a run
        return dataclasses.replace(entry.row, note=short_message(error))
    row = entry.row.timed(timing, plan.copy_bandwidth, settings=candidate.settings)
    try:
        return dataclasses.replace(row, **entry.finish(timing))
    except Exception as error:
        return dataclasses.replace(row, note=short_message(error))


def _best(candidates: list[tuple[Candidate, concurrent.futures.Future]]) -> Candidate:
    """The fastest of those that compile and run. With one candidate its failure is raised, with several the last."""
    compiled, failure = [], Exception("nothing to run")
    for candidate, future in candidates:
        if (error := future.exception()) is None:
            compiled.append(candidate)
        else:
            failure = error
    if len(candidates) == 1 and compiled:
        return compiled[0]
    times: list[tuple[float, Candidate]] = []
    for candidate in compiled:
        try:
            times.append((candidate.chain.time(BRIEF).microseconds, candidate))
        except Exception as error:
            failure = error
    if not times:
        raise failure
    return min(times, key=lambda pair: pair[0])[1]
