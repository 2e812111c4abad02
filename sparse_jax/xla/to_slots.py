"""Token ids of a request to physical slots, in plain jnp. It has no kernel: XLA makes a gather and a select of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparse_jax.validation import INT32_MAX


def to_slots(
    token_ids: jax.Array,  # i32[R, Hkv or 1, C]
    page_table: jax.Array,  # i32[B, Hkv or 1, W]
    request_ids: jax.Array,  # i32[R]
    lengths: jax.Array | None,  # i32[B]
    workspace_request_ids: jax.Array | None,  # i32[R]
    workspace_starts: jax.Array | None,  # i32[workspaces]
    *,
    page_size: int,
    page_stride: int,
) -> jax.Array:
    """i32[R, heads, C] slots, in their places, -1 where absent. heads is the larger of the two head axes."""
    requests, table_heads, width = page_table.shape
    rows, id_heads, chosen = token_ids.shape
    token_ids = jnp.broadcast_to(token_ids, (rows, max(table_heads, id_heads), chosen))
    request = jnp.where((request_ids >= 0) & (request_ids < requests), request_ids, -1)
    row = jnp.maximum(request, 0)[:, None, None]
    index = token_ids // page_size
    inside = (token_ids >= 0) & (index < width) & (request >= 0)[:, None, None]
    if lengths is not None:
        inside &= token_ids < lengths[row]
    page = page_table[
        row, jnp.minimum(jnp.arange(token_ids.shape[1]), table_heads - 1)[None, :, None], jnp.where(inside, index, 0)
    ]
    # The bound keeps a wild page id from wrapping round to a real slot.
    in_reach = (page >= 0) & (page <= (INT32_MAX - page_size) // page_stride)
    slots = jnp.where(inside & in_reach, page * page_stride + token_ids % page_size, -1)
    if workspace_request_ids is None or workspace_starts is None:
        return slots
    workspace = workspace_request_ids[:, None, None]
    known = (workspace >= 0) & (workspace < workspace_starts.shape[0])
    start = workspace_starts[jnp.where(known, workspace, 0)]
    known &= inside & (start >= 0) & (start <= INT32_MAX - jnp.maximum(token_ids, 0))
    return jnp.where(workspace >= 0, jnp.where(known, start + token_ids, -1), slots)


def compact(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The valid slots of each row in front, in their order, then -1; and how many they are."""
    valid = slots >= 0
    counts = jnp.sum(valid, axis=-1, dtype=jnp.int32)
    places = jnp.where(valid, jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1, slots.shape[-1])
    rows = jnp.meshgrid(*(jnp.arange(n) for n in slots.shape[:-1]), indexing="ij")
    packed = jnp.full_like(slots, -1).at[(*(r[..., None] for r in rows), places)].set(slots, mode="drop")
    return packed, counts
