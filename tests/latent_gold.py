"""Sparse MLA and its indexer in float64 NumPy, from the bytes on and one row at a time: independent of the packages."""

import ml_dtypes
import numpy as np

from tests.oracle import attend
from tests.sparse_jax.quantized_bytes import E2M1, E4M3


def e4m3(codes):
    size = np.append(E4M3, np.nan)[codes & 127]
    return np.where(codes & 128, -size, size)


def latent_row(record, format, d_c, d_r):
    """The numbers of one token from its bytes."""
    if format == "fp8_ds_mla":
        scales = record[d_c : d_c + d_c // 32].copy().view(np.float32).astype(np.float64)
        rope = record[d_c + d_c // 32 :].copy().view(ml_dtypes.bfloat16).astype(np.float64)
        return np.concatenate([e4m3(record[:d_c]) * np.repeat(scales, 128), rope[:d_r]])
    codes = np.array([(record[i // 2] >> (4 * (i % 2))) & 15 for i in range(d_c)])
    blocks = d_c // 16
    scales = [e4m3(record[d_c // 2 + d_r + blocks // 4 * (s & 3) + (s >> 2)]) for s in range(blocks)]
    values = np.where(codes & 8, -1, 1) * E2M1[codes & 7] * np.repeat(scales, 16)
    return np.concatenate([values, e4m3(record[d_c // 2 : d_c // 2 + d_r])])


def mla(case, x):
    """(out, lse) for the arrays of `mla_cases.make_inputs`."""
    pool, q, slots = x["pool"], np.asarray(x["q"], np.float64), np.asarray(x["slots"])
    data = np.asarray(getattr(pool, "data", pool)).reshape(case.N * case.P, -1)
    out, lse = np.zeros((*q.shape[:3], case.latent)), np.zeros(q.shape[:3])
    for b, t, h in np.ndindex(*q.shape[:3]):
        chosen = [s for s in (slots[b, t] if case.row_lists else slots[b]) if 0 <= s < len(data)]
        rows = data[chosen]
        if case.stored.endswith("ds_mla"):
            rows = np.array([latent_row(row, case.stored, case.latent, case.rope) for row in rows])
        rows = rows.astype(np.float64).reshape(len(chosen), case.latent + case.rope)
        sink = None if x["sinks"] is None else float(x["sinks"][h])
        found = attend(q[b, t, h], rows, rows[:, : case.latent], scale=case.scale, sink=sink)
        out[b, t, h], lse[b, t, h] = found[:2]
    return out, lse


def index_scores(case, x):
    """f64[B, T, W * P] for the arrays of `indexer_cases.make_inputs`."""
    keys, q, weights = x["keys"], np.asarray(x["q"], np.float64), np.asarray(x["weights"], np.float64)
    table, pages = np.asarray(x["page_table"]), case.B * case.W + 2
    if case.stored == "index_keys":
        data, end = np.asarray(keys.data), case.P * case.dim
        scales = data[:, end:].copy().view(np.float32).astype(np.float64)
        keys = e4m3(data[:, :end]).reshape(pages, case.P, case.dim) * scales[..., None]
    keys = np.asarray(keys, np.float64)
    scores = np.full((case.B, case.T, case.W * case.P), -np.inf)
    for b, t, place in np.ndindex(*scores.shape):
        length, page = int(x["lengths"][b]), int(table[b, place // case.P])
        position = length - case.T + t if x["q_positions"] is None else int(x["q_positions"][b, t])
        if place > position or place >= length or not 0 <= page < pages:
            continue
        products = np.maximum(q[b, t] @ keys[page, place % case.P], 0)
        everything = case.k is not None and min(position + 1, length) <= case.k
        scores[b, t, place] = 0 if everything else weights[b, t] @ products
    return scores
