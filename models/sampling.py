"""Choosing the next token on the device: greedy, temperature, top-k and top-p, with one random stream per request.

The draw of a request depends on its own seed, its own logits and how many tokens it has generated, and on nothing of
its neighbours in the batch.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; hashable, so a static argument of a jitted step.

    temperature 0 is greedy (ties go to the lower id). Filters follow each other: temperature, top_k (0 = off), top_p
    (the fewest most probable tokens whose probability reaches top_p; 1 = off; at least one token stays).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be finite and 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


GREEDY = Sampling()


def request_keys(seed: int | Sequence[int], requests: int) -> jax.Array:
    """One random key per request: u32[B, 2], the data of keys. Typed ones would be dispatched by Python at each call.

    An int seeds the batch, and request b gets stream b of it. A sequence gives each request its own seed; with seed s
    it draws what it would draw alone in a batch seeded with s. Raises ValueError for a sequence of another length.
    """
    if isinstance(seed, (int, np.integer)):
        base = jax.random.key(int(seed))
        keys = jax.vmap(lambda request: jax.random.fold_in(base, request))(jnp.arange(requests, dtype=jnp.uint32))
        return jax.random.key_data(keys)
    if len(seed) != requests:
        raise ValueError(f"need one seed or one for each of {requests} requests, got {len(seed)}")
    return jax.random.key_data(jnp.stack([jax.random.fold_in(jax.random.key(int(one)), 0) for one in seed]))


def filtered(logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """The logits that may be drawn: f32[B, V] -> (f32[B, K] falling, -inf where filtered out; ids i32[B, K])."""
    width = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    values, ids = jax.lax.top_k(logits.astype(jnp.float32), width)  # ties by rising id
    scaled = (values - values[:, :1]) / sampling.temperature  # from the maximum, so a small temperature cannot overflow
    probability = jax.nn.softmax(scaled, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    keep = (before < sampling.top_p).at[:, 0].set(True)
    return jnp.where(keep, scaled, -jnp.inf), ids


def sample(logits: jax.Array, keys: jax.Array, generated: jax.Array, sampling: Sampling) -> jax.Array:
    """Choose a token of each request: logits f32[B, V], keys u32[B, 2], generated i32[B] (tokens so far) -> i32[B]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    step_keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), generated.astype(jnp.uint32))
    if sampling.top_k == 0 and sampling.top_p == 1:
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
        return jax.vmap(jax.random.categorical)(step_keys, scaled).astype(jnp.int32)
    scaled, ids = filtered(logits, sampling)
    choice = jax.vmap(jax.random.categorical)(step_keys, scaled)
    return jnp.take_along_axis(ids, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)
