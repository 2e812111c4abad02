"""The reference suite: capture and consume of reference correction against dense attention, one layer of one loop."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import sparse_jax
from sparse_jax import Reference
from sparse_jax.bench import attention, cases, entries, inputs
from sparse_jax.bench.cases import DecodeShape
from sparse_jax.bench.entries import Candidate, Entry
from sparse_jax.bench.inputs import Lists, Pools
from sparse_jax.bench.report import Row
from sparse_jax.bench.timing import Chain, Plan, Timing, sets_to_rotate

CASES, CASES_CPU = cases.REFERENCE, cases.REFERENCE_CPU
QUICK = (*cases.REFERENCE_QUICK, *cases.REFERENCE_CPU_QUICK)


class Given(NamedTuple):
    """What every call of a case reads from."""

    pools: Pools
    reference: Reference


class Op(NamedTuple):
    """One row: a step of a chain, and the fewest bytes that it moves."""

    name: str
    call: Callable[[jax.Array, Given, Lists], jax.Array]  # gives out, the next call's q
    bytes: int


def _capture(q: jax.Array, pools: Pools, lists: Lists, kept: int, config: Any = None) -> tuple[Any, Reference]:
    counts = jnp.full(q.shape[0], kept, jnp.int32)
    return sparse_jax.reference_capture(
        q, pools.k, pools.v, lists.page_table, pools.lengths, counts, capacity=kept, config=config
    )


def ops(case: DecodeShape, config: Any) -> list[Op]:
    """All rows of a case; `case.kept_tokens` is the k of each row."""

    def dense(q: jax.Array, given: Given, lists: Lists) -> jax.Array:
        pools = given.pools
        return sparse_jax.paged_attention(q, pools.k, pools.v, lists.page_table, pools.lengths, config=config).out

    def capture(q: jax.Array, given: Given, lists: Lists) -> jax.Array:
        output, reference = _capture(q, given.pools, lists, case.kept_tokens, config)
        # The next call must wait for the reference too: one number of each array is read.
        last = reference.contribution[..., -1] + reference.mass + reference.indices[..., -1]
        return jnp.where(jnp.isnan(last)[..., None], 0, output.out)

    def consume(q: jax.Array, given: Given, lists: Lists) -> jax.Array:
        pools = given.pools
        return sparse_jax.reference_consume(
            q, pools.k, pools.v, lists.page_table, pools.lengths, given.reference, config=config
        )

    rows = case.batch * case.q_heads
    kept = 4 * rows * case.kept_tokens
    read, vectors = attention.dense_bytes(case), 2 * 4 * rows * case.head_dim
    # Each query head reads keys of its own.
    chosen = dataclasses.replace(case, kv_heads=case.q_heads).bytes_read(case.kept_tokens, 0)
    return [
        Op("dense", dense, read),
        Op("capture", capture, read + kept + vectors),
        Op("consume", consume, chosen + kept + vectors),
    ]


def rows(case: DecodeShape, plan: Plan) -> Iterator[Row]:
    """Measures one case, row by row; `of dense` is its time over that of dense attention in this run."""
    wanted = [op for op in ops(case, plan.config) if plan.only in op.name]
    if not wanted:
        return
    on_gpu = jax.default_backend() == "gpu"
    q, pools = inputs.make_query(case), inputs.make_pools(case)._replace(pages=None)
    sets = inputs.make_sets(case, max(sets_to_rotate(op.bytes) for op in wanted) if on_gpu else 1)
    capture = jax.jit(_capture, static_argnums=3)
    given = Given(pools, capture(q, pools, sets[0], case.kept_tokens)[1])
    dense: list[float] = []

    def entry(op: Op) -> Entry:
        chain = Chain(op.call, q, given, sets[: sets_to_rotate(op.bytes)], calls=plan.effort.calls, hold=not on_gpu)

        def finish(timing: Timing) -> dict[str, Any]:
            if op.name == "dense":
                dense.append(timing.microseconds)
            return {"details": {"of dense": timing.microseconds / dense[0]}} if dense else {}

        row = Row(case=case.name, op=op.name, implementation="triton" if on_gpu else "xla", bytes=op.bytes)
        return Entry(row, lambda: [Candidate(chain)], finish, plan.effort)

    yield from entries.measure([entry(op) for op in wanted], plan)
