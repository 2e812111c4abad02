"""The attention suite: dense, page-sparse and token-sparse decode, against plain XLA and the peers that are there."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import sparse_jax
from sparse_jax.bench import inputs, peers
from sparse_jax.bench.cases import (
    ATTENTION,
    ATTENTION_CPU,
    ATTENTION_CPU_QUICK,
    ATTENTION_QUICK,
    DecodeShape,
)
from sparse_jax.bench.inputs import Lists, Pools
from sparse_jax.bench.report import Row
from sparse_jax.bench.timing import Effort, Plan, Timing, measure, sets_to_rotate, short_message


def select_cases(names: Sequence[str], quick: bool) -> tuple[DecodeShape, ...]:
    """The cases to run: those named, or the (quick) list of this backend. ValueError for an unknown name."""
    known = {case.name: case for case in (*ATTENTION, *ATTENTION_CPU)}
    on_gpu = jax.default_backend() == "gpu"
    if not names:
        everything = ATTENTION if on_gpu else ATTENTION_CPU
        wanted = ATTENTION_QUICK if on_gpu else ATTENTION_CPU_QUICK
        return tuple(case for case in everything if not quick or case.name in wanted)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown case {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in names)


class Op(NamedTuple):
    """One of our operations as a step of a chain."""

    name: str
    call: Callable[..., Any]  # (q, pools, lists, **options) -> AttentionOutput
    bytes: Callable[[DecodeShape], int]


def _dense(q: jax.Array, pools: Pools, lists: Lists, **options: Any) -> Any:
    return sparse_jax.paged_attention(q, pools.k, pools.v, lists.page_table, pools.lengths, **options)


def _pages(q: jax.Array, pools: Pools, lists: Lists, **options: Any) -> Any:
    table, chosen = lists.page_table, lists.page_indices
    return sparse_jax.page_sparse_attention(q, pools.k, pools.v, table, pools.lengths, chosen, **options)


def _tokens(q: jax.Array, pools: Pools, lists: Lists, **options: Any) -> Any:
    return sparse_jax.token_sparse_attention(q, pools.k, pools.v, lists.slots, **options)


OPS = (
    Op("dense", _dense, lambda case: case.bytes_read(case.context, 0) + 4 * case.batch * case.pages_per_request),
    Op("page-sparse", _pages, lambda case: case.bytes_read(case.kept_pages * case.page_size, 2 * case.kept_pages)),
    Op("token-sparse", _tokens, lambda case: case.bytes_read(case.kept_tokens, case.kept_tokens)),
)


def rows(case: DecodeShape, plan: Plan) -> Iterator[Row]:
    """Measures one case, row by row. An entry that fails becomes a row that says why."""
    q, pools = inputs.make_query(case), inputs.make_pools(case)
    for op in OPS:
        yield from _op_rows(op, case, q, pools, plan)


def _op_rows(op: Op, case: DecodeShape, q: jax.Array, pools: Pools, plan: Plan) -> Iterator[Row]:
    on_gpu = jax.default_backend() == "gpu"
    sets = inputs.make_sets(case, sets_to_rotate(op.bytes(case)) if on_gpu else 1)

    def entry(implementation: str, time: Callable[[], tuple[Timing, dict[str, Any]]]) -> tuple[Timing | None, Row]:
        row = Row(case=case.name, op=op.name, implementation=implementation, bytes=op.bytes(case))
        return _guarded(time, row, plan.copy_bandwidth)

    def ours(implementation: str, config: Any, effort: Effort) -> Timing:
        def step(q: jax.Array, pools: Pools, lists: Lists) -> jax.Array:
            return op.call(q, pools, lists, implementation=implementation, config=config).out

        return measure(step, q, pools, sets, effort, hold=implementation == "xla")

    def plain() -> tuple[Timing, dict[str, Any]]:
        _check_memory(case, op)
        return ours("xla", None, plan.effort._replace(calls=min(plan.effort.calls, 4), repeats=3)), {}

    meaning, row = entry("xla", plain)
    yield row
    if not on_gpu:
        return
    kernel, row = entry("triton", lambda: (ours("triton", plan.config, plan.effort), _settings(plan.config)))
    yield dataclasses.replace(row, error=_relative_error(kernel, meaning))
    if plan.with_peers and op.name == "dense":
        yield entry("jax paged_attention", lambda: peers.jax_paged_attention(case, q, pools, sets, plan.effort))[1]
        yield entry("torch SDPA, contiguous", lambda: peers.torch_sdpa(case, q, pools, plan.effort))[1]


class Skip(Exception):
    """Not measured, and the message says why."""


def _check_memory(case: DecodeShape, op: Op) -> None:
    """Plain XLA gathers what it attends to and widens it to float32: at the longest contexts that does not fit."""
    stats = jax.devices()[0].memory_stats() or {}
    needed = op.bytes(case) * (1 + 4 / case.itemsize)
    free = stats.get("bytes_limit", float("inf")) - stats.get("bytes_in_use", 0)
    if needed > 0.9 * free:
        raise Skip(f"skipped: would need about {needed / 1e9:.0f} GB beside the pool, {free / 1e9:.0f} GB are free")


def _guarded(
    time: Callable[[], tuple[Timing, dict[str, Any]]], row: Row, copy_bandwidth: float | None
) -> tuple[Timing | None, Row]:
    try:
        timing, settings = time()
    except Skip as reason:
        return None, dataclasses.replace(row, note=str(reason))
    except ImportError as error:
        return None, dataclasses.replace(row, note=f"not installed: {error.name}")
    except Exception as error:  # one failure must not cost the other rows of a run
        return None, dataclasses.replace(row, note=short_message(error))
    return timing, row.timed(timing, copy_bandwidth, settings=settings)


def _settings(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    return {key: value for key, value in dataclasses.asdict(config).items() if value}


def _relative_error(timing: Timing | None, plain: Timing | None) -> float | None:
    if timing is None or plain is None:
        return None
    ours, meaning = timing.first.astype(jnp.float32), plain.first.astype(jnp.float32)
    return float(jnp.linalg.norm(ours - meaning) / jnp.linalg.norm(meaning))
