"""The contracts of the attention operations, one test or more each, named after them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import sparse_jax
from pallas_kernels import lowering
from sparse_jax import Config
from tests.attention_cases import CASES, OPS, call, invalid, make_inputs, poisoned, reference
from tests.compare import assert_close, assert_same_bits

EXACT = Config(exact=True)
BOTH = ["xla", "interpret"]


def scalar_inputs(scores, values, *, page_size, table, lengths):
    """D = 1 with q = 1, so that a key is its own score."""
    k = jnp.asarray(scores, jnp.float32).reshape(-1, 1, page_size, 1)
    v = jnp.asarray(values, jnp.float32).reshape(-1, 1, page_size, 1)
    q = jnp.ones((len(lengths), 1, 1), jnp.float32)
    return q, k, v, jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", OPS)
def test_contract_1_ids_out_of_range_are_absent(op, implementation):
    case = CASES["gqa4"]
    x, rng = make_inputs(case), np.random.default_rng(1)
    limits = {"page_table": x["k_pages"].shape[0], "page_indices": case.W, "slots": x["k_pages"].shape[0] * case.P}
    wild, absent = dict(x), dict(x)
    for name, limit in limits.items():
        hit = rng.random(x[name].shape) < 0.4
        wild[name] = jnp.where(hit, jnp.asarray(invalid(rng, x[name].shape, limit), jnp.int32), x[name])
        absent[name] = jnp.where(hit | (x[name] < 0) | (x[name] >= limit), -1, x[name])
    got = call(op, case, wild, implementation=implementation)
    assert_same_bits(got.out, call(op, case, absent, implementation=implementation).out)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", OPS)
def test_contract_1_wide_numpy_ids_do_not_wrap(op, implementation):
    """NumPy's integers have 64 bits, and JAX would narrow them by dropping the upper half."""
    case = CASES["gqa4"]
    x = make_inputs(case)
    names = ("page_table", "slots", "page_indices")
    wild = {n: np.asarray(x[n]).astype(np.int64) + np.where(np.asarray(x[n]) % 2 == 0, 2**32, 0) for n in names}
    absent = {n: jnp.where(x[n] % 2 == 0, -1, x[n]) for n in names}
    a, b = (call(op, case, {**x, **y}, implementation=implementation) for y in (wild, absent))
    assert_same_bits(a.out, b.out)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", ["paged", "page_sparse"])
def test_contract_1_extreme_positions_lengths_and_windows_do_not_wrap(op, implementation):
    case = dataclasses.replace(CASES["draft4"], lengths=(61, 61))
    x, largest = make_inputs(case), 2**31 - 1
    x["page_indices"] = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), x["page_indices"].shape)

    def run(case=case, **changes):
        return call(op, case, {**x, **changes}, implementation=implementation).lse

    everything = run(q_positions=jnp.full((2, 4), 60, jnp.int32))
    assert_same_bits(run(q_positions=jnp.full((2, 4), largest, jnp.int32)), everything)
    wide = run(dataclasses.replace(case, window=2**40), q_positions=jnp.full((2, 4), 60, jnp.int32))
    assert_close(wide, everything)
    assert jnp.isneginf(run(q_positions=jnp.full((2, 4), -largest - 1, jnp.int32))).all()
    assert jnp.isneginf(run(lengths=jnp.full((2,), -largest - 1, jnp.int32))).all()


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("paged", {"page_table": jnp.full((2, 5), 99, jnp.int32)}, "page_table.*99"),
        ("paged", {"lengths": jnp.array([3, 1000], jnp.int32)}, "lengths.*1000"),
        ("page_sparse", {"page_indices": jnp.full((2, 2, 3), 7, jnp.int32)}, "page_indices.*7"),
        ("token_sparse", {"slots": jnp.full((2, 2, 4), -5, jnp.int32)}, "slots.*-5"),
        ("paged", {"q_positions": jnp.array([[3], [-7]], jnp.int32)}, "q_positions.*-7"),
    ],
)
def test_contract_1_checked_raises(op, change, message):
    case = CASES["gqa4"]
    x = make_inputs(case)
    x |= {name: jnp.clip(x[name], -1, high) for name, high in (("page_table", 11), ("page_indices", 4), ("slots", 191))}
    run = sparse_jax.checked(jax.jit(lambda x: call(op, case, x, implementation=None).out))
    assert_same_bits(run(x), call(op, case, x, implementation=None).out)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        run({**x, **change})


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", OPS)
def test_contract_2_empty_rows(op, implementation):
    case = CASES["empty_rows"]
    x = make_inputs(case)
    x["slots"], x["page_indices"] = x["slots"].at[2:].set(-1), x["page_indices"].at[2:].set(-1)
    whole = call(op, case, x, implementation=implementation, config=EXACT)
    assert (whole.out[2:] == 0).all()
    assert jnp.isneginf(whole.lse[2:]).all()
    assert jnp.isfinite(whole.out).all()
    per_row = {"q", "page_table", "lengths", "page_indices", "slots"}
    two = {name: a[:2] if name in per_row else a for name, a in x.items()}
    part = call(op, dataclasses.replace(case, B=2), two, implementation=implementation, config=EXACT)
    assert_same_bits(part.out, whole.out[:2])


