"""Finds the fastest Config of an operation for one shape: candidates, compiled side by side, checked, then timed."""

import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import Config
from pallas_kernels.config import MOST_STAGE_BYTES, Launch, next_power_of_two
from pallas_kernels.decode_call import decode_shape
from sparse_jax.bench import inputs
from sparse_jax.bench.attention import Op
from sparse_jax.bench.cases import DecodeShape
from sparse_jax.bench.entries import Timed
from sparse_jax.bench.inputs import Lists, Pools
from sparse_jax.bench.timing import BRIEF, Chain, sets_to_rotate, short_message
from sparse_jax.tuning import CallShape

OWN = Config()  # the kernel's own choice
# KB of keys and values that a program reads in one step, warps, stages.
TILES = ((16, 2, 4), (16, 4, 3), (32, 4, 2), (32, 4, 3), (32, 8, 3), (64, 4, 2), (64, 8, 2))
MOST_WORKERS = 16
FINALISTS, LOOKS = 3, 5
MARGIN = 0.02  # times move by this much from look to look, so a smaller gain is none
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}  # relative, of each row of the result


class Outcome(NamedTuple):
    """What was found for a shape."""

    config: Config  # OWN where nothing was faster by more than the margin
    microseconds: float  # of one call with it
    own_microseconds: float | None  # with the kernel's own choice; None where that does not run on this device
    tried: int
    dropped: dict[Config, str]  # candidates that do not run or give a wrong result, and why


def call_shape(op: Op, q: jax.Array, pools: Pools, lists: Lists) -> CallShape:
    """What a call of `op` with q [B, Hq, D] is looked up by."""
    operation, ids = {
        "dense": ("paged_attention", lists.page_table),
        "page-sparse": ("page_sparse_attention", lists.page_indices),
        "token-sparse": ("token_sparse_attention", lists.slots),
    }[op.name.partition(",")[0]]
    by_page = operation != "token_sparse_attention"
    rows = jax.eval_shape(lambda q: q[:, None], q)  # T = 1
    return CallShape.of(operation, rows, pools.k, pools.v, ids, by_page=by_page)


def own_launch(shape: CallShape) -> tuple[Launch, int]:
    """What the kernel decides by itself, and how many query rows share a program's keys."""

    def array(dtype: str, *dimensions: int) -> Any:
        return jax.ShapeDtypeStruct(dimensions, dtype)

    q = array(shape.q_dtype, shape.batch, shape.rows, shape.q_heads, shape.key_width)
    k = array(shape.cache_dtype, 1, shape.kv_heads, shape.page_size, shape.key_width)
    v = array(shape.cache_dtype, 1, shape.kv_heads, shape.page_size, shape.value_width)
    call = decode_shape(q, k, v, per_token=shape.lists_per_row, scale=1.0, soft_cap=None, interpret=False)
    by_page = shape.operation != "token_sparse_attention"
    return call.launch(None, shape.tokens, k.dtype, by_page=by_page), call.rows


