"""The select suite: what choosing costs. Scoring and accumulation alone, and whole steps against dense attention."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import sparse_jax
from sparse_jax import paging, selectors
from sparse_jax.bench import attention, cases, entries, inputs
from sparse_jax.bench.cases import DecodeShape
from sparse_jax.bench.entries import Candidate, Entry
from sparse_jax.bench.report import Row
from sparse_jax.bench.timing import Chain, Plan, Timing, sets_to_rotate
from sparse_jax.paging import PagedState, PageView
from sparse_jax.selectors import Selector
from sparse_jax.selectors.h2o_pages import Statistics
from sparse_jax.selectors.summaries import Envelope, Sums
from sparse_jax.selectors.views import Pages

CASES, CASES_CPU = cases.SELECT, cases.SELECT_CPU
QUICK = (*cases.SELECT_QUICK, *cases.SELECT_CPU_QUICK)
FLOAT32 = 4


class Inputs(NamedTuple):
    """What every call of a case reads from."""

    pools: inputs.Pools
    box: Envelope
    sums: Sums
    parts: Envelope  # of 16 tokens


class Carry(NamedTuple):
    """What one call hands to the next."""

    q: jax.Array  # [B, Hq, D]
    state: Any


class Work(NamedTuple):
    """One row: a step of a chain, and the fewest bytes that it moves."""

    name: str
    call: Callable[[Carry, Inputs, inputs.Lists], Carry]
    bytes: int
    state: Any = ()


def make_inputs(case: DecodeShape) -> Inputs:
    """Pools, and what page selectors remember of them, full pages all."""
    pools = inputs.make_pools(case)
    return Inputs(pools, pools.pages, _sums(pools.k), _parts(pools.k))  # type: ignore[arg-type]


@jax.jit
def _sums(k: jax.Array) -> Sums:
    total = k.sum(axis=2, dtype=jnp.float32)
    return Sums(total, jnp.full(k.shape[0], k.shape[2], jnp.int32), (total / k.shape[2]).astype(k.dtype), k.shape[2])


@jax.jit
def _parts(k: jax.Array) -> Envelope:
    boxes = max(1, k.shape[2] // 16)
    parts = k.reshape(k.shape[0], k.shape[1], boxes, -1, k.shape[3]).swapaxes(1, 2)  # [N, boxes, Hkv, tokens, D]
    lo, hi = (x.reshape(-1, *x.shape[2:]) for x in (parts.min(axis=3), parts.max(axis=3)))
    return Envelope(lo, hi, k.shape[2], boxes)


def _after(carry: Carry, ids: jax.Array) -> jax.Array:
    """The same ids, but known only once q is: choosing belongs to each call of a chain, not before the first."""
    return jnp.where(jnp.isnan(carry.q[0, 0, 0]), -1, ids)


def _view(carry: Carry, given: Inputs, lists: inputs.Lists) -> PageView:
    return PageView(_after(carry, lists.page_table), given.pools.lengths, jnp.int32(0))


def _waiting(q: jax.Array, scores: jax.Array) -> jax.Array:
    """The same query, but known only once the scores are."""
    # One number is read, once: fused into several users, XLA would keep the scores for it and copy them.
    one = jax.lax.optimization_barrier(scores[(0,) * scores.ndim])
    return jnp.where(jnp.isnan(one), 0, q)


def _bounds(carry: Carry, given: Inputs, lists: inputs.Lists) -> Carry:
    return _score_pages(given.box.bounds, carry, given, lists)


def _means(carry: Carry, given: Inputs, lists: inputs.Lists) -> Carry:
    return _score_pages(given.sums.means, carry, given, lists)


def _score_pages(score: Any, carry: Carry, given: Inputs, lists: inputs.Lists) -> Carry:
    _, kv_heads, page_size, _ = given.pools.k.shape
    pages = Pages.of(_view(carry, given, lists), kv_heads=kv_heads, page_size=page_size)
    scores = score(carry.q[:, None], pages)
    return Carry(_waiting(carry.q, scores), scores)


def _accumulate(group: str, kept: int, carry: Carry, given: Inputs, lists: inputs.Lists) -> Carry:
    table, lengths = _after(carry, lists.page_table), given.pools.lengths
    scores = sparse_jax.h2o_accumulate(
        carry.state, carry.q, given.pools.k, table, lengths, k=kept - 36, reserved=(4, 32), group=group
    )
    return Carry(_waiting(carry.q, scores), scores)


def _dense(carry: Carry, given: Inputs, lists: inputs.Lists) -> Carry:
    table = _after(carry, lists.page_table)
    return Carry(sparse_jax.paged_attention(carry.q, given.pools.k, given.pools.v, table, given.pools.lengths).out, ())


def _step(
    selector: Selector, remembered: Callable[[Inputs], Any] | None, carry: Carry, given: Inputs, lists: inputs.Lists
) -> Carry:
    """A whole step: choose and attend. State that grows with each step is carried, summaries are read."""
    state = remembered(given) if remembered else carry.state
    attended = selector.attend(state, carry.q, given.pools.k, given.pools.v, _view(carry, given, lists))
    return Carry(attended.output.out, () if remembered else attended.state)


def _held_step(selector: Selector, carry: Carry, given: Inputs, lists: inputs.Lists) -> Carry:
    """A step of a method that forgets: the new token takes an old one's place, and all that is held is read."""
    del given, lists
    paged, state = carry.state
    batch, _, width = carry.q.shape
    paged, state, room = selector.reserve(paged, state, jnp.ones(batch, jnp.int32), 1)
    k = carry.q.reshape(batch, 1, paged.kv.kv_heads, -1, width).mean(axis=3).astype(paged.kv.k.dtype)
    paged, state, _ = selector.store(paged, state, jnp.int32(0), room, k, k)
    attended = selector.attend(state, carry.q, *paging.flat(paged.kv), paging.view(paged, jnp.int32(0)))
    return Carry(attended.output.out, (paged, attended.state))


