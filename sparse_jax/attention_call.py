"""What the attention operations share: checks, dispatch, sinks and casting the result."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import Config
from pallas_kernels.pairs import offsets_wrap
from sparse_jax import dispatch
from sparse_jax.dispatch import IMPLEMENTATIONS
from sparse_jax.tuning import CallShape, Tuning
from sparse_jax.validation import CACHE_DTYPES, INT32_MAX, as_array, as_float, as_ids, as_int, check_shape, require
from sparse_jax.xla.merge_attention import merge_attention

E4M3_MAX = 448.0


class AttentionOutput(NamedTuple):
    """Result of an attention operation.

    out: [B, Hq, Dv] or [B, T, Hq, Dv], like q; 0 for a row without a valid key.
    lse: f32[B, Hq] or f32[B, T, Hq], natural logarithm of the sum of exp(score), without sinks; -inf for such a row.
    weights: None, or float32 probabilities of the chosen tokens per query head [..., Hq, C] (pages: C * P); absent 0.
    """

    out: jax.Array
    lse: jax.Array
    weights: jax.Array | None = None


class Operation(NamedTuple):
    """An operation's plain-jnp meaning, its kernel, and the checks of its values.

    All take the same operands in the same order.
    """

    name: str  # of the public function
    meaning: Callable[..., Any]
    kernel: Callable[..., Any]
    check: Callable[..., None]
    windowed: bool  # takes a window
    weighted: bool  # can return weights; then its kernel takes return_scores
    listing: int  # which of its integer operands lists the keys of a row
    by_page: bool  # they are pages, not tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is static in a call."""

    scale: float
    soft_cap: float | None
    out_dtype: Any
    implementation: str | None
    config: Config | Tuning | None
    window: int | None = None
    return_weights: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments that every operation has, checked. `single`: q came without the T axis."""

    q: jax.Array  # [B, T, Hq, D]
    k_pages: jax.Array  # [N, Hkv, P, D]
    v_pages: jax.Array  # [N, Hkv, P, Dv]
    sinks: jax.Array | None  # f32[Hq]
    k_scale: jax.Array | None  # f32[1] or f32[N, Hkv, P]
    v_scale: jax.Array | None
    out_scale: jax.Array | None  # f32[]
    single: bool

    @staticmethod
    def of(q: Any, k_pages: Any, v_pages: Any, sinks: Any, k_scale: Any, v_scale: Any, out_scale: Any) -> Call:
        """Checks what every operation takes. Raises ValueError with the values seen."""
        q = as_float("q", q, CACHE_DTYPES)
        q = q.astype(jnp.bfloat16) if q.dtype.itemsize == 1 else q  # exact
        k_pages, v_pages = as_float("k_pages", k_pages, CACHE_DTYPES), as_float("v_pages", v_pages, CACHE_DTYPES)
        require(q.ndim in (3, 4), f"q must be [B, Hq, D] or [B, T, Hq, D], got {list(q.shape)}")
        check_shape("k_pages", k_pages, (None, None, None, q.shape[-1]))
        check_shape("v_pages", v_pages, (*k_pages.shape[:3], None))
        heads, (pages, kv_heads, page_size) = q.shape[-2], k_pages.shape[:3]
        require(
            min(*q.shape, *v_pages.shape) >= 1,
            f"no axis may be empty, got q {list(q.shape)}, v_pages {list(v_pages.shape)}",
        )
        require(
            heads % kv_heads == 0, f"Hq must be a multiple of Hkv, got Hq = {heads} (q) and Hkv = {kv_heads} (k_pages)"
        )
        require(
            k_pages.dtype == v_pages.dtype,
            f"k_pages and v_pages must have one dtype, got {k_pages.dtype} and {v_pages.dtype}",
        )
        require(
            page_size & (page_size - 1) == 0,
            f"the page size must be a power of two, got {page_size} (axis 2 of k_pages)",
        )
        return Call(
            q=q[:, None] if q.ndim == 3 else q,
            k_pages=k_pages,
            v_pages=v_pages,
            sinks=_optional("sinks", sinks, (heads,)),
            k_scale=_cache_scale("k_scale", k_scale, (pages, kv_heads, page_size)),
            v_scale=_cache_scale("v_scale", v_scale, (pages, kv_heads, page_size)),
            out_scale=_optional("out_scale", out_scale, ()),
            single=q.ndim == 3,
        )

    def table(self, page_table: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
        """page_table i32[B, Hkv or 1, W] and lengths i32[B, Hkv or 1]."""
        batch, kv_heads = self.q.shape[0], self.k_pages.shape[1]
        page_table, lengths = as_ids("page_table", page_table), as_ids("lengths", lengths)
        check_shape("page_table", page_table, (batch, None), (batch, kv_heads, None))
        check_shape("lengths", lengths, (batch,), (batch, kv_heads))
        width, page_size = page_table.shape[-1], self.k_pages.shape[2]
        require(width >= 1, f"page_table must have at least one column, got {list(page_table.shape)}")
        require(width * page_size <= INT32_MAX, f"W * P must fit in 32 bits, got {width} * {page_size}")
        page_table = page_table if page_table.ndim == 3 else page_table[:, None]
        return page_table, lengths if lengths.ndim == 2 else lengths[:, None]

    def lists(self, name: str, ids: Any) -> jax.Array:
        """i32[B, T or 1, Hkv, C]."""
        batch, t_rows, kv_heads = self.q.shape[0], self.q.shape[1], self.k_pages.shape[1]
        ids = as_ids(name, ids)
        check_shape(name, ids, (batch, kv_heads, None), (batch, t_rows, kv_heads, None))
        require(ids.shape[-1] >= 1, f"{name} must have at least one column, got {list(ids.shape)}")
        return ids if ids.ndim == 4 else ids[:, None]

    def positions(self, q_positions: Any, key_positions: Any) -> tuple[jax.Array | None, jax.Array | None]:
        """q_positions None or i32[B, T], key_positions None or i32[N, Hkv, P]."""
        batch, t_rows = self.q.shape[:2]
        if q_positions is not None:
            q_positions = as_ids("q_positions", q_positions)
            check_shape("q_positions", q_positions, (batch, t_rows), *([(batch,)] if t_rows == 1 else []))
            q_positions = q_positions.reshape(batch, t_rows)
        if key_positions is not None:
            key_positions = as_ids("key_positions", key_positions)
            check_shape("key_positions", key_positions, self.k_pages.shape[:3])
        return q_positions, key_positions

    def options(
        self,
        scale: float | None,
        soft_cap: float | None,
        out_dtype: Any,
        implementation: str | None,
        config: Config | Tuning | None,
        window: int | None = None,
        return_weights: bool = False,
    ) -> Options:
        """Checks the static arguments. Raises ValueError with the values seen."""
        out_dtype = jnp.dtype(self.q.dtype if out_dtype is None else out_dtype)
        require(
            out_dtype in [jnp.dtype(d) for d in CACHE_DTYPES],
            f"out_dtype must be one of {[jnp.dtype(d).name for d in CACHE_DTYPES]}, got {out_dtype}",
        )
        window = None if window is None else as_int("window", window)
        require(window is None or window >= 1, f"window must be at least 1 token, got {window}")
        capped = soft_cap is None or (isinstance(soft_cap, (int, float)) and 0 < soft_cap < math.inf)
        require(capped, f"soft_cap must be a positive finite number, got {soft_cap!r}")
        require(
            implementation in IMPLEMENTATIONS,
            f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}",
        )
        is_config = config is None or isinstance(config, Config | Tuning)
        require(is_config, f"config must be a Config or a Tuning, got {config!r}")
        scale = self.q.shape[-1] ** -0.5 if scale is None else scale
        is_number = isinstance(scale, (int, float)) and math.isfinite(scale)
        require(is_number, f"scale must be a finite Python number, got {scale!r}")
        return Options(
            scale=float(scale),
            soft_cap=None if soft_cap is None else float(soft_cap),
            out_dtype=out_dtype,
            implementation=implementation,
            config=config,
            window=None if window is None else min(window, INT32_MAX),
            return_weights=return_weights,
        )

    def run(self, operation: Operation, ids: tuple[jax.Array | None, ...], options: Options) -> AttentionOutput:
        """Runs the operation; `ids` are its integer operands, in the order of its functions."""
        operands = (self.q, self.k_pages, self.v_pages, *ids, self.k_scale, self.v_scale)
        result = _compute(operation, options, operands, (self.sinks, self.out_scale))
        return jax.tree.map(lambda x: x[:, 0], result) if self.single else result


def _optional(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """None or float32 of that shape."""
    if value is None:
        return None
    array = as_array(name, value)
    require(jnp.issubdtype(array.dtype, jnp.floating) or array.ndim == 0, f"{name} must be floating, got {array.dtype}")
    check_shape(name, array, shape)
    return array.astype(jnp.float32)


def _cache_scale(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """None, f32[1] or f32[N, Hkv, P]."""
    array = _optional(name, value, () if jnp.ndim(value) == 0 else shape) if value is not None else None
    return array if array is None or array.ndim else array.reshape(1)


def refusal_of(k_pages: jax.Array, v_pages: jax.Array) -> str | None:
    """Why the kernels cannot read these pools, if so."""
    for name, pool in (("k_pages", k_pages), ("v_pages", v_pages)):
        if offsets_wrap(pool):
            return (
                f"{name} has {pool.size} one-byte elements in rows of {pool.shape[-1]}; of an odd width the kernel "
                "cannot address between 2^31 and 2^32 of them. Make the width even, the pool smaller than 2^31 or "
                'larger than 2^32 elements, or use implementation="xla".'
            )
    return None


@functools.partial(jax.jit, static_argnames=("operation", "options"))
def _compute(
    operation: Operation, options: Options, operands: tuple[Any, ...], extras: tuple[jax.Array | None, jax.Array | None]
) -> AttentionOutput:
    """Runs one implementation on (q, k_pages, v_pages, ids..., k_scale, v_scale); extras are (sinks, out_scale)."""
    _, k_pages, v_pages, *ids, _, _ = operands
    operation.check(k_pages, *ids)
    common = {
        "scale": options.scale,
        "soft_cap": options.soft_cap,
        **({"window": options.window} if operation.windowed else {}),
    }
    asked = {"return_scores": options.return_weights} if operation.weighted else {}
    plain = all(extra is None for extra in extras) and jnp.dtype(options.out_dtype).itemsize > 1
    config = config_of(operation, options, operands)

    # Everything that is differentiated is an argument, none is captured.
    def meaning(args: Any, extras: Any) -> AttentionOutput:
        out, lse, scores = operation.meaning(*args, **common)
        return _finish(out, lse, scores, extras, options)

    def kernel(args: Any, extras: Any, *, interpret: bool) -> AttentionOutput:
        # With nothing left to do afterwards, the kernel writes the final dtype itself.
        out_dtype = options.out_dtype if plain else jnp.float32
        out, lse, scores = operation.kernel(
            *args, **common, **asked, out_dtype=out_dtype, config=config, interpret=interpret
        )
        return _finish(out, lse, scores, extras, options)

    return dispatch.run(
        options.implementation, (operands, extras), xla=meaning, kernel=kernel, refusal=refusal_of(k_pages, v_pages)
    )


def config_of(operation: Operation, options: Options, operands: tuple[Any, ...]) -> Config | None:
    """The kernel's Config: the caller's, or what the caller's Tuning has for these shapes.

    Asked while `_compute` is traced, so a shape that the Tuning lacks is reported once.
    """
    if not isinstance(options.config, Tuning):
        return options.config
    if options.implementation == "xla":
        return None
    q, k_pages, v_pages, *ids, _, _ = operands
    listing = ids[operation.listing]
    return options.config.find(CallShape.of(operation.name, q, k_pages, v_pages, listing, by_page=operation.by_page))


def _finish(
    out: jax.Array,
    lse: jax.Array,
    scores: jax.Array | None,
    extras: tuple[jax.Array | None, jax.Array | None],
    options: Options,
) -> AttentionOutput:
    """Adds the sinks, casts, and turns scores into probabilities."""
    sinks, out_scale = extras
    if sinks is not None:
        out, lse = merge_attention(out[None], lse[None], sinks)
    weights = None
    if options.return_weights:
        assert scores is not None
        total = lse if sinks is None else jnp.logaddexp(lse, sinks)
        weights = jnp.where(
            jnp.isneginf(scores), 0.0, jnp.exp(scores - jnp.where(jnp.isneginf(total), 0.0, total)[..., None])
        )
    return AttentionOutput(cast_output(out, out_scale, options.out_dtype), lse, weights)


def cast_output(out: jax.Array, out_scale: jax.Array | None, dtype: Any) -> jax.Array:
    """Divides by the output scale and casts; e4m3 is clipped first, because a plain cast of 465 and above makes NaN."""
    out = out if out_scale is None else out.astype(jnp.float32) / out_scale
    return (jnp.clip(out, -E4M3_MAX, E4M3_MAX) if jnp.dtype(dtype).itemsize == 1 else out).astype(dtype)
