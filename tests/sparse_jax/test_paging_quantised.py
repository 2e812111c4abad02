"""Paged state whose pools are bytes: what is written, in which plane, and what follows a page."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from sparse_jax import compaction, paging, selectors
from tests.sparse_jax import quantized_bytes

PLANES, PAGES, P, LATENT, ROPE, INDEX = 3, 5, 4, 32, 8, 12
FORMATS = ["fp8_ds_mla", "nvfp4_ds_mla"]
rng = np.random.default_rng(0)


def make(dtype="fp8_ds_mla", **changes):
    sizes = {"planes": PLANES, "pages": PAGES, "page_size": P, "kv_heads": 1, "key_width": LATENT + ROPE}
    sizes |= {"value_width": INDEX, "requests": 2, "pages_per_request": 3, "latent_dim": LATENT}
    return paging.create(dtype=dtype, **(sizes | changes))


def normal(*shape, dtype=np.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def poisoned(state):
    kv = jax.tree.map(lambda x: jnp.full_like(x, 0xAB), state.kv)
    return dataclasses.replace(state, kv=kv)


def expected(k, format):
    return quantized_bytes.records(np.asarray(k, np.float32).reshape(-1, LATENT + ROPE), format, LATENT)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_bytes_of_a_plane_are_those_of_the_writers_and_no_others_change(format, dtype):
    state, reservation = jax.jit(paging.reserve, static_argnums=2)(poisoned(make(format)), jnp.array([5, 2]), 6)
    k, v = normal(2, 6, 1, LATENT + ROPE, dtype=dtype), normal(2, 6, 1, INDEX, dtype=dtype)
    after, stale = jax.jit(paging.write)(state, jnp.int32(1), reservation, k, v)
    assert stale == 0
    slots = np.asarray(reservation.slots)
    valid = slots.ravel() >= 0
    assert valid.sum() == 7
    latents = np.array(state.kv.k).reshape(PLANES, PAGES * P, -1)
    latents[1, slots.ravel()[valid]] = expected(k, format)[valid]
    np.testing.assert_array_equal(after.kv.k.reshape(latents.shape), latents)
    keys = sparse_jax.create_index_keys(PAGES, P, INDEX)
    keys = dataclasses.replace(keys, data=jnp.full_like(keys.data, 0xAB))
    keys = sparse_jax.write_index_keys(keys, slots.ravel(), v.reshape(-1, INDEX))
    np.testing.assert_array_equal(after.kv.v[1].reshape(PAGES, -1), keys.data)
    assert (np.asarray(after.kv.v)[[0, 2]] == 0xAB).all()


@pytest.mark.parametrize("name", ["quest", "centroid", "h2o", "lserve", "tova"])
def test_what_selectors_remember_has_the_shapes_of_a_plain_cache(name):
    selector = selectors.get(name)
    quantised, plain = (jax.tree.leaves(selector.init(make(dtype).kv)) for dtype in (FORMATS[0], jnp.bfloat16))
    assert [(x.shape, x.dtype) for x in quantised] == [(x.shape, x.dtype) for x in plain]


def test_a_plane_out_of_range_and_released_pages_are_not_written():
    state, reservation = paging.reserve(poisoned(make()), jnp.array([2, 1]), 2)
    k, v = normal(2, 2, 1, LATENT + ROPE), normal(2, 2, 1, INDEX)
    after, stale = paging.write(state, PLANES, reservation, k, v)
    assert stale == 3
    released, _ = paging.release(state, jnp.array([True, True]))
    again, stale = paging.write(released, 0, reservation, k, v)
    assert stale == 3
    for x in jax.tree.leaves((after.kv, again.kv)):
        assert (np.asarray(x) == 0xAB).all()


@pytest.mark.parametrize("format", FORMATS)
def test_shared_pages_are_copied_with_latents_and_index_keys_before_they_are_written(format):
    append = jax.jit(paging.append)
    k, v = normal(PLANES, 2, 6, 1, LATENT + ROPE), normal(PLANES, 2, 6, 1, INDEX)
    state, _ = append(poisoned(make(format)), k, v, jnp.array([6, 0]))
    state, _ = paging.share(state, jnp.int32(0), jnp.int32(1), jnp.int32(6))
    more = normal(PLANES, 2, 1, 1, LATENT + ROPE), normal(PLANES, 2, 1, 1, INDEX)
    state, reservation = append(state, *more, jnp.array([0, 1]))
    assert (np.asarray(reservation.copied_to) >= 0).tolist() == [False, True]
    gather = jax.jit(paging.gather)
    for plane in range(PLANES):
        ours, theirs = (gather(state, plane, request) for request in (0, 1))
        for a, b, new in zip(ours, theirs, more):
            np.testing.assert_array_equal(a[:6], b[:6])
            assert not np.asarray(a[6:]).any()
            np.testing.assert_allclose(b[6, 0], new[plane, 1, 0, 0], atol=0.4)
            assert not np.asarray(b[7:]).any()
        records = expected(k[plane, 0], format)
        sizes = {"latent_dim": LATENT, "rope_dim": ROPE}
        np.testing.assert_array_equal(ours[0][:6, 0], sparse_jax.dequantize_latent(records, format=format, **sizes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_dim": None}, "latent_dim say how many of the 40 columns are latent, got 1 and None"),
        ({"kv_heads": 2}, "kv_heads must be 1 .* got 2 and 32"),
        ({"latent_dim": 30}, "latent_dim a positive multiple of 4 .* got 30 and 10"),
        ({"latent_dim": 44}, "rope_dim a multiple of 2, got 44 and -4"),
        ({"value_width": 10}, "dim must be a positive multiple of 4, so that scales align, got 10"),
        ({"dtype": "fp4"}, "fp4"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(**changes)


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("format", FORMATS)
def test_contract_9_steps_of_a_donated_state_copy_no_pool(format, platform):
    def steps(state, k, v):
        def step(state, _):
            state, reservation = paging.reserve(state, jnp.array([1, 1]), 1)
            return jax.lax.fori_loop(
                0, PLANES, lambda plane, s: paging.write(s, plane, reservation, k, v)[0], state
            ), None

        return jax.lax.scan(step, state, None, length=3)[0]

    with jax.default_device(jax.devices(platform)[0]):
        state = make(format, pages=4096)
        k, v = normal(2, 1, 1, LATENT + ROPE), normal(2, 1, 1, INDEX)
        memory = jax.jit(steps, donate_argnums=0).lower(state, k, v).compile().memory_analysis()
    pools = state.kv.k.nbytes + state.kv.v.nbytes
    assert memory.temp_size_in_bytes < pools / 8
    assert memory.alias_size_in_bytes >= pools


def test_compaction_refuses_them():
    with pytest.raises(ValueError, match=r"not the bytes of Quantised\(format='fp8_ds_mla'"):
        compaction.track(make("fp8"))


def test_widths_are_checked():
    state, reservation = paging.reserve(make(), jnp.array([1, 1]), 1)
    with pytest.raises(ValueError, match=r"k must be \[2, 1, 1, 40\], got \[2, 1, 1, 44\]"):
        paging.write(state, 0, reservation, normal(2, 1, 1, 44), normal(2, 1, 1, INDEX))
    with pytest.raises(ValueError, match=r"v must be \[2, 1, 1, 12\], got \[2, 1, 1, 16\]"):
        paging.write(state, 0, reservation, normal(2, 1, 1, 40), normal(2, 1, 1, 16))
