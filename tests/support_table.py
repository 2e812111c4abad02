"""Writes docs/support.md: what sparse GQA supports, from the scenarios that test it, and what is refused, by asking.

    python -m tests.support_table

tests/test_support.py checks that the committed file is what this gives, and that the tests it names exist.
"""

import collections
from pathlib import Path

import jax
import jax.numpy as jnp

import sparse_jax
from sparse_jax import compaction, paging
from tests import gqa_scenarios as scenarios

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "support.md"
SUPPORT, PREFILL = "tests/sparse_jax/test_gqa_support.py", "tests/sparse_jax/test_gqa_prefill.py"
COMPACTION, RELATIONS = "tests/sparse_jax/test_gqa_compaction.py", "tests/sparse_jax/test_gqa_relations.py"
DECODE = "tests/sparse_jax/test_compaction_decode.py"

# Each list of scenarios, what it holds, and the test that runs all of it.
LISTS = {
    "TOKEN_DECODE": ("token-sparse decode and drafts", f"{SUPPORT}::test_token_sparse"),
    "DTYPE_GRID": ("token-sparse decode: dtype x width x heads", f"{SUPPORT}::test_token_sparse"),
    "E4M3_GRID": ("token-sparse decode: e4m3 cache x width x heads x output", f"{SUPPORT}::test_token_sparse"),
    "PAGE_GRID": ("token-sparse decode: page sizes", f"{SUPPORT}::test_token_sparse"),
    "TOKEN_PREFILL": ("token-sparse prefill, packed", f"{PREFILL}::test_token_sparse_prefill"),
    "PAGE_SPARSE": ("page-sparse prefill, decode and drafts", f"{SUPPORT}::test_page_sparse"),
    "COMPACTION": ("KV compaction at prefill", f"{COMPACTION}::test_compaction"),
    "BEYOND_TOKEN": ("token-sparse, of this project", f"{SUPPORT}::test_token_sparse_beyond"),
    "BEYOND_PAGE": ("page-sparse, of this project", f"{SUPPORT}::test_page_sparse_beyond"),
}

# What is tested beside the scenarios.
ALSO = {
    "pages anywhere in the pool, in any plane of it, with NaN wherever no row looks: the same bits": (
        f"{SUPPORT}::test_token_sparse", f"{SUPPORT}::test_page_sparse",
    ),
    "absent ids (-1, or out of range) anywhere in a row": (
        f"{SUPPORT}::test_token_sparse", f"{SUPPORT}::test_page_sparse",
    ),
    "everything chosen equals dense `paged_attention`, out and lse": (
        f"{RELATIONS}::test_everything_chosen_is_dense_attention",
    ),
    "chosen pages equal the tokens in them": (f"{RELATIONS}::test_pages_are_the_tokens_in_them",),
    "drafts in one call equal single tokens": (f"{RELATIONS}::test_drafts_in_one_call_equal_single_tokens",),
    "packed query rows, each with its own table row, length and position": (
        f"{RELATIONS}::test_packed_queries_equal_a_padded_batch",
    ),
    "decode after compaction at prefill, or of a cache that is in pages already": (
        f"{COMPACTION}::test_a_compacted_cache_serves_decode",
    ),
    "decode from a compacted cache: dense, window, chosen pages, chosen tokens; in `lax.scan`": (
        f"{DECODE}::test_decode_in_a_scan_sees_true_positions",
    ),
    "drafts on a compacted cache": (f"{DECODE}::test_drafts_see_what_was_kept_and_earlier_drafts",),
    "window, soft cap, sinks, moved keys, lengths above the table": (
        "tests/pallas_kernels/test_decode_kernels.py::test_interpret",
    ),
    "gradients (plain jnp, and `implementation=None`)": (
        "tests/sparse_jax/test_transforms.py::test_case_TRANSFORM_1_gradient",
    ),
    "`vmap`": ("tests/sparse_jax/test_transforms.py::test_vmap_equals_a_loop",),
}  # fmt: skip

