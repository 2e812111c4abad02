"""Shapes of the benchmarks, by name."""

import dataclasses
from typing import Any


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
        """Bytes of one stored number."""
        return {"bfloat16": 2, "float16": 2, "float32": 4}[self.dtype]

    def bytes_read(self, tokens: int, ids_per_row: int) -> int:
        """The fewest bytes a call moves: keys and values of `tokens` per (request, KV head), queries, outputs, ids."""
        keys_and_values = 2 * self.batch * self.kv_heads * tokens * self.head_dim * self.itemsize
        queries_and_outputs = 2 * self.batch * self.q_heads * self.head_dim * self.itemsize
        return keys_and_values + queries_and_outputs + 4 * self.batch * self.kv_heads * ids_per_row


ATTENTION = (
    DecodeShape(name="b64-32k", batch=64, context=32_768),
    DecodeShape(name="b8-32k", batch=8, context=32_768),
    DecodeShape(name="b1-32k", batch=1, context=32_768),
    DecodeShape(name="b64-128k", batch=64, context=131_072),
    DecodeShape(name="b8-128k", batch=8, context=131_072),
    DecodeShape(name="b1-128k", batch=1, context=131_072),
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
