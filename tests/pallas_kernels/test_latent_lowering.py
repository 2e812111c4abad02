"""What the kernels of sparse MLA become, read in the printed IR: offsets into large pools, types of products."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import lowering
from sparse_jax import IndexKeys, LatentCache, indexer_scores, mla_sparse_attention
from sparse_jax.latent_cache import latent_bytes
from tests.mla_cases import FORMATS


@pytest.fixture
def printed_ir(monkeypatch, capsys):
    """A function that lowers for CUDA and returns the kernel's IR as text."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))

    def lower(function, *args):
        jax.clear_caches()
        lowering.lower_for_cuda(functools.partial(function, implementation="triton"), *args)
        return capsys.readouterr().out

    return lower


def attention(stored, size, dtype=jnp.bfloat16):
    """The operation and its arguments, with a pool of about `size` bytes."""
    struct = jax.ShapeDtypeStruct
    row = latent_bytes(stored) if stored in FORMATS else 576 * jnp.dtype(stored).itemsize
    pages = size // (64 * row)
    if stored in FORMATS:
        pool = LatentCache(struct((pages, 64, row), jnp.uint8), stored)
    else:
        pool = struct((pages, 64, 576), stored)
    run = functools.partial(mla_sparse_attention, scale=0.1)
    return run, struct((1, 16, 576), dtype), pool, struct((1, 64), jnp.int32)


def scores(stored, size):
    struct = jax.ShapeDtypeStruct
    pages = size // (64 * (132 if stored == "index_keys" else 256))
    keys = struct((pages, 64, 128), jnp.bfloat16)
    if stored == "index_keys":
        keys = IndexKeys(struct((pages, 64 * 132), jnp.uint8), 64)
    table, lengths = struct((1, 8), jnp.int32), struct((1,), jnp.int32)
    return indexer_scores, struct((1, 64, 128), jnp.bfloat16), struct((1, 64), jnp.float32), keys, table, lengths


BELOW, ABOVE = 2**32 - 2**20, 2**32 + 2**20


@pytest.mark.parametrize(
    ("make", "stored", "pointer"),
    [
        (attention, "bfloat16", "bf16"),
        (attention, "fp8_ds_mla", "i16"),
        (attention, "nvfp4_ds_mla", "i16"),
        (scores, "bfloat16", "bf16"),
        (scores, "index_keys", "i16"),
    ],
)
def test_contract_5_offsets_of_large_pools(printed_ir, make, stored, pointer):
    """Of 32 bits up to 2^32 bytes, where they count 2-byte elements, fewer than 2^31; of 64 bits above. No bytes."""

    def offsets(size):
        lines = [line for line in printed_ir(*make(stored, size)).splitlines() if "tt.addptr" in line]
        assert not any(re.search(r"ptr<(i8|f8)", line) for line in lines)
        return {
            kind for line in lines if f"ptr<{pointer}>" in line for kind in re.findall(r"\b(?:\d+x)*i(32|64)>", line)
        }

    assert offsets(BELOW) == {"32"}
    assert "64" in offsets(ABOVE)


@pytest.mark.parametrize("stored", ["float32", *FORMATS])
def test_float32_products_are_ieee(printed_ir, stored):
    text = printed_ir(*attention(stored, 2**24, jnp.float32))
    dots = [line for line in text.splitlines() if "tt.dot" in line]
    assert dots
    assert all("f16" not in line for line in dots)
    assert "tf32" not in text.lower()


def test_quantised_rows_are_multiplied_in_16_bits(printed_ir):
    """Latents in float16; rotary columns of fp8 in bfloat16, but with float16 queries, which have more bits."""

    def kinds(stored, dtype):
        text = printed_ir(*attention(stored, 2**24, dtype))
        lines = [line for line in text.splitlines() if "tt.dot" in line]
        return {re.search(r": tensor<\d+x\d+x(\w+)>", line).group(1) for line in lines}

    assert kinds("fp8_ds_mla", jnp.bfloat16) == {"f16", "bf16"}
    assert "bf16" not in kinds("fp8_ds_mla", jnp.float16)
    assert kinds("nvfp4_ds_mla", jnp.bfloat16) == {"f16"}