INTRODUCTION = """\
Written by `python -m tests.support_table` from the scenarios that are tested and from the errors that are raised; not
to be edited. "Token-sparse" is `token_sparse_attention`, "page-sparse" is `page_sparse_attention` (block-sparse: a
block is a page). Every scenario runs in plain jnp on a CPU, some in the interpreter, and with `pytest -m gpu` all as
the kernel on a GPU, against a float64 reference that knows no pages: float32 within 2e-5, fp16 2e-3, bf16 and e4m3
1e-2, absolute and relative, with a cosine above 0.9999. An e4m3 output may be one rounding further off (cosine above
0.999)."""

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3"}
PHASES = {"prefill": "prefill", "decode": "decode, one token", "draft": "draft rows, several tokens of a request"}


def _queries(case):
    return "lengths differ in the batch" if len(set(case.queries)) > 1 else max(case.queries)


FEATURES = {
    "phase": lambda case: PHASES[case.phase],
    "query tokens of a request (T)": _queries,
    "position of the first query": lambda case: "given for each request" if case.offsets else "the end of the cache",
    "query heads of a KV head (G)": lambda case: case.G,
    "KV heads": lambda case: case.Hkv,
    "key width (D)": lambda case: case.D,
    "value width (Dv), where it differs": lambda case: None if case.value_width == case.D else case.value_width,
    "tokens of a page (P)": lambda case: case.P,
    "chosen tokens or pages (C)": lambda case: case.C,
    "ids": lambda case: f"for each {'query token and ' if case.per_token else ''}KV head",
    "page tables": lambda case: "for each KV head" if case.head_tables else "for each request",
    "length of a request": lambda case: "any" if any(s % case.P for s in case.lengths) else "whole pages",
    "queries": lambda case: DTYPES[case.dtype],
    "cache": lambda case: DTYPES[case.pool_dtype],
    "scales of the cache": lambda case: {None: "none", "tensor": "one", "token": "for each token"}[case.scales],
    "output": lambda case: DTYPES[case.result_dtype],
}


def _attention(op, *, q=(2, 4, 8), pool=(4, 2, 4, 8), ids=(2, 2, 3), **options):
    """A small call of an operation, with arrays of zeros of these shapes or the arrays themselves."""
    q, pool = (jnp.zeros(x) if isinstance(x, tuple) else x for x in (q, pool))
    ids = jnp.zeros(ids, jnp.int32) if isinstance(ids, tuple) else ids
    table, lengths = jnp.zeros((2, 2), jnp.int32), jnp.ones(2, jnp.int32)
    arguments = {"paged": (table, lengths), "page_sparse": (table, lengths, ids), "token_sparse": (ids,)}[op]
    return getattr(sparse_jax, f"{op}_attention")(q, pool, pool, *arguments, **options)


def _on_a_cpu():
    """Lowered for a CPU, also where there is a GPU."""
    run = jax.jit(lambda: _attention("paged", implementation="triton"))
    return run.trace().lower(lowering_platforms=("cpu",))


def _one_byte_pool():
    """By shapes alone: the pool would have 63/64 of 3 * 2^30 elements."""
    pool = jax.ShapeDtypeStruct((3 * 2**16, 16, 16, 63), jnp.float8_e4m3fn)
    q, ids = jax.ShapeDtypeStruct((1, 16, 63), jnp.bfloat16), jax.ShapeDtypeStruct((1, 16, 4), jnp.int32)
    return jax.eval_shape(
        lambda q, k, v, ids: sparse_jax.token_sparse_attention(q, k, v, ids, implementation="triton"),
        q,
        pool,
        pool,
        ids,
    )


def _derivative():
    return jax.grad(lambda q: _attention("paged", q=q, implementation="interpret").out.sum())(jnp.zeros((2, 4, 8)))


def _state():
    sizes = {"planes": 1, "pages": 2, "page_size": 4, "kv_heads": 1, "key_width": 1, "requests": 2}
    return compaction.track(paging.create(**sizes, pages_per_request=2))


def _without_room():
    kept = jnp.array([4, 5], jnp.int32)
    state, _ = compaction.reserve_prompt(_state(), jnp.array([9, 9], jnp.int32), kept, 5)
    paging.check(state.paged)


