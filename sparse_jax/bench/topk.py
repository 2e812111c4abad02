"""The top-k suite: `sparse_jax.top_k` in both orders against `lax.top_k` and `torch.topk`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import sparse_jax
from sparse_jax.bench import cases, entries
from sparse_jax.bench.cases import TopKShape
from sparse_jax.bench.entries import Candidate, Entry
from sparse_jax.bench.peers import TorchChain
from sparse_jax.bench.report import Row
from sparse_jax.bench.timing import Chain, Effort, Plan, Timing, sets_to_rotate

CASES, CASES_CPU = cases.TOP_K, cases.TOP_K_CPU
QUICK = (*cases.TOP_K_QUICK, *cases.TOP_K_CPU_QUICK)
Ids = tuple[jax.Array, jax.Array]  # the carry of a chain: lengths i32[*rows], ids i32[*rows, k]


@functools.partial(jax.jit, static_argnames=("case",))
def make_scores(key: jax.Array, case: TopKShape) -> jax.Array:
    """f32[*rows, S] normal numbers, some of them set to 0."""
    score_key, zero_key = jax.random.split(key)
    scores = jax.random.normal(score_key, (*case.rows, case.size))
    return jnp.where(jax.random.uniform(zero_key, scores.shape) < case.zeros, 0.0, scores)


def rows(case: TopKShape, plan: Plan) -> Iterator[Row]:
    """Measures one case, row by row. The error of a row is the fraction of its ids that are not those of lax.top_k."""
    on_gpu = jax.default_backend() == "gpu"
    keys = jax.random.split(jax.random.key(0), sets_to_rotate(case.bytes) if on_gpu else 1)
    sets = [make_scores(key, case) for key in keys]
    carry = jnp.full(case.rows, case.size, jnp.int32), jnp.zeros((*case.rows, case.k), jnp.int32)
    right = jax.jit(lax.top_k, static_argnums=1)(sets[0], case.k)[1]

    def entry(op: str, implementation: str, candidates: Any, order: str = "score") -> Entry:
        def error(timing: Timing) -> dict[str, Any]:
            if timing.first is None:
                return {}
            expected = jnp.sort(right, axis=-1) if order == "id" else right
            return {"error": float(jnp.mean(timing.first[1] != expected))}

        row = Row(case=case.name, op=op, implementation=implementation, bytes=case.bytes)
        return Entry(row, candidates, error, plan.effort)

    def ours(order: str) -> list[Candidate]:
        top_k = functools.partial(_ours, order, "triton" if on_gpu else "xla")
        return [Candidate(TopKChain(top_k, carry, sets, plan.effort.calls, hold=not on_gpu))]

    def lax_top_k() -> list[Candidate]:
        return [Candidate(TopKChain(_lax, carry, sets, plan.effort.calls, hold=True))]

    name = "triton" if on_gpu else "xla"
    todo = [entry(f"top-k by {order}", name, functools.partial(ours, order), order) for order in ("id", "score")]
    if plan.with_peers:
        todo.append(entry("top-k by score", "lax.top_k", lax_top_k))
    if plan.with_peers and on_gpu:
        todo.append(entry("top-k by score", "torch.topk", functools.partial(_torch_top_k, case, sets)))
    yield from entries.measure(todo, plan)


class TopKChain(Chain):
    """A chain of calls top_k(scores, k, lengths); its kernels are those of the calls, without what links them."""

    def __init__(self, top_k: Callable[..., jax.Array], carry: Ids, sets: list[jax.Array], calls: int, hold: bool):
        def step(carry: Ids, _: None, scores: jax.Array) -> Ids:
            lengths, ids = carry
            ids = top_k(scores, ids.shape[-1], lengths)
            # The same lengths, but known only once these ids are: the next call must wait for them.
            return lengths + jnp.minimum(ids[..., 0], 0), ids

        super().__init__(step, carry, None, sets, calls=calls, hold=hold)
        self.alone = functools.partial(jax.jit(top_k, static_argnames="k"), k=carry[1].shape[-1], lengths=carry[0])

    def time(self, effort: Effort) -> Timing:
        """The wall time of the chain, the kernel times of the calls alone."""
        timing, sets = super().time(effort), self.arguments[2]
        if not timing.kernels:
            return timing

        def run() -> list[jax.Array]:
            return [self.alone(scores) for scores in sets]

        jax.block_until_ready(run())
        return timing.with_kernels(run, len(sets))


def _ours(order: str, implementation: str, scores: jax.Array, k: int, lengths: jax.Array) -> jax.Array:
    return sparse_jax.top_k(scores, k, lengths, order=order, implementation=implementation)


def _lax(scores: jax.Array, k: int, lengths: jax.Array) -> jax.Array:
    # Without its values XLA would not know it as a top-k any more, and sort.
    return lax.optimization_barrier(lax.top_k(scores, k))[1]


def _torch_top_k(case: TopKShape, sets: list[jax.Array]) -> list[Candidate]:
    import torch

    def step(_: Any, scores: Any) -> Any:
        return torch.topk(scores, case.k)[1]

    return [Candidate(TorchChain(step, None, [(torch.from_dlpack(scores),) for scores in sets]))]
