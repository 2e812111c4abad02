"""Reported cases of other systems on quantised latents and index keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import (
    Config,
    IndexKeys,
    LatentCache,
    create_index_keys,
    create_latent_cache,
    dequantize_index_keys,
    dequantize_latent,
    indexer_scores,
    merge_attention,
    mla_sparse_attention,
    plane_slots,
    quantize_latent,
    write_index_keys,
    write_latent,
)
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax.scalar_attention import LN2, every_implementation, ids
from tests.sparse_jax.test_cases_mla import draw

NAN = np.nan
SMALL = {"latent_dim": 128, "rope_dim": 4}
every_format = pytest.mark.parametrize("format", ["fp8_ds_mla", "nvfp4_ds_mla"])


def store(rows, format="fp8_ds_mla", page_size=2, **widths):
    """A cache of rows f[tokens, d_c + d_r], in order."""
    cache = create_latent_cache(len(rows) // page_size, page_size, format, **(widths or SMALL))
    return write_latent(cache, jnp.arange(len(rows)), rows)


def read_back(x, format):
    return np.asarray(dequantize_latent(quantize_latent(x, format, latent_dim=128), format=format, **SMALL))


@every_implementation
def test_case_QUANT_1_the_scales_of_index_keys_count_on_every_path(implementation):
    """Keys of very different sizes, so that a path without their scales would choose others."""
    rows = draw(24, 8) * jnp.exp2(jnp.arange(24) % 7 * 3.0)[:, None]
    keys = write_index_keys(create_index_keys(6, 4, 8), jnp.arange(24), rows)
    table, plain = ids([4, 0, 2], [5, 1, 3]), dequantize_index_keys(keys)
    for shape in ((2, 5), (2, 3, 5)):
        q, w = draw(*shape, 8, seed=1), draw(*shape, seed=2)
        for options in ({}, {"k": 10}):
            got = indexer_scores(q, w, keys, table, ids(11, 9), implementation=implementation, **options)
            expected = indexer_scores(q, w, plain, table, ids(11, 9), implementation="xla", **options)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


@every_implementation
@every_format
def test_case_QUANT_1_the_scales_of_latents_count_on_every_path(format, implementation):
    """One row a request, drafts with lists of their own or a shared one, and splits."""
    rows = draw(16, 132) * jnp.exp2(jnp.arange(16) % 5 * 1.0)[:, None] * 0.1
    cache = store(rows, format)
    slots = np.random.default_rng(1).integers(-1, 16, (2, 3, 9))
    options = {"scale": 0.1, "value_dim": 128}
    split = Config(splits=2, block_tokens=16)
    for q, chosen, config in (
        (draw(2, 2, 132), slots[:, 0], None),
        (draw(2, 3, 2, 132), slots, split),
        (draw(2, 3, 2, 132), slots[:, 0], None),
    ):
        expected = mla_sparse_attention(q, dequantize_latent(cache), chosen, implementation="xla", **options)
        got = mla_sparse_attention(q, cache, chosen, implementation=implementation, config=config, **options)
        assert_close(got.out, expected.out)
        assert_close(got.lse, expected.lse, name="lse")


def test_case_QUANT_2_rotary_columns_saturate():
    """Of nvfp4, which stores them in e4m3 without a scale. bfloat16 holds them in fp8_ds_mla."""
    x = jnp.zeros((2, 132)).at[0, 128:].set(jnp.array([448.0, 464, 465, 1000])).at[1, 128].set(-1000.0)
    assert read_back(x, "nvfp4_ds_mla")[:, 128:].tolist() == [[448.0] * 4, [-448.0, 0, 0, 0]]
    assert read_back(x, "fp8_ds_mla")[:, 128:].tolist() == [[448.0, 464, 464, 1000], [-1000.0, 0, 0, 0]]


def test_case_QUANT_3_a_block_of_zeros():
    x = jnp.zeros((1, 132)).at[0, 16:32].set(jnp.array([6.0, -3, 0.5, 1] * 4))
    back = read_back(x, "nvfp4_ds_mla")
    assert np.isfinite(back).all()
    assert (back == np.asarray(x)).all()


def test_case_QUANT_4_blocks_of_different_magnitudes():
    """Swizzled scales that one side takes for plain ones would give far more."""
    magnitudes = jnp.exp2(jnp.asarray(np.random.default_rng(1).permutation(8) - 4, jnp.float32))
    x = draw(64, 132).at[:, :128].multiply(jnp.repeat(magnitudes, 16))
    error = read_back(x, "nvfp4_ds_mla") - np.asarray(x)
    for start in (*range(0, 128, 16), 128):
        part = slice(start, start + 16)
        assert np.linalg.norm(error[:, part]) < 0.15 * np.linalg.norm(x[:, part]), start


@every_format
def test_case_QUANT_5_rotary_columns_are_not_scaled_by_the_latent(format):
    x = draw(8, 132)
    x = jnp.where(jnp.arange(132) < 128, 0.1 * x / jnp.abs(x).max(), x / jnp.abs(x).max(1, keepdims=True))
    back = read_back(x.at[:, 131].set(1.0), format)
    assert (back[:, 131] == 1.0).all()
    np.testing.assert_allclose(back[:, 128:131], x[:, 128:131], rtol=2**-4, atol=2**-10)


@every_format
def test_case_QUANT_6_and_LOOP_1_planes_of_one_cache(format):
    """A second layer that starts up, and writes, leaves the bytes of the first alone, scales included."""
    rows, slots = 100 * draw(4, 132), ids(*range(4))
    cache = create_latent_cache(2 * 2, 2, format, **SMALL)  # two planes of two pages
    cache = write_latent(cache, slots, rows)
    after = write_latent(cache, plane_slots(slots, 1, pages=2, page_size=2), rows / 128)
    assert_same_bits(after.data[:2], cache.data[:2])
    keys = write_index_keys(create_index_keys(4, 2, 132), slots, rows)
    later = write_index_keys(keys, plane_slots(slots, 1, pages=2, page_size=2), rows / 128)
    assert_same_bits(later.data[:2], keys.data[:2])
    assert_same_bits(dequantize_index_keys(later)[2:], dequantize_index_keys(keys)[:2] / 128)


@every_implementation
@every_format
def test_case_QUANT_7_a_sick_token(format, implementation):
    """NaN and infinities reach the rows that attend the token and no other; rotary NaN stays NaN in both formats."""
    x = draw(4, 132)
    cache = store(x.at[1, 129].set(NAN).at[2, 5].set(jnp.inf), format)
    options = {"scale": 0.1, "value_dim": 128, "implementation": implementation}
    q = draw(4, 2, 132, seed=1)
    got = mla_sparse_attention(q, cache, ids([0, 3], [1, 3], [2, 3], [3, 0]), **options)
    clean = mla_sparse_attention(q, store(x, format), ids([0, 3], [0, 3], [3, 0], [3, 0]), **options)
    for row in (0, 3):
        assert_same_bits(got.out[row], clean.out[row])
    assert not jnp.isfinite(got.out[1]).any()
    assert jnp.isfinite(got.out[2]).all()  # saturated


@every_implementation
@every_format
def test_case_POISON_3_bytes_that_nobody_chose(format, implementation):
    """0x7F, NaN in e4m3 and in scales, and 0xFF: in page 0, where ids are absent, and beside the chosen rows."""
    cache, q = store(draw(6, 132), format), draw(1, 2, 132, seed=1)
    options = {"scale": 0.1, "value_dim": 128, "implementation": implementation}
    expected = mla_sparse_attention(q, cache, ids([5, -1, -1, 99]), **options)
    for byte in (0x7F, 0xFF):
        data = jnp.full_like(cache.data, byte).at[2, 1].set(cache.data[2, 1])
        got = mla_sparse_attention(q, dataclasses.replace(cache, data=data), ids([5, -1, -1, 99]), **options)
        assert_same_bits(got.out, expected.out)
        assert_same_bits(got.lse, expected.lse)


@every_implementation
def test_case_POISON_3_of_index_keys(implementation):
    keys = write_index_keys(create_index_keys(3, 4, 8), jnp.arange(12), draw(12, 8))
    poisoned = write_index_keys(IndexKeys(jnp.full_like(keys.data, 0x7F), 4, 8), 4 + jnp.arange(3), draw(12, 8)[4:7])
    q, w = draw(1, 2, 8, seed=1), draw(1, 2, seed=2)
    both = [
        indexer_scores(q, w, pool, ids([1, -1, 9]), ids(3), implementation=implementation) for pool in (keys, poisoned)
    ]
    assert_same_bits(*both)
    assert jnp.isfinite(both[1][0, :3]).all()
    assert jnp.isneginf(both[1][0, 3:]).all()


@every_implementation
@every_format
def test_case_SINK_2_counted_once(format, implementation):
    """Scores 0, values 3, a sink of 0: 2.0, for one split and two, and 0 for an empty row."""
    cache, sinks = store(jnp.zeros((2, 132)).at[:, 0].set(3.0), format), jnp.zeros(1)
    for splits in (1, 2):
        options = {"sinks": sinks, "implementation": implementation, "config": Config(splits=splits, block_tokens=16)}
        got = mla_sparse_attention(
            jnp.zeros((2, 1, 132)), cache, ids([0, 1], [-1, -1]), scale=1.0, value_dim=128, **options
        )
        np.testing.assert_allclose(got.out[:, 0, 0], [2.0, 0.0], rtol=1e-5)
        np.testing.assert_allclose(got.lse.ravel(), [LN2, -np.inf], rtol=1e-5)
        assert (got.out[..., 1:] == 0).all()


def test_case_PAD_2_and_OOB_1_absent_slots_are_never_written():
    rows, slots = draw(4, 132), np.array([5, -1, 8, -(2**31)], np.int32)
    for cache, write in (
        (create_latent_cache(2, 4, **SMALL), write_latent),
        (create_latent_cache(2, 4, "nvfp4_ds_mla", **SMALL), write_latent),
        (create_index_keys(2, 4, 132), write_index_keys),
    ):
        after = write(cache, slots, rows)
        only = write(cache, slots[:1], rows[:1])
        assert_same_bits(after.data, only.data)
        assert (after.data != cache.data).any()


@pytest.mark.parametrize(
    ("create", "write", "name"),
    [(create_latent_cache, write_latent, "cache"), (create_index_keys, write_index_keys, "keys")],
)
def test_case_DONATE_1_a_pool_used_twice_is_named(create, write, name):
    pool = create(2, 4, **(SMALL if name == "cache" else {"dim": 32}))
    rows = draw(1, 132 if name == "cache" else 32)
    after = jax.jit(write, donate_argnums=0)(pool, ids(1), rows)
    assert (after.data != 0).any()
    gone = r"\.data was donated to an earlier call: go on with what that call returned"
    with pytest.raises(ValueError, match=name + gone):
        write(pool, ids(2), rows)
    if name == "cache":
        with pytest.raises(ValueError, match="latent_pages" + gone):
            mla_sparse_attention(rows[None], pool, ids([1]), scale=1.0, value_dim=128)
    else:
        with pytest.raises(ValueError, match="key_pages" + gone):
            indexer_scores(rows[None], jnp.ones((1, 1)), pool, ids([0, 1])[None], ids([2]), k=1)


@every_implementation
@pytest.mark.parametrize("heads", [4, 17, 128])
def test_case_HEADS_4_on_the_full_geometry(heads, implementation):
    q, cache = draw(1, heads, 576), store(draw(8, 576, seed=1), page_size=4, latent_dim=512, rope_dim=64)
    options, slots = {"scale": 192**-0.5, "sinks": draw(heads, seed=2)}, ids([5, 0, -1, 7, 3])
    got = mla_sparse_attention(q, cache, slots, implementation=implementation, **options)
    expected = mla_sparse_attention(q, dequantize_latent(cache), slots, implementation="xla", **options)
    assert_close(got.out, expected.out)
    assert_close(got.lse, expected.lse, name="lse")


@every_implementation
def test_case_CP_1_tokens_dealt_out_to_two_devices(implementation):
    rows, q = draw(6, 132), draw(1, 2, 132, seed=1)
    options = {"scale": 0.1, "value_dim": 128, "implementation": implementation}
    whole = mla_sparse_attention(q, store(rows), ids([0, 3, 4]), **options)
    parts = [
        mla_sparse_attention(q, store(rows[d::2], page_size=1), ids([[0, 2, -1], [1, -1, -1]][d]), **options)
        for d in range(2)
    ]
    merged = merge_attention(*(jnp.stack([getattr(part, x) for part in parts]) for x in ("out", "lse")))
    assert_close(merged.out, whole.out)
    assert_close(merged.lse, whole.lse, name="lse")


@pytest.mark.gpu
@every_format
def test_case_INT32_1_records_past_2_to_the_31(format):
    """The same page of 64 records before 2^31 bytes, around them, and past 2^32."""
    page = store(draw(64, 576), format, page_size=64, latent_dim=512, rope_dim=64).data
    size = page[0].size
    places = [1, 2**31 // size - 1, 2**31 // size, 2**31 // size + 1, 2**32 // size, 2**32 // size + 1]
    data = jnp.zeros((places[-1] + 1, *page.shape[1:]), jnp.uint8)
    data = jax.jit(lambda data: data.at[jnp.array(places)].set(page), donate_argnums=0)(data)
    q, options = draw(1, 16, 576, seed=1, dtype="bfloat16"), {"scale": 192**-0.5, "implementation": "triton"}
    got = [
        mla_sparse_attention(q, LatentCache(data, format), place * 64 + ids(range(64)), **options) for place in places
    ]
    assert float(jnp.abs(got[0].out).max()) > 0
    for other in got[1:]:
        assert_same_bits(other.out, got[0].out)
        assert_same_bits(other.lse, got[0].lse)


@pytest.mark.gpu
def test_case_INT32_1_index_keys_past_2_to_the_31():
    page = write_index_keys(create_index_keys(1, 64), jnp.arange(64), draw(64, 128)).data
    size = page[0].size
    places = [1, 2**31 // size - 1, 2**31 // size, 2**31 // size + 1, 2**32 // size, 2**32 // size + 1]
    data = jnp.zeros((places[-1] + 1, size), jnp.uint8)
    data = jax.jit(lambda data: data.at[jnp.array(places)].set(page), donate_argnums=0)(data)
    q, w = draw(1, 32, 128, seed=1, dtype="bfloat16"), draw(1, 32, seed=2)
    got = [
        indexer_scores(q, w, IndexKeys(data, 64), ids([place]), ids(64), implementation="triton") for place in places
    ]
    assert float(jnp.abs(got[0]).max()) > 0
    for other in got[1:]:
        assert_same_bits(other, got[0])
