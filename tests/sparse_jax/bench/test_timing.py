"""Chains, the profiler's reader, and entries: what is compiled first, timed later, and what becomes of failures."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax.bench import cases, entries, profiler, timing
from tests.sparse_jax.bench.shapes import BRIEF, any_timing, row

PLAN = timing.Plan(BRIEF, 1e12)


def test_chain_feeds_each_output_to_the_next_call_and_rotates():
    def step(carry, fixed, inputs):
        return carry * fixed + inputs

    sets = [jnp.float32(1), jnp.float32(10)]
    carry, first = timing._chain(step, 2, 1, True, jnp.float32(2), jnp.float32(3), sets)
    assert float(first) == 7
    assert float(carry) == ((((7 * 3 + 1) * 3 + 10) * 3 + 1) * 3) + 10
    passed_twice, _ = timing._chain(step, 1, 2, False, jnp.float32(2), jnp.float32(3), sets)
    assert float(passed_twice) == float(carry)


@pytest.mark.parametrize(
    ("sets", "hold", "calls"), [(1, False, 17), (3, False, 109), (16, False, 1025), (3, True, 13), (1, True, 11)]
)
def test_the_body_of_a_chain_holds_enough_calls_for_a_graph(sets, hold, calls):
    chain = timing.Chain(None, None, None, [None] * sets, calls=10, hold=hold)
    assert chain.calls == calls
    assert chain.function.keywords == {}
    _, rounds, passes, _ = chain.function.args
    assert hold or passes * sets >= timing.LEAST_CALLS_IN_BODY
    assert chain.calls == rounds * passes * sets + 1


def test_measure_gives_a_positive_median_inside_its_spread():
    result = timing.measure(
        lambda q, k, x: jnp.tanh(q @ k) + x, jnp.ones((8, 8)), jnp.eye(8), [jnp.ones(())] * 3, BRIEF
    )
    assert 0 < result.low <= result.microseconds <= result.high
    assert result.kernel_microseconds is None
    np.testing.assert_allclose(result.first, np.tanh(np.ones((8, 8))) + 1, rtol=1e-5)


def test_sets_exceed_twice_the_cache():
    case = next(case for case in cases.ATTENTION if case.name == "b64-32k")
    assert timing.sets_to_rotate(case.bytes_read(2048, 2048)) == 1
    assert timing.sets_to_rotate(8 * 2**20) == 15
    assert timing.sets_to_rotate(1) == timing.MOST_SETS


@pytest.fixture
def watched(monkeypatch):
    """What a profiler on a GPU would have written: two streams, and the host's calls."""

    def write(nanoseconds):
        def line(name, *events):
            # One after the other, and 1,000 ns between them.
            starts = itertools.count(0, nanoseconds + 1000)
            events = [
                types.SimpleNamespace(name=event, start_ns=next(starts), duration_ns=nanoseconds)
                for event in events * 6
            ]
            return types.SimpleNamespace(name=name, events=events)

        streams = [line("Stream #7", "a"), line("Stream #8", "b", "b"), line("XLA Ops", "a")]
        gpu = types.SimpleNamespace(name="/device:GPU:0", lines=streams)
        host = types.SimpleNamespace(name="/host:CPU", lines=[line("1", "cuGraphLaunch", "cuMemAlloc", "Stream")])
        read = types.SimpleNamespace(from_file=lambda path: types.SimpleNamespace(planes=[gpu, host]))
        monkeypatch.setattr(jax.profiler, "ProfileData", read)

    return write


@pytest.mark.parametrize(("nanoseconds", "believed"), [(4000, True), (400_000, False), (0, False)])
def test_kernel_time_is_the_sum_over_streams_where_believable(watched, nanoseconds, believed):
    watched(nanoseconds)
    seen = timing._believable(lambda: jnp.ones(2) + 1, calls=2, wall=12.0)
    assert (seen is not None) == believed
    if seen:
        assert seen.kernels == {"b": (8.0, 2.0), "a": (4.0, 1.0)}
        assert list(seen.kernels) == ["b", "a"]  # the longest first
        assert (seen.microseconds, seen.launches) == (12.0, 3.0)
        assert seen.host == {"cuGraphLaunch": 1.0}
        # The streams run beside each other; the longer one has 12 kernels.
        assert (seen.idle, seen.span) == ((1.0,) * 11, 12 * 4.0 + 11)
        assert seen.busy == pytest.approx(48 / 59)


