"""Quantised latents: the bytes, what reads back, and what is refused."""

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import sparse_jax
from sparse_jax.latent_cache import LatentCache, latent_bytes
from tests.compare import assert_same_bits
from tests.sparse_jax import quantized_bytes

FP8, NVFP4 = "fp8_ds_mla", "nvfp4_ds_mla"
SIZES = [(FP8, 512, 64), (FP8, 32, 16), (FP8, 512, 0), (FP8, 200, 6), (NVFP4, 512, 64), (NVFP4, 32, 16), (NVFP4, 96, 3)]


def exact_division():
    """Raw scales are divided by, and a GPU rounds that less well."""
    return jax.default_device(jax.devices("cpu")[0])


@pytest.mark.parametrize(("format", "latent_dim", "rope_dim"), SIZES)
@pytest.mark.parametrize("scales", ["power_of_two", "raw"])
def test_bytes_are_those_of_the_description(format, latent_dim, rope_dim, scales):
    x = quantized_bytes.ugly(np.random.default_rng(latent_dim + rope_dim), 6, latent_dim + rope_dim)
    with exact_division() if scales == "raw" else contextlib.nullcontext():
        actual = sparse_jax.quantize_latent(x, format, scales=scales, latent_dim=latent_dim)
    expected = quantized_bytes.records(x, format, latent_dim, scales)
    assert expected.shape[1] == latent_bytes(format, latent_dim, rope_dim)
    assert_same_bits(actual, expected)


def test_rounding_is_that_of_ml_dtypes():
    x = (np.random.default_rng(7).standard_normal((30, 128)) * 30).astype(np.float32)
    x[0] = np.arange(128) / 4 - 16  # ties among them
    eight = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    x[:, 0], eight[:, 0] = 448, 0x7E  # so that the scale is 1
    assert_same_bits(sparse_jax.quantize_latent(x, FP8, latent_dim=128)[:, :128], eight)
    x = (x / 20).clip(-6, 6)
    x[0] = np.arange(128) / 8 % 6
    x[:, ::16] = -6.0
    four = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert_same_bits(sparse_jax.quantize_latent(x, NVFP4, latent_dim=128)[:, :64], four[:, ::2] | four[:, 1::2] << 4)


def test_fp8_bytes_by_hand():
    x = np.zeros((1, 576), np.float32)
    x[0, [0, 1, 2, 128, 129, 384, 512, 575]] = [448, -1, 2**-9, 449, 32, 1.75, 1.0, -2.0]
    record = np.asarray(sparse_jax.quantize_latent(x, "fp8"))[0]
    assert record.shape == (656,)
    assert record[[0, 1, 2, 3]].tolist() == [0x7E, 0xB8, 0x01, 0x00]  # scale 1: 448, -1, the smallest subnormal, 0
    assert record[[128, 129]].tolist() == [0x76, 0x58]  # scale 2, because 449 is above 448: 224 and 16
    assert record[384] == 0x7E  # scale 2^-8 = 1.75 / 448: 448 again
    scales = record[512:528].view(np.float32)
    assert scales.tolist() == [1.0, 2.0, 2.0**-13, 2.0**-8]  # 1e-4, rounded up, where there is nothing
    assert record[528:530].tolist() == [0x80, 0x3F]
    assert record[654:].tolist() == [0x00, 0xC0]


