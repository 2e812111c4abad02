"""The kernel of sparse MLA from one body: interpreter, lowering for CUDA, GPU; and mutations that must fail."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lowering
from pallas_kernels.mla_sparse_decode import resolve_mla
from sparse_jax import Config, LatentCache, mla_sparse_attention
from sparse_jax.latent_cache import latent_bytes
from tests.compare import assert_close, assert_same_bits
from tests.mla_cases import CASES, COMMON, CORNER, FORMATS, MlaCase, call, make_inputs, poisoned, reference, store

GPU = pytest.param("triton", marks=pytest.mark.gpu)
EXACT = Config(exact=True)


def check(case, implementation, config=None, change=None, **options):
    """The kernel (first, so that no reused memory can hold the answer) against the plain-jnp meaning.

    change: a mutation, which finds ordinary numbers in all rows; otherwise those that nobody chose are NaN.
    """
    x = make_inputs(case)
    options = {**case.options, **options}
    actual = call(change(x) if change else poisoned(x), implementation=implementation, config=config, **options)
    expected = reference(case, x)
    assert actual.out.dtype == x["q"].dtype
    assert actual.weights is None
    # Products of numbers of 16 bits are exact in float32, so only probabilities are rounded; and scales that are no
    # powers of two.
    assert_close(actual.lse, expected.lse, case.dtype if case.scales == "raw" else "float32", name="lse")
    assert_close(actual.out, expected.out, case.dtype)
    if case.empty:
        assert (actual.out[-1, -1] == 0).all()
        assert jnp.isneginf(actual.lse[-1, -1]).all()


@pytest.mark.parametrize("case", COMMON + CORNER, ids=str)
def test_interpret(case):
    check(case, "interpret")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("draft3_row_lists", Config(splits=3, block_tokens=16)),
        ("draft3_bf16", Config(splits=7, block_rows=16, num_warps=2)),  # more splits than blocks, three row tiles
        ("nvfp4", EXACT),
        ("fp8", Config(block_tokens=128, splits=1, num_stages=1)),
    ],
)
def test_interpret_configs(name, config):
    check(CASES[name], "interpret", config)


@pytest.mark.parametrize("case", COMMON + CORNER, ids=str)
def test_lowers_for_cuda(case):
    x = make_inputs(case)
    lowered = lowering.lower_for_cuda(lambda x: call(x, implementation="triton", **case.options), x)
    assert "mla_sparse_decode" in lowered.as_text()


def shapes(stored, dtype="bfloat16", *, batch=8, rows=2, heads=128, chosen=2048, pages=4096, page_size=64):
    """q, pool, slots of the full geometry, 512 and 64 columns, without memory."""
    struct, width = jax.ShapeDtypeStruct, 576
    if stored in FORMATS:
        data = struct((pages, page_size, latent_bytes(stored)), jnp.uint8)
        pool = LatentCache(data, stored)
    else:
        pool, dtype = struct((pages, page_size, width), stored), stored
    return struct((batch, rows, heads, width), dtype), pool, struct((batch, chosen), jnp.int32)


def launches(stored, dtype="bfloat16"):
    """What the heuristics choose for any number of heads, rows and slots: one config for each different kernel."""
    found = {}
    for groups, rows, chosen, exact in itertools.product(
        (1, 8, 64, 500), (1, 17, 32, 64, 256), (1, 100, 2048, 4224), (False, True)
    ):
        launch = resolve_mla(
            Config(exact=exact),
            groups=groups,
            rows=rows,
            chosen=chosen,
            width=576,
            itemsize=4 if dtype == "float32" else 2,
            packed=stored in FORMATS,
        )
        fields = {f: getattr(launch, f) for f in ("block_rows", "block_tokens", "num_warps", "num_stages")}
        found[tuple(fields.values()), launch.splits > 1] = Config(**fields, splits=launch.splits, exact=exact)
    return list(found.values())


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(dtype, dtype) for dtype in ("float32", "bfloat16", "float16")]
    + list(itertools.product(FORMATS, ("bfloat16", "float32"))),
)
def test_lowers_for_cuda_in_every_config(stored, dtype):
    """Those of the heuristics, and tiles of each size with each number of warps in turn."""
    tuned = [
        Config(block_rows=rows, num_warps=warps, block_tokens=tokens)
        for rows, warps, tokens in ((16, 2, 16), (16, 4, 64), (32, 2, 32), (32, 8, 64), (64, 4, 32), (64, 8, 128))
    ]
    args = shapes(stored, dtype)
    for config in [*launches(stored, dtype), *(tuned if dtype == "bfloat16" else [])]:
        run = functools.partial(mla_sparse_attention, scale=0.1, implementation="triton", config=config)
        assert lowering.names_kernel(lowering.lower_for_cuda(run, *args).as_text())


@pytest.mark.parametrize("implementation", ["interpret", GPU])
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_quantised_rows_take_queries_of_any_size(name, implementation):
    """The products are taken in float16, which bfloat16 queries may exceed in both directions."""
    case = dataclasses.replace(CASES[name], scale=0.125)
    x = make_inputs(case)
    expected = call(x, implementation=implementation, **case.options)
    for exponent in (100, -60):
        moved = {**x, "q": x["q"] * jnp.asarray(2.0**exponent, x["q"].dtype)}
        actual = call(moved, implementation=implementation, scale=0.125 * 2.0**-exponent, value_dim=case.latent)
        assert_same_bits(actual.out, expected.out)
        assert_same_bits(actual.lse, expected.lse)


@pytest.mark.parametrize("implementation", ["interpret", GPU])
@pytest.mark.parametrize(("dtype", "exponent"), [("bfloat16", -8), ("bfloat16", 13), ("float32", -60), ("float32", 15)])
def test_fp8_rows_of_any_size(dtype, exponent, implementation):
    """Of scales from 2^-15 to 2^7, and of any for float32 queries: the others meet rows in float16."""
    case = dataclasses.replace(CASES["fp8"], dtype=dtype)
    x = make_inputs(case)
    scales = slice(case.latent, case.latent + 4)

    def moved(data):
        scale = np.ascontiguousarray(data[..., scales]).view(np.float32) * np.float32(2.0**exponent)
        return np.concatenate([data[..., : scales.start], scale.view(np.uint8), data[..., scales.stop :]], axis=-1)

    other = {**x, "pool": dataclasses.replace(x["pool"], data=moved(np.asarray(x["pool"].data)))}
    q = np.array(x["q"], np.float32)
    q[..., : case.latent] *= 2.0**-exponent if exponent > 0 else 0
    other["q"] = jnp.asarray(q, dtype)
    actual, expected = call(other, implementation=implementation, **case.options), reference(case, other)
    assert_close(actual.out.astype(jnp.float32) * 2.0**-exponent, expected.out * 2.0**-exponent, dtype)


@pytest.mark.parametrize("implementation", ["interpret", GPU])
def test_fp8_rows_too_large_for_float16_are_seen(implementation):
    """A latent that float16 does not hold makes what it draws to itself infinite or NaN: no number that looks right."""
    rows = jnp.ones((1, 2, 130)).at[0, 1, :128].set(2.0**17)
    cache = store(rows, "fp8_ds_mla", 128)
    options = {"scale": 1.0, "value_dim": 128, "implementation": implementation}
    out = mla_sparse_attention(jnp.ones((2, 1, 130), "bfloat16"), cache, jnp.array([[0], [1]]), **options).out
    assert (out[0] == 1).all()
    assert not jnp.isfinite(out[1]).any()


@pytest.mark.parametrize("implementation", ["interpret", GPU])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_large_latent_leaves_the_others_their_precision(dtype, implementation):
    """4,096 times as large as all others of its block, and hardly attended."""
    rows = np.abs(np.random.default_rng(0).standard_normal((1, 16, 130))).astype(np.float32)
    rows[0, :, 128] = -0.13 * np.arange(16)
    rows[0, 3, :129] *= [*[4096.0] * 128, 40]
    case = MlaCase(name="one_large", B=1, Hq=1, N=1, P=16, latent=128, rope=2, dtype=dtype, scale=1.0)
    x = {
        "q": jnp.zeros((1, 1, 1, 130), dtype).at[..., 128].set(1.0),
        "pool": store(jnp.asarray(rows), "fp8_ds_mla", 128),
        "slots": jnp.arange(16, dtype=jnp.int32)[None],
        "sinks": None,
    }
    assert_close(call(x, implementation=implementation, **case.options).out, reference(case, x).out, dtype)


MUTATIONS = {
    "nothing": ("nvfp4", lambda x: x),
    "wrong_value_columns": ("small", lambda x: rolled(x, slice(0, 32))),
    "rotary_columns_as_values": ("small", lambda x: rolled(x, slice(0, 48), 16)),
    "slots_shifted": ("small", lambda x: {**x, "slots": x["slots"] + 1}),
    "mask_dropped": ("small", lambda x: {**x, "slots": jnp.clip(x["slots"], 0, 35)}),
    "duplicates_dropped": ("small", lambda x: {**x, "slots": x["slots"].at[..., 0].set(-1)}),
    "sinks_dropped": ("draft3_row_lists", lambda x: {**x, "sinks": None}),
    "lists_of_another_row": (
        "draft3_row_lists",
        lambda x: {**x, "slots": x["slots"].at[0].set(jnp.roll(x["slots"][0], 1, 0))},
    ),
    "rotary_columns_dropped": ("small", lambda x: {**x, "q": x["q"].at[..., 32:].set(0)}),
    "rotary_columns_of_fp8_dropped": ("fp8", lambda x: {**x, "q": x["q"].at[..., 128:].set(0)}),
    "another_head": ("small", lambda x: {**x, "q": jnp.roll(x["q"], 1, axis=2)}),
    "scales_of_fp8_missing": ("fp8", lambda x: with_bytes(x, slice(128, 132), lambda _: (0, 0, 128, 63))),
    "scales_of_fp8_of_another_group": ("fp8_512", lambda x: with_bytes(x, slice(512, 528), roll_by(4))),
    "scales_of_nvfp4_in_plain_order": ("nvfp4_512", lambda x: with_bytes(x, slice(320, 352), plain_order)),
    "nibbles_swapped": ("nvfp4", lambda x: with_bytes(x, slice(0, 32), lambda b: (b >> 4) | (b << 4))),
    "bytes_of_a_pair_swapped": ("fp8", lambda x: with_bytes(x, slice(0, 128), lambda b: b[..., np.arange(128) ^ 1])),
}


def rolled(x, columns, by=1):
    """Columns of queries and rows in another order: the same scores, other values."""
    q, pool = (x[name].at[..., columns].set(jnp.roll(x[name][..., columns], by, axis=-1)) for name in ("q", "pool"))
    return {**x, "q": q, "pool": pool}


def roll_by(shift):
    return lambda b: jnp.roll(b, shift, axis=-1)


def plain_order(b):
    return jnp.swapaxes(b.reshape(*b.shape[:-1], 4, 8), -1, -2).reshape(b.shape)


def with_bytes(x, columns, change):
    data = x["pool"].data
    new = jnp.broadcast_to(jnp.asarray(change(data[..., columns]), jnp.uint8), data[..., columns].shape)
    return {**x, "pool": dataclasses.replace(x["pool"], data=data.at[..., columns].set(new))}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_fails(mutation):
    """A comparison that forgives a wrong input is no test."""
    name, change = MUTATIONS[mutation]
    if mutation == "nothing":
        check(CASES[name], "interpret", change=change)
        return
    with pytest.raises(AssertionError, match=r"^(lse|out): .* expected"):
        check(CASES[name], "interpret", change=change)


def test_mutation_of_the_scale_fails():
    with pytest.raises(AssertionError, match=r"^lse: .* expected"):
        check(CASES["small"], "interpret", scale=48**-0.5)


FULL = {"latent": 512, "rope": 64, "dtype": "bfloat16", "P": 64}
LARGE = [
    MlaCase(name=f"{stored}_h{heads}_c{chosen}", Hq=heads, C=chosen, T=rows, B=batch, N=pages, stored=stored, **FULL)
    for stored in ("bfloat16", *FORMATS)
    for heads, chosen, rows, batch, pages in ((16, 2048, 1, 8, 300), (64, 4224, 2, 8, 300), (128, 2048, 2, 8, 300))
] + [
    MlaCase(name="row_lists", Hq=128, C=2048, T=2, B=8, N=300, stored="bfloat16", row_lists=True, empty=True, **FULL),
    MlaCase(name="fp8_row_lists", Hq=64, C=4224, T=2, N=300, stored="fp8_ds_mla", row_lists=True, sinks=True, **FULL),
    MlaCase(name="one_row", Hq=128, C=4224, B=1, N=300, stored="bfloat16", sinks=True, **FULL),
    MlaCase(name="nope_512", Hq=64, C=2048, B=3, N=300, stored="fp8_ds_mla", **{**FULL, "rope": 0}),
    MlaCase(name="float32", Hq=16, C=2046, B=3, N=300, **{**FULL, "dtype": "float32"}),
    *[
        MlaCase(name=f"float16_{stored}", Hq=64, C=2046, B=3, N=300, stored=stored, **{**FULL, "dtype": "float16"})
        for stored in ("float16", *FORMATS)
    ],
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMMON + CORNER + LARGE, ids=str)
def test_gpu(case):
    check(case, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["bfloat16", *FORMATS])
def test_gpu_in_every_config(stored):
    case = MlaCase(name="configs", Hq=64, C=500, T=2, N=20, stored=stored, empty=True, **FULL)
    for config in [*launches(stored), Config(block_rows=16, num_warps=2), Config(block_rows=32, num_warps=8, splits=5)]:
        check(case, "triton", config)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["bfloat16", *FORMATS])
def test_gpu_same_bits_and_exact_rows(stored):
    """The same call twice; and with `exact`, a row among others and alone."""
    case = MlaCase(name="bits", Hq=128, C=2048, T=2, B=8, N=300, stored=stored, **FULL)
    x = make_inputs(case)
    alone = {**x, "q": x["q"][3:4], "slots": x["slots"][3:4]}
    for config in (None, EXACT):
        first, second = (call(x, implementation="triton", config=config, **case.options) for _ in range(2))
        assert_same_bits(first.out, second.out)
        assert_same_bits(first.lse, second.lse)
    single = call(alone, implementation="triton", config=EXACT, **case.options)
    assert_same_bits(single.out[0], first.out[3])
    assert_same_bits(single.lse[0], first.lse[3])


@pytest.mark.gpu
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("size", [3.9e9, 4.5e9])
def test_gpu_caches_beside_2_to_the_32_bytes(size, stored):
    """Of one between 2^31 and 2^32 bytes the offsets have 32 bits, and they count words. tests/sparse_jax has more."""
    case = MlaCase(name="large", Hq=16, B=1, C=64, N=1, stored=stored, **FULL)
    x = make_inputs(case)
    page = x["pool"].data
    last = int(size) // page.size - 1
    data = jnp.full((last + 1, *page.shape[1:]), 0x7F, jnp.uint8)
    data = jax.jit(lambda data: data.at[last].set(page[0]), donate_argnums=0)(data)
    valid = (x["slots"] >= 0) & (x["slots"] < 64)
    large = {**x, "pool": LatentCache(data, stored), "slots": jnp.where(valid, x["slots"] + 64 * last, -1)}
    actual, expected = (call(y, implementation="triton", **case.options) for y in (large, x))
    assert_same_bits(actual.out, expected.out)
    assert_same_bits(actual.lse, expected.lse)
