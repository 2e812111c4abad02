"""Attention in float64 NumPy, one row and head at a time: independent of everything in the packages."""

import numpy as np


def attend(q, keys, values, *, scale, soft_cap=None, sink=None):
    """q [D], keys [S, D], values [S, Dv] that the row sees -> out [Dv], lse, probabilities [S]."""
    if len(keys) == 0:
        return np.zeros(values.shape[-1]), -np.inf, np.zeros(0)
    scores = keys @ q * scale
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    lse = np.logaddexp.reduce(scores)
    total = lse if sink is None else np.logaddexp(lse, sink)
    weights = np.exp(scores - total)
    return weights @ values, lse, weights


def rows_of(case, x):
    """The keys that each row sees: functions (b, t, h) -> [(page, offset) or -1 where it does not], in list order."""
    pages, page_size = x["k_pages"].shape[0], case.P
    x = {n: a.astype(np.int64) if a is not None and a.dtype == np.int32 else a for n, a in x.items()}

    def of_table(b, t, h, indices):
        table = x["page_table"][b, h] if x["page_table"].ndim == 3 else x["page_table"][b]
        length = x["lengths"][b, h] if x["lengths"].ndim == 2 else x["lengths"][b]
        row = length - case.T + t if x["q_positions"] is None else x["q_positions"][b, t]
        seen = []
        for index in indices:
            for offset in range(page_size):
                page = int(table[index]) if 0 <= index < len(table) else -1
                place = int(index) * page_size + offset
                ok = 0 <= page < pages and place < length
                if ok:
                    position = place if x["key_positions"] is None else x["key_positions"][page, h, offset]
                    ok = 0 <= position <= row and (case.window is None or position > row - case.window)
                seen.append((page, offset) if ok else -1)
        return seen

    def of_slots(b, t, h):
        slots = x["slots"][b, t, h] if x["slots"].ndim == 4 else x["slots"][b, h]
        return [divmod(int(s), page_size) if 0 <= s < pages * page_size else -1 for s in slots]

    def of_pages(b, t, h):
        lists = x["page_indices"]
        return of_table(b, t, h, lists[b, t, h] if lists.ndim == 4 else lists[b, h])

    return {
        "paged": lambda b, t, h: of_table(b, t, h, range(x["page_table"].shape[-1])),
        "page_sparse": of_pages,
        "token_sparse": of_slots,
    }


def attention(op, case, inputs):
    """out [B, T, Hq, Dv], lse [B, T, Hq], weights [B, T, Hq, C] in float64, for arrays of `make_inputs`."""
    x = {name: None if value is None else np.asarray(value) for name, value in inputs.items()}
    k, v = x["k_pages"].astype(np.float64), x["v_pages"].astype(np.float64)
    for name, pool in (("k_scale", k), ("v_scale", v)):
        if x[name] is not None:
            pool *= x[name][..., None]
    seen_by = rows_of(case, x)[op]
    out, lse, weights = [
        np.zeros((case.B, case.T, case.Hq, *rest)) for rest in ((case.Dv,), (), (len(seen_by(0, 0, 0)),))
    ]
    for b, t, head in np.ndindex(case.B, case.T, case.Hq):
        h = head // (case.Hq // case.Hkv)
        seen = seen_by(b, t, h)
        places = [i for i, s in enumerate(seen) if s != -1]
        keys = np.array([k[seen[i][0], h, seen[i][1]] for i in places]).reshape(-1, case.D)
        values = np.array([v[seen[i][0], h, seen[i][1]] for i in places]).reshape(-1, case.Dv)
        scale = case.D**-0.5 if case.scale is None else case.scale
        sink = None if x["sinks"] is None else x["sinks"][head]
        row = attend(
            x["q"][b, t, head].astype(np.float64), keys, values, scale=scale, soft_cap=case.soft_cap, sink=sink
        )
        out[b, t, head], lse[b, t, head], weights[b, t, head, places] = row
    return out, lse, weights
