"""Inputs of the attention tests: frozen cases in lists, and arrays made from them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import sparse_jax

INT32_MIN = -(2**31)
OPS = ("paged", "page_sparse", "token_sparse")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One shape. S is the largest length; lengths are drawn up to it unless given."""

    name: str
    B: int = 2
    T: int = 1
    Hq: int = 8
    Hkv: int = 2
    D: int = 64
    Dv: int = 64
    P: int = 16
    W: int = 5
    C: int = 3  # chosen pages; 13 times as many tokens
    dtype: str = "float32"
    cache_dtype: str | None = None
    lengths: tuple[int, ...] | None = None
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    head_tables: bool = False
    row_lists: bool = False  # lists for each of the T rows
    q_positions: bool = False
    key_positions: bool = False
    scales: str | None = None  # "scalar" or "token"
    seed: int = 0

    def __str__(self):
        return self.name


COMMON = [
    AttentionCase(name="gqa4"),
    AttentionCase(name="gqa4_bf16", dtype="bfloat16", D=128, Dv=128, P=64, W=3),
    AttentionCase(name="mqa_fp16", dtype="float16", Hkv=1, P=32, head_tables=True),
    AttentionCase(name="mha_p1", Hq=2, P=1, W=37, C=19),
    AttentionCase(name="draft4", T=4, Hq=4, lengths=(61, 69)),
    AttentionCase(name="draft3_row_lists_window", T=3, row_lists=True, window=21, sinks=True),
]
CORNER = [
    AttentionCase(name="g3_d80_dv96", Hq=6, D=80, Dv=96),
    AttentionCase(name="g31_d192", Hq=31, Hkv=1, D=192, Dv=128, B=1),
    AttentionCase(name="g48_mqa", Hq=48, Hkv=1, B=1),
    AttentionCase(name="g17_mqa_d7_dv3", Hq=17, Hkv=1, D=7, Dv=3, P=4),
    AttentionCase(name="d576_dv512", Hq=2, Hkv=1, D=576, Dv=512, B=1, W=3),
    AttentionCase(name="window_softcap_sinks", window=29, soft_cap=2.0, sinks=True, P=8, W=11),
    AttentionCase(name="empty_rows", B=4, lengths=(3, 80, 0, -5)),
    AttentionCase(name="too_long", lengths=(1000, 2**31 - 1), q_positions=True),
    AttentionCase(name="moved_keys", key_positions=True, q_positions=True, T=2),
    AttentionCase(name="padding_rows", T=5, Hq=2, q_positions=True, window=40),
    AttentionCase(name="p128_bf16", dtype="bfloat16", P=128, W=2, C=1),
    AttentionCase(name="e4m3_scalar", dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="scalar"),
    AttentionCase(name="e4m3_token", dtype="bfloat16", cache_dtype="float8_e4m3fn", scales="token", T=2),
    AttentionCase(
        name="e4m3_d80_dv96", dtype="bfloat16", cache_dtype="float8_e4m3fn", Hq=6, D=80, Dv=96, scales="scalar"
    ),
    AttentionCase(name="e4m3_d7_dv3", dtype="bfloat16", cache_dtype="float8_e4m3fn", D=7, Dv=3, T=2, scales="token"),
    AttentionCase(name="e4m3_fp16_query", dtype="float16", cache_dtype="float8_e4m3fn", scales="token", soft_cap=3.0),
    AttentionCase(name="e4m3_f32_query", cache_dtype="float8_e4m3fn", scales="token", B=1),
    AttentionCase(name="bf16_cache_f32_query", cache_dtype="bfloat16"),
]
CASES = {case.name: case for case in COMMON + CORNER}


