"""The scenarios of TensorRT-LLM's sparse MQA and GQA tests, by their names, and what this library supports beyond them.

Frozen cases in lists, for tests, the table in docs/support.md and benchmarks (`Scenario.scaled`). Arrays are made from
them in tests/gqa_inputs.py.
"""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """One attention call. Ids are drawn per KV head and, where `per_token`, per query token."""

    name: str
    op: str  # "token_sparse" or "page_sparse"
    phase: str  # "prefill", "decode" (one token of each request) or "draft" (several)
    queries: tuple[int, ...]  # query tokens of each request in this call
    lengths: tuple[int, ...]  # tokens of each request in the cache, those of this call included
    offsets: tuple[int, ...] | None = None  # position of the first query token; default length - queries
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    Dv: int | None = None  # default D
    P: int = 32
    C: int = 64  # chosen tokens or pages
    per_token: bool = True
    dtype: str = "bfloat16"  # of the queries
    cache_dtype: str | None = None  # default dtype
    out_dtype: str | None = None  # default dtype; bfloat16 for float8_e4m3fn queries
    scales: str | None = None  # of the cache: "tensor" or "token"
    head_tables: bool = False  # a page table for each KV head

    def __str__(self):
        return self.name

    @property
    def G(self):
        return self.Hq // self.Hkv

    @property
    def value_width(self):
        return self.Dv or self.D

    @property
    def pool_dtype(self):
        return self.cache_dtype or self.dtype

    @property
    def result_dtype(self):
        return self.out_dtype or ("bfloat16" if self.dtype == "float8_e4m3fn" else self.dtype)

    @property
    def first_positions(self):
        """Position of the first query token of each request."""
        return self.offsets or tuple(s - t for s, t in zip(self.lengths, self.queries))

    def scaled(self, tokens):
        """The same scenario with `tokens` in its longest request, as a benchmark wants it."""
        longest = max(self.lengths)
        lengths = tuple(max(tokens * s // longest, t) for s, t in zip(self.lengths, self.queries))
        return dataclasses.replace(self, name=f"{self.name}_{tokens}", lengths=lengths, offsets=None)

    @property
    def bytes_read(self):
        """The fewest bytes of keys and values that a call reads: each chosen token once for each list."""
        item = jnp.dtype(self.pool_dtype).itemsize
        chosen = 0
        for queries, length in zip(self.queries, self.lengths):
            most = min(self.C * (self.P if self.op == "page_sparse" else 1), length)
            chosen += most * (queries if self.per_token else 1)
        return chosen * self.Hkv * (self.D + self.value_width) * item


def token_decode(name, past, T=1, **options):
    """One-token decode: `past` tokens, and T new ones behind them."""
    phase = "decode" if T == 1 else "draft"
    lengths = tuple(s + T for s in past)
    return Scenario(name=name, op="token_sparse", phase=phase, queries=(T,) * len(past), lengths=lengths, **options)


def token_prefill(name, lengths, **options):
    return Scenario(name=name, op="token_sparse", phase="prefill", queries=lengths, lengths=lengths, **options)


def page_sparse(name, queries, lengths, C=16, per_token=False, **options):
    phase = "prefill" if max(queries) > 8 else "decode" if max(queries) == 1 else "draft"
    shape = {"P": 128, "C": C, "per_token": per_token} | options
    return Scenario(name=name, op="page_sparse", phase=phase, queries=queries, lengths=lengths, **shape)


EIGHT = (64, 96, 128, 160, 192, 224, 256, 288)
TOKEN_DECODE = [
    token_decode("batch2_var_kv", (96, 128)),
    token_decode("batch4_var_kv", (192, 224, 256, 288)),
    token_decode("batch1_kv64", (64,)),
    token_decode("batch3_var_kv", (128, 160, 192)),
    token_decode("mqa_8q1kv", (96, 128), Hq=8, Hkv=1),
    token_decode("gqa_16q4kv", (128, 256), Hq=16, Hkv=4),
    token_decode("gqa_8q4kv", (128, 256), Hq=8, Hkv=4),
    token_decode("mqa_group32_boundary", (128,), Hq=32, Hkv=1),
    token_decode("gqa_group32_boundary", (128,), Hq=64, Hkv=2),
    token_decode("gqa_group3_non_power_of_two", (64,), Hq=6, Hkv=2),
    token_decode("gqa_group16", (64,), Hq=32, Hkv=2),
    token_decode("gqa_group24", (64,), Hq=48, Hkv=2),
    token_decode("gqa_group31", (64,), Hq=62, Hkv=2),
    token_decode("gqa_2to1_with_3_draft_tokens", (64,), T=4, C=32, Hq=8, Hkv=4),
    token_decode("topk4_min", (128,), C=4),
    token_decode("topk128_exceeds_some", (32, 256), C=128),
    token_decode("batch8_varied", EIGHT),
    token_decode("page_size_64", (64, 192), P=64),
]
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "e4m3"}
DTYPE_GRID = [
    token_decode(f"{NAMES[dtype]}_d{D}_8q{Hkv}kv", (64,), C=32, Hq=8, Hkv=Hkv, D=D, dtype=dtype)
    for dtype in ("bfloat16", "float16")
    for D in (64, 80, 128, 256)
    for Hkv in (1, 4)
    if (dtype, D) != ("bfloat16", 128)  # covered above
]
E4M3_GRID = [
    token_decode(
        f"e4m3_d{D}_8q{Hkv}kv_out_{NAMES[out]}",
        (64,), C=32, Hq=8, Hkv=Hkv, D=D, cache_dtype="float8_e4m3fn", out_dtype=out,
    )
    for D in (64, 128, 256)
    for Hkv in (1, 4)
    for out in ("bfloat16", "float8_e4m3fn")
]  # fmt: skip
PAGE_GRID = [token_decode(f"page_size_{P}", (64,), C=32, P=P) for P in (8, 16, 128, 256, 512)]
TOKEN_PREFILL = [
    token_prefill("mqa_8q1kv", (128, 64), Hq=8, Hkv=1),
    token_prefill("gqa_8q2kv", (128, 64), Hq=8, Hkv=2),
    token_prefill("gqa_16q4kv_batch3", (64, 96, 128), Hq=16, Hkv=4),
    token_prefill("gqa_32q4kv", (64, 128), Hq=32, Hkv=4),
    token_prefill("topk4_very_sparse", (64, 128), Hq=8, Hkv=1, C=4),
    token_prefill("topk128_near_dense", (64, 128), Hq=8, Hkv=2, C=128),
]
E4M3 = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}
PAGE_SPARSE = [
    page_sparse("msa_mqa_single_token_varlen_batch4", (1,) * 4, (2176, 2304, 2432, 2560), Hq=16, Hkv=1),
    page_sparse("msa_gqa_linear_draft_tokens", (4, 4), (2176, 2304), Hq=32, Hkv=2, per_token=True),
    page_sparse("msa_gqa_single_token_2q_per_kv", (1,), (2176,), Hq=4, Hkv=2),
    page_sparse("msa_gqa_single_token_4q_per_kv", (1,), (2176,), Hq=8, Hkv=2),
    page_sparse("msa_gqa_single_token_8q_per_kv", (1,), (2176,), Hq=16, Hkv=2),
    page_sparse("msa_gqa_decode_topk4", (1,), (640,), Hq=16, Hkv=2, C=4),
    page_sparse("msa_gqa_decode_topk8", (1,), (1152,), Hq=16, Hkv=2, C=8),
    page_sparse("msa_gqa_8q_per_kv_topk16", (33,), (2176,), Hq=16, Hkv=2),
    page_sparse("msa_gqa_16q_per_kv_topk32", (33,), (4224,), Hq=32, Hkv=2, C=32),
    page_sparse("msa_mqa_fp8_qkv_bf16_output", (33,), (2176,), Hq=16, Hkv=1, per_token=True, **E4M3),
    page_sparse("msa_gqa_custom_per_request_q_offsets", (33, 40), (2176, 2304), Hq=16, Hkv=2, offsets=(512, 1024)),
    page_sparse("msa_gqa_fp8_single_token", (1, 1), (2176, 2304), Hq=32, Hkv=2, **E4M3),
]

