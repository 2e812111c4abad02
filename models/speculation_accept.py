"""Which drafts of a round are right, and the token after them: greedy, or by rejection sampling.

Row i of a round saw the tokens up to position `base + i`; its target chooses the token after that, and candidate i is
what the draft chose in the same place. With temperature 0 a draft is right where it is the target's choice. Otherwise,
with q and p the probabilities of draft and target after temperature, top-k and top-p:

    candidate c ~ q is right with probability min(1, p(c) / q(c))
    the token after the right ones is drawn from max(p - q, 0), normalised, where a draft was wrong, else from p

so that what is emitted is distributed as p, whatever q is. Source: speculative sampling, arXiv 2302.01318, 2211.17192.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.sampling import Sampling, filtered

DRAFT, ACCEPT, REST = 0, 1, 2  # what a random number of a token is for; each is used once for a token that stays


def propose(
    logits: jax.Array, keys: jax.Array, generated: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array | None]:
    """A draft of each request: logits f32[B, V], keys u32[B, 2], generated i32[B] (tokens so far, earlier drafts too).

    Returns (tokens i32[B], their probabilities q f32[B, V], or None for greedy).
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), None
    q = probabilities(logits, sampling)
    return _draw(q, _stream(keys, generated, DRAFT)), q


def accept(
    logits: jax.Array,
    candidates: jax.Array,
    q: jax.Array | None,
    drafts: jax.Array,
    keys: jax.Array,
    generated: jax.Array,
    sampling: Sampling,
) -> tuple[jax.Array, jax.Array]:
    """The tokens of a round: logits f32[B, K + 1, V] of the target, candidates i32[B, K], drafts i32[B] of them count.

    q: f32[B, K, V] of the candidates. Returns (tokens i32[B, K + 1], accepted i32[B] in 0 .. drafts): the tokens
    0 .. accepted of a request follow what it has, the others mean nothing.
    """
    rows = jnp.arange(candidates.shape[1], dtype=jnp.int32)
    if sampling.temperature == 0:
        chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return chosen, _leading((candidates == chosen[:, :-1]) & (rows < drafts[:, None]))
    assert q is not None
    p, at = probabilities(logits, sampling), generated[:, None] + rows
    p_drafted, q_drafted = (jnp.take_along_axis(x, candidates[..., None], axis=-1)[..., 0] for x in (p[:, :-1], q))
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(_stream(keys[:, None], at, ACCEPT))
    accepted = _leading((uniform * q_drafted < p_drafted) & (rows < drafts[:, None]))

    target = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
    drafted = jnp.take_along_axis(q, jnp.minimum(accepted, rows.size - 1)[:, None, None], axis=1)[:, 0]
    rest = jnp.where((accepted < drafts)[:, None], jnp.maximum(target - drafted, 0.0), target)
    # Where p = q a draft is wrong by rounding only, and nothing is left.
    rest = jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, target)
    last = _draw(rest, _stream(keys, generated + accepted, REST))
    tokens = jnp.pad(candidates, ((0, 0), (0, 1)))
    return jnp.where(jnp.arange(rows.size + 1) == accepted[:, None], last[:, None], tokens), accepted


def probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """What `models.sampling.sample` draws from: f32[..., V] of logits f32[..., V], for a temperature above 0."""
    if sampling.top_k == 0 and sampling.top_p == 1:
        # From the maximum, so a small temperature cannot overflow.
        logits = logits.astype(jnp.float32)
        return jax.nn.softmax((logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature, axis=-1)
    flat = logits.reshape(-1, logits.shape[-1])
    scaled, ids = filtered(flat, sampling)
    drawn = jnp.zeros(flat.shape, jnp.float32)
    drawn = drawn.at[jnp.arange(flat.shape[0])[:, None], ids].set(jax.nn.softmax(scaled, axis=-1))
    return drawn.reshape(logits.shape)


def _leading(right: jax.Array) -> jax.Array:
    """How many of bool[B, K] are true before the first that is not, i32[B]."""
    return jnp.cumprod(right.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _stream(keys: jax.Array, generated: jax.Array, purpose: int) -> jax.Array:
    """A random key for each token: keys u32[..., 2], generated i32[...] of one shape, up to broadcasting."""
    keys, generated = jnp.broadcast_arrays(jax.random.wrap_key_data(keys), generated.astype(jnp.uint32))

    def one(key: jax.Array, count: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, count), purpose)

    for _ in range(keys.ndim):
        one = jax.vmap(one)
    return one(keys, generated)


def _draw(weights: jax.Array, keys: jax.Array) -> jax.Array:
    """One id of each row of weights f32[B, V], which need not sum to 1, and never one of weight 0: i32[B]."""
    logits = jnp.where(weights > 0, jnp.log(jnp.where(weights > 0, weights, 1.0)), -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
