"""Attention of a DeepSeek-style model inside training sequences, in the stages of its training.

    dense     everything is seen, by a fused kernel; the indexer rests
    indexer   everything is seen; the indexer alone learns: D( mean over heads of p  ||  softmax of its scores )
    sparse    each token sees the `topk` tokens that the indexer scores highest, and learns from that; the indexer
              learns the same divergence among the chosen tokens

p, the attention of a head, is no path for gradients of the divergence, and the indexer's input is detached, so that the
language model and the indexer learn from losses of their own.
Legend: B sequences, S tokens (rows s, tokens t), Hq heads.

Source: DeepSeek-V3.2 (facts only).
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from models import latent_attention
from models.interface import Attend
from models.latent_attention import LatentQuery

Stage = Literal["dense", "indexer", "sparse"]

LOW = -1e30
"""Stands for minus infinity where a product with zero must stay zero."""


def scores(q: LatentQuery, index_keys: jax.Array) -> jax.Array:
    """What the indexer thinks of every token: f32[B, S, S]; index_keys [B, S, d_I]. Raises ValueError without one."""
    if q.index_q is None or q.index_weights is None:
        raise ValueError("training needs an indexer in every layer, and here is a layer that has none")
    total = jnp.zeros((), jnp.float32)
    for head in range(q.index_q.shape[2]):  # one by one: no transposed copy of S x S numbers for each head
        dots = jnp.einsum("bsd,btd->bst", q.index_q[:, :, head], index_keys, preferred_element_type=jnp.float32)
        total = total + q.index_weights[:, :, head, None] * jax.nn.relu(dots)
    return total


def best(scores: jax.Array, seen: jax.Array, k: int) -> jax.Array:
    """The k highest of f32[B, S, S] in each row among those that are seen, bool[S, S]; of equal ones the earlier.

    Two searches bit by bit, for the k-th highest score and for the last of those equal to it: no sort.
    """
    scores = jnp.where(scores == 0, 0.0, scores)  # one zero
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    top = jnp.uint32(1 << 31)
    rank = jnp.where(bits >= top, ~bits, bits | top)  # rises with the score
    rank = jnp.where(seen, rank, 0)

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)

    def higher(place, least):
        tried = least | (top >> place.astype(jnp.uint32))
        return jnp.where(count(rank >= tried) >= k, tried, least)

    least = jax.lax.fori_loop(0, 32, higher, jnp.zeros((*rank.shape[:-1], 1), jnp.uint32))
    token = jnp.arange(rank.shape[-1], dtype=jnp.int32)
    equal, missing = rank == least, k - count(rank > least)
    width = (rank.shape[-1]).bit_length()

    def further(place, end):  # the largest end before which no more than `missing` equal ones stand
        tried = end | (jnp.int32(1 << (width - 1)) >> place)
        return jnp.where(count(equal & (token < tried)) <= missing, tried, end)

    end = jax.lax.fori_loop(0, width, further, jnp.zeros(least.shape, jnp.int32))
    return ((rank > least) | (equal & (token < end))) & seen


def divergence(target: jax.Array, scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over rows of D(target || softmax of the scores where the mask is): f32[B, S, S] each -> f32[]."""
    normaliser = jax.nn.logsumexp(jnp.where(mask, scores, LOW), axis=-1)
    entropy = -jnp.sum(jax.scipy.special.xlogy(target, target), axis=-1)
    return jnp.mean(normaliser - jnp.sum(target * jnp.where(mask, scores, 0.0), axis=-1) - entropy)


def masked(q: LatentQuery, latents: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention of latents [B, S, E] by the mask bool[B or 1, S, S] -> (out [B, S, Hq, d_v], mean p f32[B, S, S])."""
    queries, keys, values = latent_attention.multi_head(q, latents)
    logits = jnp.einsum("bsnd,btnd->bnst", queries, keys, preferred_element_type=jnp.float32) * q.scale
    p = jax.nn.softmax(jnp.where(mask[:, None], logits, LOW), axis=-1)
    out = jnp.einsum("bnst,btnv->bsnv", p.astype(values.dtype), values)
    return out, jax.lax.stop_gradient(p.mean(axis=1))


def attend_in(stage: Stage, topk: int, implementation: Any) -> Attend:
    """The attention of a stage; the cache is a tuple that grows by the divergence f32[] of each layer.

    implementation: that of `jax.nn.dot_product_attention`, where everything is seen and the indexer rests.
    """

    def attend(plane, q: LatentQuery, k, v, cache):
        del plane
        latents, index_keys = k[:, :, 0], v[:, :, 0]
        if stage == "dense":
            everything = dataclasses.replace(q, topk=None)
            return latent_attention.causal(everything, latents, index_keys, implementation), cache
        tokens = jnp.arange(latents.shape[1])
        seen = tokens[:, None] >= tokens
        scored = scores(q, index_keys)
        mask = seen[None]
        if stage == "sparse" and tokens.size > topk:
            mask = best(jax.lax.stop_gradient(scored), seen, topk)
        out, target = masked(q, latents, mask)
        return (out, None), (*cache, divergence(target, scored, mask))

    return attend
