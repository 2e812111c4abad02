"""The device's side of an evaluation: pure functions, compiled once per method and length.

    paged = prefill(...)                                  the context, without the question, by dense attention
    state = begin(...)                                    what the method remembers of it
    paged, state = prefill_own(...)                       or both at once, where the method takes part in storing
    paged, state, steps = advance(...)                    some tokens of question and answer, each a decode step

Tokens of question and answer are fed one by one, the right ones whatever the model would have said, so a method sees
the question only as it is asked, and greedy decoding gives the answer exactly when each token of it is the arg max.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models import decode
from models.evaluation.diagnostics import Diagnosis, nothing
from models.evaluation.methods import Method
from models.evaluation.observed import Observed, Watched, attend, diagnosed, watch
from models.interface import LoopedModel
from models.latent_attention import LatentQuery
from sparse_jax import paging
from sparse_jax.paged_kv import tokens_of
from sparse_jax.paging import PagedState
from sparse_jax.selectors import Dense

ASKED = 128
"""Tokens of question and answer at most; caches of methods that hold few tokens have room for so many more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is fixed for a compilation; hashable.

    most: the largest budget. attention_rows: requests whose prompt attends at a time, where that needs much memory.
    """

    length: int
    rows: int
    page_size: int
    most: int
    dtype: Any = None  # of the cache, as for `ModelConfig.pools`; default the model's
    chunk: int = 8  # decode steps of a call
    diagnostics: bool = True
    dense_planes: int = 0
    attention_rows: int | None = None
    implementation: str | None = None


class Steps(NamedTuple):
    """What the host learns of some steps; the first axis is the step."""

    right: jax.Array  # bool[steps, R], the judged token is the arg max
    margin: jax.Array  # f32[steps, R], its logit minus the best other one
    nll: jax.Array  # f32[steps, R], minus its log probability
    length: jax.Array  # i32[steps, R] tokens that dense attention reads; 0 where the request took no part
    read: jax.Array  # f32[steps, planes, R] tokens read, averaged over KV heads
    found: Diagnosis  # f32[steps, planes, R]


def empty(model: LoopedModel, shape: Shape, tokens: int | None = None) -> PagedState:
    """A cache for `rows` requests of `tokens` tokens each, default the whole length."""
    pages = -(-(tokens or shape.length) // shape.page_size)
    config = model.config
    return paging.create(
        planes=config.planes,
        pages=shape.rows * pages,
        page_size=shape.page_size,
        requests=shape.rows,
        pages_per_request=pages,
        **config.pools(model.dtype if shape.dtype is None else shape.dtype),
    )


class Sliced:
    """A model whose prompts attend a few requests at a time."""

    def __init__(self, model: LoopedModel, rows: int):
        self.model, self.rows = model, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def causal(self, plane, q, k, v, cache, implementation=None):
        """See `LoopedModel.causal`. Raises ValueError for latent attention, whose queries are not one array."""
        if isinstance(q, LatentQuery):
            raise ValueError(f"latent attention takes all requests at once: leave out attention_rows, got {self.rows}")

        def some(qkv):
            q, k, v = (x[None] for x in qkv)
            return self.model.causal(plane, q, k, v, (), implementation)[0][0]

        return jax.lax.map(some, (q, k, v), batch_size=min(self.rows, q.shape[0])), cache


def _model(graph: nnx.GraphDef, params: nnx.State, shape: Shape) -> Any:
    model = nnx.merge(graph, params)
    return Sliced(model, shape.attention_rows) if shape.attention_rows else model


@functools.partial(jax.jit, static_argnames=("graph", "shape"))
def prefill(params: nnx.State, tokens: jax.Array, counts: jax.Array, *, graph: nnx.GraphDef, shape: Shape):
    """The cache of contexts tokens i32[R, length], right-padded, counts i32[R], as dense attention leaves it."""
    model = _model(graph, params, shape)
    # The barrier keeps XLA from computing what happens to a cache of zeros while it compiles.
    paged = jax.lax.optimization_barrier(empty(model, shape))
    return decode.prefill(model, tokens, counts, paged, Dense(), (), implementation=shape.implementation).paged


@functools.partial(jax.jit, static_argnames=("heads", "method", "shape"))
def begin(paged: PagedState, budget: jax.Array, *, heads: int, method: Method, shape: Shape) -> Watched:
    """What a method that keeps all tokens remembers of a cache that was filled without it; heads: Hq.

    It learns the keys as the cache holds them: rounded, where that is narrower than the model.
    """
    selector = method.at(budget, shape.most)
    page_size = shape.page_size

    def write(plane, state):
        view = paging.view(paged, plane)
        page = jnp.maximum(view.page_table, 0)
        place = jnp.arange(page.shape[1] * page_size, dtype=jnp.int32)
        slots = (page[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32)).reshape(page.shape[0], -1)
        holds = jnp.repeat(view.page_table >= 0, page_size, axis=1) & (place < view.lengths[:, None])
        k, _ = tokens_of(paged.kv, plane, paged.table.pages.reshape(-1))
        return selector.write(state, k.reshape(*slots.shape, *k.shape[1:]), jnp.where(holds, slots, -1))

    state = jax.lax.fori_loop(0, paged.kv.planes, write, selector.init(paged.kv, shape.rows))
    return watch(state, paged.kv, shape.rows, heads, _watched_tokens(shape))


@functools.partial(jax.jit, static_argnames=("graph", "method", "shape"))
def prefill_own(
    params: nnx.State,
    tokens: jax.Array,
    counts: jax.Array,
    budget: jax.Array,
    *,
    graph: nnx.GraphDef,
    method: Method,
    shape: Shape,
) -> tuple[PagedState, Watched]:
    """Cache and state of contexts whose storing is the method's own business; budget i32[R, 1]."""
    model = _model(graph, params, shape)
    selector, prompts = method.at(shape.most, shape.most), {shape.length, max(1, shape.length - ASKED)}
    paged = empty(model, shape, max(selector.tokens_held(prompt, shape.length) for prompt in prompts))
    shadow = empty(model, shape) if shape.diagnostics else None
    selector = _observed(method, budget, shape)
    inner = selector.inner.init(paged.kv, shape.rows)
    state = watch(inner, paged.kv, shape.rows, model.config.num_heads, _watched_tokens(shape), shadow)
    paged, state = jax.lax.optimization_barrier((paged, state))
    out = decode.prefill(model, tokens, counts, paged, selector, state, implementation=shape.implementation)
    return out.paged, out.selector_state


