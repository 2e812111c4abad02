"""Eight-bit keys and values with scales, for the attentions over pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax import quantized_bytes

N, HKV, P, D = 4, 2, 8, 16


def pools(seed=0):
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.integers(-6, 6, (2, N, HKV, P, 1)))
    return (rng.standard_normal((2, N, HKV, P, D)) * spread).astype(np.float32)


@pytest.mark.parametrize("per", ["token", "tensor"])
@pytest.mark.parametrize("scales", ["power_of_two", "raw"])
def test_attention_over_the_quantised_pool_is_that_over_what_it_stands_for(per, scales):
    (k, v), q = pools(), np.random.default_rng(1).standard_normal((2, 4, D)).astype(np.float32)
    table, lengths = jnp.array([[2, 0, -1], [3, 1, -1]], jnp.int32), jnp.array([13, 5], jnp.int32)
    (k8, k_scale), (v8, v_scale) = (sparse_jax.quantize_kv(x, per=per, scales=scales) for x in (k, v))
    assert k8.dtype == jnp.float8_e4m3fn
    assert k_scale.shape == ((N, HKV, P) if per == "token" else ())

    stored = sparse_jax.paged_attention(q, k8, v8, table, lengths, k_scale=k_scale, v_scale=v_scale)
    meant = [x.astype(jnp.float32) * (s[..., None] if per == "token" else s) for x, s in ((k8, k_scale), (v8, v_scale))]
    assert_close(stored.out, sparse_jax.paged_attention(q, *meant, table, lengths).out)
    with pytest.raises(AssertionError):
        assert_close(sparse_jax.paged_attention(q, k8, v8, table, lengths).out, stored.out)
    unit = np.asarray(k_scale)[..., None] * 2.0**-6  # times the smallest normal e4m3
    assert (np.abs(np.asarray(meant[0]) - k) <= np.maximum(np.abs(k), unit) * 2.0**-4).all(), "four bits"


def test_values_and_scales_by_hand():
    x = jnp.array([[448.0, -1.0, 0.0], [897.0, jnp.inf, jnp.nan], [0.0, 0.0, 0.0]])
    values, scale = sparse_jax.quantize_kv(x)
    assert scale.tolist() == [1.0, 4.0, 2.0**-13]
    np.testing.assert_array_equal(np.asarray(values, np.float32), [[448, -1, 0], [224, 448, np.nan], [0, 0, 0]])
    values, scale = sparse_jax.quantize_kv(x, per="tensor")
    assert scale == 4.0
    np.testing.assert_array_equal(np.asarray(values, np.float32), [[112, -0.25, 0], [224, 448, np.nan], [0, 0, 0]])


def test_absent_tokens_do_not_count():
    x = pools()[0]
    x[1, :, 3:] = 1e30
    valid = np.ones((N, HKV, P), bool)
    valid[1, :, 3:] = False
    _, scale = sparse_jax.quantize_kv(x, per="tensor", valid=valid)
    assert scale == quantized_bytes.fp8_scale(np.abs(x[valid]).max(), "power_of_two")
    values, scale = sparse_jax.quantize_kv(x, valid=valid)
    whole, every = sparse_jax.quantize_kv(x)
    assert_same_bits(
        jax.lax.bitcast_convert_type(values, jnp.uint8)[valid], jax.lax.bitcast_convert_type(whole, jnp.uint8)[valid]
    )
    assert_same_bits(scale[valid], every[valid])
    assert (np.asarray(values, np.float32)[~valid] == 448).all()


def test_errors_name_the_argument_and_the_values():
    x = jnp.zeros((4, 2, 8, 16))
    for options, text in [
        (dict(per="head"), "per must be 'token' or 'tensor', got 'head'"),
        (dict(scales="exact"), "scales must be one of .*'exact'"),
        (dict(valid=jnp.ones((4, 2, 8))), "valid must be bool, got float32"),
        (dict(valid=jnp.ones((4, 2), bool)), r"valid must have the shape \[4, 2, 8\], got \[4, 2\]"),
    ]:
        with pytest.raises(ValueError, match=text):
            sparse_jax.quantize_kv(x, **options)
    with pytest.raises(ValueError, match="x must have one of the dtypes"):
        sparse_jax.quantize_kv(x.astype(jnp.int32))
