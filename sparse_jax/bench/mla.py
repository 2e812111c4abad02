"""The mla suite: attention over chosen latents, the lightning indexer, and both as a step, against dense MLA."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import sparse_jax
from sparse_jax import IndexKeys, LatentCache
from sparse_jax.bench import attention, cases, entries, inputs
from sparse_jax.bench.cases import LatentShape
from sparse_jax.bench.entries import Candidate, Entry
from sparse_jax.bench.report import Row
from sparse_jax.bench.timing import Chain, Plan, Timing, sets_to_rotate
from sparse_jax.quantization import bytes_of

CASES, CASES_CPU, MORE = cases.MLA, cases.MLA_CPU, cases.MLA_MORE
QUICK = (*cases.MLA_QUICK, *cases.MLA_CPU_QUICK)
SCALE = 192**-0.5  # of the un-absorbed heads of DeepSeek-V3.2
CHECKED = 4  # requests that are compared with plain XLA


class Given(NamedTuple):
    """What every call of a row reads from."""

    q: jax.Array  # [B, T, Hq, E]
    index_q: jax.Array  # [B, T, index heads, d]
    index_weights: jax.Array  # f32[B, T, index heads]
    lengths: jax.Array  # i32[B]
    latents: Any = None  # [N, P, E], or a LatentCache
    keys: Any = None  # [N, P, d], or IndexKeys


class Lists(NamedTuple):
    """One input set: where the tokens of each request lie, and which of them were chosen."""

    page_table: jax.Array  # i32[B, W]
    slots: jax.Array  # i32[B, T, C] in random order
    sorted_slots: jax.Array  # i32[B, T, C] the same by rising token id, as `top_k(order="id")` gives them


def _attend(case: LatentShape, given: Given, slots: jax.Array, options: dict[str, Any]) -> jax.Array:
    q, latents = given.q, given.latents
    return sparse_jax.mla_sparse_attention(q, latents, slots, scale=SCALE, value_dim=case.latent_dim, **options).out


def _dense(case: LatentShape, given: Given, lists: Lists, **options: Any) -> jax.Array:
    """Every token of a request, shared by its T rows."""
    slots = lists.page_table[:, :, None] * case.page_size + jnp.arange(case.page_size, dtype=jnp.int32)
    return _attend(case, given, slots.reshape(lists.page_table.shape[0], -1), options)


def _sparse(case: LatentShape, given: Given, lists: Lists, **options: Any) -> jax.Array:
    return _attend(case, given, lists.slots, options)


def _sorted(case: LatentShape, given: Given, lists: Lists, **options: Any) -> jax.Array:
    return _attend(case, given, lists.sorted_slots, options)


def _score(case: LatentShape, given: Given, lists: Lists, **options: Any) -> jax.Array:
    return sparse_jax.indexer_scores(
        given.index_q, given.index_weights, given.keys, lists.page_table, given.lengths, k=case.kept_tokens, **options
    )


def _select(case: LatentShape, given: Given, lists: Lists, *, implementation: Any, config: Any) -> jax.Array:
    """A layer's step with an indexer: scores, top-k of them, ids to slots, attention to the chosen tokens."""
    batch, rows, chosen = lists.slots.shape
    scores = _score(case, given, lists, implementation=implementation)
    ids = sparse_jax.top_k(scores, chosen, order="id", implementation=implementation)
    requests = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), rows)
    slots = sparse_jax.to_slots(ids.reshape(-1, chosen), lists.page_table, requests, page_size=case.page_size)
    options = {"implementation": implementation, "config": config}
    return _attend(case, given, slots.reshape(lists.slots.shape), options)


