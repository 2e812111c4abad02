"""The step suite: whole decode steps of a GQA model of L layers in one `lax.scan`, as a decode loop runs them.

A layer projects (elementwise, as the matrix products of a real model are not what is measured), writes its keys and
values into the paged pool in place, chooses, attends, and adds to the residual stream. The layers are a scan too.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sparse_jax
from sparse_jax import paging
from sparse_jax.bench import attention, cases, entries, inputs
from sparse_jax.bench.cases import DecodeShape, StepShape
from sparse_jax.bench.entries import Candidate, Entry
from sparse_jax.bench.profiler import Profile, profile
from sparse_jax.bench.report import Row
from sparse_jax.bench.timing import Effort, Plan, Timing, timed
from sparse_jax.paging import PagedKV, PagedState, Reservation

CASES, CASES_CPU = cases.STEP, cases.STEP_CPU
QUICK = (*cases.STEP_QUICK, *cases.STEP_CPU_QUICK)
STEPS = 8  # in one jit
MOST_UNROLLED = 8  # layers; more take long to compile
# XLA turns command buffers off while a profiler watches, unless it is told not to.
WATCHED = {"xla_enable_command_buffers_during_profiling": True}
WITHOUT_GRAPHS = {"xla_gpu_graph_min_graph_size": 1_000_000}


class Weights(NamedTuple):
    """Elementwise projections, [L, Hq, D] each, and what the sparse variants are told to read."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array
    page_indices: jax.Array  # i32[B, Hkv, kept_pages]
    slots: jax.Array  # i32[B, Hkv, kept_tokens], in one plane
    reservation: Reservation  # room for the token at `Model.length`


class Carry(NamedTuple):
    """What one step hands to the next."""

    h: jax.Array  # [B, Hq, D]
    paged: PagedState
    summaries: Any  # of the selector


class Variant(NamedTuple):
    """One kind of step."""

    name: str
    attend: Callable[..., jax.Array]  # (plane, q [B, 1, Hq, D], carry, weights, config) -> [B, 1, Hq, D]
    bytes: Callable[[DecodeShape], int]  # of the attention of one layer
    chooses: bool = False
    reserves: bool = False  # grants room for the token in every step, instead of once before
    unrolled: bool = False  # the layers stand one after the other, instead of in a scan


def _pools(plane: Any, carry: Carry) -> tuple[Any, ...]:
    view = paging.view(carry.paged, plane)
    return (*paging.flat(carry.paged.kv), view.page_table, view.lengths)


def _dense(plane: Any, q: jax.Array, carry: Carry, weights: Weights, config: Any) -> jax.Array:
    return sparse_jax.paged_attention(q, *_pools(plane, carry), config=config).out


def _pages(plane: Any, q: jax.Array, carry: Carry, weights: Weights, config: Any) -> jax.Array:
    pools = *_pools(plane, carry), weights.page_indices
    return sparse_jax.page_sparse_attention(q, *pools, config=config).out


def _tokens(plane: Any, q: jax.Array, carry: Carry, weights: Weights, config: Any) -> jax.Array:
    kv = carry.paged.kv
    slots = plane * (kv.pages * kv.page_size) + weights.slots
    return sparse_jax.token_sparse_attention(q, *paging.flat(kv), slots, config=config).out


def _quest(plane: Any, q: jax.Array, carry: Carry, weights: Weights, config: Any) -> jax.Array:
    view, (k, v) = paging.view(carry.paged, plane), paging.flat(carry.paged.kv)
    return _selector(weights, k.shape[2]).attend(carry.summaries, q, k, v, view, config=config).output.out


def _selector(weights: Weights, page_size: int) -> Any:
    return sparse_jax.selectors.get("quest", budget=weights.page_indices.shape[-1] * page_size)


