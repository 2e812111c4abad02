"""Attention over latents and the indexer's scores: their meaning, contracts and transformations.

What other systems reported is in test_cases_mla.py, test_cases_indexer.py and test_cases_quantised_mla.py; errors are
in test_latent_errors.py.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from sparse_jax import Config, indexer_scores, mla_sparse_attention
from tests import indexer_cases, latent_gold, mla_cases
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax.scalar_attention import ids
from tests.sparse_jax.test_cases_mla import draw

EXACT = Config(exact=True)
BOTH = ["xla", "interpret"]
MLA, INDEXER = mla_cases.CASES, indexer_cases.CASES
ATTENDED = ["draft3_bf16", "draft3_row_lists", "fp8", "nvfp4"]
SCORED = ["small", "fp8_draft5_k"]
both = pytest.mark.parametrize("implementation", BOTH)


def attend(case, x, **options):
    return mla_cases.call(x, **case.options, **options)


def score(case, x, **options):
    return indexer_cases.call(x, k=case.k, **options)


SMALL = [name for name, case in MLA.items() if case.latent < 500]


@pytest.mark.parametrize("name", SMALL)
def test_meaning_of_attention(name):
    """Plain jnp against float64, from the bytes on."""
    x = mla_cases.make_inputs(MLA[name])
    got, (out, lse) = attend(MLA[name], x, implementation="xla"), latent_gold.mla(MLA[name], x)
    assert_close(got.out, out, MLA[name].dtype)
    assert_close(got.lse, lse, name="lse")


@pytest.mark.parametrize("name", [name for name, case in INDEXER.items() if case.heads < 64])
def test_meaning_of_scores(name):
    x = indexer_cases.make_inputs(INDEXER[name])
    got = score(INDEXER[name], x, implementation="xla")
    assert_close(got, latent_gold.index_scores(INDEXER[name], x), name="scores")


@both
def test_absorbed_attention_is_that_of_expanded_heads(implementation):
    """Keys [W_UK c | k_pe] and values W_UV c of each head, and the scale of that model: 12 columns, not 20."""
    heads, d_n, d_r, d_c, d_v, tokens = 3, 8, 4, 16, 6, 16
    rng = np.random.default_rng(0)
    w_uk, w_uv = rng.standard_normal((heads, d_n, d_c)), rng.standard_normal((heads, d_v, d_c))
    q_nope, q_pe = rng.standard_normal((1, heads, d_n)), rng.standard_normal((1, heads, d_r))
    latent, k_pe = rng.standard_normal((tokens, d_c)), rng.standard_normal((tokens, d_r))
    chosen, scale = [3, 0, 15, 7, 8], (d_n + d_r) ** -0.5

    q = np.concatenate([np.einsum("hnc,bhn->bhc", w_uk, q_nope), q_pe], axis=-1).astype(np.float32)
    pool = np.concatenate([latent, k_pe], axis=-1).astype(np.float32).reshape(4, 4, d_c + d_r)
    got = mla_sparse_attention(q, pool, ids(chosen), scale=scale, value_dim=d_c, implementation=implementation)
    out = np.einsum("hvc,bhc->bhv", w_uv, np.asarray(got.out, np.float64))

    for h in range(heads):
        keys = np.concatenate([latent @ w_uk[h].T, k_pe], axis=-1)[chosen]
        p = np.exp(scale * keys @ np.concatenate([q_nope[0, h], q_pe[0, h]]))
        np.testing.assert_allclose(out[0, h], p @ (latent @ w_uv[h].T)[chosen] / p.sum(), rtol=1e-4)
        np.testing.assert_allclose(got.lse[0, h], np.log(p.sum()), rtol=1e-5)


@both
def test_no_rotary_columns_and_the_scale_of_the_model(implementation):
    """GLM: 512 columns, 256^-0.5. 512^-0.5 would be another temperature."""
    q, pool, chosen = draw(1, 3, 512), draw(2, 4, 512, seed=1), [5, 0, 7]
    got = mla_sparse_attention(q, pool, ids(chosen), scale=256**-0.5, implementation=implementation)
    x = np.asarray(pool, np.float64).reshape(8, 512)[chosen]
    p = np.exp(256**-0.5 * np.asarray(q[0], np.float64) @ x.T)
    assert_close(got.out[0], p @ x / p.sum(-1, keepdims=True))
    assert_close(got.lse[0], np.log(p.sum(-1)), name="lse")


SIZES_OF_VLLM = list(itertools.product((128, 64, 32), (32, 64), ("bfloat16", *mla_cases.FORMATS)))


@pytest.mark.parametrize(
    ("heads", "page_size", "stored", "implementation"),
    [
        (128, 64, "bfloat16", "interpret"),
        (64, 32, "fp8_ds_mla", "interpret"),
        (32, 64, "nvfp4_ds_mla", "interpret"),
        *[pytest.param(*sizes, "triton", marks=pytest.mark.gpu) for sizes in SIZES_OF_VLLM],
    ],
)
def test_decode_at_the_sizes_and_within_the_tolerances_of_vllm(heads, page_size, stored, implementation):
    """64 of 128 ids are there, others in each row; against the latents as they were before fp8, or after nvfp4."""
    q, rows = draw(4, heads, 576, dtype="bfloat16") / 2, draw(8, page_size, 576, seed=1, dtype="bfloat16")
    pool = mla_cases.store(rows, stored, 512)
    rng, tokens = np.random.default_rng(2), 8 * page_size
    slots = np.concatenate([rng.permuted(np.tile(np.arange(tokens), (4, 1)), axis=1)[:, :64], np.full((4, 64), -1)], 1)
    got = mla_sparse_attention(q, pool, slots, scale=192**-0.5, implementation=implementation)
    rows = sparse_jax.dequantize_latent(pool) if stored == "nvfp4_ds_mla" else rows
    x = np.asarray(rows, np.float64).reshape(tokens, 576)[slots[:, :64]]
    p = np.exp(192**-0.5 * np.asarray(q, np.float64) @ x.swapaxes(1, 2))
    tolerance = {"rtol": 0.065, "atol": 0.05} if stored == "fp8_ds_mla" else {"rtol": 0.01, "atol": 0.01}
    out = p @ x[..., :512] / p.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(got.out, np.float64), out, **tolerance)


@both
@pytest.mark.parametrize("name", ["draft3_bf16", "fp8", "nvfp4"])
def test_contract_1_wild_slots_are_absent(name, implementation):
    """Of 64 bits too, as NumPy makes them: dropping the upper half would make real slots of them."""
    case, x = MLA[name], mla_cases.make_inputs(MLA[name])
    slots, tokens = np.asarray(x["slots"], np.int64), case.N * case.P
    wide = {**x, "slots": np.where(slots % 3 == 0, slots + 2**32, slots)}
    absent = {**x, "slots": np.where((slots % 3 == 0) | (slots < 0) | (slots >= tokens), -1, slots)}
    a, b = (attend(case, y, implementation=implementation) for y in (wide, absent))
    assert_same_bits(a.out, b.out)
    assert_same_bits(a.lse, b.lse)


@both
@pytest.mark.parametrize("name", ATTENDED)
def test_contracts_2_and_4_empty_rows_and_other_bytes(name, implementation):
    """NaN bytes in what nobody chose change no bit; a row without keys gives 0 and -inf, with sinks and without."""
    case, x = MLA[name], mla_cases.make_inputs(MLA[name])
    clean = attend(case, x, implementation=implementation)
    assert (clean.out[-1, -1] == 0).all()
    assert jnp.isneginf(clean.lse[-1, -1]).all()
    for byte in (0x7F, 0xFF):
        dirty = attend(case, mla_cases.poisoned(x, byte), implementation=implementation)
        assert_same_bits(dirty.out, clean.out)
        assert_same_bits(dirty.lse, clean.lse)


@both
@pytest.mark.parametrize("name", SCORED)
def test_contracts_2_and_4_of_scores(name, implementation):
    case, x = INDEXER[name], indexer_cases.make_inputs(INDEXER[name])
    clean = score(case, x, implementation=implementation)
    for byte in (0x7F, 0xFF):
        assert_same_bits(score(case, indexer_cases.poisoned(case, x, byte), implementation=implementation), clean)
    empty = score(case, {**x, "lengths": x["lengths"] * 0}, implementation=implementation)
    assert jnp.isneginf(empty).all()


@pytest.mark.parametrize("name", ["draft3_row_lists", "fp8"])
def test_contract_12_rows_of_a_batch(name):
    """The same call twice; each request alone, and after a padding row, with the exact configuration."""
    case, x = MLA[name], mla_cases.make_inputs(MLA[name])
    run = functools.partial(attend, case, implementation="interpret", config=EXACT)
    whole = run(x)
    assert_same_bits(run(x).out, whole.out)
    alone = run({**x, "q": x["q"][:1], "slots": x["slots"][:1]})
    padded = run({**x, "slots": x["slots"].at[1].set(-1), "q": x["q"].at[1].set(jnp.nan)})
    for other in (alone, padded):
        assert_same_bits(other.out[0], whole.out[0])
        assert_same_bits(other.lse[0], whole.lse[0])
    assert jnp.isneginf(padded.lse[1]).all()
    assert (padded.out[1] == 0).all()


@both
def test_padding_rows_of_scores(implementation):
    """Rows at position -1, whatever stands in their queries: -inf, and the other rows keep their bits."""
    case, x = INDEXER["positions_k"], indexer_cases.make_inputs(INDEXER["positions_k"])
    padding = x["q_positions"] < 0
    assert padding.any()
    sick = {**x, "q": jnp.where(padding[..., None, None], jnp.nan, x["q"])}
    got = score(case, sick, implementation=implementation)
    assert_same_bits(got, score(case, x, implementation=implementation))
    assert jnp.isneginf(got[padding]).all()


@both
def test_single_rows_are_batches_of_one_row(implementation):
    """q without the axis T; q_positions i32[B] for it."""
    case, x = MLA["fp8"], mla_cases.make_inputs(MLA["fp8"])
    a, b = (attend(case, {**x, "q": q}, implementation=implementation) for q in (x["q"], x["q"][:, 0]))
    assert_same_bits(b.out, a.out[:, 0])
    assert_same_bits(b.lse, a.lse[:, 0])
    case, x = INDEXER["small"], indexer_cases.make_inputs(INDEXER["small"])
    single = {"q": x["q"][:, 0], "weights": x["weights"][:, 0], "q_positions": ids(3, -1)}
    a, b = (score(case, {**x, **y}, implementation=implementation) for y in ({"q_positions": ids([3], [-1])}, single))
    assert_same_bits(b, a[:, 0])
    assert jnp.isfinite(b).sum() == 4


@both
def test_nothing_retraces_when_values_change(implementation):
    traces = []

    @jax.jit
    def step(slots, sinks, table, lengths, positions):
        traces.append(1)
        case, x = MLA["draft3_row_lists"], mla_cases.make_inputs(MLA["draft3_row_lists"])
        out = attend(case, {**x, "slots": slots, "sinks": sinks}, implementation=implementation).out
        case, x = INDEXER["positions_k"], indexer_cases.make_inputs(INDEXER["positions_k"])
        x = {**x, "page_table": table, "lengths": lengths, "q_positions": positions}
        return out, score(case, x, implementation=implementation)

    for seed in range(3):
        rng = np.random.default_rng(seed)
        step(
            rng.integers(-1, 40, (2, 3, 100), np.int32),
            rng.standard_normal(1).astype(np.float32),
            rng.integers(-1, 24, (4, 5), np.int32),
            rng.integers(-5, 100, 4, np.int32),
            rng.integers(-1, 80, (4, 5), np.int32),
        )
    assert len(traces) == 1


@pytest.mark.parametrize("implementation", ["interpret", None])
def test_jit_vmap_and_scan(implementation):
    """Over queries and lists with one cache; over caches; and both operations one after the other in a scan."""
    cases, inputs = (MLA["nvfp4"], INDEXER["small"]), [mla_cases.make_inputs(MLA["nvfp4"])]
    inputs.append(indexer_cases.make_inputs(INDEXER["small"]))
    run = (
        functools.partial(attend, cases[0], implementation=implementation),
        functools.partial(score, cases[1], implementation=implementation),
    )
    batched = ({"q", "slots"}, {"q", "weights", "page_table", "lengths"})
    for f, x, names in zip(run, inputs, batched):
        axes = {name: 0 if name in names else None for name in x}
        stacked = {name: jnp.stack([a, a[::-1]]) if name in names else a for name, a in x.items()}
        together = jax.tree.leaves(jax.jit(jax.vmap(f, in_axes=(axes,)))(stacked))
        for got, first, second in zip(
            together, *(jax.tree.leaves(f({n: a[i] if n in names else a for n, a in stacked.items()})) for i in (0, 1))
        ):
            assert_close(got[0], first, cases[0].dtype)
            assert_close(got[1], second, cases[0].dtype)

    def step(lengths, _):
        scores = run[1]({**inputs[1], "lengths": lengths})[:, 0]
        slots = sparse_jax.top_k(scores, 20)  # ids as slots: any will do
        return lengths - 9, run[0]({**inputs[0], "slots": slots}).out

    start = inputs[1]["lengths"]
    _, outs = jax.lax.scan(step, start, None, length=3)
    assert_close(outs[2], step(start - 18, None)[1], cases[0].dtype)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_gradients_of_attention(implementation):
    """Against finite differences; 0 for an empty row and for latents that nobody chose, which hold NaN; never NaN."""
    case = mla_cases.MlaCase(name="grad", B=2, T=2, Hq=2, C=7, row_lists=True, latent=4, rope=2, sinks=True, empty=True)
    x = mla_cases.poisoned(mla_cases.make_inputs(case))
    floats = ("q", "pool", "sinks")

    def loss(values):
        got = attend(case, {**x, **values}, implementation=implementation)
        return jnp.sum(jnp.sin(got.out)) + jnp.sum(jnp.where(jnp.isneginf(got.lse), 0.0, got.lse))

    check_gradients(loss, {name: x[name] for name in floats})
    grads = jax.grad(loss)({name: x[name] for name in floats})
    assert (grads["q"][-1, -1] == 0).all()
    assert (jnp.where(jnp.isnan(x["pool"]), grads["pool"], 0) == 0).all()


@pytest.mark.parametrize("implementation", ["xla", None])
def test_gradients_of_scores(implementation):
    case = indexer_cases.IndexerCase(name="grad", B=2, T=2, heads=2, dim=4, P=4, W=3, lengths=(9, 0))
    x = indexer_cases.poisoned(case, indexer_cases.make_inputs(case))
    floats = ("q", "weights", "keys")

    def loss(values):
        scores = score(case, {**x, **values}, implementation=implementation)
        return jnp.sum(jnp.sin(jnp.where(jnp.isneginf(scores), 0.0, scores)))

    check_gradients(loss, {name: x[name] for name in floats})
    grads = jax.grad(loss)({name: x[name] for name in floats})
    assert (grads["q"][1] == 0).all()
    assert (jnp.where(jnp.isnan(x["keys"]), grads["keys"], 0) == 0).all()


def check_gradients(loss, values):
    rng, eps = np.random.default_rng(0), 1e-3
    grads, loss = jax.grad(loss)(values), jax.jit(loss)
    for name, value in values.items():
        assert jnp.isfinite(grads[name]).all(), name
        way = jnp.where(jnp.isnan(value), 0.0, jnp.asarray(rng.standard_normal(value.shape), jnp.float32))
        way = way / jnp.linalg.norm(way)
        ahead, behind = (loss({**values, name: value + sign * eps * way}) for sign in (1, -1))
        np.testing.assert_allclose(jnp.vdot(grads[name], way), (ahead - behind) / (2 * eps), rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_gradients_through_quantised_caches(implementation):
    """Of the queries, with eight-bit caches as constants: those of the numbers that they stand for."""
    case, x = MLA["fp8_f32_query"], mla_cases.make_inputs(MLA["fp8_f32_query"])
    plain = {**x, "pool": sparse_jax.dequantize_latent(x["pool"])}

    def loss(q, x):
        return jnp.sum(jnp.sin(attend(case, {**x, "q": q}, implementation=implementation).out))

    assert_close(jax.grad(loss)(x["q"], x), jax.grad(loss)(x["q"], plain))
    case, x = INDEXER["fp8_f32_query"], indexer_cases.make_inputs(INDEXER["fp8_f32_query"])
    plain = {**x, "keys": sparse_jax.dequantize_index_keys(x["keys"])}

    def loss(q, x):
        scores = score(case, {**x, "q": q}, implementation=implementation)
        return jnp.sum(jnp.where(jnp.isneginf(scores), 0.0, scores))

    assert_close(jax.grad(loss)(x["q"], x), jax.grad(loss)(x["q"], plain))


@pytest.mark.parametrize("implementation", ["interpret", "triton"])
def test_kernels_say_that_they_are_not_differentiable(implementation):
    case, x = MLA["small"], mla_cases.make_inputs(MLA["small"])
    with pytest.raises(TypeError, match=r'not differentiable. Use implementation="xla"'):
        jax.grad(lambda q: attend(case, {**x, "q": q}, implementation=implementation).out.sum())(x["q"])
    case, x = INDEXER["small"], indexer_cases.make_inputs(INDEXER["small"])
    with pytest.raises(TypeError, match=r'not differentiable. Use implementation="xla"'):
        jax.grad(lambda q: score(case, {**x, "q": q}, implementation=implementation).sum())(x["q"])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU runs it")
def test_contract_11_lowered_for_a_cpu_the_kernels_name_the_others():
    case, x = MLA["fp8"], mla_cases.make_inputs(MLA["fp8"])
    with pytest.raises(ValueError, match=r'"triton" is a GPU kernel .*"xla" .*"interpret"'):
        attend(case, x, implementation="triton")
    case, x = INDEXER["fp8"], indexer_cases.make_inputs(INDEXER["fp8"])
    with pytest.raises(ValueError, match=r'"triton" is a GPU kernel .*"xla" .*"interpret"'):
        score(case, x, implementation="triton")


@both
def test_64_bit_mode_changes_nothing(implementation):
    case, x = MLA["nvfp4"], mla_cases.make_inputs(MLA["nvfp4"])
    index, y = INDEXER["fp8_draft5_k"], indexer_cases.make_inputs(INDEXER["fp8_draft5_k"])
    narrow, scores = attend(case, x, implementation=implementation), score(index, y, implementation=implementation)
    with jax.enable_x64(True):
        wide = attend(case, x, implementation=implementation)
        assert (wide.out.dtype, wide.lse.dtype) == (jnp.bfloat16, jnp.float32)
        assert_close(wide.out, narrow.out, "bfloat16")
        assert_close(wide.lse, narrow.lse, name="lse")
        again = score(index, y, implementation=implementation)
        assert again.dtype == jnp.float32
        assert_close(again, scores, name="scores")
        far = {**x, "slots": x["slots"].astype(jnp.int64) + 2**32}
        assert jnp.isneginf(attend(case, far, implementation=implementation).lse).all()
        with pytest.raises(ValueError, match=r"q must have one of the dtypes .*got float64"):
            attend(case, {**x, "q": x["q"].astype(jnp.float64)}, implementation=implementation)


def test_both_in_a_step_with_a_donated_cache():
    """A step that writes its token and reads the cache changes the cache in place."""
    cache, keys = sparse_jax.create_latent_cache(512, 64), sparse_jax.create_index_keys(512, 64)

    def step(cache, keys, q, x, table, lengths):
        slot = table[:, 0] * 64 + lengths - 1
        cache = sparse_jax.write_latent(cache, slot, x)
        keys = sparse_jax.write_index_keys(keys, slot, x[:, :128])
        scores = indexer_scores(q[..., :128], jnp.ones(q.shape[:2]), keys, table, lengths)
        chosen = sparse_jax.to_slots(sparse_jax.top_k(scores, 8), table, jnp.arange(2), page_size=64)
        return cache, keys, mla_sparse_attention(q, cache, chosen, scale=0.1).out

    args = draw(2, 4, 576), draw(2, 576), ids([3, 4], [7, -1]), jnp.array([60, 3], jnp.int32)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(cache, keys, *args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < cache.data.nbytes / 4
