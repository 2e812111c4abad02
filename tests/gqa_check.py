"""What a scenario of tests/gqa_scenarios.py must equal, wherever its pages lie and whatever stands beside them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.compare import TOLERANCE, assert_close, assert_same_bits
from tests.gqa_inputs import Layout, attend, paged, reference, sequences, with_holes

ELSEWHERE = {
    "on shuffled pages": Layout(shuffled=True),
    "in another plane of the pool": Layout(plane=1),
    "with NaN wherever no row looks": Layout(shuffled=True, plane=1, poisoned=True),
}


def check_scenario(case, implementation):
    """Equal to the reference; in the same bits wherever it lies; and right with absent ids anywhere in its rows."""
    seqs = sequences(case)
    got = attend(case, paged(case, seqs), implementation)  # first, so that no reused memory can hold the answer
    assert_right(case, got, reference(case, seqs))
    for where, layout in ELSEWHERE.items():
        again = attend(case, paged(case, seqs, layout), implementation)
        assert_same_bits(again.out, got.out, name=f"out {where}")
        assert_same_bits(again.lse, got.lse, name=f"lse {where}")
    holes, front = with_holes(case, seqs)
    expected = reference(case, front)
    for ids in (front, holes):
        assert_right(case, attend(case, paged(case, ids), implementation), expected)


def assert_right(case, got, expected):
    """Dtype, values and log-sum-exp of a scenario's output against the float64 reference."""
    assert got.out.dtype == case.result_dtype
    if case.result_dtype == "float8_e4m3fn":
        assert_one_rounding(got.out, expected.out, TOLERANCE[case.dtype])
    else:
        assert_close(got.out, expected.out, case.dtype)
    assert_close(got.lse, expected.lse, case.dtype, name="lse")


def assert_one_rounding(actual, expected, tolerance):
    """`actual`, float8_e4m3fn, is the rounding of a value within the tolerance of `expected`."""
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    slack = tolerance * (1 + np.abs(e))
    low, high = (np.clip(x, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float64) for x in (e - slack, e + slack))
    assert a.shape == e.shape
    wrong = ~((low <= a) & (a <= high))
    assert not wrong.any(), f"{wrong.mean():.1%} off, first at {np.argwhere(wrong)[0]}"
    # Three bits of mantissa turn the direction a little: rounding alone gives about 0.9997.
    cosine = a.ravel() @ e.ravel() / max(np.linalg.norm(a) * np.linalg.norm(e), 1e-300)
    assert cosine > 0.999, f"cosine {cosine}"


def every_scenario(cases, interpreted=()):
    """Parametrises `case` and `implementation`: plain jnp and, on a GPU, the kernel for all; the interpreter for some.

    The interpreter is slow. tests/pallas_kernels runs it over every kind of shape.
    """
    names = {case.name for case in cases}
    assert names >= set(interpreted), set(interpreted) - names
    params = []
    for case in cases:
        params.append(pytest.param(case, "xla", id=f"{case}-xla"))
        params.append(pytest.param(case, "triton", id=f"{case}-triton", marks=pytest.mark.gpu))
        if case.name in interpreted:
            params.append(pytest.param(case, "interpret", id=f"{case}-interpret"))
    return pytest.mark.parametrize(("case", "implementation"), params)
