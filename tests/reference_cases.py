"""Inputs of the tests of reference correction: a capture loop, a later loop, counts, keys that nobody may read."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import sparse_jax
from sparse_jax import Reference
from tests import numpy_reference
from tests.attention_cases import AttentionCase, make_inputs, poisoned

# Lengths with a last page that is full, one that is not, and a row of few keys. Some pages are absent.
CASE = AttentionCase(name="reference", B=3, Hq=4, Hkv=2, D=16, Dv=24, P=4, W=10, lengths=(33, 40, 7))
DRAFT = dataclasses.replace(CASE, name="reference_draft", B=2, T=3, lengths=(2, 37))
ARRAYS = ("q", "k_pages", "v_pages", "page_table", "lengths")
FIELDS = ("indices", "count", "mass", "output", "contribution")
LOOP = ("q", "k_pages", "v_pages")  # what each loop has of its own


def loops(case, retention=0.3, *, poison=True):
    """(arrays of the capture loop, arrays of a later one, counts i32[B, T]), NaN where no row of the loop looks."""
    first = make_inputs(case)
    other = make_inputs(dataclasses.replace(case, seed=case.seed + 1))
    later = {**first, **{name: other[name] for name in LOOP}}
    if poison:
        first, later = poisoned("paged", case, first), poisoned("paged", case, later)
    return first, later, counts_of(first, retention)


def seen_of(x):
    """Keys that each row sees, [B, T]."""
    tokens, capacity = x["q"].shape[1], x["page_table"].shape[-1] * x["k_pages"].shape[2]
    lengths = np.maximum(np.asarray(x["lengths"], np.int64), 0)[:, None]
    return np.clip(lengths - tokens + 1 + np.arange(tokens), 0, capacity)


def counts_of(x, retention):
    return np.array([[numpy_reference.kept(int(n), retention) for n in row] for row in seen_of(x)], np.int32)


def capture(x, counts, capacity, **options):
    """(AttentionOutput, Reference) of the public operation."""
    return sparse_jax.reference_capture(*(x[n] for n in ARRAYS), counts, capacity=capacity, **options)


def consume(x, reference, **options):
    return sparse_jax.reference_consume(*(x[n] for n in ARRAYS), reference, **options)


def dense(x, **options):
    return sparse_jax.paged_attention(*(x[n] for n in ARRAYS), **options)


def as_dict(reference):
    return {name: np.asarray(getattr(reference, name)) for name in FIELDS}


def as_reference(found):
    """A Reference of what the NumPy transcription found."""
    kinds = {"indices": jnp.int32, "count": jnp.int32}
    return Reference(**{name: jnp.asarray(found[name], kinds.get(name, jnp.float32)) for name in FIELDS})


def unselected_poisoned(x, reference, fill=np.nan):
    """The arrays of a later loop with `fill` in every key and value that no query head of the KV head has chosen."""
    arrays = {name: np.asarray(x[name]) for name in ARRAYS}
    used = np.zeros(arrays["k_pages"].shape[:3], bool)
    count, indices = np.asarray(reference.count), np.asarray(reference.indices)
    for b, t, head in np.ndindex(arrays["q"].shape[:3]):
        n, keys = numpy_reference.keys_of(arrays, b, t, head)
        chosen = keys if count[b, t] == n else indices[b, t, head, : max(int(count[b, t]), 0)]
        for place in (keys[int(j)] for j in chosen if int(j) in keys):
            used[place[0], place[1], place[2]] = True
    keep = jnp.asarray(used)[..., None]
    hidden = {name: jnp.where(keep, x[name], jnp.asarray(fill, x[name].dtype)) for name in ("k_pages", "v_pages")}
    return {**x, **hidden}
