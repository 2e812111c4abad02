"""Arrays of the scenarios in tests/gqa_scenarios.py, a float64 reference on them, and the call of the operation.

Keys and values are drawn for each request as one contiguous sequence; `Layout` says how they lie in a paged pool. The
reference knows only the sequences, so it shares nothing with page tables, slots or pools.
"""

import dataclasses
import zlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import sparse_jax
from sparse_jax import AttentionOutput
from tests.attention_cases import invalid

PLANES = 2  # of every pool, so that where a request lies changes no shape


class Sequences(NamedTuple):
    """The requests of a scenario; NumPy, in the dtypes of queries and cache."""

    q: np.ndarray  # [B, T, Hq, D]
    k: np.ndarray  # [B, S, Hkv, D]
    v: np.ndarray  # [B, S, Hkv, Dv]
    k_scale: np.ndarray | None  # f32[] or f32[B, S, Hkv]
    v_scale: np.ndarray | None
    positions: np.ndarray  # [B, T] of the query tokens, -1 where a request has fewer
    chosen: np.ndarray  # [B, T, Hkv, C] token ids or page indices


def sequences(case, seed=0):
    """Standard normal numbers and the ids that the scenario chooses, from a fixed seed."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{case.op} {case.phase} {case.name}".encode())])
    batch, rows, size = len(case.lengths), max(case.queries), max(case.lengths)
    dtype, cache = (jnp.dtype(name) for name in (case.dtype, case.pool_dtype))
    scale_shape = {None: None, "tensor": (), "token": (batch, size, case.Hkv)}[case.scales]
    scale = [None if scale_shape is None else np.float32(rng.uniform(0.5, 2, scale_shape)) for _ in range(2)]
    row, count = np.arange(rows), np.array(case.queries)[:, None]
    positions = np.where(row < count, np.array(case.first_positions)[:, None] + row, -1)
    chosen = np.full((batch, rows, case.Hkv, case.C), -1)
    for b, t, h in np.ndindex(chosen.shape[:3]):
        if positions[b, t] >= 0:
            ids = _chosen_ids(case, rng, case.lengths[b], positions[b, 0 if not case.per_token else t], t, h)
            chosen[b, t, h, : len(ids)] = ids
    if not case.per_token:  # one list for all rows
        chosen[:] = chosen[:, :1]
    return Sequences(
        rng.standard_normal((batch, rows, case.Hq, case.D)).astype(dtype),
        rng.standard_normal((batch, size, case.Hkv, case.D)).astype(cache),
        rng.standard_normal((batch, size, case.Hkv, case.value_width)).astype(cache),
        *scale, positions, chosen,
    )  # fmt: skip


def _chosen_ids(case, rng, length, position, t, h):
    if case.op == "page_sparse":
        pages = -(-length // case.P)
        first = (t + h) % pages if case.per_token else 0
        return sorted({(first + i) % pages for i in range(min(case.C, pages))})
    # In decode the new token is not chosen; a draft may choose earlier drafts and itself.
    available = position if case.phase == "decode" else position + 1
    return np.sort(rng.choice(available, min(case.C, available), replace=False))


def seen_counts(case, seqs):
    """How often each row sees each token, int [B, T, Hkv, S]."""
    batch, rows, heads, _ = seqs.chosen.shape
    size = seqs.k.shape[1]
    unit = case.P if case.op == "page_sparse" else 1
    counts = np.zeros((batch, rows, heads, -(-size // unit)), int)
    place = np.nonzero((seqs.chosen >= 0) & (seqs.chosen < counts.shape[-1]))
    np.add.at(counts, (*place[:3], seqs.chosen[place]), 1)
    counts = np.repeat(counts, unit, axis=-1)[..., :size]
    exists = np.arange(size) < np.array(case.lengths)[:, None, None, None]
    counts = counts * exists * (seqs.positions >= 0)[..., None, None]
    if case.op == "page_sparse":
        counts = counts * (np.arange(size) <= seqs.positions[..., None])[:, :, None]
    return counts


def reference(case, seqs, counts=None):
    """out [B, T, Hq, Dv] and lse [B, T, Hq] in float64, of the stored values times their scales."""
    counts = seen_counts(case, seqs) if counts is None else counts
    q, k, v = (x.astype(np.float64) for x in (seqs.q, seqs.k, seqs.v))
    k, v = (x if s is None else x * s[..., None] for x, s in ((k, seqs.k_scale), (v, seqs.v_scale)))
    batch, rows = counts.shape[:2]
    q = q.reshape(batch, rows, case.Hkv, case.G, case.D)
    out, lse = np.zeros((batch, rows, case.Hkv, case.G, v.shape[-1])), np.full(q.shape[:-1], -np.inf)
    for b, h in np.ndindex(batch, case.Hkv):
        scores = q[b, :, h] @ k[b, :, h].T * case.D**-0.5  # [T, G, S]
        seen = counts[b, :, h][:, None]
        top = np.max(scores, axis=-1, keepdims=True, where=seen > 0, initial=-1e300)
        p = seen * np.exp(np.where(seen > 0, scores - top, -np.inf))
        l = p.sum(-1)
        alive = l > 0
        out[b, :, h] = np.where(alive[..., None], p @ v[b, :, h] / np.where(alive, l, 1)[..., None], 0)
        lse[b, :, h][alive] = (top[..., 0] + np.log(np.where(alive, l, 1)))[alive]
    return AttentionOutput(out.reshape(batch, rows, case.Hq, -1), lse.reshape(batch, rows, case.Hq))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the pages lie, and what stands where nobody may look."""

    shuffled: bool = False
    plane: int = 0  # of a pool [PLANES, N, ...], flattened: page id = plane * N + page
    poisoned: bool = False  # NaN in every key, value and scale that no row sees