def test_time_without_a_kernel_is_found_across_streams():
    running = [(2000, 5000), (0, 1500), (4000, 4500), (9000, 10_000), (5000, 6000)]
    assert profiler.idle_between(running) == ((3.0, 0.5), 10.0)
    assert profiler.idle_between([]) == ((), 0.0)


def test_a_profiler_that_fails_costs_no_measurement(monkeypatch):
    monkeypatch.setattr(timing, "profile", lambda run, calls: 1 / 0)
    assert timing._believable(lambda: None, 1, 1.0) is None


class Fake:
    """A chain that takes so long."""

    def __init__(self, microseconds=1.0, compile_error=None, time_error=None):
        self.microseconds, self.compile_error, self.time_error = microseconds, compile_error, time_error

    def compile(self):
        if self.compile_error:
            raise self.compile_error

    def time(self, effort):
        if self.time_error:
            raise self.time_error
        return any_timing()._replace(microseconds=self.microseconds)


def measured(*candidates, **fields):
    named = [entries.Candidate(chain, {"name": number}) for number, chain in enumerate(candidates)]
    (found,) = entries.measure([entries.Entry(row("dense", "peer", None), lambda: named, **fields)], PLAN)
    return found


def test_the_fastest_candidate_that_runs_counts():
    error = RuntimeError("shared memory")
    found = measured(Fake(5), Fake(1, compile_error=error), Fake(2, time_error=error), Fake(3))
    assert (found.microseconds, found.settings, found.note) == (3, {"name": 3}, "")
    assert found.terabytes_per_second == pytest.approx(10**6 / 3e-6 / 1e12)


@pytest.mark.parametrize(
    "candidates",
    [
        [Fake(compile_error=RuntimeError("out of\nmemory"))],
        [Fake(time_error=RuntimeError("out of\nmemory"))],
        [Fake(compile_error=ValueError("first")), Fake(time_error=RuntimeError("out of\nmemory"))],
    ],
)
def test_a_failure_becomes_a_row(candidates):
    found = measured(*candidates)
    assert found.microseconds is None
    assert found.note == "RuntimeError: out of memory"


def test_a_peer_that_is_not_installed_is_named():
    def candidates():
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    (found,) = entries.measure([entries.Entry(row("dense", "peer", None), candidates)], PLAN)
    assert (found.microseconds, found.note) == (None, "not installed: torch")


def test_what_does_not_fit_beside_its_inputs_is_not_run(monkeypatch):
    chain = timing.Chain(lambda x, _, scale: jnp.sin(x @ x) * scale, jnp.ones((64, 64)), None, [jnp.ones(())])
    chain.compile()
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 10_000, "bytes_in_use": 9000})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    with pytest.raises(MemoryError, match=r"needs 0.0 GB beside its inputs"):
        chain.time(BRIEF)


def test_a_failure_to_finish_leaves_the_number():
    compiled = []
    beside = types.SimpleNamespace(compile=lambda: compiled.append(True))
    found = measured(Fake(), finish=lambda timing: 1 / 0, beside=[beside])
    assert (found.microseconds, found.note) == (1, "ZeroDivisionError: division by zero")
    assert compiled == [True]


def test_finish_adds_to_the_row_and_only_wanted_rows_are_measured():
    assert measured(Fake(), finish=lambda timing: {"error": 0.5}).error == 0.5
    todo = [entries.Entry(row(op, "x", None), lambda: [entries.Candidate(Fake())]) for op in ("dense", "page-sparse")]
    assert [found.op for found in entries.measure(todo, PLAN._replace(only="sparse"))] == ["page-sparse"]
