"""The bench suite of whole decode steps of a looped model."""

import pytest

from models import step_bench
from models.reference import ReferenceCorrection
from sparse_jax.bench import suites
from sparse_jax.bench.timing import Effort


def test_bytes_and_the_ideal_are_those_of_the_specification():
    """Bound from weights and keys and values of Ouro-1.4B in BF16 at a retention of 0.1."""
    ideal = {}
    for case in step_bench.CASES:
        assert case.weight_bytes == pytest.approx(10.07e9, rel=1e-3)
        assert case.kv_bytes == case.batch * case.context * 768 * 1024
        corrected = case.weight_bytes + case.kv_read(ReferenceCorrection(retention=0.1))
        ideal[case.name] = round((case.weight_bytes + case.kv_bytes) / corrected, 2)
    assert ideal == {"b1-1k": 1.03, "b1-8k": 1.21, "b1-32k": 1.48, "b8-8k": 1.60, "b16-8k": 1.69}


def test_steps_run_on_a_cpu_beside_the_other_suites(monkeypatch):
    monkeypatch.setitem(suites.SUITES, "ouro", step_bench)
    result = suites.run("ouro", effort=Effort(repeats=2, seconds=0.01, calls=2))
    assert [row.op for row in result.rows] == ["step: dense", "step: reference 0.1"]
    assert all(row.microseconds > 0 and not row.note for row in result.rows), result.rows
    assert result.rows[1].details["ideal"] == pytest.approx(1.137, abs=1e-3)
