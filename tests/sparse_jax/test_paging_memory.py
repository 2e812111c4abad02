"""Writing into a donated pool must not copy it: seen in the temporary memory of the compiled step."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from sparse_jax import paging
from tests.sparse_jax.test_paging import counts_of, make, tokens

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn]
PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def decode(state, k, v, counts):
    """Five steps; in each a place for one token of each request, then a write for each plane."""

    def step(state, _):
        state, reservation = paging.reserve(state, counts, 1)

        def write(state, plane):
            return paging.write(state, plane, reservation, k[plane], v[plane])

        return lax.scan(write, state, jnp.arange(k.shape[0], dtype=jnp.int32))

    return lax.scan(step, state, None, length=5)


def sized(dtype):
    return make(pages=64, page_size=16, kv_heads=2, key_width=64, value_width=64, dtype=dtype)  # pages of 2 x 16 KB


def check_temporary(f, state, *args, platform, **options):
    with jax.default_device(jax.devices(platform)[0]):
        compiled = jax.jit(f, donate_argnums=0, **options).lower(state, *args).compile()
    pool, memory = state.kv.k.nbytes, compiled.memory_analysis()
    assert memory.temp_size_in_bytes < pool / 8, (memory.temp_size_in_bytes, pool)
    assert memory.alias_size_in_bytes >= 2 * pool, "keys and values are updated in their own memory"


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_9_writing_one_token_in_a_scan_does_not_copy_the_pool(dtype, platform):
    state = sized(dtype)
    k, v = tokens(state, 1)
    check_temporary(decode, state, k, v, counts_of(1, 1, 1), platform=platform)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_9_appending_and_copying_a_page_do_not_copy_the_pool(dtype, platform):
    state = sized(dtype)
    k, v = tokens(state, 1)
    check_temporary(paging.append, state, k, v, counts_of(1, 1, 1), platform=platform)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_9_reading_one_request_does_not_convert_the_pool(dtype):
    state = sized(dtype)
    compiled = jax.jit(paging.gather).lower(state, 0, 1).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < state.kv.k.nbytes / 8
