"""The suites by name, and `run`, which measures one of them."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from sparse_jax.bench import attention
from sparse_jax.bench.report import BenchResult, Row, environment
from sparse_jax.bench.timing import Effort, Plan, copy_bandwidth

# A suite is a module with `select_cases(names, quick)` and `rows(case, plan)`.
SUITES = {"attention": attention}

CPU_NOTE = (
    "This is a CPU: small shapes, plain XLA only. The numbers say that everything runs, not how fast the kernels are; "
    "those need an NVIDIA GPU."
)


def run(
    suite: str = "attention",
    *,
    quick: bool = False,
    cases: Sequence[str] = (),
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
        cases: names of cases, instead of the suite's list for this device.
        config: a `sparse_jax.Config` that the kernels use instead of their own choice.
        with_peers: whether other implementations are measured where they are installed.
        minutes: no further case is begun after this long.
        effort: how long each row is measured.
        on_row: called after each row, with the result so far.

    Returns:
        The rows with everything needed to read them later: device, versions, shapes, copy bandwidth.

    Raises:
        ValueError: the suite or a case is unknown.
    """
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}; there are {', '.join(SUITES)}")
    module = SUITES[suite]
    chosen = module.select_cases(cases, quick)
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
    effort = effort or (Effort(repeats=5, seconds=0.4) if quick else Effort())
    plan = Plan(effort, yardstick, config, with_peers)
    for row in _all_rows(result, chosen, minutes, lambda case: module.rows(case, plan)):
        result.rows.append(row)
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
            result.notes.append(f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
