"""The bench suite `ouro`: whole decode steps of a looped model with random weights, dense and reference-corrected.

It is a suite like those of `sparse_jax.bench`; the console app adds it to them, because the library knows no model.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.decode import DecodeOptions, DecodeState, decode_chunk
from models.ouro import Ouro, OuroConfig
from models.reference import CONSUME, ReferenceCorrection
from models.sampling import request_keys
from sparse_jax import paging
from sparse_jax.bench.entries import Candidate, Entry, measure
from sparse_jax.bench.inputs import normal_in_chunks
from sparse_jax.bench.report import Row
from sparse_jax.bench.timing import Effort, Plan, Timing, timed
from sparse_jax.paging import PagedKV
from sparse_jax.selectors import Dense

STEPS = 4  # in one jit
TINY: dict[str, Any] = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_layers": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuroShape:
    """Decode steps of `batch` requests that hold `context` tokens each."""

    name: str
    batch: int
    context: int
    retention: float = 0.1
    page_size: int = 64
    tiny: bool = False  # a model of next to nothing, for a CPU
    dtype: str = "bfloat16"

    @property
    def config(self) -> OuroConfig:
        """Ouro-1.4B, or the tiny one."""
        heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
        return OuroConfig.ouro_1_4b(**(TINY | heads if self.tiny else {}))

    @property
    def weight_bytes(self) -> int:
        """Read in a step: the layers once a loop, the head once."""
        c, itemsize = self.config, jnp.dtype(self.dtype).itemsize
        heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        layer = c.hidden_size * (heads + 3 * c.intermediate_size)
        return itemsize * (c.loops * c.num_layers * layer + c.vocab_size * c.hidden_size)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all planes, read in a dense step."""
        c = self.config
        token = 2 * c.planes * c.num_kv_heads * c.head_dim * jnp.dtype(self.dtype).itemsize
        return self.batch * self.context * token

    def kv_read(self, correction: ReferenceCorrection | None) -> int:
        """Of them, what a step reads: later loops read the kept keys of each query head alone."""
        if correction is None:
            return self.kv_bytes
        c = self.config
        kept = correction.retention * c.num_heads / c.num_kv_heads
        loops = [kept if mode == CONSUME else 1.0 for mode in correction.modes(c.loops)]
        return int(self.kv_bytes * sum(loops) / c.loops)


CASES = (
    OuroShape(name="b1-1k", batch=1, context=1024),
    OuroShape(name="b1-8k", batch=1, context=8192),
    OuroShape(name="b1-32k", batch=1, context=32_768),
    OuroShape(name="b8-8k", batch=8, context=8192),
    OuroShape(name="b16-8k", batch=16, context=8192),
)
CASES_CPU = (OuroShape(name="cpu-b2-256", batch=2, context=256, page_size=16, tiny=True, dtype="float32"),)
QUICK = ("b1-8k", "cpu-b2-256")


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (jax.random.normal(jax.random.key(0), shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)


def _random(like: jax.ShapeDtypeStruct) -> jax.Array:
    return _normal(like.shape, like.dtype)


def random_ouro(config: OuroConfig, dtype: Any) -> Ouro:
    """A model with random weights."""
    # Matrix by matrix: to draw the numbers of all of them in one program takes XLA minutes to compile.
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Ouro(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)))
    return nnx.merge(graph, jax.tree.map(_random, shapes))


class Loop:
    """The one model and state of a case; steps of all variants take turns with it, as it may not fit twice."""

    def __init__(self, case: OuroShape) -> None:
        self.case = case
        self.graph, self.params = nnx.split(random_ouro(case.config, jnp.dtype(case.dtype)))
        self.state = self._new_state()

    def _new_state(self) -> DecodeState:
        case, config = self.case, self.case.config
        pages = -(-case.context // case.page_size)

        def empty() -> DecodeState:
            paged = paging.create(
                planes=config.planes,
                pages=case.batch * pages,
                page_size=case.page_size,
                requests=case.batch,
                pages_per_request=pages,
                **config.pools(case.dtype),
            )
            counts = jnp.full(case.batch, case.context, jnp.int32)
            paged, _ = paging.reserve(paged, counts, case.context)
            zeros = jnp.zeros(case.batch, jnp.int32)
            keys = jax.random.split(jax.random.key(0))
            k, v = (normal_in_chunks(key, x.shape, 1, x.dtype) for key, x in zip(keys, (paged.kv.k, paged.kv.v)))
            return DecodeState(
                paged=dataclasses.replace(paged, kv=PagedKV(k, v)),
                selector=(),
                tokens=zeros,
                generated=zeros,
                limits=jnp.full(case.batch, 2**30, jnp.int32),
                started=jnp.ones(case.batch, bool),
                done=jnp.zeros(case.batch, bool),
                keys=request_keys(0, case.batch),
            )

        return jax.jit(empty)()


class Steps:
    """STEPS decode steps of one variant: compiled first, timed later."""

    def __init__(self, loop: Loop, correction: ReferenceCorrection | None) -> None:
        self.loop = loop
        self.options = DecodeOptions(selector=Dense(), reference=correction)

    def compile(self) -> None:
        """Traces and compiles, without running anything."""
        start = self.loop.case.context - STEPS

        def run(params: nnx.State, state: DecodeState) -> tuple[DecodeState, jax.Array]:
            table = dataclasses.replace(state.paged.table, lengths=jnp.full_like(state.paged.table.lengths, start))
            state = dataclasses.replace(state, paged=dataclasses.replace(state.paged, table=table))
            state, out = decode_chunk(self.loop.graph, params, state, self.options, STEPS)
            return state, out.tokens

        self.compiled = jax.jit(run, donate_argnums=1).lower(self.loop.params, self.loop.state).compile()

    def run(self) -> jax.Array:
        """Takes the steps; the state goes on from where the last run left it, at the same lengths."""
        self.loop.state, tokens = self.compiled(self.loop.params, self.loop.state)
        return tokens

    def time(self, effort: Effort) -> Timing:
        """Microseconds of one step."""
        jax.block_until_ready(self.run())
        return timed(self.run, STEPS, effort)


def rows(case: OuroShape, plan: Plan) -> Iterator[Row]:
    """Measures one case: `times dense` is how often a step fits into a dense one of this run, beside the ideal.

    The ideal counts the bytes of weights and of keys and values alone.
    """
    correction = ReferenceCorrection(retention=case.retention)
    variants = {"step: dense": None, f"step: reference {case.retention:g}": correction}
    loop = Loop(case)
    dense: list[float] = []

    def entry(name: str, correction: ReferenceCorrection | None) -> Entry:
        nbytes = case.weight_bytes + case.kv_read(correction)

        def finish(timing: Timing) -> dict[str, Any]:
            if correction is None:
                dense.append(timing.microseconds)
            ideal = (case.weight_bytes + case.kv_bytes) / nbytes
            return {"details": {"times dense": dense[0] / timing.microseconds, "ideal": ideal} if dense else {}}

        name_of = "triton" if jax.default_backend() == "gpu" else "xla"
        row = Row(case=case.name, op=name, implementation=name_of, bytes=nbytes)
        return Entry(row, lambda: [Candidate(Steps(loop, correction))], finish, plan.effort)

    wanted = {name: correction for name, correction in variants.items() if plan.only in name}
    yield from measure([entry(name, correction) for name, correction in wanted.items()], plan)
