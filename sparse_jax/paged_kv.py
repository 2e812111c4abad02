"""The keys and values of a paged cache in memory: written and copied in place, whatever the type and the platform.

Who owns which page is the business of `sparse_jax.paging`; ids here are already checked, with -1 for absent.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from pallas_kernels.pairs import offsets_wrap
from sparse_jax import dispatch
from sparse_jax.index_keys import IndexKeys, dequantize_index_keys, index_key_bytes, write_index_keys
from sparse_jax.latent_cache import FORMATS, LatentCache, dequantize_latent, latent_bytes, write_latent


@dataclasses.dataclass(frozen=True)
class Quantised:
    """What the bytes of a cache of latents mean: keys are rows of a `LatentCache`, values pages of `IndexKeys`."""

    format: str
    latent_dim: int
    rope_dim: int
    index_dim: int  # 1: there are no index keys, and nothing is written

    def sizes(self) -> tuple[int, int]:
        """Bytes of a token in keys and values. Raises ValueError for columns that the formats cannot hold."""
        index = index_key_bytes(self.index_dim) if self.index_dim > 1 else 1
        return latent_bytes(self.format, self.latent_dim, self.rope_dim), index

    def pools(self, k: jax.Array, v: jax.Array) -> tuple[LatentCache, Any]:
        """Pages u8[N, P, bytes] as the operations of sparse MLA take them."""
        latents = LatentCache(k, self.format, self.latent_dim, self.rope_dim)
        return latents, IndexKeys(v.reshape(v.shape[0], -1), v.shape[1], self.index_dim) if self.index_dim > 1 else v

    def read(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Pages u8[N, P, bytes] as numbers f32[N, 1, P, columns]."""
        latents, keys = self.pools(k, v)
        values = dequantize_index_keys(keys) if self.index_dim > 1 else v.astype(jnp.float32)
        return dequantize_latent(latents)[:, None], values[:, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Keys and values of all planes, head-major. Quantised ones are bytes of one head, which has no axis.

    For XLA on CPUs would copy a pool to write it without its axis of one.
    """

    k: jax.Array  # [planes, N, Hkv, P, D], or u8[planes, N, P, bytes of a token]
    v: jax.Array  # [planes, N, Hkv, P, Dv], or the same, where the bytes of a page are not in the order of its tokens
    quantised: Quantised | None = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    planes = property(lambda self: self.k.shape[0])
    pages = property(lambda self: self.k.shape[1])
    kv_heads = property(lambda self: self.k.shape[2] if self.quantised is None else 1)
    page_size = property(lambda self: self.k.shape[-2])

    @property
    def widths(self) -> tuple[int, int]:
        """D and Dv of what is written."""
        q = self.quantised
        return (self.k.shape[-1], self.v.shape[-1]) if q is None else (q.latent_dim + q.rope_dim, q.index_dim)


def create(
    shape: tuple[int, int, int, int], key_width: int, value_width: int, dtype: Any, latent_dim: int | None
) -> PagedKV:
    """Zeros: shape is (planes, N, Hkv, P); `dtype` and `latent_dim` as for `paging.create`."""
    if isinstance(dtype, str) and dtype in FORMATS:
        if shape[2] != 1 or latent_dim is None:
            raise ValueError(
                f"{dtype} holds latents that all heads share: kv_heads must be 1 and latent_dim say how many of the "
                f"{key_width} columns are latent, got {shape[2]} and {latent_dim}"
            )
        quantised = Quantised(FORMATS[dtype], latent_dim, key_width - latent_dim, value_width)
        planes, pages, _, page_size = shape
        pools = (jnp.zeros((planes, pages, page_size, size), jnp.uint8) for size in quantised.sizes())
        return PagedKV(*pools, quantised=quantised)
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits not in (8, 16, 32):
        raise ValueError(f"dtype must be a float type of 1, 2 or 4 bytes, got {dtype}")
    return PagedKV(jnp.zeros((*shape, key_width), dtype), jnp.zeros((*shape, value_width), dtype))


def key_shape(kv: PagedKV) -> tuple[int, ...]:
    """(planes, N, Hkv, P, D) of the keys, quantised or not; callers with a cache of their own have k and v alone."""
    if getattr(kv, "quantised", None) is None:
        return kv.k.shape
    return kv.planes, kv.pages, kv.kv_heads, kv.page_size, kv.widths[0]


def flat(kv: PagedKV) -> tuple[Any, Any]:
    """Keys [planes * N, Hkv, P, D] and values [planes * N, Hkv, P, Dv]: the pool that a `PageView` addresses.

    Of a quantised cache a `LatentCache` and `IndexKeys` of planes * N pages; without index keys some bytes instead.
    """
    k, v = (pool.reshape(-1, *pool.shape[2:]) for pool in (kv.k, kv.v))
    quantised = getattr(kv, "quantised", None)  # callers with a cache of their own have k and v alone
    return (k, v) if quantised is None else quantised.pools(k, v)


def put(kv: PagedKV, plane: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> PagedKV:
    """Write M tokens, k [planes, M, Hkv, D] and v [planes, M, Hkv, Dv], at slots of the planes from `plane` on.

    slots: i32[M], or i32[M, Hkv] where each KV head has a place of its own for the token. `plane` i32[] is valid, slots
    are valid or -1 and differ from each other (in a head). Values are cast to the type of the pool, or quantised;
    eight-bit floats saturate (infinities too) and NaN stays NaN.
    """
    if kv.quantised is not None:
        return _put_quantised(kv, plane, slots, k, v)
    page = jnp.where(slots >= 0, slots // kv.page_size, -1)
    offset = jnp.where(slots >= 0, slots % kv.page_size, 0)

    def one(pool, new):
        if pool.dtype.itemsize == 1:  # a plain cast of what is too large for eight bits gives NaN
            largest = float(jnp.finfo(pool.dtype).max)
            new = jnp.clip(new, -largest, largest)
        # A scatter is in place on GPUs, and for some types on CPUs; of the others XLA's CPU scatter copies the pool.
        # The loop is for CPUs only: a GPU would start one kernel for each token.
        cpu = _put_scatter if pool.dtype in _PLAIN_ON_CPU else _put_loop
        args = pool, plane, page, offset, new.astype(pool.dtype)
        return lax.platform_dependent(*args, cpu=cpu, default=_put_scatter)

    return PagedKV(one(kv.k, k), one(kv.v, v))


def _put_quantised(kv: PagedKV, plane: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> PagedKV:
    first = (plane + jnp.arange(k.shape[0], dtype=jnp.int32)) * (kv.pages * kv.page_size)
    at = jnp.where(slots.reshape(-1) >= 0, first[:, None] + slots.reshape(-1), -1).reshape(-1)
    latents, keys = flat(kv)
    kv = dataclasses.replace(kv, k=write_latent(latents, at, k.reshape(at.size, -1)).data.reshape(kv.k.shape))
    if not isinstance(keys, IndexKeys):
        return kv
    return dataclasses.replace(kv, v=write_index_keys(keys, at, v.reshape(at.size, -1)).data.reshape(kv.v.shape))


def _put_loop(pool, plane, page, offset, new):
    if _SLOW_BITS and page.size > FEW_TOKENS and jnp.issubdtype(pool.dtype, jnp.floating):
        return lax.bitcast_convert_type(_put_loop(_bits(pool), plane, page, offset, _bits(new)), pool.dtype)
    # A whole token at a time, or where heads have places of their own, one head of a token.
    heads = 1 if page.ndim == 2 else pool.shape[2]
    one_head = pool.shape[2] == 1
    new = new.reshape(new.shape[0], page.size, heads, *([1] if one_head else []), -1)
    page, offset = page.reshape(-1), offset.reshape(-1)
    which, count = _present(page)

    def put_one(i, rows):
        token = lax.dynamic_slice_in_dim(new, which[i], 1, axis=1)  # [planes, 1, Hkv or 1, (1,) D]
        head = jnp.int32(0) if heads > 1 else which[i] % pool.shape[2]
        start = (offset[which[i]], jnp.int32(0)) if one_head else (offset[which[i]] * pool.shape[4],)
        return _overwrite_bits(rows, token, plane, page[which[i]], head, *start)

    return lax.fori_loop(jnp.int32(0), count, put_one, _rows(pool)).reshape(pool.shape)


def _put_scatter(pool, plane, page, offset, new):
    pages, heads = pool.shape[1:3]
    # Every axis but the last has its own index: no flat offset that could pass 2**31, and no transposed copy of the
    # pool, which XLA makes when indexed axes do not lead. "drop" mode drops what is past the end but lets -1 wrap, so
    # absent tokens go past the end, each to a page of its own: unique indices spare a GPU the atomics.
    page = jnp.where(page >= 0, page, pages + jnp.arange(page.size, dtype=jnp.int32).reshape(page.shape))
    page, offset = (x if x.ndim == 2 else x[:, None] for x in (page, offset))  # [M, Hkv or 1]
    plane = plane + jnp.arange(new.shape[0], dtype=jnp.int32)
    at = (plane[:, None, None], page, jnp.arange(heads, dtype=jnp.int32), offset)
    return pool.at[at].set(new, mode="drop", unique_indices=True)


def copy_pages(kv: PagedKV, sources: jax.Array, targets: jax.Array) -> PagedKV:
    """Copy K pages, sources i32[K] to targets i32[K], in all planes; -1 in targets: nothing to do.

    Targets differ from each other and from the sources. Most steps of a decode copy none, and no step should read or
    hold K pages, or let a GPU wait for the host: plain jnp is a loop over those there are, so a GPU has a kernel.
    """
    pools = kv.k, kv.v
    wraps = any(offsets_wrap(pool.reshape(*pool.shape[:2], -1)) for pool in pools)
    refusal = "pages of an odd number of bytes in a pool between 2^31 and 2^32 bytes" if wraps else None
    kernel = pallas_kernels.copy_pages
    k, v = dispatch.run(None, (pools, sources, targets), xla=_copy_loop, kernel=kernel, refusal=refusal)
    return dataclasses.replace(kv, k=k, v=v)


def _copy_loop(pools, sources, targets):
    which, count = _present(targets)

    def copy_one(i, pools):
        source, target, zeros = sources[which[i]], targets[which[i]], [jnp.int32(0)] * 4

        def copy_in(rows):
            def read():
                return lax.dynamic_slice_in_dim(rows, source, 1, axis=1)

            # The condition is always true. It keeps XLA on CPUs from fusing the read with the write, which then could
            # not be done in place and would copy the pool.
            page = lax.cond(count > 0, read, lambda: jnp.zeros((rows.shape[0], 1, *rows.shape[2:]), rows.dtype))
            cpu = _overwrite if rows.dtype in _PLAIN_ON_CPU else _overwrite_bits
            at = zeros[0], target, *zeros[: rows.ndim - 2]
            return lax.platform_dependent(rows, page, *at, cpu=cpu, default=_overwrite)

        return tuple(map(copy_in, pools))

    copied = lax.fori_loop(jnp.int32(0), count, copy_one, tuple(map(_rows, pools)))
    return tuple(new.reshape(pool.shape) for new, pool in zip(copied, pools, strict=True))


# XLA's CPU backend computes the other types in float32: to update one token it would convert the whole pool twice.
_PLAIN_ON_CPU = (jnp.float32, jnp.float16, *([jnp.bfloat16] if jax.__version_info__ >= (0, 11) else []))
# The walk of `_overwrite_bits` touches all bytes in JAX 0.12: there, prompts are worth one copy of an eight-bit pool.
_SLOW_BITS, FEW_TOKENS = jax.__version_info__ >= (0, 12), 8


def _rows(pool):
    # [planes, N, Hkv, P * D], the same bytes. Not with a single head: a reshape around an axis of one may come out in
    # another layout, and XLA on CPUs would copy the pool to get from one to the other.
    return pool if pool.shape[2] == 1 else pool.reshape(*pool.shape[:3], -1)


def _overwrite(rows, new, *at):
    return lax.dynamic_update_slice(rows, new, at)


def _overwrite_bits(rows, new, *at):
    # Nothing to convert in unsigned integers, so this is in place. XLA still walks over the rows, without touching
    # their bytes; that is why they are as long as they can be, and why a loop must carry them in this shape.
    return lax.bitcast_convert_type(_overwrite(_bits(rows), _bits(new), *at), rows.dtype)


def _bits(x):
    return lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def tokens_of(kv: PagedKV, plane: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys [K * P, Hkv, D] and values [K * P, Hkv, Dv] of K pages i32[K] in one plane; for -1 those of page 0.

    Quantised ones as float32.
    """
    at = plane, jnp.maximum(pages, 0)
    k, v = (pool.at[at].get(mode="promise_in_bounds") for pool in (kv.k, kv.v))
    k, v = (k, v) if kv.quantised is None else kv.quantised.read(k, v)  # [K, Hkv, P, D]
    return tuple(jnp.moveaxis(x, 2, 1).reshape(-1, kv.kv_heads, x.shape[-1]) for x in (k, v))  # type: ignore[return-value]


def _present(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions of the M ids i32[M] that are not -1, in front: (positions i32[M], their count i32[])."""
    (which,) = jnp.nonzero(ids >= 0, size=ids.size, fill_value=0)
    return which.astype(jnp.int32), jnp.sum(ids >= 0, dtype=jnp.int32)
