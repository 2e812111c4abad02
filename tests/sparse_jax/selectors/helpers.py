"""Small caches without a pool: arrays of pages, tables drawn at random, and what the right answer is in NumPy."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_jax import selectors
from tests.compare import assert_same_bits


class View(NamedTuple):
    page_table: jax.Array
    lengths: jax.Array


class KV(NamedTuple):
    k: jax.Array  # [planes, N, Hkv, P, D]
    v: jax.Array


class Cache(NamedTuple):
    """Requests whose tokens lie in randomly placed pages of one plane."""

    kv: KV
    view: View
    keys: np.ndarray  # [B, W * P, Hkv, D], beyond the length: never written

    @property
    def flat(self):
        return tuple(x.reshape(-1, *x.shape[2:]) for x in self.kv)

    @property
    def slots(self):
        """i32[B, W * P], the slot of each token; -1 beyond the length."""
        page_size = self.kv.k.shape[3]
        table, lengths = np.asarray(self.view.page_table), np.asarray(self.view.lengths)
        token = np.arange(table.shape[1] * page_size)
        slots = table[:, token // page_size] * page_size + token % page_size
        return np.where(token < lengths[:, None], slots, -1).astype(np.int32)


def make_cache(lengths, *, page_size, table_width, kv_heads=2, width=8, planes=1, plane=0, seed=0, dtype=np.float32):
    """Pages in random order over the pool; bytes outside the tokens are NaN."""
    rng = np.random.default_rng(seed)
    pages = len(lengths) * table_width + 2
    order = rng.permutation(pages)[: len(lengths) * table_width].reshape(len(lengths), table_width)
    used = np.arange(table_width) * page_size < np.asarray(lengths)[:, None]
    table = np.where(used, order + plane * pages, -1).astype(np.int32)
    keys = rng.standard_normal((len(lengths), table_width * page_size, kv_heads, width)).astype(dtype)
    k = np.full((planes * pages, kv_heads, page_size, width), np.nan, dtype)
    v = np.full((planes * pages, kv_heads, page_size, width), np.nan, dtype)
    for b, length in enumerate(lengths):
        for s in range(length):
            k[table[b, s // page_size], :, s % page_size] = keys[b, s]
            v[table[b, s // page_size], :, s % page_size] = rng.standard_normal((kv_heads, width))
    shape = (planes, pages, kv_heads, page_size, width)
    view = View(jnp.asarray(table), jnp.asarray(lengths, jnp.int32))
    return Cache(KV(jnp.asarray(k.reshape(shape)), jnp.asarray(v.reshape(shape))), view, keys)


# A test runs what it compiles once or twice: less optimisation is less time.
quick_jit = functools.partial(
    jax.jit,
    compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
)


@functools.partial(quick_jit, static_argnums=0)
def write(selector, state, keys, slots):
    """`selector.write`; one compilation for each shape."""
    return selector.write(state, keys, slots)


@functools.partial(quick_jit, static_argnums=(0, 4, 5))
def _select(selector, state, q, view, kv_heads, page_size):
    return selector.select(state, q, view, kv_heads=kv_heads, page_size=page_size)


def filled(selector, cache):
    """The selector's state after all tokens of the cache were written."""
    return write(selector, selector.init(cache.kv), cache.keys, cache.slots)


def select(selector, cache, q, state=None):
    """Page indices as a NumPy array i32[B, Hkv, C]."""
    _, _, kv_heads, page_size, _ = cache.kv.k.shape
    state = filled(selector, cache) if state is None else state
    return np.asarray(_select(selector, state, q, cache.view, kv_heads, page_size))


def queries(batch, rows, heads, width=8, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, rows, heads, width)), jnp.float32)


def chosen(indices):
    """Page indices as sets, one per (request, KV head); fails on duplicates and on anything not ascending."""
    sets = []
    for row in indices.reshape(-1, indices.shape[-1]):
        ids = row[row >= 0].tolist()
        assert ids == sorted(set(ids)), row
        assert (row[len(ids) :] == -1).all(), row
        sets.append(set(ids))
    return sets


def equal_bits(state, other):
    """Fails unless two states are the same, bit for bit."""
    for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert_same_bits(leaf, expected)


PAGE_SELECTORS = [name for name in selectors.names() if isinstance(selectors.get(name), selectors.PageSelector)]
# Those that count pages in a way of their own; the others do as `quest` does.
COUNTING = ["window", "quest", "h2o_sparse_attention"]

# One set of options and one cache for as many tests as possible: they share their compilations.
SELECTORS = {name: selectors.get(name, budget=24, sinks=5, recent=6) for name in PAGE_SELECTORS}
LENGTHS = [61, 0, 1, 7, 33, 64]


@functools.cache
def common_cache(seed=0):
    """Pages of 4 tokens in tables of 16, a plane of three."""
    return make_cache(LENGTHS, page_size=4, table_width=16, planes=3, plane=2, seed=seed)