@functools.partial(jax.jit, static_argnames=("graph", "method", "shape"), donate_argnames=("paged", "state"))
def advance(
    params: nnx.State,
    paged: PagedState,
    state: Watched,
    tokens: jax.Array,
    targets: jax.Array,
    budget: jax.Array,
    *,
    graph: nnx.GraphDef,
    method: Method,
    shape: Shape,
) -> tuple[PagedState, Watched, Steps]:
    """Decode steps with tokens i32[chunk, R] (-1: takes no part) that are judged by targets i32[chunk, R] (-1: not).

    budget i32[R, 1]. One compilation serves every budget up to `shape.most`, every task and every prompt.
    """
    model = nnx.merge(graph, params)
    selector = _observed(method, budget, shape)

    def step(carry: tuple[PagedState, Watched], now: tuple[jax.Array, jax.Array]):
        (paged, state), (token, target) = carry, now
        before = selector.next_positions(paged, state)
        out = decode.decode_step(
            model,
            jnp.maximum(token, 0),
            jnp.where(token >= 0, before, -1),
            paged,
            selector,
            state,
            implementation=shape.implementation,
            attend=attend,
        )
        watched = out.selector_state
        length = jnp.where(token >= 0, before + 1, 0)
        found = nothing(*watched.tokens_read.shape)
        if shape.diagnostics:
            # Only where an answer is judged: it reads everything.
            asked = jnp.any(target >= 0)
            found = jax.lax.cond(asked, lambda: diagnosed(out.paged, watched), lambda: nothing(*found.mass.shape))
        steps = Steps(*judge(out.logits, target), length, watched.tokens_read, found)
        return (out.paged, watched), steps

    (paged, state), steps = jax.lax.scan(step, (paged, state), (tokens, targets))
    return paged, state, steps


def _observed(method: Method, budget: Any, shape: Shape) -> Observed:
    dense_planes = shape.dense_planes if method.keeps_all else 0
    return Observed(inner=method.at(budget, shape.most), dense_planes=dense_planes)


def _watched_tokens(shape: Shape) -> int | None:
    return -(-shape.length // shape.page_size) * shape.page_size if shape.diagnostics else None


def judge(logits: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(right bool[R], margin f32[R], nll f32[R]) of logits f32[R, V] at targets i32[R]; undefined for -1."""
    target = jnp.maximum(target, 0)
    own = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    others = jnp.where(jnp.arange(logits.shape[-1]) == target[:, None], -jnp.inf, logits).max(axis=-1)
    return own > others, own - others, jax.nn.logsumexp(logits, axis=-1) - own
