"""Random inputs of a case, made on the device: full pools, shuffled page tables, distinct chosen ids. Never zeros."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_jax.bench.cases import DecodeShape
from sparse_jax.selectors.quest import Envelope


class Pools(NamedTuple):
    """What every call of a case reads from."""

    k: jax.Array  # [N, Hkv, P, D]
    v: jax.Array  # [N, Hkv, P, D]
    lengths: jax.Array  # i32[B]
    scale: jax.Array | None = None  # f32[], multiplies the stored values
    pages: Envelope | None = None  # what Quest remembers of each page


class Lists(NamedTuple):
    """One input set: where the tokens of each request lie, which of them were chosen, and scores to choose by."""

    page_table: jax.Array  # i32[B, W]
    page_indices: jax.Array  # i32[B, Hkv, kept_pages]
    slots: jax.Array  # i32[B, Hkv, kept_tokens]
    scores: jax.Array  # f32[B, Hkv, S]


@functools.partial(jax.jit, static_argnames=("shape", "chunk", "dtype"))
def normal_in_chunks(key: jax.Array, shape: tuple[int, ...], chunk: int, dtype: Any) -> jax.Array:
    """Normal numbers, `chunk` of the first axis at a time: a pool of many GB must not need its bits twice."""
    keys = jax.random.split(key, shape[0] // chunk)
    return lax.map(lambda key: jax.random.normal(key, (chunk, *shape[1:]), dtype), keys).reshape(shape)


def random_pool(key: jax.Array, case: DecodeShape) -> jax.Array:
    """[N, Hkv, P, D] normal numbers."""
    shape = (case.pages, case.kv_heads, case.page_size, case.head_dim)
    return normal_in_chunks(key, shape, case.chunk_pages, case.dtype)


def make_pools(case: DecodeShape, seed: int = 0) -> Pools:
    """The pools of a case. All requests are `case.context` tokens long."""
    k_key, v_key = jax.random.split(jax.random.key(seed))
    lengths = jnp.full((case.batch,), case.context, jnp.int32)
    k, v = random_pool(k_key, case), random_pool(v_key, case)
    return Pools(k, v, lengths, pages=envelope(k))


@jax.jit
def envelope(k: jax.Array) -> Envelope:
    """What Quest remembers of the keys [N, Hkv, P, D] of full pages."""
    return Envelope(k.min(axis=2), k.max(axis=2), k.shape[2])


FP8_SCALE = 1 / 64  # normal numbers stay below 6 in magnitude, e4m3 holds up to 448


@jax.jit
def to_fp8(pools: Pools) -> Pools:
    """The same pools in eight-bit floats with one scale."""
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    k, v = (jnp.clip(x / FP8_SCALE, -largest, largest).astype(jnp.float8_e4m3fn) for x in (pools.k, pools.v))
    return Pools(k, v, pools.lengths, jnp.float32(FP8_SCALE))


def make_query(case: DecodeShape, seed: int = 1) -> jax.Array:
    """[B, Hq, D] normal numbers."""
    return jax.random.normal(jax.random.key(seed), (case.batch, case.q_heads, case.head_dim), case.dtype)


@functools.partial(jax.jit, static_argnames=("rows", "size"))
def shuffled(key: jax.Array, rows: tuple[int, ...], size: int) -> jax.Array:
    """i32[*rows, size] all numbers below `size`, each row in an order of its own."""
    return jnp.argsort(jax.random.bits(key, (*rows, size)), axis=-1).astype(jnp.int32)


def make_lists(key: jax.Array, case: DecodeShape) -> Lists:
    """One input set. The requests' pages lie shuffled over the whole pool, ids are in random order, as by score."""
    table_key, page_key, token_key, score_key = jax.random.split(key, 4)
    owned, rows = case.batch * case.pages_per_request, (case.batch, case.kv_heads)
    table = shuffled(table_key, (), case.pages)[:owned].reshape(case.batch, case.pages_per_request)
    page_indices = shuffled(page_key, rows, case.pages_per_request)[..., : case.kept_pages]
    tokens = shuffled(token_key, rows, case.context)[..., : case.kept_tokens]
    page = jnp.take_along_axis(table[:, None, :], tokens // case.page_size, axis=2)
    slots = page * case.page_size + tokens % case.page_size
    return Lists(table, page_indices, slots, jax.random.normal(score_key, (*rows, case.context)))


def make_sets(case: DecodeShape, count: int, seed: int = 2) -> list[Lists]:
    """`count` input sets to rotate over."""
    return [make_lists(key, case) for key in jax.random.split(jax.random.key(seed), count)]
