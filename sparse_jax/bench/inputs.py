"""Random inputs of a case, made on the device: full pools, shuffled page tables, distinct chosen ids. Never zeros."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_jax.bench.cases import DecodeShape


class Pools(NamedTuple):
    """What every call of a case reads from."""

    k: jax.Array  # [N, Hkv, P, D]
    v: jax.Array  # [N, Hkv, P, D]
    lengths: jax.Array  # i32[B]


class Lists(NamedTuple):
    """One input set: where the tokens of each request lie, and which of them were chosen."""

    page_table: jax.Array  # i32[B, W]
    page_indices: jax.Array  # i32[B, Hkv, kept_pages]
    slots: jax.Array  # i32[B, Hkv, kept_tokens]


@functools.partial(jax.jit, static_argnames=("case",))
def random_pool(key: jax.Array, case: DecodeShape) -> jax.Array:
    """[N, Hkv, P, D] normal numbers, filled chunk by chunk: a pool of many GB must not need its bits twice."""
    chunks = case.pages // case.chunk_pages
    chunk = (case.chunk_pages, case.kv_heads, case.page_size, case.head_dim)
    pool = lax.map(lambda chunk_key: jax.random.normal(chunk_key, chunk, case.dtype), jax.random.split(key, chunks))
    return pool.reshape(case.pages, *chunk[1:])


def make_pools(case: DecodeShape, seed: int = 0) -> Pools:
    """The pools of a case. All requests are `case.context` tokens long."""
    k_key, v_key = jax.random.split(jax.random.key(seed))
    lengths = jnp.full((case.batch,), case.context, jnp.int32)
    return Pools(random_pool(k_key, case), random_pool(v_key, case), lengths)


def make_query(case: DecodeShape, seed: int = 1) -> jax.Array:
    """[B, Hq, D] normal numbers."""
    return jax.random.normal(jax.random.key(seed), (case.batch, case.q_heads, case.head_dim), case.dtype)


def distinct(key: jax.Array, rows: tuple[int, ...], size: int, count: int) -> jax.Array:
    """i32[*rows, count] different numbers below `size` in random order, as ids come that were chosen by score."""
    return lax.top_k(jax.random.uniform(key, (*rows, size)), min(count, size))[1]


@functools.partial(jax.jit, static_argnames=("case",))
def make_lists(key: jax.Array, case: DecodeShape) -> Lists:
    """One input set. The requests' pages lie shuffled over the whole pool."""
    table_key, page_key, token_key = jax.random.split(key, 3)
    owned = case.batch * case.pages_per_request
    table = jax.random.permutation(table_key, case.pages)[:owned].reshape(case.batch, case.pages_per_request)
    rows = (case.batch, case.kv_heads)
    page_indices = distinct(page_key, rows, case.pages_per_request, case.kept_pages)
    tokens = distinct(token_key, rows, case.context, case.kept_tokens)
    page = jnp.take_along_axis(table[:, None, :], tokens // case.page_size, axis=2)
    return Lists(
        table.astype(jnp.int32), page_indices, (page * case.page_size + tokens % case.page_size).astype(jnp.int32)
    )


def make_sets(case: DecodeShape, count: int, seed: int = 2) -> list[Lists]:
    """`count` input sets to rotate over."""
    return [make_lists(key, case) for key in jax.random.split(jax.random.key(seed), count)]
