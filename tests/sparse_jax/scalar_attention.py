"""Attention with D = 1 and q = 1, so that a key is its own score: the notation of the reported cases."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paged_attention

IMPLEMENTATIONS = [pytest.param("xla"), pytest.param("interpret"), pytest.param("triton", marks=pytest.mark.gpu)]
KERNELS = IMPLEMENTATIONS[1:]
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
LN2 = np.log(2)


def pool(values, page_size, dtype=jnp.float32):
    """[N, 1, P, 1] from a flat list of tokens."""
    return jnp.asarray(values, jnp.float32).astype(dtype).reshape(-1, 1, page_size, 1)


def one(q=1.0, dtype=jnp.float32):
    return jnp.full((1, 1, 1), q, dtype)


def ids(*values):
    return jnp.asarray(values, jnp.int32)


def attend(scores, values, length, *, page_size, table=None, implementation="xla", q=None, **options):
    pages = -(-len(scores) // page_size)
    table = ids(range(pages)) if table is None else ids(table)
    got = paged_attention(
        one() if q is None else q,
        pool(scores, page_size),
        pool(values, page_size),
        table,
        ids(length),
        implementation=implementation,
        **options,
    )
    return got


def expect(got, out, lse, rtol=1e-5):
    np.testing.assert_allclose(np.asarray(got.out, np.float64).ravel(), np.ravel(out), rtol=rtol)
    np.testing.assert_allclose(np.asarray(got.lse, np.float64).ravel(), np.ravel(lse), rtol=rtol)