class Op(NamedTuple):
    """One of our operations as a step of a chain, and the formats of what it reads: none, "plain", or as it says."""

    name: str
    call: Callable[..., jax.Array]  # (case, given, lists, implementation=, config=) -> out, or scores
    latents: str = ""
    keys: str = ""

    def bytes(self, case: LatentShape) -> int:
        """The fewest that a call must move."""
        rows, found = case.batch * case.query_tokens, 0
        if self.latents:
            read = case.batch * case.context if self.call is _dense else rows * case.kept_tokens
            found += read * case.row_bytes(self.latents)
            found += rows * case.heads * (case.width + case.latent_dim) * case.itemsize  # queries and outputs
        if self.keys:
            found += case.batch * (case.context * case.key_bytes(self.keys) + 4 * case.pages_per_request)
            found += rows * case.index_heads * (case.index_dim * case.itemsize + 4)  # queries and head weights
        if self.call is _score:
            found += 4 * rows * case.context
        return found

    def flop(self, case: LatentShape) -> int:
        """Of the two products of attention, and of the one of the indexer."""
        rows, found = case.batch * case.query_tokens, 0
        if self.latents:
            tokens = case.context if self.call is _dense else case.kept_tokens
            found += 2 * rows * case.heads * tokens * (case.width + case.latent_dim)
        if self.keys:
            found += 2 * rows * case.context * case.index_heads * case.index_dim
        return found


OPS = (
    Op("dense MLA", _dense, "plain"),
    Op("sparse MLA", _sparse, "plain"),
    Op("sparse MLA, sorted ids", _sorted, "plain"),
    Op("sparse MLA, fp8_ds_mla", _sparse, "fp8_ds_mla"),
    Op("sparse MLA, nvfp4_ds_mla", _sparse, "nvfp4_ds_mla"),
    Op("indexer", _score, keys="plain"),
    Op("indexer, fp8 keys", _score, keys="fp8"),
    Op("select + sparse MLA", _select, "plain", "plain"),
    Op("select + sparse MLA, fp8", _select, "fp8_ds_mla", "fp8"),
)


@functools.partial(jax.jit, static_argnames=("case", "format"))
def to_latent_cache(pool: jax.Array, case: LatentShape, format: str) -> LatentCache:
    """The same latents quantised, some pages at a time: the numbers in between are many times the pool."""
    quantize = functools.partial(sparse_jax.quantize_latent, format=format, latent_dim=case.latent_dim)
    chunks = pool.reshape(-1, case.chunk_pages, *pool.shape[1:])
    data = lax.map(quantize, chunks).reshape(*pool.shape[:2], -1)
    return LatentCache(data, format, case.latent_dim, case.rope_dim)


@functools.partial(jax.jit, static_argnames="case")
def to_index_keys(pool: jax.Array, case: LatentShape) -> IndexKeys:
    """The same keys in eight bits: of each page its keys, then its scales."""

    def pages(x: jax.Array) -> jax.Array:
        values, scale = sparse_jax.quantize_index_keys(x)
        parts = [bytes_of(values).reshape(x.shape[0], -1), bytes_of(scale[..., None]).reshape(x.shape[0], -1)]
        return jnp.concatenate(parts, axis=1)

    data = lax.map(pages, pool.reshape(-1, case.chunk_pages, *pool.shape[1:]))
    return IndexKeys(data.reshape(pool.shape[0], -1), case.page_size, case.index_dim)


def make_given(case: LatentShape, ops: tuple[Op, ...], seed: int = 0) -> list[Given]:
    """What each operation reads: normal numbers, the pools full and shared where formats agree."""
    keys = jax.random.split(jax.random.key(seed), 5)
    rows = (case.batch, case.query_tokens)
    q = jax.random.normal(keys[0], (*rows, case.heads, case.width), case.dtype)
    index_q = jax.random.normal(keys[1], (*rows, case.index_heads, case.index_dim), case.dtype)
    weights = jax.random.normal(keys[2], (*rows, case.index_heads)) * (case.index_heads * case.index_dim) ** -0.5
    lengths = jnp.full(case.batch, case.context, jnp.int32)

    def pool(key: jax.Array, width: int) -> jax.Array:
        shape = (case.pages, case.page_size, width)
        return inputs.normal_in_chunks(key, shape, case.chunk_pages, case.dtype)

    latents: dict[str, Any] = {"": None}
    for format in sorted({op.latents for op in ops} - {""}, key="plain".__ne__):  # "plain" first
        plain = latents.setdefault("plain", pool(keys[3], case.width))
        latents[format] = plain if format == "plain" else to_latent_cache(plain, case, format)
    index_keys: dict[str, Any] = {"": None}
    if any(op.keys for op in ops):
        index_keys["plain"] = pool(keys[4], case.index_dim)
    if any(op.keys == "fp8" for op in ops):
        index_keys["fp8"] = to_index_keys(index_keys["plain"], case)
    return [Given(q, index_q, weights, lengths, latents[op.latents], index_keys[op.keys]) for op in ops]