@pytest.mark.parametrize("implementation", BOTH)
def test_contract_3_lse_is_natural_without_sinks(implementation):
    args = scalar_inputs([1.0, 3.0], [2.0, 5.0], page_size=2, table=[[0]], lengths=[2])
    plain = sparse_jax.paged_attention(*args, implementation=implementation)
    sunk = sparse_jax.paged_attention(*args, sinks=jnp.array([4.0]), implementation=implementation)
    np.testing.assert_allclose(plain.lse, [[np.logaddexp(1, 3)]], rtol=1e-6)
    assert_same_bits(plain.lse, sunk.lse)
    for sink in (100.0, 3e38):  # far above every score
        drowned = sparse_jax.paged_attention(*args, sinks=jnp.array([sink]), implementation=implementation)
        assert_same_bits(plain.lse, drowned.lse)
        assert drowned.out.item() == 0
    capped = sparse_jax.paged_attention(*args, soft_cap=2.0, implementation=implementation)
    np.testing.assert_allclose(capped.lse, [[np.logaddexp(*(2 * np.tanh([0.5, 1.5])))]], rtol=1e-6)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("fill", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["gqa4", "draft4", "padding_rows", "e4m3_token"])
@pytest.mark.parametrize("op", OPS)
def test_contract_4_other_bytes_change_no_bit(op, name, fill, implementation):
    case = CASES[name]
    x = make_inputs(case)
    clean = call(op, case, poisoned(op, case, x, 0.0), implementation=implementation)
    dirty = call(op, case, poisoned(op, case, x, fill), implementation=implementation)
    assert_same_bits(clean.out, dirty.out)
    assert_same_bits(clean.lse, dirty.lse, name="lse")


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", OPS)
def test_contract_4_a_poisoned_draft_leaves_earlier_rows_alone(op, implementation):
    """The last of T tokens holds NaN: only its own row may show it."""
    case = dataclasses.replace(CASES["draft4"], lengths=(61, 61), row_lists=op == "token_sparse")
    x = make_inputs(case)
    x["page_table"] = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    x["page_indices"] = jnp.broadcast_to(jnp.array([3, 0, 1], jnp.int32), (2, 2, 3))
    last = jnp.array([[3 * 16 + 12], [8 * 16 + 12]])
    rows = jnp.array([3 * 16, 3 * 16 + 1]), jnp.array([8 * 16, 8 * 16 + 1])
    base = jnp.broadcast_to(jnp.stack(rows)[:, None, None], (2, 4, 2, 2))
    mine = jnp.where(jnp.arange(4)[None, :, None, None] == 3, last[:, None, None], -1)
    x["slots"] = jnp.concatenate([base, jnp.broadcast_to(mine, (2, 4, 2, 1))], -1).astype(jnp.int32)
    bad = dict(x)
    for pool in ("k_pages", "v_pages"):
        bad[pool] = x[pool].at[jnp.array([3, 8]), :, 12].set(jnp.nan)
    good, sick = (call(op, case, y, implementation=implementation).out for y in (x, bad))
    assert_same_bits(good[:, :3], sick[:, :3])
    assert jnp.isnan(sick[:, 3]).all()
    assert jnp.isfinite(good).all()


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(("kind", "size"), [("scalar", 1e5), ("scalar", 1e-6), ("token", 3e4), ("token", 1e-3)])
def test_contract_5_value_scales_do_not_leave_the_range_of_float16(kind, size, implementation):
    case = dataclasses.replace(CASES["e4m3_" + kind], dtype="float16", T=1)
    x = make_inputs(case)
    scaled = {**x, "v_scale": x["v_scale"] * size, "v_pages": x["v_pages"].astype(jnp.float32).clip(-0.4, 0.4)}
    scaled["v_pages"] = scaled["v_pages"].astype(jnp.float8_e4m3fn)
    got, unit = (
        call("paged", case, {**scaled, "v_scale": v_scale}, implementation=implementation, out_dtype="float32").out
        for v_scale in (scaled["v_scale"], x["v_scale"])
    )
    assert_close(got / size, unit, "float16")


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("size", [37.0, 3e30])
def test_contract_4_a_scale_that_a_row_does_not_see_changes_no_bit_of_it(size, implementation):
    """Finite, so that nothing filters it out: the last token's scale, which only the last row sees."""
    case = dataclasses.replace(CASES["e4m3_token"], B=1, T=2, lengths=(40,), W=3)
    x = make_inputs(case)
    page, offset = x["page_table"].reshape(-1, case.W)[0, 39 // case.P], 39 % case.P
    changed = {**x, "v_scale": x["v_scale"].at[page, :, offset].set(size)}
    for config in (None, Config(block_tokens=64, splits=1)):
        before, after = (
            call("paged", case, y, implementation=implementation, config=config).out[:, 0] for y in (x, changed)
        )
        assert_same_bits(after, before)


@pytest.mark.parametrize("implementation", BOTH)
def test_contract_5_one_large_value_scale_leaves_the_other_keys_their_precision(implementation):
    """Seen by the second row alone; the first sees scales of 1, in the same block."""
    case = dataclasses.replace(CASES["e4m3_token"], B=1, T=2, lengths=(64,), W=4)
    x = make_inputs(case)
    page = x["page_table"].reshape(-1, case.W)[0, 3]
    scales = jnp.ones_like(x["v_scale"]).at[page, :, case.P - 1].set(1e6)
    x = {**x, "v_scale": scales}
    got = call("paged", case, x, implementation=implementation, config=Config(block_tokens=64, splits=1))
    assert_close(got.out, reference("paged", case, x).out, "bfloat16")


def test_contract_5_arithmetic_is_float32():
    """bf16 inputs whose 4,096 equal weights would stall a bf16 sum."""
    n = 4096
    k, v = jnp.zeros((1, 1, n, 16), jnp.bfloat16), jnp.ones((1, 1, n, 16), jnp.bfloat16)
    q, table = jnp.ones((1, 1, 16), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32)
    for implementation in BOTH:
        got = sparse_jax.paged_attention(q, k, v, table, jnp.array([n], jnp.int32), implementation=implementation)
        assert got.lse.dtype == jnp.float32
        np.testing.assert_allclose(got.lse, np.log(n), rtol=1e-6)
        np.testing.assert_allclose(got.out.astype(jnp.float32), 1.0, rtol=1e-2)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", ["page_sparse", "token_sparse"])
def test_contract_7_duplicates_count_as_often_as_they_appear(op, implementation):
    q, k, v, table, lengths = scalar_inputs([0.0, 0.0], [1.0, 4.0], page_size=1, table=[[0, 1]], lengths=[2])
    ids = jnp.array([[[0, 1, 1]]], jnp.int32)
    if op == "page_sparse":
        got = sparse_jax.page_sparse_attention(q, k, v, table, lengths, ids, implementation=implementation)
    else:
        got = sparse_jax.token_sparse_attention(q, k, v, ids, implementation=implementation)
    np.testing.assert_allclose(got.out, [[[3.0]]], rtol=1e-6)
    np.testing.assert_allclose(got.lse, [[np.log(3)]], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((2, 8, 32))}, r"k_pages must have the shape .*32\], got"),
        ({"q": jnp.zeros((2, 7, 64))}, r"Hq must be a multiple of Hkv, got Hq = 7 \(q\) and Hkv = 2"),
        ({"q": jnp.zeros((2, 8, 64), jnp.int32)}, "q must have one of the dtypes .*got int32"),
        ({"q": jnp.zeros((0, 8, 64))}, r"no axis may be empty, got q \[0, 8, 64\]"),
        ({"q": jnp.zeros((8, 64))}, r"q must be \[B, Hq, D\] .*got \[8, 64\]"),
        ({"k_pages": jnp.zeros((12, 2, 12, 64)), "v_pages": jnp.zeros((12, 2, 12, 64))}, "power of two, got 12"),
        ({"v_pages": jnp.zeros((11, 2, 16, 64))}, r"v_pages must have the shape .*got \[11"),
        ({"v_pages": jnp.zeros((12, 2, 16, 64), jnp.bfloat16)}, "one dtype, got float32 and bfloat16"),
        ({"page_table": jnp.zeros((3, 5), jnp.int32)}, r"page_table must have the shape .*got \[3, 5\]"),
        ({"page_table": jnp.zeros((2, 5))}, "page_table must hold integers, got float32"),
        ({"lengths": jnp.zeros((3,), jnp.int32)}, r"lengths must have the shape .*got \[3\]"),
        ({"lengths": None}, "lengths is required"),
        ({"sinks": jnp.zeros((2,))}, r"sinks must have the shape \[8\], got \[2\]"),
        ({"k_scale": jnp.zeros((12,))}, r"k_scale must have the shape .*got \[12\]"),
        ({"q_positions": jnp.zeros((2, 2), jnp.int32)}, r"q_positions must have the shape .*got \[2, 2\]"),
        ({"key_positions": jnp.zeros((12, 16), jnp.int32)}, "key_positions must have the shape"),
    ],
)
def test_contract_8_shapes_and_dtypes(change, message):
    case = CASES["gqa4"]
    x = {**make_inputs(case), **change}
    x["q"] = x["q"][:, 0] if x["q"].ndim == 4 else x["q"]
    with pytest.raises(ValueError, match=message):
        call("paged", case, x, implementation="xla")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"soft_cap": float("inf")}, ValueError, "soft_cap must be a positive finite number, got inf"),
        ({"implementation": ["xla"]}, ValueError, "implementation must be one of"),
        ({"window": 2.5}, ValueError, "window must be an integer .*got 2.5"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite Python number, got nan"),
        ({"window": 0}, ValueError, "window must be at least 1 token, got 0"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap must be a positive finite number, got -1.0"),
        ({"scale": jnp.float32(1)}, ValueError, "scale must be a finite Python number"),
        ({"out_dtype": jnp.int8}, ValueError, "out_dtype must be one of .*got int8"),
        ({"implementation": "cuda"}, ValueError, "implementation must be one of .*got 'cuda'"),
        ({"config": {"splits": 2}}, ValueError, "config must be a Config"),
    ],
)
def test_contract_8_options(options, error, message):
    x = make_inputs(CASES["gqa4"])
    args = [x[name] for name in ("q", "k_pages", "v_pages", "page_table", "lengths")]
    with pytest.raises(error, match=message):
        sparse_jax.paged_attention(*args, **options)


