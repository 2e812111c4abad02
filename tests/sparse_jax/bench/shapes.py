"""Shapes and results that take no time."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from sparse_jax.bench import cases, report, timing

TINY = cases.DecodeShape(
    name="tiny",
    batch=2,
    context=64,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    page_size=8,
    kept_tokens=16,
    kept_pages=2,
    dtype="float32",
    pool_bytes=0,
)
TINY_TOP_K = cases.TopKShape(name="tiny", rows=(2, 3), size=40, k=5, zeros=0.5)
TINY_STEP = cases.StepShape(name="tiny", attention=TINY, layers=(1, 2))
TINY_MLA = cases.LatentShape(
    name="tiny",
    batch=2,
    context=64,
    heads=4,
    kept_tokens=16,
    latent_dim=32,
    rope_dim=8,
    index_heads=2,
    index_dim=16,
    page_size=8,
    dtype="float32",
    pool_bytes=0,
)
BRIEF = timing.Effort(repeats=2, seconds=0.01, calls=2)
H200 = {"device": "NVIDIA H200", "driver": "580", "jax": "0.11.2", "date": "2026-11-29T19:48:56+00:00"}


def row(op: str, implementation: str, microseconds: float | None, case: str = "tiny", **fields: Any) -> report.Row:
    found = report.Row(case=case, op=op, implementation=implementation, bytes=10**6)
    if microseconds is None:
        return dataclasses.replace(found, **fields)
    return found.timed(timing.Timing(microseconds, 0.9 * microseconds, 1.1 * microseconds), 1e12, **fields)


def result(suite: str, shapes: list[Any], rows: list[report.Row]) -> report.BenchResult:
    return report.BenchResult(
        suite=suite,
        quick=True,
        environment=H200,
        copy_terabytes_per_second=1.0,
        cases=[dataclasses.asdict(shape) for shape in shapes],
        rows=rows,
    )


def example() -> report.BenchResult:
    found = dataclasses.replace(row("dense", "xla", 2.0, settings={"splits": 4}), kernels={"fused": [1.5, 2.0]})
    return result("attention", [TINY], [found, row("dense", "triton", None, note="skipped: no room")])


def any_timing(first: Any = None) -> timing.Timing:
    return timing.Timing(1, 1, 1, None, jnp.ones(2) if first is None else first)
