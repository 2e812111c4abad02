"""Other implementations of dense decode, measured on the same pool in the same run.

Each is a function of (case, q, pools, sets) that returns candidates: the same call with a few settings, of which the
fastest counts.
"""

import functools
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparse_jax.bench.cases import DecodeShape
from sparse_jax.bench.entries import Candidate
from sparse_jax.bench.inputs import Lists, Pools
from sparse_jax.bench.timing import Chain, Effort, Timing


def jax_paged_settings(case: DecodeShape) -> list[dict[str, int]]:
    """A few settings around the best found on an H200. The defaults do not fit shared memory at 64-token pages."""
    splits = [1, 4] if case.batch * case.kv_heads >= 256 else [8, 16]
    shapes = [(1, 4, 2), (1, 4, 3), (2, 8, 2)]  # pages_per_compute_block, num_warps, num_stages
    names = ("pages_per_compute_block", "num_warps", "num_stages")
    return [dict(zip(names, shape)) | {"k_splits": split} for split, shape in itertools.product(splits, shapes)]


def jax_paged_attention(case: DecodeShape, q: jax.Array, pools: Pools, sets: list[Lists]) -> list[Candidate]:
    """`jax.experimental.pallas.ops.gpu.paged_attention`.

    Its pools are `[Hkv, N, P, D]`. Ours is read under that shape without moving a byte: the numbers are random anyway.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "jax.experimental.pallas.ops.gpu.paged_attention is deprecated", DeprecationWarning
        )
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    def step(settings: dict[str, int], q: jax.Array, pools: Pools, lists: Lists) -> jax.Array:
        shape = (case.kv_heads, case.pages, case.page_size, case.head_dim)
        k, v = pools.k.reshape(shape), pools.v.reshape(shape)
        scaled = (q * case.head_dim**-0.5).astype(q.dtype)  # it leaves the scale to its caller
        return paged_attention(scaled, k, v, lists.page_table, pools.lengths, **settings)

    return [
        Candidate(Chain(functools.partial(step, settings), q, pools, sets), settings)
        for settings in jax_paged_settings(case)
    ]


def jax_cudnn(case: DecodeShape, q: jax.Array, pools: Pools, sets: list[Lists]) -> list[Candidate]:
    """`jax.nn.dot_product_attention(implementation="cudnn")` over contiguous keys and values."""
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    return [Candidate(_contiguous_chain(case, q, pools, attention))]


def tokamax(case: DecodeShape, q: jax.Array, pools: Pools, sets: list[Lists]) -> list[Candidate]:
    """`tokamax.dot_product_attention` over contiguous keys and values, with its own choice of implementation."""
    import tokamax

    return [Candidate(_contiguous_chain(case, q, pools, tokamax.dot_product_attention))]


def _contiguous_chain(case: DecodeShape, q: jax.Array, pools: Pools, attention: Callable[..., jax.Array]) -> Chain:
    """A chain of attention(q [B, 1, Hq, D], k [B, S, Hkv, D], v): the memory of the pool, read under that shape."""
    pages = case.batch * case.pages_per_request
    k, v = ((x if x.shape[0] == pages else x[:pages]) for x in (pools.k, pools.v))

    def step(q: jax.Array, pools: tuple[jax.Array, jax.Array], _: None) -> jax.Array:
        k, v = (x.reshape(case.batch, case.context, case.kv_heads, case.head_dim) for x in pools)
        return attention(q[:, None], k, v)[:, 0]

    return Chain(step, q, (k, v), [None])


def torch_sdpa(case: DecodeShape, q: jax.Array, pools: Pools, sets: list[Lists]) -> list[Candidate]:
    """torch's scaled_dot_product_attention over contiguous keys and values: what dense decode reaches without pages.

    The pool's memory is read as `[sets, B, Hkv, S, D]`, without a copy. Both ways of saying grouped heads are tried.
    """
    import torch

    keys, values = (_contiguous(case, torch.from_dlpack(pool)) for pool in (pools.k, pools.v))
    group = case.q_heads // case.kv_heads
    attention = torch.nn.functional.scaled_dot_product_attention

    def as_heads(q: Any, k: Any, v: Any) -> Any:  # Hq heads of one row
        return attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    def as_rows(q: Any, k: Any, v: Any) -> Any:  # Hkv heads of G rows: the same numbers, as nothing is causal here
        rows = q.reshape(case.batch, case.kv_heads, group, case.head_dim)
        return attention(rows, k, v).reshape(q.shape)

    sets_of_torch = list(zip(keys, values))
    return [
        Candidate(TorchChain(step, torch.from_dlpack(q), sets_of_torch), {"grouped": step.__name__})
        for step in (as_heads, as_rows)
    ]


def _contiguous(case: DecodeShape, pool: Any) -> Any:
    """[sets, B, Hkv, S, D] view of as much of a pool as makes whole sets."""
    per_set = case.batch * case.kv_heads * case.context * case.head_dim
    sets = pool.numel() // per_set
    shape = (sets, case.batch, case.kv_heads, case.context, case.head_dim)
    return pool.reshape(-1)[: sets * per_set].reshape(shape)


DENSE = {
    "jax paged_attention": jax_paged_attention,
    "jax cudnn, contiguous": jax_cudnn,
    "tokamax, contiguous": tokamax,
    "torch SDPA, contiguous": torch_sdpa,
}


class TorchChain:
    """A chain of calls step(last output, *set) in torch. It is a CUDA graph, as ours is one jit."""

    def __init__(self, step: Callable[..., Any], carry: Any, sets: list[tuple[Any, ...]], calls: int = 10) -> None:
        self.step, self.carry, self.sets = step, carry, sets
        self.calls = -(-calls // len(sets)) * len(sets)

    def compile(self) -> None:
        """Nothing: graphs are captured when no other thread uses the GPU."""

    def _chain(self) -> Any:
        out = self.carry
        for call in range(self.calls):
            out = self.step(out, *self.sets[call % len(self.sets)])
        return out

    def time(self, effort: Effort) -> Timing:
        """Captures the chain and measures its replay."""
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch is installed without CUDA")
        with torch.no_grad():
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                self._chain()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._chain()

        def seconds(queued: int) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(queued):
                graph.replay()
            torch.cuda.synchronize()
            return time.perf_counter() - start

        seconds(1)
        queued = int(np.clip(effort.seconds / effort.repeats / seconds(1), 1, 200))
        samples = [seconds(queued) / (queued * self.calls) * 1e6 for _ in range(effort.repeats)]
        return Timing(float(np.median(samples)), min(samples), max(samples))
