"""The seam: what the kernels become, read in the printed IR, because the interpreter forgives it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import sparse_jax
from pallas_kernels import lowering


@pytest.fixture
def printed_ir(monkeypatch, capsys):
    """A function that lowers for CUDA and returns the kernel's IR as text."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))

    def lower(function, *args):
        jax.clear_caches()
        lowering.lower_for_cuda(function, *args)
        return capsys.readouterr().out

    return lower


def paged_args(dtype, *, pages=8, cache_dtype=None, page_size=16, width=64):
    pool = jax.ShapeDtypeStruct((pages, 2, page_size, width), cache_dtype or dtype)
    q = jax.ShapeDtypeStruct((2, 4, width), dtype)
    return q, pool, pool, jax.ShapeDtypeStruct((2, 3), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)


def triton(*args):
    return sparse_jax.paged_attention(*args, implementation="triton")


def test_float32_products_are_ieee_and_16_bit_ones_keep_their_dtype(printed_ir):
    """PREC-1: precision None would be TF32 here."""
    text = printed_ir(triton, *paged_args(jnp.float32))
    assert "tt.dot" in text
    assert "tf32" not in text.lower()
    text = printed_ir(triton, *paged_args(jnp.bfloat16))
    dots = [line for line in text.splitlines() if "tt.dot" in line]
    assert dots
    assert all("bf16" in line for line in dots)


def test_contract_5_offsets_of_large_pools_are_64_bit(printed_ir):
    """INT32-1: pools above 2^31 elements of two bytes."""
    row = 2 * 64 * 64
    large = printed_ir(triton, *paged_args(jnp.bfloat16, pages=2**31 // row + 9, page_size=64))
    small = printed_ir(triton, *paged_args(jnp.bfloat16, pages=2**20 // row, page_size=64))
    is_pool = [line for line in large.splitlines() if "tt.addptr" in line and "bf16" in line and "x64x" in line]
    assert any("xi64" in line for line in is_pool), "\n".join(is_pool)
    assert not any("xi64" in line for line in small.splitlines() if "tt.addptr" in line)


@pytest.mark.parametrize("elements", [2**31 + 2**20, 2**32])
def test_contract_5_one_byte_pools_that_would_wrap_are_read_as_pairs(printed_ir, elements):
    args = paged_args(jnp.bfloat16, pages=elements // (2 * 64 * 64), cache_dtype=jnp.float8_e4m3fn, page_size=64)
    pointers = [line for line in printed_ir(triton, *args).splitlines() if "tt.addptr" in line]
    assert any("ptr<i16>" in line for line in pointers)
    assert not any("f8" in line for line in pointers)


@pytest.mark.parametrize("elements", [2**31 + 2**20, 2**32])
def test_contract_5_one_byte_pools_of_odd_width_that_would_wrap_are_refused(elements):
    pages = -(-elements // (2 * 64 * 63))
    pages -= pages * 2 * 64 * 63 > 2**32
    args = paged_args(jnp.bfloat16, pages=pages, cache_dtype=jnp.float8_e4m3fn, page_size=64, width=63)
    with pytest.raises(NotImplementedError, match=f"k_pages has {pages * 2 * 64 * 63} one-byte elements in rows of 63"):
        lowering.lower_for_cuda(triton, *args)
    lowered = lowering.lower_for_cuda(sparse_jax.paged_attention, *args)
    assert "paged_decode" not in lowered.as_text(), "None picks the plain-jnp implementation instead"


def test_contract_11_none_takes_the_kernel_on_a_gpu_and_plain_jnp_on_a_cpu():
    args = paged_args(jnp.bfloat16)
    assert "paged_decode" in lowering.lower_for_cuda(sparse_jax.paged_attention, *args).as_text()
    assert "paged_decode" not in jax.jit(sparse_jax.paged_attention).lower(*args).as_text()


def test_contract_11_triton_on_a_cpu_names_the_other_implementations():
    q, k, v, table, lengths = (jnp.zeros(a.shape, a.dtype) for a in paged_args(jnp.float32))
    for call in (triton, jax.jit(triton)):
        with pytest.raises(ValueError, match=r'implementation="xla".*implementation="interpret"'):
            call(q, k, v, table, lengths)


def test_case_INTERP_1_masked_load_does_not_slide():
    """Array 0..7, eight wanted from 3, filler -1: the kernels index with vectors, which behave alike in both modes."""

    def kernel(x_ref, start_ref, o_ref):
        place = start_ref[0] + jnp.arange(8, dtype=jnp.int32)
        inside = place < 8
        o_ref[...] = lowering.load(x_ref.at[jnp.where(inside, place, 0)], mask=inside, other=-1.0)

    spec = pl.BlockSpec((8,), lambda _: (0,))
    run = lowering.call(
        kernel,
        name="masked",
        programs=1,
        in_specs=[spec, pl.BlockSpec((1,), lambda _: (0,))],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
        num_warps=1,
        num_stages=1,
        interpret=True,
    )
    assert run(jnp.arange(8.0), jnp.array([3], jnp.int32)).tolist() == [3, 4, 5, 6, 7, -1, -1, -1]
