"""What the operations of sparse MLA refuse: each message names the argument and the value."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import IndexKeys, create_index_keys, create_latent_cache, indexer_scores, mla_sparse_attention

CACHE = create_latent_cache(3, 4, latent_dim=128, rope_dim=16)
ATTENTION = {
    "q": jnp.zeros((2, 3, 5, 144)),
    "latent_pages": CACHE,
    "slots": jnp.zeros((2, 7), jnp.int32),
    "scale": 0.1,
    "value_dim": 128,
}
PLAIN = jnp.zeros((3, 4, 144))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "q is required, got None"),
        ({"q": jnp.zeros((2, 3, 5, 144), jnp.int32)}, "q must have one of the dtypes float32, .*got int32"),
        ({"q": jnp.zeros((2, 144))}, r"q must be \[B, Hq, E\] or \[B, T, Hq, E\], got \[2, 144\]"),
        ({"q": jnp.zeros((2, 0, 5, 144))}, r"no axis may be empty, got q \[2, 0, 5, 144\]"),
        ({"q": jnp.zeros((2, 3, 5, 128))}, "latent_pages hold 128 latent and 16 rotary .*E .q. their sum, got 128"),
        ({"value_dim": 0}, r"value_dim must be from 1 to E = 144 \(q\), got 0"),
        ({"value_dim": 145}, r"value_dim must be from 1 to E = 144 \(q\), got 145"),
        ({"value_dim": 128.0}, "value_dim must be an integer .*got 128.0"),
        ({"value_dim": 64}, "latent_pages hold 128 latent .*value_dim must be the first, got 64"),
        ({"latent_pages": None}, "latent_pages is required, got None"),
        ({"latent_pages": PLAIN[..., :143]}, r"latent_pages must have the shape \[\*, \*, 144\], got \[3, 4, 143\]"),
        ({"latent_pages": PLAIN[:, None]}, r"latent_pages must have the shape \[\*, \*, 144\], got \[3, 1, 4, 144\]"),
        ({"latent_pages": CACHE.data}, "latent_pages must have one of the dtypes .*got uint8"),
        ({"latent_pages": PLAIN[:, :3]}, "page size of latent_pages must be a power of two, got 3"),
        (
            {"latent_pages": dataclasses.replace(CACHE, data=CACHE.data[:, :3])},
            "page size of latent_pages must be a power of two, got 3",
        ),
        ({"latent_pages": PLAIN[:0]}, "latent_pages must have a page, got 0"),
        ({"slots": None}, "slots is required, got None"),
        ({"slots": jnp.zeros((2, 7))}, "slots must hold integers, got float32"),
        ({"slots": jnp.zeros((3, 7), jnp.int32)}, r"slots must have the shape .*2, 3, \*\], got \[3, 7\]"),
        ({"slots": jnp.zeros((2, 1, 7), jnp.int32)}, r"slots must have the shape .*2, 3, \*\], got \[2, 1, 7\]"),
        ({"slots": jnp.zeros((2, 0), jnp.int32)}, r"slots must have at least one column, got \[2, 0\]"),
        ({"q": jnp.zeros((2, 5, 144)), "slots": jnp.zeros((2, 1, 7), jnp.int32)}, r"\[2, \*\], got \[2, 1, 7\]"),
        ({"sinks": jnp.zeros(4)}, r"sinks must have the shape \[5\], got \[4\]"),
        ({"scale": "0.1"}, "scale must be a finite number known on the host, got '0.1'"),
        ({"scale": float("inf")}, "scale must be a finite number known on the host, got inf"),
        ({"scale": jnp.float32(1)}, "scale must be a finite number known on the host"),
        ({"implementation": "cuda"}, "implementation must be one of .*got 'cuda'"),
        ({"implementation": ["xla"]}, "implementation must be one of"),
        ({"config": {"splits": 2}}, r"config must be a sparse_jax.Config, got \{'splits': 2\}"),
    ],
)
def test_attention(change, message):
    with pytest.raises(ValueError, match=message):
        mla_sparse_attention(**{**ATTENTION, **change})


def test_attention_needs_a_scale():
    with pytest.raises(ValueError, match=r"scale is required: \(d_n \+ d_r\) \*\* -0.5"):
        mla_sparse_attention(**{name: value for name, value in ATTENTION.items() if name != "scale"})


@pytest.mark.parametrize(
    ("format", "latent", "rope", "implementation"),
    [
        ("fp8_ds_mla", 32, 16, "interpret"),
        ("fp8_ds_mla", 160, 0, "triton"),
        ("nvfp4_ds_mla", 48, 16, "triton"),
        ("nvfp4_ds_mla", 64, 3, "interpret"),
    ],
)
def test_what_only_plain_jnp_reads(format, latent, rope, implementation):
    """The kernel says so; None takes plain jnp instead."""
    cache = create_latent_cache(3, 4, format, latent_dim=latent, rope_dim=rope)
    args = (jnp.ones((2, 5, latent + rope)), cache, ATTENTION["slots"])
    with pytest.raises(NotImplementedError, match=f"got {latent} and {rope}; use implementation=.xla"):
        mla_sparse_attention(*args, scale=0.1, value_dim=latent, implementation=implementation)
    got = mla_sparse_attention(*args, scale=0.1, value_dim=latent)
    np.testing.assert_allclose(got.lse, np.log(7), rtol=1e-6)


KEYS = create_index_keys(6, 4, 24)
SCORES = {
    "q": jnp.zeros((2, 3, 5, 24)),
    "weights": jnp.zeros((2, 3, 5)),
    "key_pages": KEYS,
    "page_table": jnp.zeros((2, 4), jnp.int32),
    "lengths": jnp.ones(2, jnp.int32),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "q is required, got None"),
        ({"q": jnp.zeros((2, 3, 5, 24), jnp.int8)}, "q must have one of the dtypes float32, .*got int8"),
        ({"q": jnp.zeros((5, 24))}, r"q must be \[B, heads, d\] or \[B, T, heads, d\], got \[5, 24\]"),
        ({"q": jnp.zeros((2, 3, 0, 24))}, r"no axis may be empty, got q \[2, 3, 0, 24\]"),
        ({"weights": jnp.zeros((2, 5))}, r"weights must have the shape \[2, 3, 5\], got \[2, 5\]"),
        ({"weights": jnp.zeros((2, 3, 5), jnp.int32)}, "weights must have one of the dtypes .*got int32"),
        ({"key_pages": None}, "key_pages is required, got None"),
        ({"key_pages": jnp.zeros((6, 4, 20))}, r"key_pages must have the shape \[\*, \*, 24\], got \[6, 4, 20\]"),
        ({"key_pages": KEYS.data}, "key_pages must have one of the dtypes .*got uint8"),
        ({"key_pages": create_index_keys(6, 4, 28)}, "key_pages.dim must be the width of q, 24, got 28"),
        ({"key_pages": jnp.zeros((6, 3, 24))}, "page size of key_pages must be a power of two, got 3"),
        ({"key_pages": IndexKeys(KEYS.data[:0], 4, 24)}, "key_pages must have a page, got 0"),
        ({"page_table": None}, "page_table is required, got None"),
        ({"page_table": jnp.zeros((2, 4))}, "page_table must hold integers, got float32"),
        ({"page_table": jnp.zeros((3, 4), jnp.int32)}, r"page_table must have the shape \[2, \*\], got \[3, 4\]"),
        ({"page_table": jnp.zeros((2, 2, 4), jnp.int32)}, r"page_table must have the shape .*got \[2, 2, 4\]"),
        ({"page_table": jnp.zeros((2, 0), jnp.int32)}, r"page_table must have at least one column, got \[2, 0\]"),
        (
            {"key_pages": jnp.zeros((1, 2**13, 24)), "page_table": jnp.zeros((2, 2**18), jnp.int32)},
            r"W \* P must fit in 32 bits, got 262144 \* 8192",
        ),
        ({"lengths": None}, "lengths is required, got None"),
        ({"lengths": jnp.ones((2, 1), jnp.int32)}, r"lengths must have the shape \[2\], got \[2, 1\]"),
        ({"lengths": jnp.ones(2)}, "lengths must hold integers, got float32"),
        ({"q_positions": jnp.zeros(2, jnp.int32)}, r"q_positions must have the shape \[2, 3\], got \[2\]"),
        ({"q_positions": jnp.zeros((2, 3))}, "q_positions must hold integers, got float32"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"k": 2.5}, "k must be an integer known on the host, got 2.5"),
        ({"implementation": "cuda"}, "implementation must be one of .*got 'cuda'"),
        ({"config": 64}, "config must be a sparse_jax.Config, got 64"),
    ],
)
def test_scores(change, message):
    with pytest.raises(ValueError, match=message):
        indexer_scores(**{**SCORES, **change})


def test_what_is_refused_is_what_was_changed():
    """The arguments that the tests change are good ones."""
    assert mla_sparse_attention(**ATTENTION).out.shape == (2, 3, 5, 128)
    assert indexer_scores(**SCORES).shape == (2, 3, 16)
