"""The benchmark's own parts: inputs, chains, reports and the command, on shapes that take no time."""

import dataclasses
import functools
import io
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import sparse_jax
from pallas_kernels.lowering import lower_for_cuda
from sparse_jax.bench import attention, cases, inputs, peers, report, run, suites, timing
from sparse_jax.bench.command import bench, parse_config

TINY = cases.DecodeShape(
    name="tiny",
    batch=2,
    context=64,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    page_size=8,
    kept_tokens=16,
    kept_pages=2,
    dtype="float32",
    pool_bytes=0,
)
BRIEF = timing.Effort(repeats=2, seconds=0.01, calls=2)


@pytest.fixture
def tiny_suite(monkeypatch):
    """The attention suite with one tiny case, and a copy bandwidth that takes no time."""
    monkeypatch.setattr(attention, "ATTENTION_CPU", (TINY,))
    monkeypatch.setattr(attention, "ATTENTION_CPU_QUICK", ("tiny",))
    monkeypatch.setattr(suites, "copy_bandwidth", lambda: 1e9)


def test_inputs_are_shuffled_distinct_and_in_range():
    pools, lists = inputs.make_pools(TINY), inputs.make_lists(jax.random.key(0), TINY)
    assert pools.k.shape == pools.v.shape == (TINY.pages, 2, 8, 16)
    assert float(jnp.std(pools.k)) == pytest.approx(1, abs=0.05)
    assert not np.array_equal(pools.k, pools.v)
    table = np.asarray(lists.page_table)
    assert len(set(table.ravel())) == table.size
    assert not np.array_equal(np.sort(table.ravel()), table.ravel())
    for rows, width in ((lists.page_indices, 2), (lists.slots, 16)):
        assert rows.shape == (2, 2, width)
        assert all(len(set(row)) == width for row in np.asarray(rows).reshape(-1, width))
    for request in range(2):  # the chosen tokens lie on the request's own pages
        assert set(np.asarray(lists.slots)[request].ravel() // 8) <= set(table[request])


def test_small_batches_get_a_pool_larger_than_the_cache():
    case = next(case for case in cases.ATTENTION if case.name == "b1-32k")
    page = 2 * case.kv_heads * case.page_size * case.head_dim * 2
    assert case.pages * page >= 512 * 2**20 > 2 * timing.L2_BYTES
    assert case.pages % case.chunk_pages == 0


def test_bytes_are_those_of_the_shapes():
    case = next(case for case in cases.ATTENTION if case.name == "b64-32k")
    keys_and_values = 2 * 64 * 8 * 2048 * 128 * 2
    assert case.bytes_read(2048, 2048) == keys_and_values + 2 * 64 * 32 * 128 * 2 + 4 * 64 * 8 * 2048
    assert timing.sets_to_rotate(case.bytes_read(2048, 2048)) == 1
    assert timing.sets_to_rotate(8 * 2**20) == 15


def test_chain_feeds_each_output_to_the_next_call_and_rotates():
    measured = []

    def step(carry, fixed, inputs):
        measured.append(inputs)
        return carry * fixed + inputs

    sets = [jnp.float32(1), jnp.float32(10)]
    carry, first = timing._chain(step, 2, True, jnp.float32(2), jnp.float32(3), sets)
    assert float(first) == 7
    assert float(carry) == ((7 * 3 + 10) * 3 + 1) * 3 + 10


def test_measure_gives_a_positive_median_inside_its_spread():
    result = timing.measure(
        lambda q, k, x: jnp.tanh(q @ k) + x, jnp.ones((8, 8)), jnp.eye(8), [jnp.ones(())] * 3, BRIEF
    )
    assert 0 < result.low <= result.microseconds <= result.high
    assert result.kernel_microseconds is None
    np.testing.assert_allclose(result.first, np.tanh(np.ones((8, 8))) + 1, rtol=1e-5)


@pytest.mark.parametrize(("nanoseconds", "expected"), [(4000, 8.0), (400_000, None), (0, None)])
def test_kernel_time_is_the_sum_over_streams_where_believable(monkeypatch, nanoseconds, expected):
    def line(name, *events):
        events = [types.SimpleNamespace(name=event, duration_ns=nanoseconds) for event in events]
        return types.SimpleNamespace(name=name, events=events * 6)

    gpu = types.SimpleNamespace(
        name="/device:GPU:0", lines=[line("Stream #7", "a"), line("Stream #8", "b"), line("XLA Ops", "a")]
    )
    host = types.SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", "cuGraphLaunch", "cuMemAlloc", "other")])
    read = types.SimpleNamespace(from_file=lambda path: types.SimpleNamespace(planes=[gpu, host]))
    monkeypatch.setattr(jax.profiler, "ProfileData", read)
    seen = timing._believable(lambda: jnp.ones(2) + 1, calls=2, wall=10.0)
    if expected is None:
        assert seen is None
        return
    assert seen.microseconds == expected
    assert seen.kernels == {"a": (4.0, 1.0), "b": (4.0, 1.0)}
    assert seen.launches == 2
    assert seen.host == {"cuGraphLaunch": 1.0}


def test_suite_on_a_cpu_measures_plain_xla_and_says_so(tiny_suite):
    seen = []
    result = run("attention", effort=BRIEF, on_row=lambda result, row: seen.append(row))
    assert [(row.op, row.implementation) for row in result.rows] == [
        ("dense", "xla"),
        ("page-sparse", "xla"),
        ("token-sparse", "xla"),
    ]
    assert seen == result.rows
    assert all(row.microseconds > 0 and row.of_copy is None and not row.note for row in result.rows), result.rows
    assert "plain XLA only" in result.notes[0]


def test_a_failure_becomes_a_row(tiny_suite, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(sparse_jax, "page_sparse_attention", broken)
    rows = run("attention", effort=BRIEF).rows
    assert rows[1].microseconds is None
    assert rows[1].note == "RuntimeError: out of memory"
    assert rows[2].microseconds is not None


def test_inputs_that_do_not_fit_become_a_note(tiny_suite, monkeypatch):
    monkeypatch.setattr(inputs, "make_pools", lambda case: 1 / 0)
    result = run("attention", effort=BRIEF)
    assert result.rows == []
    assert "tiny: ZeroDivisionError" in result.notes[1]


def test_no_case_is_begun_after_the_minutes(tiny_suite):
    result = run("attention", effort=BRIEF, minutes=-1)
    assert result.rows == []
    assert "not begun" in result.notes[1]


def test_plain_xla_is_skipped_where_it_would_not_fit(monkeypatch):
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1000, "bytes_in_use": 900})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    with pytest.raises(attention.Skip, match="would need about"):
        attention._check_memory(TINY, attention.OPS[0])


