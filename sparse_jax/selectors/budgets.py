"""Budgets: how many tokens a selector may read, fixed or as a share of the length, per layer and per KV head.

512                        tokens, everywhere
0.25                       a quarter of what a request has cached (`retained_count`)
(512, 0.25)                by plane: plane p takes entry p % 2
((512, 64), (0.5, 64))     by plane and KV head
an i32 array               inside `jax.jit`, broadcastable to [B, Hkv], with a static upper end `most`

The array form lets one compilation serve many budgets: `dataclasses.replace(selector, budget=traced, most=1024)`.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_jax.ops import retained_count


def checked(owner: str, budget: Any, most: Any) -> Any:
    """The budget in a hashable form. Raises ValueError, naming the selector `owner`, for what is none."""
    if isinstance(budget, jax.Array | np.ndarray) and not (isinstance(budget, np.ndarray) and budget.ndim == 0):
        if not jnp.issubdtype(budget.dtype, jnp.integer) or most is None:
            raise ValueError(
                f"{owner}: a budget that is an array holds integers and goes with most=, the largest it can be; "
                f"got {budget.dtype}{list(budget.shape)} and most={most!r}."
            )
        return budget
    return _checked(owner, budget, 2)


def _checked(owner: str, budget: Any, depth: int) -> Any:
    if isinstance(budget, tuple | list) and depth:
        if budget:
            return tuple(_checked(owner, entry, depth - 1) for entry in budget)
    elif isinstance(budget, float | np.floating):
        if 0 < budget <= 1:
            return float(budget)
    elif not isinstance(budget, bool):
        try:
            if operator.index(budget) >= 1:
                return operator.index(budget)
        except TypeError:
            pass
    raise ValueError(
        f"{owner}: budget is a whole number of tokens, at least 1; got {budget!r}. It can also be a share of the "
        "length, above 0 and up to 1, or a tuple of these by plane, or by plane and KV head."
    )


def most_tokens(budget: Any, most: int | None, capacity: int) -> int:
    """The largest number of tokens that the budget can come to for requests of at most `capacity` tokens."""
    if isinstance(budget, tuple):
        return max(most_tokens(entry, most, capacity) for entry in budget)
    if isinstance(budget, float):
        return retained_count(capacity, budget)
    return min(budget if isinstance(budget, int) else int(most or capacity), capacity)


def recent_of(tokens: Any) -> Any:
    """How many of a budget's tokens, an int or i32 array, are the last ones by default: an eighth, 1 to 32."""
    return min(32, max(1, tokens // 8)) if isinstance(tokens, int) else jnp.clip(tokens // 8, 1, 32)


def tokens(
    budget: Any, most: int | None, lengths: jax.Array, plane: Any, *, kv_heads: int, capacity: int
) -> int | jax.Array:
    """The budget of each request and KV head: an int where it is the same for all, else i32[B, Hkv or 1].

    lengths: i32[B, Hkv or 1] in 0 .. capacity. plane: an int, or i32[] inside a scan over planes.
    """
    if isinstance(budget, tuple):
        entries = [_entry(entry, lengths, kv_heads, capacity) for entry in budget]
        if isinstance(plane, int):
            return entries[plane % len(entries)]
        if len(entries) == 1:
            return entries[0]
        shape = jnp.broadcast_shapes(*(jnp.shape(entry) for entry in entries), lengths.shape)
        table = jnp.stack([jnp.broadcast_to(jnp.asarray(entry, jnp.int32), shape) for entry in entries])
        return table[jnp.asarray(plane, jnp.int32) % len(entries)]
    if isinstance(budget, int | float):
        return _entry(budget, lengths, kv_heads, capacity)
    limit = jnp.clip(budget, 1, most_tokens(budget, most, capacity)).astype(jnp.int32)
    return jnp.broadcast_to(limit, jnp.broadcast_shapes(limit.shape, lengths.shape))


def _entry(entry: Any, lengths: jax.Array, kv_heads: int, capacity: int) -> int | jax.Array:
    """The budget of one plane."""
    if isinstance(entry, int):
        return min(entry, capacity)
    if isinstance(entry, float):
        # A table, because the ceiling is that of the product in double precision, which the device may not have.
        return jnp.asarray(retained_count(np.arange(capacity + 1), entry))[lengths]
    if len(entry) != kv_heads:
        raise ValueError(f"a budget by KV head has one entry for each of {kv_heads} heads, got {len(entry)}")
    by_head = [_entry(one, lengths, kv_heads, capacity) for one in entry]
    rows = jnp.broadcast_to(lengths, (lengths.shape[0], kv_heads))
    columns = [jnp.broadcast_to(jnp.asarray(one, jnp.int32), rows.shape)[:, head] for head, one in enumerate(by_head)]
    return jnp.stack(columns, axis=1)