def candidates(shape: CallShape, quick: bool = False) -> tuple[Config, ...]:
    """The settings worth trying, the kernel's own choice first.

    Tiles of several sizes, each with the kernel's number of splits, with fewer and with more; quick: not every tile
    with every number of splits.
    """
    own, query_rows = own_launch(shape)
    row_bytes = (shape.key_width + shape.value_width) * jnp.dtype(shape.cache_dtype).itemsize
    own_tile = (own.block_tokens, own.num_warps, own.num_stages)
    tiles = [own_tile]
    for kilobytes, warps, stages in TILES:
        block = next_power_of_two(kilobytes * 1024 // row_bytes + 1) // 2
        block = max(16, min(block, next_power_of_two(shape.tokens)))
        if block * row_bytes * stages <= MOST_STAGE_BYTES:
            tiles.append((block, warps, stages))
    splits = (own.splits, own.splits // 2, 2 * own.splits, own.splits // 4, 4 * own.splits)
    found = []
    for tile, parts in itertools.product(tiles, splits):
        near = (tile == own_tile) + (parts == own.splits)  # 2: the kernel's own choice
        if 1 <= parts <= -(-shape.tokens // tile[0]) and near < 2 and (near or not quick):
            block, warps, stages = tile
            found.append(Config(block_tokens=block, num_warps=warps, num_stages=stages, splits=parts))
    for rows in (own.block_rows // 2, 2 * own.block_rows):
        if 16 <= rows <= next_power_of_two(query_rows):
            found.append(Config(block_rows=rows))
    return tuple(dict.fromkeys([OWN, *found]))


def tune(
    op: Op, case: DecodeShape, q: jax.Array, pools: Pools, *, quick: bool = False, implementation: str = "triton"
) -> tuple[CallShape, Outcome]:
    """Measures the candidates for an operation on the inputs of a case.

    Raises RuntimeError where no candidate works, ValueError where the operation does not take the case.
    """
    sets = inputs.make_sets(case, sets_to_rotate(op.bytes(case)))
    shape = call_shape(op, q, pools, sets[0])
    expected = meaning(op, q, pools, sets[0])

    def chain(config: Config) -> Chain:
        def step(q: jax.Array, pools: Pools, lists: Lists) -> jax.Array:
            return op.call(q, pools, lists, implementation=implementation, config=config).out

        return Chain(step, q, pools, sets)

    def error(result: jax.Array) -> str | None:
        return wrong(result, expected, TOLERANCES[shape.q_dtype])

    return shape, search(candidates(shape, quick), chain, error)


def meaning(op: Op, q: jax.Array, pools: Pools, lists: Lists) -> jax.Array:
    """The plain-jnp result [B, Hq, Dv], request by request: what it gathers in float32 may not fit for all at once."""

    @jax.jit
    def all_requests(q: jax.Array, pools: Pools, lists: Lists) -> jax.Array:
        def one(request: Any) -> jax.Array:
            q, lengths, lists = jax.tree.map(lambda leaf: leaf[None], request)
            return op.call(q, pools._replace(lengths=lengths), lists, implementation="xla", config=None).out[0]

        return lax.map(one, (q, pools.lengths, lists))

    return all_requests(q, pools, lists)


def wrong(result: jax.Array, expected: jax.Array, tolerance: float) -> str | None:
    """What is wrong with a result [..., Dv], if anything. Each row counts, not the average of all."""
    got, wanted = result.astype(jnp.float32), expected.astype(jnp.float32)
    errors = jnp.linalg.norm(got - wanted, axis=-1) / jnp.maximum(jnp.linalg.norm(wanted, axis=-1), 1e-30)
    worst = float(jnp.max(errors))
    return None if worst <= tolerance else f"wrong result: relative error {worst:.1e} in the worst row"  # NaN too


def search(
    configs: Sequence[Config], chain: Callable[[Config], Timed], error: Callable[[jax.Array], str | None]
) -> Outcome:
    """The fastest config whose chain of calls compiles, runs and gives the right first result.

    Every candidate is looked at once, which also checks it. The best few and OWN are then looked at in turn, several
    times: the best of many single looks would mostly be a lucky one. Raises RuntimeError where no candidate works.
    """
    chains, dropped = _compiled(configs, chain)
    first_look: dict[Config, float] = {}
    for config, timed in chains.items():
        try:
            timing = timed.time(BRIEF)
            problem = error(timing.first)
        except Exception as failure:
            problem = short_message(failure)
        if problem:
            dropped[config] = problem
        else:
            first_look[config] = timing.microseconds
    if not first_look:
        raise RuntimeError(f"no candidate works; the kernel's own choice: {dropped[OWN]}")
    final = sorted(first_look, key=lambda config: first_look[config])[:FINALISTS]
    if OWN in first_look and OWN not in final:
        final.append(OWN)
    looks = [[chains[config].time(BRIEF).microseconds for config in final] for _ in range(LOOKS)]
    times = dict(zip(final, np.median(looks, axis=0).tolist()))
    best = min(times, key=lambda config: times[config])
    if OWN in times and times[best] > (1 - MARGIN) * times[OWN]:
        best = OWN
    return Outcome(best, times[best], times.get(OWN), len(configs), dropped)


def _compiled(
    configs: Sequence[Config], chain: Callable[[Config], Timed]
) -> tuple[dict[Config, Timed], dict[Config, str]]:
    """The chains that compile, and why others do not. In threads, because compiling takes most of the time."""

    def attempt(config: Config) -> Timed | str:
        try:
            timed = chain(config)
            timed.compile()
            return timed
        except Exception as error:  # most often: does not fit shared memory
            return short_message(error)

    with concurrent.futures.ThreadPoolExecutor(min(MOST_WORKERS, os.cpu_count() or 1)) as pool:
        found = dict(zip(configs, pool.map(attempt, configs)))
    chains = {config: timed for config, timed in found.items() if not isinstance(timed, str)}
    return chains, {config: why for config, why in found.items() if isinstance(why, str)}


def describe(config: Config) -> str:
    """A config in one line."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    given = [f"{name}={value}" for name, value in values.items() if value != getattr(OWN, name)]
    return " ".join(given) or "the kernel's own choice"