def paged(case, seqs, layout=None):
    """The operands of the operation, by name; ids on the host. Tables for each KV head: each has pages of its own."""
    layout = layout or Layout()
    batch, size, heads, _ = seqs.k.shape
    width, tables = -(-size // case.P), case.Hkv if case.head_tables else 1
    pages = batch * width * tables + 1
    ids = np.random.default_rng(1).permutation(pages) if layout.shuffled else np.arange(pages)
    table = layout.plane * pages + ids[: batch * width * tables].reshape(batch, tables, width)
    used = -(-np.array(case.lengths) // case.P)[:, None, None] > np.arange(width)
    table = np.where(used, table, -1)
    seen = seen_counts(case, seqs).any(axis=1)  # [B, Hkv, S]
    page = np.repeat(table, case.P, axis=-1)[:, :, :size]  # [B, tables, S]
    b, h, s = np.nonzero(np.broadcast_to(page >= 0, (batch, heads, size)) & (seen | (not layout.poisoned)))

    def pool(values):
        blank = np.asarray(np.nan if layout.poisoned else 0.0).astype(values.dtype)
        stored = np.full((PLANES * pages, heads, case.P, *values.shape[3:]), blank)
        stored[np.broadcast_to(page, (batch, heads, size))[b, h, s], h, s % case.P] = values[b, s, h]
        return jnp.asarray(stored)

    scales = (x if x is None else pool(x) if x.ndim else jnp.asarray(x) for x in (seqs.k_scale, seqs.v_scale))
    return {
        "q": seqs.q,
        "k_pages": pool(seqs.k),
        "v_pages": pool(seqs.v),
        "page_table": np.int32(table if case.head_tables else table[:, 0]),
        "lengths": np.int32(case.lengths),
        "positions": np.int32(seqs.positions),
        "ids": np.int32(seqs.chosen),
        **dict(zip(("k_scale", "v_scale"), scales)),
    }


def attend(case, x, implementation, config=None, packed=None, **options):
    """The public operation on the operands of `paged`: AttentionOutput [B, T, Hq, Dv], as the reference gives it.

    packed: each query token is a row of its own, with T = 1 (default for token-sparse prefill).
    """
    options |= {"implementation": implementation, "config": config, "out_dtype": case.out_dtype}
    options |= {name: x[name] for name in ("k_scale", "v_scale")}
    packed = case.op == "token_sparse" and case.phase == "prefill" if packed is None else packed
    ids, positions, batch = x["ids"], x["positions"], len(x["lengths"])
    if not packed:
        ids = ids if case.per_token else ids[:, 0]
        request = np.repeat(np.arange(batch), ids.size // (batch * case.Hkv * case.C))
        return _call(case, x, x["q"], ids, positions, request, options)
    rows = np.nonzero(positions >= 0)  # no padding rows
    x_rows = {**x, "page_table": x["page_table"][rows[0]], "lengths": x["lengths"][rows[0]]}
    got = _call(case, x_rows, x["q"][rows], ids[rows], positions[rows], np.arange(len(rows[0])), options)
    out = np.zeros((*positions.shape, *got.out.shape[1:]), got.out.dtype)
    lse = np.full((*positions.shape, case.Hq), -np.inf, np.float32)
    out[rows], lse[rows] = got.out, got.lse
    return AttentionOutput(out, lse)


def _call(case, x, q, ids, positions, request, options):
    if case.op == "token_sparse":
        slots = np.asarray(to_slots(case, x, ids.reshape(-1, case.Hkv, case.C), request)).reshape(ids.shape)
        return sparse_jax.token_sparse_attention(q, x["k_pages"], x["v_pages"], slots, **options)
    by_length = case.offsets is None and len(set(case.queries)) == 1 and q.ndim == 4
    options["q_positions"] = None if by_length else positions
    operands = (q, x["k_pages"], x["v_pages"], x["page_table"], x["lengths"], ids)
    return sparse_jax.page_sparse_attention(*operands, **options)


def to_slots(case, x, ids, request):
    """Slots of token ids i32[R, Hkv, C] of requests i32[R]."""
    return sparse_jax.to_slots(ids, x["page_table"], request, page_size=case.P, lengths=x["lengths"])


def with_holes(case, seqs, seed=5):
    """About a third of the ids replaced by absent ones and ones out of range; and the same with them at the end."""
    rng = np.random.default_rng(seed)
    shape = seqs.chosen.shape if case.per_token else (seqs.chosen.shape[0], 1, *seqs.chosen.shape[2:])
    gone = np.broadcast_to(rng.random(shape) < 0.3, seqs.chosen.shape)
    width = -(-max(case.lengths) // case.P)
    limit = width if case.op == "page_sparse" else width * case.P
    wild = np.broadcast_to(invalid(rng, shape, limit), seqs.chosen.shape)
    kept = np.where(gone, -1, seqs.chosen)
    front = np.take_along_axis(kept, np.argsort(kept < 0, axis=-1, kind="stable"), axis=-1)
    return seqs._replace(chosen=np.where(gone, wild, seqs.chosen)), seqs._replace(chosen=front)
