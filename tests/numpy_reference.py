"""Reference correction in NumPy, one row and query head at a time: independent of everything in the packages.

A transcription of the equations: what a capture keeps, what a later loop makes of it, and how many keys a retention
keeps. `dtype` is that of all arithmetic, float64 or float32.
"""

import math

import numpy as np


def kept(n, retention):
    """k of n keys: the ceiling is that of the product in double precision."""
    return min(n, max(1, math.ceil(n * retention)))


def keys_of(x, b, t, head):
    """How many keys a row sees, and {token id: (page, KV head, offset)} of those that exist."""
    pages, kv_heads, page_size, _ = x["k_pages"].shape
    h = head // (x["q"].shape[2] // kv_heads)
    table = x["page_table"][b, h] if x["page_table"].ndim == 3 else x["page_table"][b]
    length, tokens = int(x["lengths"][b]), x["q"].shape[1]
    n = min(max(length - tokens + t + 1, 0), page_size * len(table))
    places = {j: (int(table[j // page_size]), h, j % page_size) for j in range(n)}
    return n, {j: place for j, place in places.items() if 0 <= place[0] < pages}


def attend(q, keys, values, scale):
    """Softmax attention of q [D] over keys [S, D] and values [S, Dv]: out, natural lse, scores, probabilities."""
    if len(keys) == 0:
        return np.zeros(values.shape[-1], values.dtype), -np.inf, [], []
    scores = scale * (keys @ q)
    weights = np.exp(scores - scores.max())
    p = weights / weights.sum()
    return p @ values, scores.max() + np.log(weights.sum()), scores, p


def rows(x, dtype):
    """For each row and query head: its place, how many keys it sees, their ids, and a function that attends to ids."""
    x = {name: None if value is None else np.asarray(value) for name, value in x.items()}
    scale = dtype(x["q"].shape[-1] ** -0.5)
    for place in np.ndindex(x["q"].shape[:3]):
        n, keys = keys_of(x, *place)

        def over(ids, place=place, keys=keys):
            found = tuple(np.array([keys[j] for j in ids if j in keys], int).reshape(-1, 3).T)
            k, v = (pool[found].astype(dtype) for pool in (x["k_pages"], x["v_pages"]))
            return *attend(x["q"][place].astype(dtype), k, v, scale), v

        yield place, n, sorted(keys), over


def rounded(out, like):
    """What the recurrence consumes: the output in the dtype of the model."""
    return out.astype(np.asarray(like).dtype).astype(out.dtype)


def capture(x, counts, capacity, dtype=np.float64):
    """Dense attention and the reference of every row: q [B, T, Hq, D], counts [B, T]."""
    leading, width = x["q"].shape[:3], x["v_pages"].shape[-1]
    found = {name: np.zeros((*leading, width), dtype) for name in ("out", "output", "contribution")}
    found |= {"lse": np.zeros(leading, dtype), "mass": np.zeros(leading, dtype)}
    found |= {"indices": np.full((*leading, capacity), -1), "count": np.zeros(leading[:2], int)}
    for (b, t, head), n, ids, over in rows(x, dtype):
        found["out"][b, t, head], found["lse"][b, t, head], scores, p, values = over(ids)
        count = min(max(int(counts[b][t]), 0), n) if counts[b][t] <= capacity else 0
        found["count"][b, t] = count
        if not count:
            continue
        best = sorted(range(len(ids)), key=lambda i: (-scores[i], ids[i]))[:count]
        sel = sorted(best)
        found["indices"][b, t, head, : len(sel)] = [ids[i] for i in sel]
        found["mass"][b, t, head] = sum(p[i] for i in sel)
        found["contribution"][b, t, head] = sum(p[i] * values[i] for i in sel)
        found["output"][b, t, head] = found["out"][b, t, head]
    found["output"] = rounded(found["output"], x["q"])
    return found


def consume(x, reference, dtype=np.float64):
    """The later loop's output [B, T, Hq, Dv] from what `capture` returned, or from the same names as arrays."""
    kept_of = {name: np.asarray(value) for name, value in reference.items()}
    result = np.zeros((*x["q"].shape[:3], x["v_pages"].shape[-1]), dtype)
    for (b, t, head), n, ids, over in rows(x, dtype):
        count = int(kept_of["count"][b, t])
        if count <= 0:
            continue
        if count == n:
            result[b, t, head] = over(ids)[0]
            continue
        sel = [int(j) for j in kept_of["indices"][b, t, head, :count]]
        o_ref, c_ref, m = (kept_of[name][b, t, head].astype(dtype) for name in ("output", "contribution", "mass"))
        result[b, t, head] = o_ref + m * over(sel)[0] - c_ref
    return result
