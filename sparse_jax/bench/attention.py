"""The attention suite: dense, page-sparse and token-sparse decode, with and without the choosing, against its peers."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import sparse_jax
from sparse_jax.bench import cases, entries, inputs, peers
from sparse_jax.bench.cases import DecodeShape
from sparse_jax.bench.entries import Candidate, Entry
from sparse_jax.bench.inputs import Lists, Pools
from sparse_jax.bench.report import Row
from sparse_jax.bench.timing import Chain, Plan, Timing, check_memory, sets_to_rotate
from sparse_jax.paging import PageView

CASES, CASES_CPU = cases.ATTENTION, cases.ATTENTION_CPU
QUICK = (*cases.ATTENTION_QUICK, *cases.ATTENTION_CPU_QUICK)
FP8 = "float8_e4m3fn"


class Op(NamedTuple):
    """One of our operations as a step of a chain."""

    name: str
    call: Callable[..., Any]  # (q, pools, lists, **options) -> AttentionOutput
    bytes: Callable[[DecodeShape], int]
    kv_dtype: str | None = None  # None: that of the case
    plain: bool = True  # plain XLA is timed on a GPU too


def _scales(pools: Pools) -> dict[str, Any]:
    return {} if pools.scale is None else {"k_scale": pools.scale, "v_scale": pools.scale}


def _dense(q: jax.Array, pools: Pools, lists: Lists, **options: Any) -> Any:
    table = lists.page_table
    return sparse_jax.paged_attention(q, pools.k, pools.v, table, pools.lengths, **_scales(pools), **options)


def _pages(q: jax.Array, pools: Pools, lists: Lists, **options: Any) -> Any:
    table, chosen = lists.page_table, lists.page_indices
    return sparse_jax.page_sparse_attention(
        q, pools.k, pools.v, table, pools.lengths, chosen, **_scales(pools), **options
    )


def _tokens(q: jax.Array, pools: Pools, lists: Lists, **options: Any) -> Any:
    return sparse_jax.token_sparse_attention(q, pools.k, pools.v, lists.slots, **_scales(pools), **options)


def _after(q: jax.Array, ids: jax.Array) -> jax.Array:
    """The same ids, but known only once q is: choosing belongs to each call of a chain, not before the first."""
    return jnp.where(jnp.isnan(q[0, 0, 0]), -1, ids)


def _select_pages(q: jax.Array, pools: Pools, lists: Lists, *, implementation: Any, config: Any) -> Any:
    """A decode step with Quest: bounds from the page summaries, top-k of them, attention to the chosen pages."""
    kept = lists.page_indices.shape[-1] * pools.k.shape[2]
    selector = sparse_jax.selectors.get("quest", budget=kept)
    view = PageView(_after(q, lists.page_table), pools.lengths, jnp.int32(0))
    options = {"implementation": implementation, "config": config}
    return selector.attend(pools.pages, q, pools.k, pools.v, view, **options).output


def _select_tokens(q: jax.Array, pools: Pools, lists: Lists, *, implementation: Any, config: Any) -> Any:
    """A decode step with token scores at hand: top-k of them, ids to slots, attention to the chosen tokens."""
    batch, heads, chosen = lists.slots.shape
    lengths = jnp.broadcast_to(_after(q, pools.lengths)[:, None], (batch, heads))
    ids = sparse_jax.top_k(lists.scores, chosen, lengths, order="id", implementation=implementation)
    requests = jnp.arange(batch, dtype=jnp.int32)
    slots = sparse_jax.to_slots(ids, lists.page_table, requests, page_size=pools.k.shape[2])
    options = {"implementation": implementation, "config": config}
    return sparse_jax.token_sparse_attention(q, pools.k, pools.v, slots, **options)


def dense_bytes(case: DecodeShape, kv_dtype: str | None = None) -> int:
    """All keys and values and the page table, queries and outputs."""
    return case.bytes_read(case.context, case.batch * case.pages_per_request, kv_dtype)


def page_bytes(case: DecodeShape, kv_dtype: str | None = None) -> int:
    """Keys and values of the chosen pages and where those lie, queries and outputs."""
    ids = 2 * case.batch * case.kv_heads * case.kept_pages  # which pages, and where they lie
    return case.bytes_read(case.kept_pages * case.page_size, ids, kv_dtype)


def token_bytes(case: DecodeShape, kv_dtype: str | None = None) -> int:
    """Keys and values of the chosen tokens and their slots, queries and outputs."""
    return case.bytes_read(case.kept_tokens, case.batch * case.kv_heads * case.kept_tokens, kv_dtype)


def select_pages_bytes(case: DecodeShape) -> int:
    """Two summaries of every page and the page table, beside what attention to the chosen pages reads."""
    table = case.batch * case.pages_per_request
    summaries = 2 * table * case.kv_heads * case.head_dim * case.itemsize
    return case.bytes_read(case.kept_pages * case.page_size, table) + summaries


def select_tokens_bytes(case: DecodeShape) -> int:
    """The float32 score of every token and the page table, beside keys, values, queries and outputs."""
    return case.bytes_read(case.kept_tokens, case.batch * (case.pages_per_request + case.kv_heads * case.context))


def _fp8(bytes_read: Callable[..., int]) -> Callable[[DecodeShape], int]:
    return functools.partial(bytes_read, kv_dtype=FP8)


SELECT_PAGES, SELECT_TOKENS = "select + page-sparse", "select + token-sparse"
OPS = (
    Op("dense", _dense, dense_bytes),
    Op("dense, fp8 KV", _dense, _fp8(dense_bytes), FP8, plain=False),
    Op("page-sparse", _pages, page_bytes),
    Op("page-sparse, fp8 KV", _pages, _fp8(page_bytes), FP8, plain=False),
    Op("token-sparse", _tokens, token_bytes),
    Op("token-sparse, fp8 KV", _tokens, _fp8(token_bytes), FP8, plain=False),
    Op(SELECT_PAGES, _select_pages, select_pages_bytes, plain=False),
    Op(SELECT_TOKENS, _select_tokens, select_tokens_bytes),
)


def rows(case: DecodeShape, plan: Plan) -> Iterator[Row]:
    """Measures one case, row by row."""
    wanted = [op for op in OPS if (not case.ops or op.name in case.ops) and plan.only in op.name]
    if not wanted:
        return
    q, pools = inputs.make_query(case), inputs.make_pools(case)
    narrow = inputs.to_fp8(pools) if any(op.kv_dtype == FP8 for op in wanted) else None
    on_gpu = jax.default_backend() == "gpu"
    sets = inputs.make_sets(case, max(sets_to_rotate(op.bytes(case)) for op in wanted) if on_gpu else 1)
    todo: list[Entry] = []
    for op in wanted:
        stored = narrow if op.kv_dtype == FP8 else pools
        todo += _op_entries(op, case, q, stored, sets[: sets_to_rotate(op.bytes(case))], plan)
    yield from entries.measure(todo, plan)


class Meaning:
    """What plain XLA returns for one input set. Only the value counts, so XLA need not look for fast products."""

    def __init__(self, step: Callable[..., jax.Array], *arguments: Any) -> None:
        self.step, self.arguments = step, arguments
        self.run: jax.stages.Compiled | None = None

    def compile(self) -> None:
        """Runs in a thread beside others."""
        options: dict[str, Any] = {"xla_gpu_autotune_level": 0}
        self.run = jax.jit(self.step).lower(*self.arguments).compile(compiler_options=options)

    def error(self, timing: Timing) -> dict[str, Any]:
        """The error of a row whose first call had the same inputs."""
        if self.run is None:
            raise RuntimeError("plain XLA did not compile, so the result was not checked")
        check_memory(self.run)
        return {"error": _relative_error(timing.first, self.run(*self.arguments))}


def _op_entries(op: Op, case: DecodeShape, q: jax.Array, pools: Any, sets: list[Lists], plan: Plan) -> list[Entry]:
    def row(implementation: str) -> Row:
        return Row(case=case.name, op=op.name, implementation=implementation, bytes=op.bytes(case))

    def ours(implementation: str, config: Any, q: jax.Array, pools: Pools, lists: Lists) -> jax.Array:
        return op.call(q, pools, lists, implementation=implementation, config=config).out

    plain = functools.partial(ours, "xla", None)
    kernel = functools.partial(ours, "triton", plan.config)
    on_gpu = jax.default_backend() == "gpu"
    found = []
    if not on_gpu or (op.plain and not case.ops):
        brief = plan.effort._replace(repeats=3, seconds=plan.effort.seconds / 2)
        chain = Chain(plain, q, pools, sets, calls=4, hold=True)
        found.append(Entry(row("xla"), lambda: [Candidate(chain)], effort=brief))
    if on_gpu:
        candidate = Candidate(Chain(kernel, q, pools, sets, calls=plan.effort.calls), _settings(plan.config))
        meaning = Meaning(plain, q, pools, sets[0])
        found.append(Entry(row("triton"), lambda: [candidate], meaning.error, plan.effort, (meaning,)))
    if on_gpu and plan.with_peers and op.name == "dense" and not case.ops:
        for name, candidates in peers.DENSE.items():
            found.append(Entry(row(name), functools.partial(candidates, case, q, pools, sets), effort=plan.effort))
    return found


def _settings(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    return {key: value for key, value in dataclasses.asdict(config).items() if value}


def _relative_error(ours: jax.Array, meaning: jax.Array) -> float:
    ours, meaning = ours.astype(jnp.float32), meaning.astype(jnp.float32)
    return float(jnp.linalg.norm(ours - meaning) / jnp.linalg.norm(meaning))
