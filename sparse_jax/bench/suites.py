"""The suites by name, and `run`, which measures one of them."""

import dataclasses
import fnmatch
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax

from sparse_jax.bench import attention, mla, reference, select, step, topk
from sparse_jax.bench.report import BenchResult, Row, environment
from sparse_jax.bench.timing import Effort, Plan, copy_bandwidth, short_message

# A suite is a module with CASES, CASES_CPU (dataclasses with a name), QUICK (names) and `rows(case, plan)`; and, if it
# has some that are measured only where a pattern names them, MORE.
SUITES = {"attention": attention, "topk": topk, "select": select, "step": step, "reference": reference, "mla": mla}
OF_MODELS = ("ouro", "speculation")
"""Suites that `sparse-jax bench` adds: they measure models, which this package does not know."""

CPU_NOTE = (
    "This is a CPU: small shapes, plain XLA only. The numbers say that everything runs, not how fast the kernels are; "
    "those need an NVIDIA GPU."
)
QUICK_EFFORT = Effort(repeats=5, seconds=0.2)


def select_cases(suite: str, patterns: Sequence[str] = (), quick: bool = False) -> list[Any]:
    """The cases of a suite to run: those that match a pattern such as `b8-*`, or the (quick) list of this backend.

    Raises ValueError where there is no such suite, or nothing matches.
    """
    if suite not in SUITES:
        more = ", ".join(name for name in OF_MODELS if name not in SUITES)
        more = f", and with `sparse-jax bench` {more}" if more else ""
        raise ValueError(f"unknown suite {suite!r}; there are {', '.join(SUITES)}{more}")
    module: ModuleType = SUITES[suite]
    if not patterns:
        everything = module.CASES if jax.default_backend() == "gpu" else module.CASES_CPU
        return [case for case in everything if not quick or case.name in module.QUICK]
    known = (*module.CASES, *getattr(module, "MORE", ()), *module.CASES_CPU)
    found = [case for case in known if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]
    if not found:
        names = ", ".join(case.name for case in known)
        raise ValueError(f"suite {suite} has no case {', '.join(patterns)}; there are {names}")
    return found


def run(
    suite: str = "attention",
    *,
    quick: bool = False,
    cases: Sequence[str] = (),
    only: str = "",
    config: Any = None,
    with_peers: bool = True,
    minutes: float | None = None,
    effort: Effort | None = None,
    on_row: Callable[[BenchResult, Row], None] | None = None,
) -> BenchResult:
    """Measures a suite on the default device.

    Args:
        suite: a name in `SUITES`.
        quick: fewer cases and shorter measurements.
        cases: names of cases, or patterns such as `b8-*`, instead of the suite's list for this device.
        only: measure operations whose name contains this.
        config: a `sparse_jax.Config` that the kernels use instead of their own choice.
        with_peers: whether other implementations are measured where they are installed.
        minutes: no further case is begun after this long.
        effort: how long each row is measured.
        on_row: called after each row, with the result so far.

    Returns:
        The rows with everything needed to read them later: device, versions, shapes, copy bandwidth.

    Raises:
        ValueError: the suite is unknown, or no case matches.
    """
    chosen = select_cases(suite, cases, quick)
    start = time.monotonic()
    bandwidth = copy_bandwidth()
    result = BenchResult(
        suite=suite,
        quick=quick,
        environment=environment(),
        copy_terabytes_per_second=bandwidth / 1e12,
        cases=[dataclasses.asdict(case) for case in chosen],
        notes=[] if jax.default_backend() == "gpu" else [CPU_NOTE],
    )
    # On a CPU the small inputs stay in its caches: a fraction of the memory's speed would say nothing.
    yardstick = bandwidth if jax.default_backend() == "gpu" else None
    plan = Plan(effort or (QUICK_EFFORT if quick else Effort()), yardstick, config, with_peers, only)
    for row in _all_rows(result, chosen, minutes, lambda case: SUITES[suite].rows(case, plan)):
        result.rows.append(row)
        result.seconds = time.monotonic() - start
        if on_row:
            on_row(result, row)
    return result


def _all_rows(
    result: BenchResult, cases: Sequence[Any], minutes: float | None, measure_case: Callable[[Any], Iterator[Row]]
) -> Iterator[Row]:
    start = time.monotonic()
    for case in cases:
        if minutes is not None and time.monotonic() - start > 60 * minutes:
            result.notes.append(f"{case.name} was not begun: {minutes:g} minutes were over")
            continue
        try:
            yield from measure_case(case)
        except Exception as error:  # the inputs themselves did not fit: the smaller cases still count
            result.notes.append(f"{case.name}: {short_message(error)}")
