"""Writing quantised latents into pages: which slots, in their own memory, and a cache as a tree."""

import dataclasses
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sparse_jax
from sparse_jax.latent_cache import LatentCache
from tests.compare import assert_same_bits
from tests.sparse_jax import quantized_bytes

FORMATS = ["fp8_ds_mla", "nvfp4_ds_mla"]
PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def poisoned(format, pages=3, page_size=4, latent_dim=32, rope_dim=16):
    cache = sparse_jax.create_latent_cache(pages, page_size, format, latent_dim=latent_dim, rope_dim=rope_dim)
    return dataclasses.replace(cache, data=jnp.full_like(cache.data, 0xAB))


@pytest.mark.parametrize("format", FORMATS)
def test_only_the_named_slots_change(format):
    cache = poisoned(format)
    x = np.random.default_rng(0).standard_normal((6, 48)).astype(np.float32)
    slots = np.array([5, -1, 12, 0, -(2**31), 2**40])  # 12 is the first that does not exist
    after = sparse_jax.write_latent(cache, slots, x)
    expected = np.array(cache.data).reshape(12, -1)
    expected[[5, 0]] = quantized_bytes.records(x[[0, 3]], format, 32)
    assert_same_bits(after.data.reshape(12, -1), expected)
    nothing = sparse_jax.write_latent(cache, jnp.full(6, -1, jnp.int32), x)
    assert_same_bits(nothing.data, cache.data)


def test_scales_reach_the_writer():
    x = np.random.default_rng(1).standard_normal((1, 48)).astype(np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        raw = sparse_jax.write_latent(poisoned("fp8"), [0], x, scales="raw").data[0, :1]
    assert_same_bits(raw, quantized_bytes.records(x, "fp8_ds_mla", 32, "raw"))


@pytest.mark.parametrize("format", FORMATS)
def test_64_bit_mode_and_vmap_change_no_bit(format):
    x = np.random.default_rng(2).standard_normal((2, 3, 48)).astype(np.float32)
    expected = np.stack([quantized_bytes.records(part, format, 32) for part in x])
    with jax.enable_x64(True):
        cache = sparse_jax.write_latent(poisoned(format), np.array([4, 5, -1]), x[0])
        assert sparse_jax.dequantize_latent(cache).dtype == jnp.float32
        assert_same_bits(cache.data[1, :2], expected[0, :2])
    vmapped = jax.vmap(lambda part: sparse_jax.quantize_latent(part, format, latent_dim=32))(x)
    assert_same_bits(vmapped, expected)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("format", FORMATS)
def test_contract_9_a_donated_cache_is_not_copied(format, platform):
    def steps(cache, x):
        def step(cache, slot):
            return sparse_jax.write_latent(cache, jnp.stack([slot, -1]), x), None

        return lax.scan(step, cache, jnp.arange(5, dtype=jnp.int32))[0]

    with jax.default_device(jax.devices(platform)[0]):
        cache = sparse_jax.create_latent_cache(64, 16, format)
        compiled = jax.jit(steps, donate_argnums=0).lower(cache, jnp.ones((2, 576))).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < cache.data.nbytes / 8
    assert memory.alias_size_in_bytes >= cache.data.nbytes


def test_contract_9_a_cache_is_a_carry_and_nothing_retraces():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def write(cache, slots, x):
        return sparse_jax.write_latent(cache, slots, x)

    cache = poisoned("fp8")
    for slot in (0, 7, -1):
        cache = write(cache, jnp.array([slot], jnp.int32), jnp.full((1, 48), float(slot)))
    assert (cache.format, cache.latent_dim, cache.rope_dim) == ("fp8_ds_mla", 32, 16)
    read = np.asarray(sparse_jax.dequantize_latent(cache)).reshape(12, 48)
    assert (read[0] == 0).all()
    assert (read[7] == 7).all()


def test_trees_of_a_cache_may_hold_anything():
    cache = poisoned("nvfp4_ds_mla")
    assert jax.tree.map(lambda _: None, cache).data is None
    assert LatentCache(None, "fp8").format == "fp8_ds_mla"  # a pytree of specifications, say
    assert jax.tree.map(jnp.sum, cache).data.shape == ()
    assert jax.eval_shape(lambda c: c, cache).page_size == 4
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), cache, cache)
    read = jax.vmap(sparse_jax.dequantize_latent)(stack)
    assert_same_bits(read[1], sparse_jax.dequantize_latent(cache))
    ((path, _),) = jax.tree_util.tree_leaves_with_path(cache)
    assert jax.tree_util.keystr(path) == ".data"
    assert isinstance(LatentCache(np.asarray(cache.data), "nvfp4_ds_mla", 32, 16).data, jax.Array)


def test_checked_names_a_slot_out_of_range():
    write = sparse_jax.checked(sparse_jax.write_latent)
    with pytest.raises(jax.experimental.checkify.JaxRuntimeError, match=r"slots: ids must be -1.*12.*got 12"):
        write(poisoned("fp8"), jnp.array([-1, 12]), jnp.zeros((2, 48)))


def test_code_in_the_documentation_runs():
    """The section of docs/operations.md."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    section = text[text.index("## Quantised caches") :]
    names: dict = {}
    exec(compile(section.split("```python")[1].split("```")[0], "operations.md", "exec"), names)
    np.testing.assert_allclose(
        np.asarray(names["read"][2, 2:4], np.float32), names["latents"][:2], rtol=2**-4, atol=2**-9
    )
    assert (np.asarray(names["read"], np.float32).any(axis=-1).sum(), names["keys"].data.shape) == (2, (8, 8448))