REFUSED = {
    "Hq that is no multiple of Hkv": lambda: _attention("token_sparse", q=(2, 3, 8)),
    "a page size that is no power of two": lambda: _attention("paged", pool=(4, 2, 3, 8)),
    "keys of another width than the queries": lambda: _attention("paged", q=(2, 4, 16)),
    "integer queries": lambda: _attention("paged", q=jnp.zeros((2, 4, 8), jnp.int8)),
    "a float8_e5m2 cache": lambda: _attention("paged", pool=jnp.zeros((4, 2, 4, 8), jnp.float8_e5m2)),
    "an output of another dtype": lambda: _attention("paged", out_dtype=jnp.int8),
    "no ids at all (C = 0)": lambda: _attention("token_sparse", ids=(2, 2, 0)),
    "ids for another number of KV heads": lambda: _attention("token_sparse", ids=(2, 4, 3)),
    "ids for another number of rows": lambda: _attention("page_sparse", q=(2, 3, 4, 8), ids=(2, 2, 2, 3)),
    "a mask where ids belong": lambda: _attention("token_sparse", ids=jnp.ones((2, 2, 3), bool)),
    "a window over chosen tokens": lambda: _attention("token_sparse", window=4),
    "a window of no token": lambda: _attention("paged", window=0),
    "a soft cap that is not positive": lambda: _attention("paged", soft_cap=0.0),
    "a scale that is not finite": lambda: _attention("paged", scale=float("inf")),
    "the kernel on a CPU": _on_a_cpu,
    "the kernel on 2^31 to 2^32 one-byte elements of odd width": _one_byte_pool,
    "the derivative of a kernel": _derivative,
    "another selection shape in compaction": lambda: compaction.compact(_state(), jnp.zeros((2, 3, 4), jnp.int32)),
    "a pool too small for what is kept (`paging.check`; inside jit it is a status)": _without_room,
}


def refusal(call):
    """(type of the error, its text on one line) that a call raises; it must raise."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, " ".join(str(error).split())
    raise AssertionError("this is not refused any more")


def evidence(op):
    """{(feature, value): [scenarios with it]} of one operation."""
    found = collections.defaultdict(list)
    for case in scenarios.ATTENTION:
        if case.op == op:
            for feature, value_of in FEATURES.items():
                if (value := value_of(case)) is not None:
                    found[feature, value].append(case)
    return found


def _names(cases):
    names = list(dict.fromkeys(case.name for case in cases))
    return ", ".join(f"`{name}`" for name in names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _order(value):
    return (isinstance(value, str), value)


def feature_rows():
    """Cells of the table of features: feature, value, evidence for token-sparse and for page-sparse."""
    token, page = evidence("token_sparse"), evidence("page_sparse")
    for feature in FEATURES:
        values = {value for name, value in (*token, *page) if name == feature}
        for value in sorted(values, key=_order):
            yield feature, value, _names(token.get((feature, value), [])), _names(page.get((feature, value), []))


def table(header, rows):
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def document():
    """The text of docs/support.md."""
    lists = [
        (what, len(cases), f"`{test}`", ", ".join(f"`{case.name}`" for case in cases))
        for name, (what, test) in LISTS.items()
        for cases in [getattr(scenarios, name)]
    ]
    also = [(what, ", ".join(f"`{test}`" for test in tests)) for what, tests in ALSO.items()]
    refused = [(what, *(f"`{part}`" for part in refusal(call))) for what, call in REFUSED.items()]
    parts = [
        "# What sparse GQA supports",
        INTRODUCTION,
        "## Supported, by feature",
        f"The scenarios that show it, of {len(scenarios.ATTENTION)}; an empty cell is not tested there.",
        table(["feature", "value", "token-sparse", "page-sparse"], feature_rows()),
        "## Supported, beside the scenarios",
        table(["what", "test"], also),
        "## Scenarios",
        "The first seven lists have the names of TensorRT-LLM's tests of sparse MQA and GQA; members of grids are\n"
        "named by what they are. The last two are what those tests do not reach.",
        table(["list", "count", "test", "scenarios"], lists),
        "## Refused",
        "What a call raises, and its text.",
        table(["what", "error", "text"], refused),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
