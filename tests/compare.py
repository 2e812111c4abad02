"""The one comparison of the numeric tests: shape, dtype, places of inf and nan, worst element, direction."""

import jax.numpy as jnp
import numpy as np

# Absolute and relative, by dtype of the operands (float32 products in full precision).
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2, "float8_e4m3fn": 1e-2}
COSINE = 0.9999


def assert_close(actual, expected, dtype="float32", *, name="out"):
    """`actual` against a reference of higher precision; `dtype` names the precision of the computation."""
    tolerance = TOLERANCE[jnp.dtype(dtype).name]
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert (test(a) == test(e)).all(), f"{name}: {test.__name__} at {np.argwhere(test(a) != test(e))[:5].tolist()}"
    finite = np.isfinite(e)
    error = np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, e, 0)), 0)
    excess = error - tolerance * (1 + np.where(finite, np.abs(e), 0))
    if excess.size and excess.max() > 0:
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        raise AssertionError(
            f"{name}: {a[worst]} at {worst}, expected {e[worst]} within {tolerance}; {(excess > 0).mean():.1%} off"
        )
    norms = np.linalg.norm(a[finite]) * np.linalg.norm(e[finite])
    if norms > 0:
        cosine = float(a[finite] @ e[finite] / norms)
        assert cosine > COSINE, f"{name}: cosine {cosine}"


def assert_same_bits(actual, expected, *, name="out"):
    """Equal bit for bit, NaN included."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} and {expected.dtype}"
    a, e = np.asarray(actual), np.asarray(expected)
    assert a.shape == e.shape, f"{name}: shapes {a.shape} and {e.shape}"
    assert a.tobytes() == e.tobytes(), f"{name}: {(a != e).sum()} of {a.size} elements differ"
