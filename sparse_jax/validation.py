"""Checks of the public functions: shapes and dtypes when they are traced, values under `checked`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from pallas_kernels.config import INT32_MAX as INT32_MAX

QUERY_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
CACHE_DTYPES = (*QUERY_DTYPES, jnp.float8_e4m3fn)
INT32_MIN = -(2**31)


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_kept(name: str, tree: Any) -> None:
    """Raises ValueError for an array of the tree that an earlier call took over; inside `jax.jit` there is none."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} was donated to an earlier call: go on with what that call returned"
            )


def as_array(name: str, value: Any) -> jax.Array:
    """A device array that later changes of a NumPy argument cannot reach.

    Without the copy a transfer may still be pending when the caller goes on.
    """
    require(value is not None, f"{name} is required, got None")
    require_kept(name, value)
    return jnp.array(value) if isinstance(value, np.ndarray) else jnp.asarray(value)


def as_float(name: str, value: Any, dtypes: tuple[Any, ...] = QUERY_DTYPES) -> jax.Array:
    """A floating array of one of the dtypes."""
    array = as_array(name, value)
    names = ", ".join(jnp.dtype(d).name for d in dtypes)
    require(
        any(array.dtype == d for d in dtypes),
        f"{name} must have one of the dtypes {names}, got {array.dtype} {array.shape}",
    )
    return array


def as_ids(name: str, value: Any) -> jax.Array:
    """int32 ids. Wider integers are clipped before they are narrowed, so that an id out of range stays out of range."""
    require(value is not None, f"{name} is required, got None")
    require_kept(name, value)
    array = value if isinstance(value, jax.Array) else np.asarray(value)  # JAX would narrow a host array by wrapping
    require(jnp.issubdtype(array.dtype, jnp.integer), f"{name} must hold integers, got {array.dtype} {array.shape}")
    if array.dtype != np.int32:
        kind = jnp.iinfo(array.dtype)
        array = array.clip(max(INT32_MIN, int(kind.min)), min(INT32_MAX, int(kind.max))).astype(np.int32)
    return array if isinstance(array, jax.Array) else jnp.array(array)


def as_int(name: str, value: Any) -> int:
    """A whole number that is known when the function is traced."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer known on the host, got {value!r}") from None


def check_shape(name: str, array: jax.Array, *allowed: tuple[int | None, ...]) -> None:
    """The shape must match one of `allowed`; None in it stands for any size."""
    for shape in allowed:
        if len(shape) == array.ndim and all(
            want in (None, have) for want, have in zip(shape, array.shape, strict=True)
        ):
            return
    wanted = " or ".join("[" + ", ".join("*" if n is None else str(n) for n in shape) + "]" for shape in allowed)
    raise ValueError(f"{name} must have the shape {wanted}, got {list(array.shape)}")


_CHECKING = jax.make_user_context(False)
"""Whether checks of values are traced: part of what jitted functions are cached by."""


def debug_check(good: jax.Array, message: str, **values: Any) -> None:
    """Under `checked`: raises the message, with the values in it, unless all of bool[...] `good` hold.

    Otherwise there is no check at all. One that only waits for `checkify` is an effect, and a program with effects is
    dispatched by Python: that costs the host more than a small decode step takes.
    """
    if _CHECKING.value:
        checkify.debug_check(jnp.all(good), message, **values)


def debug_ids(name: str, ids: jax.Array, limit: int | jax.Array) -> None:
    """Under `checked`: every id is -1 or lies in [0, limit). Costs nothing otherwise."""
    good = (ids >= -1) & (ids < limit)
    debug_check(
        good,
        name + ": ids must be -1 (absent) or lie in [0, {limit}), got {bad}",
        limit=jnp.max(jnp.asarray(limit)),
        bad=jnp.ravel(ids)[jnp.argmin(jnp.ravel(good))] if ids.size else jnp.int32(0),
    )


def debug_lengths(name: str, lengths: jax.Array, capacity: int) -> None:
    """Under `checked`: lengths lie in [0, capacity]."""
    debug_check(
        (lengths >= 0) & (lengths <= capacity),
        name + ": lengths must lie in [0, {capacity}], got {low} to {high}",
        capacity=jnp.int32(capacity),
        low=jnp.min(lengths, initial=INT32_MAX),
        high=jnp.max(lengths, initial=INT32_MIN),
    )


def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that does what `fn` does and raises a clear error for ids and lengths out of range.

    For debugging: without it such an id is absent (rule 1 of docs/operations.md). `fn` may be jitted, and may call
    operations of this library anywhere inside.
    Raises `jax.experimental.checkify.JaxRuntimeError` that names the argument and shows the values. Waits for the
    result of each call, so the returned function is called from the host, not inside `jit`.
    """
    instrumented = checkify.checkify(fn, errors=checkify.user_checks)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _CHECKING(True):
            error, result = instrumented(*args, **kwargs)
        error.throw()
        return result

    return wrapper
