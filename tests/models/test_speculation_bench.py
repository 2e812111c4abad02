"""The bench suite of self-speculation."""

import jax.numpy as jnp
import pytest

from models import speculation_bench
from models.ouro import OuroConfig
from models.speculation_bench import SpeculationShape, Way
from sparse_jax.bench import suites
from sparse_jax.bench.timing import Effort

SMALL = SpeculationShape(name="small", batch=2, prompt=12, tokens=8, drafts=3)


def test_ways_are_plain_and_speculative_with_and_without_correction():
    ways = speculation_bench.ways(speculation_bench.CASES[0])
    assert list(ways) == [
        "plain",
        "rounds in one jit",
        "rounds, overlapped",
        "rounds, none read",
        "reference 0.1, plain",
        "reference 0.1, overlapped",
    ]
    assert ways["plain"] == Way()
    drafts = ways["rounds in one jit"].speculation
    assert (drafts.drafts, drafts.draft_loops) == (3, 2)
    assert [name for name, way in ways.items() if way.reference] == list(ways)[4:]
    assert all(way.speculation == drafts for name, way in ways.items() if "plain" not in name)


def test_a_way_runs_on_a_cpu_beside_the_other_suites(monkeypatch):
    way = speculation_bench.ways(SMALL)["rounds, overlapped"]
    monkeypatch.setitem(suites.SUITES, "speculation", speculation_bench)
    monkeypatch.setattr(speculation_bench, "CASES_CPU", (SMALL,))
    monkeypatch.setattr(speculation_bench, "ways", lambda case: {"rounds, overlapped": way})
    monkeypatch.setattr(suites, "copy_bandwidth", lambda: 1e9)
    (row,) = suites.run("speculation", effort=Effort(repeats=1, seconds=0.01, calls=1)).rows
    assert (row.note, row.bytes, row.of_copy) == ("", 0, None)
    details = row.details
    assert 0 <= details["acceptance"] <= 1
    # The first token is there before the clock starts.
    assert 1 <= details["tokens a round"] <= SMALL.drafts + 1
    assert details["tokens/s"] * row.microseconds == pytest.approx(1e6)


def test_a_released_size_has_random_weights_and_overlapped_rounds(monkeypatch):
    case = next(case for case in speculation_bench.CASES if case.model == "ouro-1.4b")
    assert list(speculation_bench.ways(case)) == ["rounds, overlapped", "rounds, none read"]
    small = OuroConfig.tiny(hidden_size=64, intermediate_size=64, num_layers=1)
    monkeypatch.setattr(OuroConfig, "ouro_1_4b", lambda: small)
    config, model = speculation_bench._model.__wrapped__(case.model)
    hidden = model.forward(jnp.ones((1, 3), jnp.int32)).hidden
    assert config is small
    assert (hidden.dtype, bool(jnp.isfinite(hidden).all())) == (jnp.bfloat16, True)