VARIANTS = (
    Variant("dense", _dense, attention.dense_bytes),
    Variant("page-sparse", _pages, attention.page_bytes),
    Variant("page-sparse, layers unrolled", _pages, attention.page_bytes, unrolled=True),
    Variant("page-sparse, reserve", _pages, attention.page_bytes, reserves=True),
    Variant("token-sparse", _tokens, attention.token_bytes),
    Variant("select + page-sparse", _quest, attention.select_pages_bytes, chooses=True),
    Variant("select + page-sparse, reserve", _quest, attention.select_pages_bytes, chooses=True, reserves=True),
)


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _layer(variant: Variant, config: Any, weights: Weights, reservation: Any, carry: Carry, plane: Any) -> Carry:
    h = _norm(carry.h)
    batch, q_heads, width = h.shape
    kv_heads = carry.paged.kv.kv_heads
    groups = h.reshape(batch, 1, kv_heads, q_heads // kv_heads, width)

    def key_or_value(scale: jax.Array) -> jax.Array:  # [B, 1, Hkv, D]
        return jnp.mean(groups * scale[plane].reshape(groups.shape[2:]), axis=3).astype(h.dtype)

    k = key_or_value(weights.k)
    paged, _ = paging.write(carry.paged, plane, reservation, k, key_or_value(weights.v))
    carry = carry._replace(paged=paged)
    if variant.chooses:
        selector, slots = _selector(weights, paged.kv.page_size), paging.flat_slots(paged, plane, reservation)
        carry = carry._replace(summaries=selector.write(carry.summaries, k, slots))
    out = variant.attend(plane, (h * weights.q[plane])[:, None], carry, weights, config)[:, 0]
    return carry._replace(h=carry.h + out * weights.out[plane])


def decode(
    variant: Variant, layers: int, config: Any, carry: Carry, weights: Weights, length: Any
) -> tuple[Carry, jax.Array]:
    """STEPS decode steps of requests that hold `length` i32[] tokens before the first.

    Without reserving, every step writes the token at `length` again. Returns the state, to be donated to the next call,
    and a number that stays and can be waited for.
    """
    ones = jnp.ones(carry.h.shape[0], jnp.int32)
    table = dataclasses.replace(carry.paged.table, lengths=ones * (length if variant.reserves else length + 1))
    carry = carry._replace(paged=dataclasses.replace(carry.paged, table=table))

    def step(carry: Carry, _: None) -> tuple[Carry, None]:
        places = weights.reservation
        if variant.reserves:
            paged, places = paging.reserve(carry.paged, ones, 1)
            carry = carry._replace(paged=paged)
        layer = functools.partial(_layer, variant, config, weights, places)
        if variant.unrolled:
            for plane in range(layers):
                carry = layer(carry, jnp.int32(plane))
        else:
            planes = jnp.arange(layers, dtype=jnp.int32)
            carry, _ = lax.scan(lambda carry, plane: (layer(carry, plane), None), carry, planes)
        return carry._replace(h=_norm(carry.h)), None

    carry, _ = lax.scan(step, carry, None, length=STEPS)
    return carry, jnp.sum(carry.h, dtype=jnp.float32)


class Model:
    """The one state of a case; steps of all variants take turns with it, as it may not fit twice."""

    def __init__(self, case: StepShape) -> None:
        self.case, self.shape = case, case.attention
        self.length = self.shape.context - STEPS
        self.carry = self._new_carry()
        self.weights = self._new_weights()

    def _new_carry(self) -> Carry:
        shape, planes = self.shape, max(self.case.layers)
        deep = dataclasses.replace(shape, batch=shape.batch * planes, pool_bytes=0)
        k, v = (inputs.random_pool(key, deep) for key in jax.random.split(jax.random.key(0)))
        summaries = inputs.envelope(k)
        in_planes = jax.jit(lambda x: x.reshape(planes, -1, *x.shape[1:]), donate_argnums=0)
        paged = dataclasses.replace(jax.jit(self._owned)(), kv=PagedKV(in_planes(k), in_planes(v)))
        return Carry(inputs.make_query(shape), paged, summaries)

    def _owned(self) -> PagedState:
        """Page tables that are full, and a pool of next to nothing."""
        shape = self.shape
        state = paging.create(
            planes=1,
            pages=shape.batch * shape.pages_per_request,
            page_size=shape.page_size,
            kv_heads=1,
            key_width=1,
            requests=shape.batch,
            pages_per_request=shape.pages_per_request,
        )
        return paging.reserve(state, jnp.full(shape.batch, shape.context, jnp.int32), shape.context)[0]

    def _reservation(self) -> Reservation:
        state, ones = self._owned(), jnp.ones(self.shape.batch, jnp.int32)
        state = dataclasses.replace(state, table=dataclasses.replace(state.table, lengths=self.length * ones))
        return paging.reserve(state, ones, 1)[1]

    def _new_weights(self) -> Weights:
        shape, planes = self.shape, max(self.case.layers)
        keys = jax.random.split(jax.random.key(1), 5)
        rows = (shape.batch, shape.kv_heads)
        wide = (planes, shape.q_heads, shape.head_dim)
        q, k, v, out = (jax.random.normal(key, wide, shape.dtype) for key in keys[:4])
        pages = inputs.shuffled(keys[4], rows, shape.pages_per_request)[..., : shape.kept_pages]
        tokens = inputs.shuffled(keys[4], rows, shape.context - STEPS)[..., : shape.kept_tokens]
        table = self.carry.paged.table.pages
        page = jnp.take_along_axis(table[:, None, :], tokens // shape.page_size, axis=2)
        slots = page * shape.page_size + tokens % shape.page_size
        return Weights(q, k, v, out, pages, slots, jax.jit(self._reservation)())

    def live_carry(self) -> Carry:
        """The state that the last run left, or a new one where a failed run took it along."""
        if self.carry.paged.kv.k.is_deleted():
            self.carry = self._new_carry()
        return self.carry


class Steps:
    """STEPS decode steps of one variant: compiled first, timed later."""

    def __init__(self, model: Model, variant: Variant, layers: int, config: Any) -> None:
        self.model = model
        self.function = functools.partial(decode, variant, layers, config)
        self.options: dict[str, Any] = {}
        self.compiled: Callable[..., tuple[Carry, jax.Array]] | None = None

    def with_options(self, options: dict[str, Any]) -> "Steps":
        """The same steps for XLA with other options."""
        other = copy.copy(self)
        other.options = options
        return other

    def compile(self) -> None:
        """Traces and compiles, without running anything."""
        arguments = (self.model.carry, self.model.weights, self.model.length)
        lowered = jax.jit(self.function, donate_argnums=0).lower(*arguments)
        self.compiled = lowered.compile(compiler_options=self.options)

    def run(self) -> jax.Array:
        """Takes the steps; the state goes on from where the last run left it."""
        if self.compiled is None:
            raise RuntimeError(f"did not compile with {self.options}")
        self.model.carry, done = self.compiled(self.model.live_carry(), self.model.weights, self.model.length)
        return done

    def time(self, effort: Effort) -> Timing:
        """Microseconds of one step."""
        jax.block_until_ready(self.run())
        return timed(self.run, STEPS, effort)

    def watch(self) -> Profile:
        """What one step did, with its CUDA graphs if it has some."""
        jax.block_until_ready(self.run())
        return profile(self.run, STEPS)


def rows(case: StepShape, plan: Plan) -> Iterator[Row]:
    """Measures one case, row by row: each variant with each number of layers."""
    variants = [variant for variant in VARIANTS if plan.only in variant.name]
    if not variants:
        return
    model = Model(case)
    todo = [entry for variant in variants for entry in _entries(model, variant, plan)]
    yield from entries.measure(todo, plan)


def _entries(model: Model, variant: Variant, plan: Plan) -> Iterator[Entry]:
    on_gpu = jax.default_backend() == "gpu"
    layers = [layers for layers in model.case.layers if not variant.unrolled or layers <= MOST_UNROLLED]
    measured: list[tuple[int, Timing]] = []

    def entry(count: int) -> Entry:
        steps = Steps(model, variant, count, plan.config)
        beside = [steps.with_options(options) for options in (WATCHED, WITHOUT_GRAPHS)]
        beside = beside if on_gpu and count == layers[-1] else []

        def finish(timing: Timing) -> dict[str, Any]:
            measured.append((count, timing))
            details = {"layers": count} | (_slopes(measured) if count == layers[-1] else {})
            if beside:
                watched, without_graphs = beside
                details |= _launches(watched) | {"us without graphs": without_graphs.time(plan.effort).microseconds}
            return {"details": details}

        row = Row(
            case=model.case.name,
            op=variant.name,
            implementation="triton" if on_gpu else "xla",
            bytes=count * variant.bytes(model.shape),
        )
        return Entry(row, lambda: [Candidate(steps)], finish, plan.effort, beside)

    yield from map(entry, layers)


def _slopes(measured: list[tuple[int, Timing]]) -> dict[str, float]:
    """What one more layer costs."""
    if len(measured) < 2:
        return {}
    layers = [count for count, _ in measured]

    def slope(values: list[float]) -> float:
        return float(np.polyfit(layers, values, 1)[0])

    found = {"us a layer": slope([timing.microseconds for _, timing in measured])}
    kernels = [timing.kernels for _, timing in measured if timing.kernels]
    if len(kernels) == len(measured):
        found["kernel us a layer"] = slope([sum(kernel.microseconds for kernel in seen.values()) for seen in kernels])
        found["kernels a layer"] = slope([sum(kernel.launches for kernel in seen.values()) for seen in kernels])
    return found


def _launches(watched: Steps) -> dict[str, float]:
    """How the host started the kernels of one step, and how often it waited for the GPU."""
    host = watched.watch().host

    def count(*names: str) -> float:
        return sum(number for name, number in host.items() if name.startswith(names))

    return {
        "graphs launched": count("cuGraphLaunch"),
        "kernels launched": count("cuLaunchKernel"),
        "waits": count("cuStreamSync", "cuEventSync", "cuCtxSync"),
    }