def test_error_is_the_relative_distance_to_plain_xla():
    ours = timing.Timing(1, 1, 1, None, jnp.array([1.0, 2.1]))
    plain = timing.Timing(1, 1, 1, None, jnp.array([1.0, 2.0]))
    assert attention._relative_error(ours, plain) == pytest.approx(0.1 / 5**0.5, rel=1e-4)
    assert attention._relative_error(None, plain) is None


def test_peers_get_settings_that_divide_the_table():
    for case in cases.ATTENTION:
        for settings in peers.jax_paged_settings(case):
            part, rest = divmod(case.pages_per_request, settings["k_splits"])
            assert rest == 0
            assert part % settings["pages_per_compute_block"] == 0


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    row = report.Row(case="tiny", op="dense", implementation="torch", bytes=1)
    assert attention._guarded(missing, row, None)[1].note == "not installed: torch"


def example_result():
    row = report.Row(case="tiny", op="dense", implementation="xla", bytes=10**6)
    timed = row.timed(timing.Timing(2.0, 1.5, 3.0, None, jnp.zeros(())), 1e12, settings={"splits": 4})
    failed = dataclasses.replace(row, implementation="triton", note="skipped: no room")
    return report.BenchResult(
        suite="attention",
        quick=True,
        environment=report.environment(),
        copy_terabytes_per_second=1.0,
        cases=[dataclasses.asdict(TINY)],
        rows=[timed, failed],
    )