# What those lists do not reach: this library's own targets.
_8Q2 = {"Hq": 8, "Hkv": 2, "D": 64}
BEYOND_TOKEN = [
    token_decode("fp32_d96", (64, 93), Hq=8, Hkv=2, D=96, dtype="float32"),
    token_decode("fp32_d192_dv128", (61,), Hq=4, Hkv=2, D=192, Dv=128, dtype="float32"),
    token_decode("d7_dv3", (64,), Hq=6, Hkv=2, D=7, Dv=3, dtype="float32"),
    token_decode("fp16_d192", (61, 64), Hq=8, Hkv=2, D=192, dtype="float16"),
    token_decode("bf16_d96", (64,), Hq=8, Hkv=4, D=96),
    token_decode("mha_8q8kv", (96, 69), Hq=8, Hkv=8),
    token_decode("mha_1q1kv", (96,), Hq=1, Hkv=1),
    token_decode("gqa_group5", (64,), Hq=10, Hkv=2),
    token_decode("gqa_group7", (64,), Hq=28, Hkv=4),
    token_decode("group64_mqa", (64,), Hq=64, Hkv=1),
    *(token_decode(f"page_size_{P}", (61, 64), P=P, **_8Q2) for P in (1, 2, 4)),
    *(token_decode(f"topk{C}", (130,), C=C, **_8Q2) for C in (1, 3, 33, 127)),
    token_decode("topk2048", (2500,), C=2048, P=64, **_8Q2),
    token_decode("topk4096", (8191,), C=4096, P=64, **_8Q2),
    *(token_decode(f"draft_{T}", (61, 96), T=T, C=32, **_8Q2) for T in (2, 3, 5, 6, 7, 8)),
    token_decode("draft_4_shared_lists", (61, 96), T=4, C=32, per_token=False, **_8Q2),
    Scenario(name="draft_lengths_differ", op="token_sparse", phase="draft", queries=(3, 0, 1, 8),
             lengths=(64, 9, 33, 8), C=32, **_8Q2),
    token_decode("e4m3_tensor_scales", (96,), cache_dtype="float8_e4m3fn", scales="tensor", **_8Q2),
    token_decode("e4m3_token_scales", (96, 61), cache_dtype="float8_e4m3fn", scales="token", **_8Q2),
    token_decode("e4m3_d80_token_scales", (96,), Hq=8, Hkv=2, D=80, cache_dtype="float8_e4m3fn", scales="token"),
    token_decode("e4m3_d7_dv3", (96,), Hq=8, Hkv=2, D=7, Dv=3, cache_dtype="float8_e4m3fn", scales="token"),
    token_decode("e4m3_fp16_queries", (96,), dtype="float16", cache_dtype="float8_e4m3fn", scales="tensor", **_8Q2),
    token_decode("e4m3_fp32_queries", (96,), dtype="float32", cache_dtype="float8_e4m3fn", **_8Q2),
    token_decode("e4m3_queries", (96,), dtype="float8_e4m3fn", **_8Q2),
    token_decode("bf16_cache_fp32_queries", (96,), dtype="float32", cache_dtype="bfloat16", **_8Q2),
    token_decode("head_tables", (96, 61), head_tables=True, Hq=8, Hkv=4, D=64),
]  # fmt: skip
BEYOND_PAGE = [
    page_sparse("any_length", (1, 1), (2047, 300), C=5, **_8Q2),
    page_sparse("fewer_pages_than_chosen", (1, 1), (130, 5), C=16, **_8Q2),
    page_sparse("group3", (1,), (700,), C=3, Hq=6, Hkv=2, D=64),
    *(page_sparse(f"group{G}", (1,), (700,), C=3, Hq=2 * G, Hkv=2, D=64) for G in (24, 31, 32)),
    page_sparse("mha", (1,), (300,), C=2, Hq=4, Hkv=4, D=64),
    *(page_sparse(f"page_size_{P}", (1, 1), (61, 93), C=7, P=P, **_8Q2) for P in (1, 8, 16, 32, 64)),
    *(page_sparse(f"page_size_{P}", (1,), (1111,), C=2, P=P, **_8Q2) for P in (256, 512)),
    *(page_sparse(f"d{D}", (1,), (300,), C=2, Hq=4, Hkv=2, D=D) for D in (64, 80, 96, 192, 256)),
    page_sparse("fp32_dv_differs", (3,), (333,), C=2, Hq=4, Hkv=2, D=96, Dv=64, dtype="float32", per_token=True),
    page_sparse("fp16", (1,), (300,), C=2, Hq=4, Hkv=2, D=64, dtype="float16"),
    page_sparse("topk1", (1,), (300,), C=1, **_8Q2),
    page_sparse("draft_8", (8, 8), (333, 200), C=2, P=64, per_token=True, **_8Q2),
    page_sparse("varlen_batch", (5, 1, 0, 3), (333, 200, 77, 3), C=3, P=32, per_token=True, **_8Q2),
    page_sparse("head_tables", (2, 2), (333, 200), C=4, P=32, head_tables=True, Hq=8, Hkv=4, D=64),
    page_sparse("e4m3_tensor_scales", (1,), (333,), C=2, cache_dtype="float8_e4m3fn", scales="tensor", **_8Q2),
    page_sparse("e4m3_token_scales", (2,), (333,), C=4, P=32, cache_dtype="float8_e4m3fn", scales="token", **_8Q2),
    page_sparse("e4m3_output", (1,), (333,), C=2, cache_dtype="float8_e4m3fn", out_dtype="float8_e4m3fn", **_8Q2),
]

