"""The indexer's keys: bytes by page, writes in place, query scales, the Hadamard transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sparse_jax
from sparse_jax import IndexKeys
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax import quantized_bytes

PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("scales", ["power_of_two", "raw"])
@pytest.mark.parametrize("dim", [128, 12])
def test_a_page_has_its_keys_first_and_then_its_scales(dim, scales):
    x = quantized_bytes.ugly(np.random.default_rng(dim), 8, dim)
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU does not round the division by raw scales that well
        pool = sparse_jax.write_index_keys(sparse_jax.create_index_keys(2, 4, dim), np.arange(8), x, scales=scales)
    expected = np.stack([quantized_bytes.index_page(x[:4], scales), quantized_bytes.index_page(x[4:], scales)])
    assert expected.shape == (2, 4 * (dim + 4))
    assert_same_bits(pool.data, expected)


def test_bytes_by_hand():
    x = np.zeros((2, 128), np.float32)
    x[0, [0, 127]] = [449, -2]
    pool = sparse_jax.write_index_keys(sparse_jax.create_index_keys(1, 64), [63, 1], x)
    page = np.asarray(pool.data)[0]
    assert page.shape == (8448,)
    assert page[[63 * 128, 63 * 128 + 127]].tolist() == [0x76, 0xB8]  # 224 and -1, times 2
    scales = page[8192:].view(np.float32)
    assert (scales[63], scales[1], scales[0]) == (2.0, 2.0**-22, 0.0)  # 1e-4 / 448 where a key is 0; nothing written


def test_only_the_named_slots_change():
    pool = IndexKeys(jnp.full((3, 4 * 132), 0xAB, jnp.uint8), page_size=4)
    x = random(6, 128)
    after = sparse_jax.write_index_keys(pool, np.array([5, -1, 12, 0, -(2**31), 2**40]), x)
    expected = np.array(pool.data)
    for row, slot in ((0, 5), (3, 0)):
        record = quantized_bytes.index_page(x[row : row + 1])
        page, offset = divmod(slot, 4)
        expected[page, 128 * offset : 128 * offset + 128] = record[:128]
        expected[page, 512 + 4 * offset : 516 + 4 * offset] = record[128:]
    assert_same_bits(after.data, expected)
    with pytest.raises(jax.experimental.checkify.JaxRuntimeError, match=r"slots: ids must be -1.*got 12"):
        sparse_jax.checked(sparse_jax.write_index_keys)(pool, jnp.array([12]), x[:1])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_contract_9_a_donated_pool_is_not_copied(platform):
    def steps(pool, x):
        def step(pool, slot):
            return sparse_jax.write_index_keys(pool, jnp.stack([slot, -1]), x), None

        return lax.scan(step, pool, jnp.arange(5, dtype=jnp.int32))[0]

    with jax.default_device(jax.devices(platform)[0]):
        pool = sparse_jax.create_index_keys(64, 64)
        compiled = jax.jit(steps, donate_argnums=0).lower(pool, jnp.ones((2, 128))).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < pool.data.nbytes / 8
    assert memory.alias_size_in_bytes >= pool.data.nbytes


def test_keys_and_queries_read_back():
    x = random(5, 3, 128)
    values, scale = sparse_jax.quantize_index_query(x)
    assert (values.shape, values.dtype, scale.shape) == ((5, 3, 128), jnp.float8_e4m3fn, (5, 3))
    keys = sparse_jax.quantize_index_keys(x)
    assert_same_bits(lax.bitcast_convert_type(values, jnp.uint8), lax.bitcast_convert_type(keys[0], jnp.uint8))
    pool = sparse_jax.write_index_keys(sparse_jax.create_index_keys(2, 8), np.arange(15), x.reshape(15, 128))
    read = sparse_jax.dequantize_index_keys(pool)
    meant = values.astype(jnp.float32) * scale[..., None]
    assert_same_bits(read.reshape(16, 128)[:15], meant.reshape(15, 128))
    assert (np.asarray(read[1, 7]) == 0).all()
    assert sparse_jax.dequantize_index_keys(pool, jnp.bfloat16).dtype == jnp.bfloat16
    assert np.abs(np.asarray(meant) - x).max() <= np.abs(x).max() * 2.0**-4
    kept, factors = pool.parts()
    assert (kept.shape, factors.shape, pool.pages) == ((2, 8, 128), (2, 8), 2)


@pytest.mark.parametrize("width", [1, 2, 64, 128])
def test_hadamard_is_its_matrix(width):
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    x = random(3, 2, width)
    assert_close(sparse_jax.hadamard(x), x @ matrix * width**-0.5)
    assert_close(sparse_jax.hadamard(sparse_jax.hadamard(x)), x)
    half = jnp.asarray(x, jnp.bfloat16)
    assert_same_bits(sparse_jax.hadamard(half), sparse_jax.hadamard(half.astype(jnp.float32)).astype(jnp.bfloat16))


def test_hadamard_changes_no_product_and_spreads_outliers():
    q, k = random(4, 128, seed=1), random(6, 128, seed=2)
    k[:, 7] = 1000.0
    assert_close(sparse_jax.hadamard(q) @ sparse_jax.hadamard(k).T, q @ k.T)
    assert np.abs(sparse_jax.hadamard(k)).max() < 100


def test_a_pool_is_a_tree():
    pool = sparse_jax.create_index_keys(3, 4)
    assert jax.tree.map(lambda _: None, pool).data is None
    assert jax.eval_shape(lambda p: p, pool).page_size == 4
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), pool, pool)
    assert jax.vmap(sparse_jax.dequantize_index_keys)(stack).shape == (2, 3, 4, 128)
    ((path, _),) = jax.tree_util.tree_leaves_with_path(pool)
    assert jax.tree_util.keystr(path) == ".data"


def test_errors_name_the_argument_and_the_values():
    data, x = jnp.zeros((2, 4 * 132), jnp.uint8), jnp.zeros((3, 128))
    pool = IndexKeys(data, 4)
    for call, text in [
        (
            lambda: IndexKeys(data, 8),
            r"data must be uint8 \[N, 1056\] for page_size 8 and dim 128, got uint8 \[2, 528\]",
        ),
        (lambda: IndexKeys(data, 4, 64), r"data must be uint8 \[N, 272\]"),
        (lambda: IndexKeys(data.astype(jnp.int8), 4), "got int8"),
        (lambda: IndexKeys(data, 3), "page_size must be a power of two, got 3"),
        (lambda: sparse_jax.create_index_keys(2, 4, 30), "dim must be a positive multiple of 4.*got 30"),
        (lambda: sparse_jax.quantize_index_keys(x, scales="up"), "scales must be one of.*'up'"),
        (lambda: sparse_jax.quantize_index_query(x[0]), r"q must be \[\.\.\., H, d\], got \[128\]"),
        (lambda: sparse_jax.write_index_keys(pool, [0, 1], x), r"x must have the shape \[2, 128\], got \[3, 128\]"),
        (lambda: sparse_jax.hadamard(x[:, :12]), r"x must have a power of two columns, got \[3, 12\]"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
