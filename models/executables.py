"""Programs compiled ahead of their calls, and remembered.

So the time of compiling is told apart from the time of running, and a caller that keeps the program calls it without
JAX's own lookup: to hash a model's structure takes the host longer than a small model's step takes a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

CONTEXT = ("jax_default_matmul_precision", "jax_enable_x64")
"""What a caller may set around a call, and what is traced depends on."""


def executable(function: Any, arguments: tuple[Any, ...], **static: Any) -> Callable[..., Any]:
    """A jitted function, compiled for arguments of these shapes and for these static arguments, called without them.

    For the same ones, under the same precision of products, it is the same program.
    """
    leaves, tree = jax.tree.flatten(arguments)
    context = tuple(getattr(jax.config, name) for name in CONTEXT)
    return _compiled(function, tuple(static.items()), tree, tuple(map(_abstract, leaves)), context)


def compilations() -> int:
    """How many programs were compiled so far."""
    return _compiled.cache_info().misses


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=getattr(leaf, "weak_type", False)
    )


@functools.lru_cache(maxsize=64)
def _compiled(
    function: Any, static: tuple, tree: Any, leaves: tuple[jax.ShapeDtypeStruct, ...], context: tuple
) -> Callable[..., Any]:
    del context  # lowering reads it from where it came from
    return function.lower(*jax.tree.unflatten(tree, leaves), **dict(static)).compile()