def make_sets(case: LatentShape, count: int, seed: int = 1) -> list[Lists]:
    """`count` input sets to rotate over. The pages of the requests lie shuffled over the whole pool."""

    def one(key: jax.Array) -> Lists:
        table_key, token_key = jax.random.split(key)
        owned = case.batch * case.pages_per_request
        table = inputs.shuffled(table_key, (), case.pages)[:owned].reshape(case.batch, -1)
        tokens = inputs.shuffled(token_key, (case.batch, case.query_tokens), case.context)[..., : case.kept_tokens]

        def slots(tokens: jax.Array) -> jax.Array:
            page = jnp.take_along_axis(table[:, None], tokens // case.page_size, axis=2)
            return page * case.page_size + tokens % case.page_size

        return Lists(table, slots(tokens), slots(jnp.sort(tokens, axis=-1)))

    return [one(key) for key in jax.random.split(jax.random.key(seed), count)]


def _step(
    op: Op, case: LatentShape, options: dict[str, Any], carry: jax.Array, given: Given, lists: Lists
) -> jax.Array:
    """A call whose ids are the same, but known only once the last call's result is."""
    one = carry[(0,) * carry.ndim]
    lists = jax.tree.map(lambda ids: jnp.where(jnp.isnan(one), -1, ids), lists)
    return op.call(case, given, lists, **options)


def _first_requests(given: Given, lists: Lists) -> tuple[Given, Lists]:
    few = jax.tree.map(lambda x: x[:CHECKED], (given._replace(latents=None, keys=None), lists))
    return few[0]._replace(latents=given.latents, keys=given.keys), few[1]


def _seen(scores: jax.Array) -> jax.Array:
    return jnp.where(scores == -jnp.inf, 0, scores)


def rows(case: LatentShape, plan: Plan) -> Iterator[Row]:
    """Measures one case, row by row; `times dense` is how often it fits into dense MLA of this run."""
    wanted = tuple(op for op in OPS if (not case.ops or op.name in case.ops) and plan.only in op.name)
    if not wanted:
        return
    on_gpu = jax.default_backend() == "gpu"
    count = max(sets_to_rotate(op.bytes(case)) for op in wanted) if on_gpu else 1
    sets, dense = make_sets(case, count), dict[str, float]()
    todo: list[Entry] = []
    for op, given in zip(wanted, make_given(case, wanted)):
        own = sets[: sets_to_rotate(op.bytes(case))]
        if not on_gpu or op.name in case.plain:
            todo.append(_entry(op, case, given, own, plan, "xla", dense))
        if on_gpu:
            todo.append(_entry(op, case, given, own, plan, "triton", dense))
    yield from entries.measure(todo, plan)


def _entry(
    op: Op, case: LatentShape, given: Given, sets: list[Lists], plan: Plan, implementation: str, dense: dict[str, float]
) -> Entry:
    plain = functools.partial(op.call, case, implementation="xla", config=None)
    kernel = implementation == "triton"
    options = {"implementation": implementation, "config": plan.config if kernel else None}
    result = jax.eval_shape(plain, given, sets[0])
    step = functools.partial(_step, op, case, options)
    effort = plan.effort if kernel else plan.effort._replace(repeats=3, seconds=plan.effort.seconds / 2)
    zeros = jnp.zeros(result.shape, result.dtype)
    chain = Chain(step, zeros, given, sets, calls=effort.calls if kernel else 4, hold=not kernel)
    meaning = attention.Meaning(lambda given, lists: _seen(plain(*_first_requests(given, lists))), given, sets[0])

    def finish(timing: Timing) -> dict[str, Any]:
        if op.call is _dense:
            dense[implementation] = timing.microseconds
        details = {"TFLOP/s": op.flop(case) / timing.microseconds / 1e6}
        if op.latents and implementation in dense:
            details["times dense"] = dense[implementation] / timing.microseconds
        checked = meaning.error(timing._replace(first=_seen(timing.first[:CHECKED]))) if kernel else {}
        return {"details": details} | checked

    row = Row(case=case.name, op=op.name, implementation=implementation, bytes=op.bytes(case))
    beside = (meaning,) if kernel else ()
    return Entry(row, lambda: [Candidate(chain)], finish, effort, beside)
