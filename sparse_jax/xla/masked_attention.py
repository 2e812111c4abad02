"""Softmax attention over gathered keys with a mask: what all attention operations mean once their keys are found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def masked_attention(
    q: jax.Array,  # [B, T, Hq, D]
    k: jax.Array,  # [groups, Hkv, S, D]; groups = B (keys shared by the T rows) or B * T
    v: jax.Array,  # [groups, Hkv, S, Dv]
    visible: jax.Array,  # bool[groups, t, Hkv, S], t = B * T / groups
    k_scale: jax.Array | None,  # f32[1] or f32[groups, Hkv, S]
    v_scale: jax.Array | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out f32[B, T, Hq, Dv], lse f32[B, T, Hq] and scores f32[B, T, Hq, S] (-inf where not visible)."""
    groups, kv_heads, keys, _ = k.shape
    seen = visible.any(axis=1)  # [groups, Hkv, S]
    # Selected before the products: a weight of 0 would not stop NaN in bytes that nobody may see, in either direction
    # of differentiation.
    k, v = (jnp.where(seen[..., None], x, jnp.zeros_like(x)) for x in (k, v))
    k_scale, v_scale = (x if x is None or x.ndim == 1 else jnp.where(seen, x, 1.0) for x in (k_scale, v_scale))
    v = v.astype(jnp.float32) if v_scale is None else v.astype(jnp.float32) * v_scale[..., None]
    compute = q.dtype if k.dtype.itemsize < 2 else jnp.promote_types(q.dtype, k.dtype)
    rows = q.reshape(groups, -1, kv_heads, q.shape[2] // kv_heads, q.shape[3]).astype(compute)
    rows = jnp.where(visible.any(axis=-1)[..., None, None], rows, jnp.zeros_like(rows))  # padding may hold anything
    s = jnp.einsum(
        "bthgd,bhsd->bthgs", rows, k.astype(compute), precision="highest", preferred_element_type=jnp.float32
    )
    s = s * scale if k_scale is None else s * (scale * jnp.atleast_3d(k_scale)[:, None, :, None])
    s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
    mask = visible[:, :, :, None, :]
    s = jnp.where(mask, s, -jnp.inf)

    m = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf))
    m = jnp.where(jnp.isneginf(m), 0.0, m)
    p = jnp.where(mask, jnp.exp(jnp.where(mask, s, 0.0) - m), 0.0)
    l = jnp.sum(p, axis=-1, keepdims=True)
    weights = p / jnp.where(l == 0, 1.0, l)
    out = _weighted_sum(weights, v, visible)
    lse = jnp.where(l == 0, -jnp.inf, m + jnp.log(jnp.where(l == 0, 1.0, l)))[..., 0]
    return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3]), s.reshape(*q.shape[:3], keys)


def _weighted_sum(weights: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """weights @ v, where a non-finite value reaches only the rows that see it (as NaN when rows see different keys)."""
    if visible.shape[1] == 1:
        return jnp.einsum("bthgs,bhsd->bthgd", weights, v, precision="highest")
    finite = jnp.isfinite(v)
    out = jnp.einsum("bthgs,bhsd->bthgd", weights, jnp.where(finite, v, 0.0), precision="highest")
    poisoned = jnp.einsum("bths,bhsd->bthd", visible.astype(jnp.float32), jnp.where(finite, 0.0, 1.0))
    return jnp.where(poisoned[:, :, :, None] > 0, jnp.nan, out)
