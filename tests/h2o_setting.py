"""The setting in which the H2O accumulator is judged, and its float64 meaning, token by token."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import sparse_jax

SIZE, STEPS, GROUP, WIDTH = 128, 600, 4, 128  # S, steps, G, D; pages of one token
K, FIRST, LAST = 32, 4, 8
DECAY = 1 - 2**-6


class Data(NamedTuple):
    """One KV head: some tokens are heavy, that is, their keys point where the queries do."""

    queries: np.ndarray  # bf16[steps, G, D]
    keys: np.ndarray  # bf16[S, D]


def make(seed=0, steps=STEPS, group=GROUP, width=WIDTH, size=SIZE):
    rng = np.random.default_rng(seed)
    u = rng.standard_normal(width)
    u /= np.linalg.norm(u)
    affinity = 2 * rng.standard_normal(size)
    keys = rng.standard_normal((size, width)) + affinity[:, None] * u
    queries = 0.3 * rng.standard_normal((steps, group, width)) + u
    return Data(queries.astype(ml_dtypes.bfloat16), keys.astype(ml_dtypes.bfloat16))


def probabilities(q, keys, scale, group="mean"):
    """Float64 probabilities [tokens] of one step: q [G, D] against keys [tokens, D]."""
    q, keys = np.asarray(q, np.float64), np.asarray(keys, np.float64)
    s = scale * (q.mean(axis=0, keepdims=True) if group == "mean" else q) @ keys.T
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return (p / p.sum(axis=1, keepdims=True)).max(axis=0)


def trajectory(data, *, group="mean", decay=DECAY, scale=None, size=SIZE, k=K, reserved=(FIRST, LAST)):
    """The float64 sums after each step, [steps, S]."""
    scale = data.keys.shape[1] ** -0.5 if scale is None else scale
    h, states = np.zeros(size), []
    first, end = reserved[0], size - reserved[1]
    for q in data.queries:
        if end - first > k:
            h = h.copy()
            h[first:end] = probabilities(q, data.keys[first:end], scale, group) + decay * h[first:end]
        states.append(h)
    return np.stack(states)


@functools.partial(jax.jit, static_argnames=("group", "dtype"))
def _run(queries, keys, k, reserved, decay, scale, group, dtype):
    size = keys.shape[0]
    pool, table = keys[:, None, None], jnp.arange(size, dtype=jnp.int32)[None]

    def step(scores, q):
        scores = sparse_jax.h2o_accumulate(
            scores, q[None], pool, table, jnp.array([size], jnp.int32),
            k=k, reserved=reserved, decay=decay, scale=scale, group=group,
        )  # fmt: skip
        return scores, scores[:, 0, 0].astype(jnp.float32)

    return jax.lax.scan(step, jnp.zeros((size, 1, 1), dtype), queries)[1]


def accumulated(data, *, group="mean", decay=DECAY, scale=None, dtype="float32", k=K, reserved=(FIRST, LAST)):
    """The sums after each step of `sparse_jax.h2o_accumulate`, [steps, S]."""
    scale = data.keys.shape[1] ** -0.5 if scale is None else scale
    run = _run(jnp.asarray(data.queries), jnp.asarray(data.keys), k, reserved, decay, scale, group, dtype)
    return np.asarray(run, np.float64)


def relative_error(actual, expected):
    """The largest error over the largest value."""
    return np.abs(actual - expected).max() / np.abs(expected).max()


def best(h, k=K):
    """The k tokens of the largest sums; ties to the lower token."""
    return set(np.argsort(-h, kind="stable")[:k].tolist())


def ulp(x):
    """One unit in the last place of bfloat16."""
    return 2.0 ** (np.floor(np.log2(x)) - 7)