def test_json_holds_shapes_versions_and_numbers(tmp_path):
    result = example_result()
    result.save(tmp_path / "new" / "result.json")
    read = json.loads((tmp_path / "new" / "result.json").read_text())
    assert read["environment"]["jax"] == jax.__version__
    assert read["cases"][0]["context"] == 64
    assert read["rows"][0]["terabytes_per_second"] == 0.5
    assert read["rows"][0]["of_copy"] == 0.5
    assert read["rows"][1]["note"] == "skipped: no room"


def test_table_leaves_out_empty_columns_and_says_why_a_number_is_missing():
    console = Console(width=120, file=io.StringIO())
    console.print(example_result().table())
    text = console.file.getvalue()
    assert "kernel us" not in text
    assert "0.50" in text
    assert "tiny dense triton: skipped: no room" in text
    assert "splits=4" in text


def test_config_is_read_from_text():
    assert parse_config(" ") is None
    config = parse_config("splits=4, num_warps=8,exact=true")
    assert (config.splits, config.num_warps, config.exact) == (4, 8, True)
    for wrong in ("splits", "splits=many", "stripes=3"):
        with pytest.raises(ValueError, match=r"setting|config"):
            parse_config(wrong)


@pytest.fixture
def command():
    app = typer.Typer()
    app.command()(bench)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_command_prints_a_table_and_writes_json(tiny_suite, command, monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "rows", lambda case, plan: iter(example_result().rows))
    path = tmp_path / "result.json"
    done = command("--quick", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "skipped: no room" in done.output
    assert len(json.loads(path.read_text())["rows"]) == 2


@pytest.mark.parametrize("wrong", [("nonsense",), ("--cases", "b9000"), ("--config", "splits=x")])
def test_command_explains_what_is_wrong(command, wrong):
    done = command(*wrong)
    assert done.exit_code == 2
    assert "Traceback" not in done.output


@pytest.mark.parametrize("name", ["b64-32k", "b1-128k"])
def test_everything_timed_on_a_gpu_lowers_for_one(name, monkeypatch):
    """The GPU part of the suite, up to the point where a compiler for the GPU would be needed."""
    case = next(case for case in cases.ATTENTION if case.name == name)
    lowered = []

    def lower(step, carry, fixed, sets, effort, hold=False):
        chain = functools.partial(timing._chain, step, 2, hold)
        lowered.append(lower_for_cuda(chain, carry, fixed, sets).as_text())
        return timing.Timing(1, 1, 1, None, jnp.ones(2))

    def shapes(function, *leading):
        return lambda case, *rest: jax.eval_shape(lambda: function(*leading, case))

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention, "measure", lower)
    monkeypatch.setattr(peers, "measure", lower)
    monkeypatch.setattr(peers, "torch_sdpa", lambda *rest: (timing.Timing(1, 1, 1, None, jnp.ones(2)), {}))
    monkeypatch.setattr(inputs, "make_query", shapes(inputs.make_query))
    monkeypatch.setattr(inputs, "make_pools", shapes(inputs.make_pools))
    one_set = shapes(inputs.make_lists, jax.random.key(0))(case)
    monkeypatch.setattr(inputs, "make_sets", lambda case, count: [one_set] * count)
    rows = list(attention.rows(case, timing.Plan(BRIEF, 1e12)))
    assert [row.implementation for row in rows if row.op == "dense"] == [
        "xla",
        "triton",
        "jax paged_attention",
        "torch SDPA, contiguous",
    ]
    assert all(row.microseconds and not row.note for row in rows), [row.note for row in rows]
    assert sum("triton" in text for text in lowered) >= 3 + len(peers.jax_paged_settings(case))


@pytest.mark.gpu
def test_suite_on_a_gpu_times_the_kernels_and_finds_them_right(monkeypatch):
    case = dataclasses.replace(TINY, context=256, q_heads=8, head_dim=64, page_size=16, dtype="bfloat16")
    monkeypatch.setattr(attention, "ATTENTION", (case,))
    result = run("attention", effort=BRIEF)
    kernels = [row for row in result.rows if row.implementation == "triton"]
    assert [row.op for row in kernels] == ["dense", "page-sparse", "token-sparse"]
    assert all(not row.note and row.microseconds > 0 and row.error < 2e-2 for row in kernels), kernels
    assert all(row.of_copy > 0 for row in kernels)
    assert result.environment["driver"] != "none"
