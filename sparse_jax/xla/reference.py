"""Reference correction, in plain jnp: what is kept of a capture, and how a later loop corrects it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from sparse_jax.validation import INT32_MAX
from sparse_jax.xla.masked_attention import masked_attention
from sparse_jax.xla.paged_attention import paged_attention
from sparse_jax.xla.top_k import top_k


def reference_capture(
    q: jax.Array,  # [B, T, Hq, D]
    k_pages: jax.Array,  # [N, Hkv, P, D]
    v_pages: jax.Array,  # [N, Hkv, P, Dv]
    page_table: jax.Array,  # i32[B, Hkv or 1, W]
    lengths: jax.Array,  # i32[B, 1]
    seen: jax.Array,  # i32[B, T] keys that each row sees
    counts: jax.Array,  # i32[B, T], at most `seen` and `capacity`
    *,
    capacity: int,
    scale: float,
) -> tuple[jax.Array, ...]:
    """Dense attention, and of each row its `counts` most probable keys.

    Returns out f32[B, T, Hq, Dv], lse f32[B, T, Hq], indices i32[B, T, Hq, capacity], mass f32[B, T, Hq], output and
    contribution f32[B, T, Hq, Dv]. With p over all keys, and what the model goes on with as output:

        mass = sum over the chosen of p_j,  contribution = sum over them of p_j v_j,  output = out in the dtype of q
    """
    out, lse, scores = paged_attention(
        q, k_pages, v_pages, page_table, lengths, None, None, None, None, scale=scale, window=None, soft_cap=None
    )
    ids = top_k(lax.stop_gradient(scores), capacity, None, order="score")
    ids = jnp.where(jnp.arange(capacity, dtype=jnp.int32) < counts[..., None, None], ids, INT32_MAX)
    ids = jnp.sort(jnp.where(ids < 0, INT32_MAX, ids), axis=-1)
    ids = jnp.where(ids == INT32_MAX, -1, ids)
    (page, head, offset), present = _places(ids, page_table, seen, v_pages)
    chosen = jnp.take_along_axis(scores, jnp.where(present, ids, 0), axis=-1)
    p = jnp.where(present, jnp.exp(jnp.where(present, chosen - lse[..., None], 0.0)), 0.0)
    v = jnp.where(present[..., None], v_pages[page, head, offset].astype(jnp.float32), 0.0)
    output = jnp.where((counts > 0)[..., None, None], out.astype(q.dtype).astype(jnp.float32), 0.0)
    return out, lse, ids, p.sum(axis=-1), output, jnp.einsum("bthc,bthcd->bthd", p, v, precision="highest")


def reference_consume(
    q: jax.Array,  # [B, T, Hq, D]
    k_pages: jax.Array,  # [N, Hkv, P, D]
    v_pages: jax.Array,  # [N, Hkv, P, Dv]
    page_table: jax.Array,  # i32[B, Hkv or 1, W]
    lengths: jax.Array,  # i32[B, 1]
    seen: jax.Array,  # i32[B, T] keys that each row sees
    rows: jax.Array,  # i32[B, T] whose reference it is, one of R; -1 none
    indices: jax.Array,  # i32[R, Hq, C]
    count: jax.Array,  # i32[R]
    mass: jax.Array,  # f32[R, Hq]
    output: jax.Array,  # f32[R, Hq, Dv]
    contribution: jax.Array,  # f32[R, Hq, Dv]
    *,
    scale: float,
) -> jax.Array:
    """out f32[B, T, Hq, Dv] = output + mass * a - contribution, a the attention over the reference's keys alone.

    A row whose count is all that it sees is dense attention; one without a reference, or with an empty one, is 0.
    """
    here = jnp.where((rows >= 0) & (rows < count.shape[0]), rows, -1)
    at = jnp.maximum(here, 0)
    counts = jnp.where(here >= 0, count[at], 0)  # [B, T]
    ids = jnp.where(jnp.arange(indices.shape[-1], dtype=jnp.int32) < counts[..., None, None], indices[at], -1)
    (page, head, offset), present = _places(ids, page_table, seen, v_pages)
    flat = (-1, *ids.shape[2:])  # each row is a group, each query head has keys of its own
    k, v = (pool[page, head, offset].reshape(*flat, pool.shape[-1]) for pool in (k_pages, v_pages))
    a, _, _ = masked_attention(q, k, v, present.reshape(flat)[:, None], None, None, scale=scale, soft_cap=None)
    corrected = output[at] + mass[at][..., None] * a - contribution[at]
    corrected = jnp.where((counts > 0)[..., None, None], corrected, 0.0)

    def dense() -> jax.Array:
        attended = paged_attention(
            q, k_pages, v_pages, page_table, lengths, None, None, None, None, scale=scale, window=None, soft_cap=None
        )
        return attended[0].astype(q.dtype).astype(jnp.float32)

    full = (counts == seen) & (counts > 0)
    exact = lax.cond(jnp.any(full), dense, lambda: jnp.zeros_like(corrected))
    return jnp.where(full[..., None, None], exact, corrected)


def _places(
    ids: jax.Array, page_table: jax.Array, seen: jax.Array, pool: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Where token ids i32[B, T, Hq, C] lie: ((page, KV head, offset), present), all [B, T, Hq, C] or broadcastable."""
    pages, kv_heads, page_size, _ = pool.shape
    batch, _, heads, _ = ids.shape
    head = jnp.arange(heads, dtype=jnp.int32) // (heads // kv_heads)
    table = jnp.broadcast_to(page_table, (batch, kv_heads, page_table.shape[-1]))
    present = (ids >= 0) & (ids < seen[..., None, None])
    request = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
    page = table[request, head[:, None], jnp.where(present, ids // page_size, 0)]
    present &= (page >= 0) & (page < pages)
    return (jnp.where(present, page, 0), head[:, None], jnp.where(present, ids % page_size, 0)), present
