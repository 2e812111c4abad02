"""The single seam between the kernels and a Pallas lowering.

This is the only file that names Triton. Pallas' Triton lowering is deprecated since JAX 0.11.0 and will be removed in
some later version, so another lowering must be one new file with the same names, not a change to the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as _triton
from jax.extend import core as _core
from jax.interpreters import mlir as _mlir

GPU_PLATFORM = "cuda"

# Streaming multiprocessors of an H200. The lowering may run on a host without a GPU, so the heuristics cannot ask the
# device.
MULTIPROCESSORS = 132

load = _triton.load
store = _triton.store


def one_element_wide(index: jax.Array) -> jax.Array:
    """The index array, with the promise that no two neighbours are contiguous: loads through it are not vectorised."""
    return _triton.max_contiguous(index, (1,) * index.ndim)


def whole(array: Any) -> pl.BlockSpec:
    """The block of an operand or result that every program gets whole, because it follows ids through it."""
    rank = len(array.shape)
    return pl.BlockSpec(array.shape, lambda _: (0,) * rank)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Two-dimensional matrix product, accumulated in float32.

    a [M, K], b [K, N] of one float dtype. float32 operands are multiplied in full precision: the default of this
    lowering would be TF32.
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return _triton.dot(a, b, precision=precision)


# Two words at a time: their even (0x4420) or odd (0x4431) bytes come side by side and are widened together.
_WIDEN = "{{ .reg .b16 h; .reg .b32 t; prmt.b32 t, $1, 0, {}; cvt.u16.u32 h, t; cvt.rn.f16x2.e4m3x2 $0, h; }}"


def widen_pairs(words: jax.Array, *, interpret: bool) -> list[jax.Array]:
    """The low and the high bytes of int16 words, read as float8_e4m3fn, as two float16 arrays.

    Exact, NaN included; needs compute capability 8.9. The compiler's own conversion wants the bytes in another order
    than its matrix products, and exchanges every block through shared memory once more (H200, 512 rows of 2,048 keys, D
    128: 97 against 77 us). The interpreter knows no assembly.
    """
    if interpret:
        bytes_ = words.astype(jnp.uint8), (words >> 8).astype(jnp.uint8)
        return [lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float16) for x in bytes_]
    shapes = [jax.ShapeDtypeStruct(words.shape, jnp.float16)]
    return [
        _triton.elementwise_inline_asm(
            _WIDEN.format(order), args=[words], constraints="=r,r", pack=2, result_shape_dtypes=shapes
        )[0]
        for order in ("0x4420", "0x4431")
    ]


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    programs: int,
    in_specs: Any,
    out_specs: Any,
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """`pallas_call` over a one-dimensional grid of `programs`.

    One dimension, because CUDA limits the others to 65,535. A kernel must get `programs`, or what it derives from it,
    as a static keyword: `pl.num_programs` may return the value of an earlier trace in JAX 0.11.0 to 0.11.2 (jax#40847).
    aliases: inputs whose memory an output takes over, by their places among the leaves of the operands and results.
    """
    return pl.pallas_call(
        kernel,
        name=name,
        grid=(programs,),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        # Always explicit: without it JAX 0.10 lowers for another backend.
        compiler_params=_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        input_output_aliases=dict(aliases or {}),
    )


def result(shape: tuple[int, ...], dtype: Any, operands: Any) -> jax.ShapeDtypeStruct:
    """The type of a result: inside a checked `shard_map` it varies over each mesh axis that an operand varies over."""
    types = [jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(operands)]
    varying = frozenset().union(*(t.varying for t in types))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying))


def for_platform(operands: Sequence[Any], *, gpu: Callable[..., Any], other: Callable[..., Any]) -> Any:
    """Calls `gpu` or `other` by the platform that the computation is lowered for, not by the devices of this host."""
    return lax.platform_dependent(*operands, default=other, **{GPU_PLATFORM: gpu})


_unavailable_p = _core.Primitive("sparse_jax_unavailable")
_unavailable_p.multiple_results = True
_unavailable_p.def_impl(lambda *, message, avals: _raise(message))
_unavailable_p.def_abstract_eval(lambda *, message, avals: list(avals))


def _raise(message: str) -> Any:
    raise ValueError(message)


_mlir.register_lowering(_unavailable_p, lambda ctx, *, message, avals: _raise(message))


def names_kernel(lowered: str) -> bool:
    """Whether the text of a lowered computation calls a kernel of this lowering."""
    return "triton" in lowered


def unavailable(message: str, like: Callable[..., Any], *operands: Any) -> Any:
    """What `like(*operands)` returns, for tracing only: raises ValueError(message) when it is lowered."""
    jaxpr, results = jax.make_jaxpr(like, return_shape=True)(*operands)
    leaves = _unavailable_p.bind(message=message, avals=tuple(jaxpr.out_avals))
    return jax.tree.unflatten(jax.tree.structure(results), leaves)


def lower_for_cuda(function: Callable[..., Any], *args: Any, gpu: str = "NVIDIA H200") -> Any:
    """Lowers `function(*args)` for a named GPU on a host that has none.

    Returns `jax.stages.Lowered`; raises what the lowering refuses.
    """
    device = jax.sharding.AbstractDevice(gpu, 1, GPU_PLATFORM)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=(GPU_PLATFORM,))