@pytest.mark.parametrize("field", [{"block_tokens": 48}, {"block_rows": 8}, {"num_warps": 3}, {"splits": 0}])
def test_contract_8_config(field):
    with pytest.raises(ValueError, match=f"{next(iter(field))} must be .*got {next(iter(field.values()))}"):
        Config(**field)


@pytest.mark.parametrize("name", ["gqa4", "draft4", "gqa4_bf16"])
@pytest.mark.parametrize("op", OPS)
def test_contract_11_backends_agree(op, name):
    case = CASES[name]
    x = make_inputs(case)
    plain, kernel, default = (call(op, case, x, implementation=i) for i in ("xla", "interpret", None))
    assert_close(kernel.out, plain.out, case.dtype)
    assert_close(kernel.lse, plain.lse, case.dtype, name="lse")
    assert_same_bits(default.out, plain.out)  # this test runs on a CPU


def test_contract_11_unknown_to_the_kernel_falls_back():
    scores, k = jnp.zeros(9000), 8193
    for implementation in ("triton", "interpret"):
        with pytest.raises(NotImplementedError, match=r'at most 8192 ids of a row, got k = 8193; use .*"xla"'):
            sparse_jax.top_k(scores, k, implementation=implementation)
    assert sparse_jax.top_k(scores, k)[-1] == k - 1
    lowered = lowering.lower_for_cuda(lambda s: sparse_jax.top_k(s, k), scores)
    assert not lowering.names_kernel(lowered.as_text())


