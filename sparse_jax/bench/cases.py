"""Shapes of the benchmarks, by name."""

import dataclasses
import itertools
import math
from typing import Any

from sparse_jax.latent_cache import latent_bytes
from sparse_jax.ops import retained_count

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """One decode step of a batch of requests, each with `context` tokens in the cache."""

    name: str
    batch: int  # B
    context: int  # S, tokens of each request
    q_heads: int = 32  # Hq
    kv_heads: int = 8  # Hkv
    head_dim: int = 128  # D = Dv
    page_size: int = 64  # P
    kept_tokens: int = 2048  # C of token-sparse attention
    kept_pages: int = 32  # C of page-sparse attention
    dtype: str = "bfloat16"
    pool_bytes: int = 512 * 2**20  # the pool holds at least this much, so that rotating over it defeats the L2 cache
    ops: tuple[str, ...] = ()  # measure the kernels of these operations only; everything if empty

    @property
    def pages_per_request(self) -> int:
        """W, the width of the page table."""
        return self.context // self.page_size

    @property
    def pages(self) -> int:
        """N, the pages of the pool: those of the requests, or more where `pool_bytes` asks for it; whole chunks."""
        page = 2 * self.kv_heads * self.page_size * self.head_dim * self.itemsize
        pages = max(self.batch * self.pages_per_request, -(-self.pool_bytes // page))
        return -(-pages // self.chunk_pages) * self.chunk_pages

    @property
    def chunk_pages(self) -> int:
        """Pages that are filled with random data at a time."""
        return min(512, self.batch * self.pages_per_request)

    @property
    def itemsize(self) -> int:
        """Bytes of one number of queries and outputs."""
        return ITEMSIZES[self.dtype]

    def bytes_read(self, tokens: int, ids: int, kv_dtype: str | None = None) -> int:
        """The fewest bytes an attention call moves.

        Keys and values of `tokens` per (request, KV head) stored as `kv_dtype` (that of the case if None), queries and
        outputs, and `ids` i32 altogether.
        """
        stored = ITEMSIZES[kv_dtype or self.dtype]
        keys_and_values = 2 * self.batch * self.kv_heads * tokens * self.head_dim * stored
        queries_and_outputs = 2 * self.batch * self.q_heads * self.head_dim * self.itemsize
        return keys_and_values + queries_and_outputs + 4 * ids


def _kept(batch: int, tokens: int) -> DecodeShape:
    return DecodeShape(
        name=f"b{batch}-32k-keep{tokens}",
        batch=batch,
        context=32_768,
        kept_tokens=tokens,
        kept_pages=tokens // 64,
        ops=("page-sparse", "token-sparse"),
    )


def _short(batch: int) -> DecodeShape:
    ops = ("dense", "page-sparse", "token-sparse", "select + page-sparse")
    return DecodeShape(name=f"b{batch}-8k", batch=batch, context=8192, ops=ops)


ATTENTION = (
    DecodeShape(name="b64-32k", batch=64, context=32_768),
    DecodeShape(name="b8-32k", batch=8, context=32_768),
    DecodeShape(name="b1-32k", batch=1, context=32_768),
    DecodeShape(name="b64-128k", batch=64, context=131_072),
    DecodeShape(name="b8-128k", batch=8, context=131_072),
    DecodeShape(name="b1-128k", batch=1, context=131_072),
    # More points for the plots: how time follows the context and the kept fraction.
    *(_short(batch) for batch in (64, 8, 1)),
    *(_kept(batch, tokens) for batch in (64, 8) for tokens in (512, 1024, 4096, 16_384)),
)
ATTENTION_QUICK = ("b64-32k", "b8-32k", "b1-128k")

_CPU: dict[str, Any] = dict(
    q_heads=8, kv_heads=2, head_dim=64, page_size=16, kept_tokens=256, kept_pages=16, dtype="float32", pool_bytes=0
)
ATTENTION_CPU = (
    DecodeShape(name="cpu-b1-4k", batch=1, context=4096, **_CPU),
    DecodeShape(name="cpu-b4-4k", batch=4, context=4096, **_CPU),
    DecodeShape(name="cpu-b4-16k", batch=4, context=16_384, **_CPU),
)
ATTENTION_CPU_QUICK = ("cpu-b1-4k", "cpu-b4-4k")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKShape:
    """The k largest of each row of float32 scores."""

    name: str
    rows: tuple[int, ...]
    size: int  # S, scores in a row
    k: int
    zeros: float = 0.0  # this fraction of the scores is exactly 0, as an indexer with a ReLU gives

    @property
    def bytes(self) -> int:
        """Every score is read and every id written."""
        return 4 * math.prod(self.rows) * (self.size + self.k)


TOP_K = (
    TopKShape(name="64x32k", rows=(64,), size=32_768, k=2048),
    TopKShape(name="64x32k-zeros", rows=(64,), size=32_768, k=2048, zeros=2 / 3),
    TopKShape(name="8x32k", rows=(8,), size=32_768, k=2048),
    TopKShape(name="1x128k", rows=(1,), size=131_072, k=2048),
    TopKShape(name="64x128k", rows=(64,), size=131_072, k=2048),
    TopKShape(name="64x9295", rows=(64,), size=9295, k=2048),
    TopKShape(name="1x1m", rows=(1,), size=2**20, k=2048),
    # Pages: many short rows.
    TopKShape(name="512x2k", rows=(64, 8), size=2048, k=64),
    TopKShape(name="512x512", rows=(64, 8), size=512, k=32),
)
TOP_K_QUICK = ("64x32k", "64x32k-zeros", "512x2k")
TOP_K_CPU = (
    TopKShape(name="cpu-8x4k", rows=(8,), size=4096, k=256),
    TopKShape(name="cpu-8x4k-zeros", rows=(8,), size=4096, k=256, zeros=2 / 3),
    TopKShape(name="cpu-64x256", rows=(64,), size=256, k=16),
)
TOP_K_CPU_QUICK = ("cpu-8x4k", "cpu-64x256")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """A whole decode step of a model of `layers` layers: the shape of its attention, and how many there are."""

    name: str
    attention: DecodeShape
    layers: tuple[int, ...] = (1, 8, 24)


STEP = (
    StepShape(name="b1-32k", attention=DecodeShape(name="b1-32k", batch=1, context=32_768)),
    StepShape(name="b8-32k", attention=DecodeShape(name="b8-32k", batch=8, context=32_768)),
)
STEP_QUICK = ("b1-32k",)
STEP_CPU = (
    StepShape(name="cpu-b2-1k", attention=DecodeShape(name="cpu-b2-1k", batch=2, context=1024, **_CPU), layers=(1, 4)),
)
STEP_CPU_QUICK = ("cpu-b2-1k",)

SELECT = (
    DecodeShape(name="b64-32k", batch=64, context=32_768),
    DecodeShape(name="b64-128k", batch=64, context=131_072),
    DecodeShape(name="b8-32k", batch=8, context=32_768),
    DecodeShape(name="b1-128k", batch=1, context=131_072),
)
SELECT_QUICK = ("b64-32k",)
SELECT_CPU = (DecodeShape(name="cpu-b4-4k", batch=4, context=4096, **_CPU),)
SELECT_CPU_QUICK = ("cpu-b4-4k",)


def _looped(name: str, batch: int, context: int) -> DecodeShape:
    """Ouro-1.4B: 16 heads, each with keys of its own; a tenth of the keys is kept."""
    kept = retained_count(context, 0.1)
    return DecodeShape(name=name, batch=batch, context=context, q_heads=16, kv_heads=16, kept_tokens=kept)


REFERENCE = (
    _looped("b1-1k", 1, 1024),
    _looped("b1-8k", 1, 8192),
    _looped("b1-32k", 1, 32_768),
    _looped("b8-8k", 8, 8192),
    _looped("b16-8k", 16, 8192),
)
REFERENCE_QUICK = ("b1-32k",)
REFERENCE_CPU = (DecodeShape(name="cpu-b2-1k", batch=2, context=1024, **_CPU | {"kept_tokens": 103}),)
REFERENCE_CPU_QUICK = ("cpu-b2-1k",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentShape:
    """One decode step of sparse MLA: requests with `context` tokens in a cache of latents, and an indexer's keys."""

    name: str
    batch: int  # B
    context: int  # S, tokens of each request
    heads: int  # Hq
    query_tokens: int = 1  # T
    kept_tokens: int = 2048  # C
    latent_dim: int = 512
    rope_dim: int = 64
    index_heads: int = 64
    index_dim: int = 128
    page_size: int = 64  # P
    dtype: str = "bfloat16"
    pool_bytes: int = 2**30  # the pool of latents holds at least this much, see DecodeShape
    ops: tuple[str, ...] = ()  # measure these operations only; everything if empty
    plain: tuple[str, ...] = ()  # plain XLA is timed for these on a GPU too

    @property
    def pages_per_request(self) -> int:
        """W, the width of the page table."""
        return self.context // self.page_size

    @property
    def width(self) -> int:
        """E, the columns of a query and of a cached row."""
        return self.latent_dim + self.rope_dim

    @property
    def pages(self) -> int:
        """N, the pages of the pools: those of the requests, or more where `pool_bytes` asks for it; whole chunks."""
        page = self.page_size * self.width * self.itemsize
        pages = max(self.batch * self.pages_per_request, -(-self.pool_bytes // page))
        return -(-pages // self.chunk_pages) * self.chunk_pages

    @property
    def chunk_pages(self) -> int:
        """Pages that are filled with random data at a time."""
        return min(512, self.batch * self.pages_per_request)

    @property
    def itemsize(self) -> int:
        """Bytes of one number of queries, outputs and plain caches."""
        return ITEMSIZES[self.dtype]

    def row_bytes(self, latents: str) -> int:
        """Of one token in a cache of the format; "plain" has the dtype of the case."""
        plain = self.width * self.itemsize
        return plain if latents == "plain" else latent_bytes(latents, self.latent_dim, self.rope_dim)

    def key_bytes(self, keys: str) -> int:
        """Of one token's index key, "plain" or "fp8" with its scale."""
        return self.index_dim * self.itemsize if keys == "plain" else self.index_dim + 4


def _latent(batch: int, context: int, heads: int, tokens: int = 1, **options: Any) -> LatentShape:
    name = f"b{batch}-{context}k-h{heads}" + (f"-t{tokens}" if tokens > 1 else "")
    return LatentShape(
        name=name, batch=batch, context=1024 * context, heads=heads, query_tokens=tokens, **options
    )  # fmt: skip


_SPARSE = ("sparse MLA", "sparse MLA, fp8_ds_mla")
_CHOOSING = ("indexer", "indexer, fp8 keys", "select + sparse MLA", "select + sparse MLA, fp8")
MLA = (
    _latent(
        128, 32, 128, plain=("sparse MLA",),
        ops=("dense MLA", *_SPARSE, "sparse MLA, sorted ids", "sparse MLA, nvfp4_ds_mla"),
    ),
    _latent(128, 32, 64, ops=_SPARSE),
    _latent(128, 32, 16, ops=("dense MLA", *_SPARSE, *_CHOOSING), plain=("indexer",)),
    *(_latent(128, 8, heads, ops=_SPARSE) for heads in (128, 64, 16)),  # of 1.2 GB, as is often quoted
    _latent(32, 32, 128, ops=_SPARSE),
    _latent(8, 128, 128, ops=("dense MLA", *_SPARSE, *_CHOOSING)),
    _latent(1, 128, 128, ops=("dense MLA", *_SPARSE, *_CHOOSING[:3]), plain=("dense MLA", "sparse MLA")),
    _latent(128, 32, 128, 2, ops=_SPARSE),
    _latent(128, 32, 16, 2, ops=_SPARSE),
    _latent(8, 32, 128, 2, ops=_SPARSE),
    _latent(8, 32, 16, 2, ops=_SPARSE[:1]),
)  # fmt: skip
MLA_QUICK = ("b128-32k-h128",)
# The other shapes, with every operation; measured where a pattern names them.
_EVERY_SHAPE = (_latent(*sizes) for sizes in itertools.product((128, 32, 8, 1), (32, 128), (128, 64, 16), (1, 2)))
MLA_MORE = tuple(case for case in _EVERY_SHAPE if case.name not in {named.name for named in MLA})
MLA_CPU = (
    LatentShape(
        name="cpu-b2-1k-h8", batch=2, context=1024, heads=8, kept_tokens=128, latent_dim=128, rope_dim=16,
        index_heads=8, index_dim=32, page_size=16, dtype="float32", pool_bytes=0,
    ),
)  # fmt: skip
MLA_CPU_QUICK = ("cpu-b2-1k-h8",)