def test_nvfp4_bytes_by_hand():
    x = np.zeros((1, 576), np.float32)
    x[0, :4] = [6, -3, 0.5, 1.5]  # block 0, scale 1
    x[0, 16 * 5 : 16 * 5 + 2] = [-12, 0]  # block 5, scale 2
    x[0, [512, 575]] = [1.0, -448.0]
    record = np.asarray(sparse_jax.quantize_latent(x, NVFP4))[0]
    assert record.shape == (352,)
    assert record[:3].tolist() == [0xD7, 0x31, 0x00]  # low nibble first: 6 | -3 << 4, 0.5 | 1.5 << 4
    assert record[40] == 0x0F
    assert record[[256, 319]].tolist() == [0x38, 0xFE]
    scales = record[320:]
    assert scales[0] == 0x38
    assert scales[8 * 1 + 1] == 0x40  # block 5 = 4 * 1 + 1
    assert (np.delete(scales, [0, 9]) == 0x01).all()  # 2^-9 where there is nothing


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nvfp4_values_read_back_bit_for_bit(dtype):
    rng = np.random.default_rng(1)
    scale = quantized_bytes.E4M3[rng.integers(1, 127, (9, 32))].repeat(16, axis=1)
    codes = rng.integers(0, 8, (9, 512))
    codes[:, ::16] = 7
    latent = quantized_bytes.E2M1[codes] * scale * rng.choice([-1.0, 1.0], codes.shape)
    rope = quantized_bytes.E4M3[rng.integers(0, 127, (9, 64))]
    x = jnp.asarray(np.concatenate([latent, rope], axis=1), dtype)
    assert (np.asarray(x, np.float64)[:, :512] == latent).all()  # all of them are bfloat16 numbers
    assert_same_bits(sparse_jax.dequantize_latent(sparse_jax.quantize_latent(x, NVFP4), dtype, format=NVFP4), x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fp8_values_with_power_of_two_scales_read_back_bit_for_bit(dtype):
    rng = np.random.default_rng(2)
    values = quantized_bytes.E4M3[rng.integers(0, 127, (9, 4, 128))]
    values[..., 0] = 448.0
    latent = values * np.exp2(rng.integers(-13, 20, (9, 4, 1))) * rng.choice([-1.0, 1.0], values.shape)
    rope = rng.standard_normal((9, 64)).astype(ml_dtypes.bfloat16).astype(np.float64)
    x = jnp.asarray(np.concatenate([latent.reshape(9, 512), rope], axis=1), dtype)
    assert_same_bits(sparse_jax.dequantize_latent(sparse_jax.quantize_latent(x, FP8), dtype, format=FP8), x)


@pytest.mark.parametrize("format", [FP8, NVFP4])
def test_reading_and_writing_again_changes_no_value(format):
    x = np.random.default_rng(3).standard_normal((7, 576)).astype(np.float32)
    once = sparse_jax.dequantize_latent(sparse_jax.quantize_latent(x, format), format=format)
    again = sparse_jax.dequantize_latent(sparse_jax.quantize_latent(once, format), format=format)
    assert_same_bits(again, once)


def test_default_scales_mean_the_same_as_e8m0():
    """Some kernels read 2^floor(log2 scale): of the default scales that is the scale itself, of raw ones it is not."""
    x = np.random.default_rng(4).standard_normal((50, 576)).astype(np.float32)

    def scales(rule):
        record = np.asarray(sparse_jax.quantize_latent(x, FP8, scales=rule))
        return np.ascontiguousarray(record[:, 512:528]).view(np.float32)

    powers, raw = scales("power_of_two"), scales("raw")
    assert (powers == np.exp2(np.floor(np.log2(powers)))).all()
    assert ((powers >= raw) & (powers < 2 * raw)).all()
    assert (raw != np.exp2(np.floor(np.log2(raw)))).any()


def test_zero_blocks_read_back_as_zero():
    for format in (FP8, NVFP4):
        for rule in ("power_of_two", "raw"):
            record = sparse_jax.quantize_latent(jnp.zeros((2, 576)), format, scales=rule)
            assert (np.asarray(sparse_jax.dequantize_latent(record, format=format)) == 0).all()
    assert (np.asarray(sparse_jax.dequantize_latent(sparse_jax.create_latent_cache(2, 4), jnp.bfloat16)) == 0).all()


@pytest.mark.parametrize("format", [FP8, NVFP4])
def test_what_is_too_large_saturates_and_nan_spoils_nothing_else(format):
    def read(x):
        return np.asarray(sparse_jax.dequantize_latent(sparse_jax.quantize_latent(x, format), format=format))[0]

    places, others = [0, 200, 201, 520, 530], np.delete(np.arange(576), [0, 200, 201, 520, 530])
    x = np.random.default_rng(5).uniform(-1, 1, (1, 576)).astype(np.float32)
    x[0, places] = 0.0
    before = read(x)
    x[0, places] = [np.nan, np.inf, -np.inf, np.nan, np.inf]
    after = read(x)
    assert (after[others] == before[others]).all(), "the scales are those of the finite values"
    if format == FP8:
        largest = 448 * quantized_bytes.fp8_scale(quantized_bytes.amax_of(x[0, 128:256]), "power_of_two")
        assert np.isnan(after[[0, 520]]).all()
        assert after[530] == np.inf, "bfloat16"
    else:
        amax = float(quantized_bytes.amax_of(x[0, 192:208]))
        largest = 6 * quantized_bytes.E4M3[np.searchsorted(quantized_bytes.E4M3, amax / 6)]
        assert after[0] == 0
        assert np.isnan(after[520])
        assert after[530] == 448
    assert (after[200], after[201]) == (largest, -largest)


def test_nvfp4_ends_at_448_times_6():
    large = np.full((1, 576), 1e6, np.float32)
    read = np.asarray(sparse_jax.dequantize_latent(sparse_jax.quantize_latent(large, NVFP4), format=NVFP4))
    assert (read == [2688.0] * 512 + [448.0] * 64).all()


@pytest.mark.parametrize("heads", [1, 5])
def test_fp8_attention_is_near_bfloat16(heads):
    rng = np.random.default_rng(6)
    latents = jnp.asarray(rng.standard_normal((4, 32, 576)), jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((1, heads, 576)), jnp.bfloat16)
    slots = jnp.asarray(np.where(np.arange(128) % 2, -1, rng.permutation(128)), jnp.int32)[None]
    stored = LatentCache(sparse_jax.quantize_latent(latents, FP8), FP8)

    def attend(pool):
        return sparse_jax.mla_sparse_attention(q, pool, slots, scale=192**-0.5, implementation="xla").out

    exact = np.asarray(attend(latents), np.float32)
    close = dict(rtol=0.065, atol=0.05)  # of the vLLM tests
    np.testing.assert_allclose(
        np.asarray(attend(sparse_jax.dequantize_latent(stored, q.dtype)), np.float32), exact, **close
    )
    halved = sparse_jax.dequantize_latent(stored, q.dtype) * 0.5  # what reading scales a factor of 2 too low does
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(np.asarray(attend(halved), np.float32), exact, **close)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", FP8])
def test_aliases_name_one_format(name):
    cache = sparse_jax.create_latent_cache(3, 2, name)
    assert cache.format == FP8
    assert (cache.pages, cache.page_size, cache.width, cache.data.shape) == (3, 2, 576, (3, 2, 656))
    assert sparse_jax.create_latent_cache(3, 2, NVFP4).format == NVFP4
    x = jnp.ones((1, 576))
    assert_same_bits(sparse_jax.quantize_latent(x, name), sparse_jax.quantize_latent(x, FP8))


def test_sizes():
    assert latent_bytes(FP8) == 656
    assert latent_bytes(NVFP4) == 352
    assert [latent_bytes(f, 512, 0) for f in (FP8, NVFP4)] == [528, 288]
    assert [latent_bytes(f, 32, 16) for f in (FP8, NVFP4)] == [68, 48]


def test_errors_name_the_argument_and_the_values():
    data, x = jnp.zeros((3, 4, 656), jnp.uint8), jnp.zeros((2, 576))
    cache = LatentCache(data, FP8)
    for call, text in [
        (lambda: LatentCache(data, NVFP4), r"data must be uint8 \[N, P, 352\].*\[3, 4, 656\]"),
        (lambda: LatentCache(data.astype(jnp.int8), FP8), "data must be uint8.*int8"),
        (lambda: LatentCache(data[0], FP8), r"got uint8 \[4, 656\]"),
        (lambda: LatentCache(data, "fp4"), "format must be one of fp8_ds_mla, .*'fp4'"),
        (lambda: LatentCache(data, NVFP4, 500, 64), "latent_dim a positive multiple of 16.*500 and 64"),
        (lambda: sparse_jax.create_latent_cache(0, 4), "pages must be at least 1, got 0"),
        (lambda: sparse_jax.create_latent_cache(4, 12), "page_size must be a power of two, got 12"),
        (lambda: sparse_jax.create_latent_cache(2**24, 256), "slots are int32"),
        (lambda: sparse_jax.quantize_latent(x[:, :100], FP8), r"latent_dim = 512 columns.*\[2, 100\]"),
        (lambda: sparse_jax.quantize_latent(x[:, :513], FP8), "rope_dim a multiple of 2, got 512 and 1"),
        (lambda: sparse_jax.quantize_latent(x, FP8, scales="e8m0"), "scales must be one of.*'e8m0'"),
        (lambda: sparse_jax.quantize_latent(x.astype(jnp.int32), FP8), "x must have one of the dtypes.*int32"),
        (lambda: sparse_jax.dequantize_latent(data), "format is required"),
        (lambda: sparse_jax.dequantize_latent(data, format=NVFP4), r"uint8 \[\.\.\., 352\].*\[3, 4, 656\]"),
        (lambda: sparse_jax.write_latent(cache, [0, 1], x[:, :512]), r"x must have the shape \[2, 576\]"),
        (lambda: sparse_jax.write_latent(cache, [0], x), r"x must have the shape \[1, 576\]"),
        (lambda: sparse_jax.write_latent(cache, [[0, 1]], x), r"slots must have the shape"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