@pytest.mark.parametrize("op", OPS)
def test_contract_12_same_call_same_bits(op):
    case = CASES["gqa4_bf16"]
    x = make_inputs(case)
    first, second = (call(op, case, x, implementation="interpret") for _ in range(2))
    assert_same_bits(first.out, second.out)


@pytest.mark.parametrize("config", [None, EXACT])
@pytest.mark.parametrize("op", OPS)
def test_contract_12_other_rows_contents_change_no_bit(op, config):
    case = CASES["gqa4"]
    x = make_inputs(case)
    other = dict(x)
    for name in ("q", "page_indices", "slots", "page_table"):
        other[name] = x[name].at[1].set(x[name][1][..., ::-1] * 1)
    other["lengths"] = x["lengths"].at[1].set(7)
    for implementation in BOTH:
        a, b = (call(op, case, y, implementation=implementation, config=config) for y in (x, other))
        assert_same_bits(a.out[0], b.out[0])
        assert_same_bits(a.lse[0], b.lse[0])


@pytest.mark.parametrize("op", OPS)
def test_contract_12_placement_changes_no_bit(op):
    """SPLIT-2: the same tokens on other physical pages."""
    case = CASES["gqa4"]
    x = make_inputs(case)
    pages = x["k_pages"].shape[0]
    perm = jnp.asarray(np.random.default_rng(0).permutation(pages), jnp.int32)
    moved = {**x, **{n: jnp.zeros_like(x[n]).at[perm].set(x[n]) for n in ("k_pages", "v_pages")}}
    ok, slot_ok = (x["page_table"] >= 0) & (x["page_table"] < pages), (x["slots"] >= 0) & (x["slots"] < pages * case.P)
    moved["page_table"] = jnp.where(ok, perm[jnp.where(ok, x["page_table"], 0)], -1)
    slots = jnp.where(slot_ok, x["slots"], 0)
    moved["slots"] = jnp.where(slot_ok, perm[slots // case.P] * case.P + slots % case.P, -1)
    for implementation in BOTH:
        a, b = (call(op, case, y, implementation=implementation, config=EXACT) for y in (x, moved))
        assert_same_bits(a.out, b.out)


@pytest.mark.parametrize("op", OPS)
def test_contract_12_exact_rows_do_not_depend_on_the_batch(op):
    """SPLIT-1 and PAD-1: one row alone, and among others, under jit of either shape."""
    case = dataclasses.replace(CASES["gqa4"], B=7, W=9)
    x = make_inputs(case)
    whole = call(op, case, x, implementation="interpret", config=EXACT)
    per_row = {"q", "page_table", "lengths", "page_indices", "slots"}
    alone = {name: a[3:4] if name in per_row else a for name, a in x.items()}
    single = call(op, dataclasses.replace(case, B=1), alone, implementation="interpret", config=EXACT)
    assert_same_bits(single.out[0], whole.out[3])
    assert_same_bits(single.lse[0], whole.lse[3], name="lse")
