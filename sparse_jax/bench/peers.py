"""Other implementations, measured on the same pool in the same run, each at the best of a few settings."""

import itertools
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_jax.bench.cases import DecodeShape
from sparse_jax.bench.inputs import Lists, Pools
from sparse_jax.bench.timing import Effort, Timing, measure, short_message


def jax_paged_settings(case: DecodeShape) -> list[dict[str, int]]:
    """A few settings around the best found on an H200. The defaults do not fit shared memory at 64-token pages."""
    splits = [1, 4] if case.batch * case.kv_heads >= 256 else [8, 16]
    shapes = [(1, 4, 2), (1, 4, 3), (2, 8, 2)]  # pages_per_compute_block, num_warps, num_stages
    names = ("pages_per_compute_block", "num_warps", "num_stages")
    return [dict(zip(names, shape)) | {"k_splits": split} for split, shape in itertools.product(splits, shapes)]


def jax_paged_attention(
    case: DecodeShape, q: jax.Array, pools: Pools, sets: list[Lists], effort: Effort
) -> tuple[Timing, dict[str, Any]]:
    """`jax.experimental.pallas.ops.gpu.paged_attention` with the best of a few settings.

    Its pools are `[Hkv, N, P, D]`. Ours is read under that shape without moving a byte: the numbers are random anyway.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "jax.experimental.pallas.ops.gpu.paged_attention is deprecated", DeprecationWarning
        )
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        def time_with(settings: dict[str, int], effort: Effort) -> Timing:
            def step(q: jax.Array, pools: Pools, lists: Lists) -> jax.Array:
                shape = (case.kv_heads, case.pages, case.page_size, case.head_dim)
                k, v = pools.k.reshape(shape), pools.v.reshape(shape)
                scaled = (q * case.head_dim**-0.5).astype(q.dtype)  # it leaves the scale to its caller
                return paged_attention(scaled, k, v, lists.page_table, pools.lengths, **settings)

            return measure(step, q, pools, sets, effort)

        best, failure = None, "no setting tried"
        for settings in jax_paged_settings(case):
            try:
                timing = time_with(settings, Effort(repeats=2, seconds=0.1))
            except Exception as error:  # most often: does not fit shared memory
                failure = short_message(error)
                continue
            if best is None or timing.microseconds < best[0]:
                best = (timing.microseconds, settings)
        if best is None:
            raise RuntimeError(f"none of the settings ran; the last said {failure}")
        return time_with(best[1], effort), best[1]


def torch_sdpa(case: DecodeShape, q: jax.Array, pools: Pools, effort: Effort) -> tuple[Timing, dict[str, Any]]:
    """torch's scaled_dot_product_attention over contiguous keys and values: what dense decode reaches without pages.

    The pool's memory is read as `[sets, B, Hkv, S, D]`, without a copy. Both ways of saying grouped heads are tried.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch is installed without CUDA")
    keys, values = (_contiguous(case, torch.from_dlpack(pool)) for pool in (pools.k, pools.v))
    query = torch.from_dlpack(q)
    group = case.q_heads // case.kv_heads
    attention = torch.nn.functional.scaled_dot_product_attention

    def as_heads(q: Any, k: Any, v: Any) -> Any:  # Hq heads of one row
        return attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    def as_rows(q: Any, k: Any, v: Any) -> Any:  # Hkv heads of G rows: the same numbers, as nothing is causal here
        rows = q.reshape(case.batch, case.kv_heads, group, case.head_dim)
        return attention(rows, k, v).reshape(q.shape)

    timings = {}
    for step in (as_heads, as_rows):
        with torch.no_grad():
            timings[step.__name__] = _time_torch(torch, step, query, list(zip(keys, values)), effort)
    best = min(timings, key=lambda name: timings[name][0])
    median, low, high = timings[best]
    return Timing(median, low, high, None, jnp.zeros(())), {"grouped": best}


def _contiguous(case: DecodeShape, pool: Any) -> Any:
    """[sets, B, Hkv, S, D] view of as much of a pool as makes whole sets."""
    per_set = case.batch * case.kv_heads * case.context * case.head_dim
    sets = pool.numel() // per_set
    shape = (sets, case.batch, case.kv_heads, case.context, case.head_dim)
    return pool.reshape(-1)[: sets * per_set].reshape(shape)


def _time_torch(torch: Any, step: Any, q: Any, sets: list[Any], effort: Effort) -> tuple[float, float, float]:
    """(median, fastest, slowest) microseconds of one call. The chain is a CUDA graph, as ours is one jit."""
    calls = -(-effort.calls // len(sets)) * len(sets)

    def chain() -> Any:
        out = q
        for call in range(calls):
            out = step(out, *sets[call % len(sets)])
        return out

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()

    def seconds(queued: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(queued):
            graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(1)
    queued = int(np.clip(effort.seconds / effort.repeats / seconds(1), 1, 200))
    samples = [seconds(queued) / (queued * calls) * 1e6 for _ in range(effort.repeats)]
    return float(np.median(samples)), min(samples), max(samples)