def make_inputs(case):
    """Arrays of a case: shuffled pages, and invalid ids among the valid ones."""
    rng = np.random.default_rng(case.seed + sum(map(ord, case.name)))
    pages = case.B * case.W * (case.Hkv if case.head_tables else 1) + 2
    heads = (case.Hkv,) if case.head_tables else ()
    table = rng.permutation(pages)[: case.B * case.W * max(1, *heads, 1)].reshape(case.B, *heads, case.W)
    table = np.where(rng.random(table.shape) < 0.1, invalid(rng, table.shape, pages), table).astype(np.int32)
    table[..., 0] = np.abs(table[..., 0]) % pages  # each row keeps something to see
    lengths = case.lengths or tuple(rng.integers(1 + case.P * (case.W - 1) // 2, case.P * case.W + 1, case.B))
    lists = (case.B, case.T, case.Hkv) if case.row_lists else (case.B, case.Hkv)
    page_indices = np.array([rng.permutation(case.W)[: case.C] for _ in range(int(np.prod(lists)))]).reshape(*lists, -1)
    page_indices = np.where(
        rng.random(page_indices.shape) < 0.2, invalid(rng, page_indices.shape, case.W), page_indices
    )
    slots = rng.integers(0, pages * case.P, (*lists, case.C * 13))
    slots = np.where(rng.random(slots.shape) < 0.2, invalid(rng, slots.shape, pages * case.P), slots)
    position = np.maximum(np.minimum(lengths, case.P * case.W), 0)[:, None] - rng.integers(0, 9, (case.B, case.T))
    key_positions = np.stack([rng.permutation(case.P * case.W)[: case.P] for _ in range(pages * case.Hkv)]) - 1
    cache = case.cache_dtype or case.dtype
    scale_shape = {"scalar": (), "token": (pages, case.Hkv, case.P), None: None}[case.scales]
    inputs = {
        "q": jnp.asarray(rng.standard_normal((case.B, case.T, case.Hq, case.D)), case.dtype),
        "k_pages": jnp.asarray(rng.standard_normal((pages, case.Hkv, case.P, case.D)), cache),
        "v_pages": jnp.asarray(rng.standard_normal((pages, case.Hkv, case.P, case.Dv)), cache),
        "page_table": jnp.asarray(table, jnp.int32),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "page_indices": jnp.asarray(page_indices, jnp.int32),
        "slots": jnp.asarray(slots, jnp.int32),
        "q_positions": jnp.asarray(np.where(rng.random(position.shape) < 0.3, -1, position), jnp.int32)
        if case.q_positions
        else None,
        "key_positions": jnp.asarray(key_positions.reshape(pages, case.Hkv, case.P), jnp.int32)
        if case.key_positions
        else None,
        "sinks": jnp.asarray(rng.standard_normal(case.Hq), jnp.float32) if case.sinks else None,
        "k_scale": None if scale_shape is None else jnp.asarray(rng.uniform(0.5, 2, scale_shape), jnp.float32),
        "v_scale": None if scale_shape is None else jnp.asarray(rng.uniform(0.5, 2, scale_shape), jnp.float32),
    }
    return inputs


def invalid(rng, shape, limit):
    """Absent and out of range: -1, far too large, the most negative int32, and exactly the limit."""
    return rng.choice(np.array([-1, 2**31 - 1, INT32_MIN, limit], np.int64), shape)


def poisoned(op, case, inputs, fill=np.nan):
    """The inputs with `fill` in every key and value that no row of this operation sees."""
    from tests.oracle import rows_of

    x = {name: None if value is None else np.asarray(value) for name, value in inputs.items()}
    seen_by, used = rows_of(case, x)[op], np.zeros(x["k_pages"].shape[:3], bool)
    for b, t, h in np.ndindex(case.B, case.T, case.Hkv):
        for place in seen_by(b, t, h):
            if place != -1:
                used[place[0], h, place[1]] = True
    used, hidden = jnp.asarray(used), {}
    for name in ("k_pages", "v_pages", "k_scale", "v_scale"):
        array = inputs[name]
        if array is not None and array.ndim > 2:
            keep = used[..., None] if array.ndim == 4 else used
            hidden[name] = jnp.where(keep, array, jnp.asarray(fill, array.dtype))
    return {**inputs, **hidden}


def call(op, case, x, *, implementation, config=None, **options):
    """Runs a public operation on the arrays of `make_inputs`."""
    options = {
        "scale": case.scale,
        "soft_cap": case.soft_cap,
        "implementation": implementation,
        "config": config,
        **options,
    }
    options |= {name: x[name] for name in ("sinks", "k_scale", "v_scale")}
    if op == "token_sparse":
        return sparse_jax.token_sparse_attention(x["q"], x["k_pages"], x["v_pages"], x["slots"], **options)
    options |= {"window": case.window, "q_positions": x["q_positions"], "key_positions": x["key_positions"]}
    pages = [x["q"], x["k_pages"], x["v_pages"], x["page_table"], x["lengths"]]
    if op == "paged":
        return sparse_jax.paged_attention(*pages, **options)
    return sparse_jax.page_sparse_attention(*pages, x["page_indices"], **options)


def reference(op, case, x, **options):
    """The plain-jnp meaning in float32 at highest precision, on the same (dequantised) values."""
    upcast = {n: x[n].astype(jnp.float32) for n in ("q", "k_pages", "v_pages")}
    return call(op, case, {**x, **upcast}, implementation="xla", **options)