def _held(selector: Any, case: DecodeShape) -> tuple[PagedState, Any]:
    """A cache of requests that hold `kept_tokens` each, and the selector's state of it."""
    pages = case.kept_tokens // case.page_size
    paged = paging.create(
        planes=1,
        pages=case.batch * pages,
        page_size=case.page_size,
        kv_heads=case.kv_heads,
        key_width=case.head_dim,
        requests=case.batch,
        pages_per_request=pages,
        dtype=case.dtype,
    )
    counts = jnp.full(case.batch, case.kept_tokens, jnp.int32)
    paged, _ = jax.jit(paging.reserve, static_argnums=2)(paged, counts, case.kept_tokens)
    keys = jax.random.split(jax.random.key(7))
    kv = paging.PagedKV(*(jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, (paged.kv.k, paged.kv.v))))
    paged = paging.PagedState(paged.pool, paged.table, kv)
    return paged, jax.jit(selector.track)(paged)


def _pages_bytes(case: DecodeShape, count: int) -> int:
    """`count` summaries of each page, the table, and a float32 score of each page and query head."""
    pages = case.batch * case.pages_per_request
    return pages * (count * case.kv_heads * case.head_dim * case.itemsize + 4 + FLOAT32 * case.q_heads)


def works(case: DecodeShape) -> Iterator[Work]:
    """All rows of a case."""
    keys = case.batch * case.context * case.kv_heads * case.head_dim * case.itemsize
    sums = 2 * FLOAT32 * case.batch * case.context * case.kv_heads  # read and written
    kept = case.kept_pages * case.page_size
    attended = attention.page_bytes(case)
    boxes, means = _pages_bytes(case, 2), _pages_bytes(case, 1)
    zeros = jnp.zeros((case.pages, case.kv_heads, case.page_size), jnp.float32)
    scores = jnp.zeros((case.batch, case.kv_heads, case.q_heads // case.kv_heads, 1, case.pages_per_request))
    yield Work("page bounds", _bounds, boxes, scores)
    yield Work("page means", _means, means, scores)
    for group in ("mean", "max"):
        call = functools.partial(_accumulate, group, kept)
        yield Work(f"h2o accumulate, {group}", call, keys + sums, zeros)
    yield Work("step: dense", _dense, attention.dense_bytes(case))
    remembered: dict[str, tuple[Callable[[Inputs], Any], int]] = {
        "window": (lambda given: (), 0),
        "quest": (lambda given: given.box, boxes),
        "centroid": (lambda given: given.sums, means),
        "lserve": (lambda given: given.parts, boxes * max(1, case.page_size // 16)),
        "h2o_sparse_attention": (lambda given: Statistics(given.box, given.sums), boxes + means),
        "gqa_h2o_sparse_attention": (lambda given: Statistics(given.box, given.sums), boxes + means),
    }
    for name, (state, summaries) in remembered.items():
        selector = selectors.get(name, budget=kept)
        yield Work(f"step: {name}", functools.partial(_step, selector, state), attended + summaries)
    h2o = selectors.get("h2o", budget=case.kept_tokens)
    yield Work("step: h2o", functools.partial(_step, h2o, None), attention.token_bytes(case) + keys + sums, zeros)
    held = selectors.get("h2o", form="evict", budget=case.kept_tokens)
    bytes_held = case.bytes_read(case.kept_tokens, 0) + 3 * FLOAT32 * case.batch * case.kv_heads * case.kept_tokens
    yield Work("step: h2o, evict", functools.partial(_held_step, held), bytes_held, _held(held, case))


def rows(case: DecodeShape, plan: Plan) -> Iterator[Row]:
    """Measures one case, row by row; of a step, `times dense` is how often it fits into a dense one of this run."""
    wanted = [work for work in works(case) if plan.only in work.name]
    if not wanted:
        return
    on_gpu = jax.default_backend() == "gpu"
    q, given = inputs.make_query(case), make_inputs(case)
    count = max(sets_to_rotate(work.bytes) for work in wanted) if on_gpu else 1
    sets = inputs.make_sets(case, count)
    dense: list[float] = []

    def entry(work: Work) -> Entry:
        chain = Chain(
            work.call, Carry(q, work.state), given, sets[: sets_to_rotate(work.bytes)], calls=plan.effort.calls,
            hold=not on_gpu,
        )  # fmt: skip

        def finish(timing: Timing) -> dict[str, Any]:
            if work.name == "step: dense":
                dense.append(timing.microseconds)
            if not dense or not work.name.startswith("step"):
                return {}
            return {"details": {"times dense": dense[0] / timing.microseconds}}

        implementation = "triton" if on_gpu else "xla"
        row = Row(case=case.name, op=work.name, implementation=implementation, bytes=work.bytes)
        return Entry(row, lambda: [Candidate(chain)], finish, plan.effort)

    yield from entries.measure([entry(work) for work in wanted], plan)