DECODE = TOKEN_DECODE + DTYPE_GRID + E4M3_GRID + PAGE_GRID
BENCHMARK = [case for case in DECODE + PAGE_SPARSE if case.phase != "prefill"]
ATTENTION = DECODE + BEYOND_TOKEN + TOKEN_PREFILL + PAGE_SPARSE + BEYOND_PAGE


def named(name, cases):
    """The scenario of that name in a list."""
    (found,) = (case for case in cases if case.name == name)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compaction:
    """A prompt of which each KV head keeps tokens of its own: min(kept, length) for each request."""

    name: str
    lengths: tuple[int, ...]
    W: int  # pages for each request
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    P: int = 32
    kept: int = 64
    dtype: str = "bfloat16"

    def __str__(self):
        return self.name

    @property
    def counts(self):
        """Tokens kept of each request."""
        return tuple(min(self.kept, length) for length in self.lengths)


COMPACTION = [
    Compaction(name="batch2_var_seq", lengths=(48, 64), W=8),
    Compaction(name="batch4_var_seq", lengths=(96, 112, 128, 144), W=16),
    Compaction(name="batch1_seq256", lengths=(256,), W=8),
    Compaction(name="batch3_var_seq", lengths=(64, 96, 128), W=12),
    Compaction(name="mha_8q8kv", lengths=(128,), W=8, Hq=8),
]
