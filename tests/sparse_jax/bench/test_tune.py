"""Tuning: candidates, the search among them with made-up times, and the command."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from pallas_kernels.config import MOST_STAGE_BYTES
from pallas_kernels.lowering import lower_for_cuda
from sparse_jax import Config, Tuning, load_tuning
from sparse_jax.bench import inputs, timing, tune, tuner
from sparse_jax.bench.attention import OPS
from sparse_jax.bench.cases import ATTENTION
from sparse_jax.bench.tuner import MARGIN, OWN, Outcome, candidates, own_launch, search
from sparse_jax.tuning import CallShape, Machine, make_entry, read_entries, save_entries
from tests.sparse_jax.bench import shapes

TINY = dataclasses.replace(shapes.TINY, kept_tokens=32, kept_pages=4)
TUNED = {op.name: op for op in OPS if op.name.partition(",")[0] in tune.OPERATIONS}
SHAPES = [
    CallShape(
        operation="token_sparse_attention",
        batch=batch,
        rows=rows,
        q_heads=q_heads,
        kv_heads=8,
        key_width=width,
        value_width=width,
        page_size=64,
        tokens=tokens,
        lists_per_row=rows == 3,
        cache_dtype=dtype,
        q_dtype="float32" if dtype == "float32" else "bfloat16",
    )
    for batch, rows, q_heads, width, tokens, dtype in [
        (64, 1, 32, 128, 2048, "bfloat16"),
        (8, 3, 32, 128, 32_768, "bfloat16"),
        (1, 1, 8, 64, 131_072, "float8_e4m3fn"),
        (1, 8, 256, 256, 100, "float32"),
        (4, 1, 24, 80, 1, "float16"),
    ]
]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_candidates_are_few_different_and_fit_the_hardware(shape, quick):
    found = candidates(shape, quick)
    assert found[0] == OWN
    assert len(set(found)) == len(found) <= (14 if quick else 42)
    own, query_rows = own_launch(shape)
    own_fields = dataclasses.asdict(own)
    row_bytes = (shape.key_width + shape.value_width) * jnp.dtype(shape.cache_dtype).itemsize
    launches = set()
    for config in found:
        given = {name: value for name, value in dataclasses.asdict(config).items() if value}
        launch = own_fields | given
        launches.add(tuple(launch.values()))
        assert launch["block_tokens"] * row_bytes * launch["num_stages"] <= MOST_STAGE_BYTES or config == OWN
        assert launch["splits"] <= max(own.splits, -(-shape.tokens // launch["block_tokens"]))
        assert launch["block_rows"] <= max(16, 2 * query_rows)
    assert len(launches) == len(found), "the same launch twice"
    assert set(candidates(shape, quick=True)) <= set(candidates(shape))


def test_candidates_vary_every_part_of_a_large_shape():
    found = candidates(SHAPES[3]) + candidates(SHAPES[1])
    for field in ("block_tokens", "block_rows", "num_warps", "num_stages", "splits"):
        assert len({getattr(config, field) for config in found}) >= 3, field


@pytest.mark.parametrize("op", ["dense", "page-sparse", "token-sparse", "token-sparse, fp8 KV"])
def test_candidates_lower_for_a_gpu(op):
    op = TUNED[op]
    case = dataclasses.replace(TINY, head_dim=128, dtype="bfloat16", page_size=64, context=4096, kept_tokens=1024)
    q, pools, lists = inputs_of(case, op)
    for config in candidates(tuner.call_shape(op, q, pools, lists), quick=True):
        call = functools.partial(op.call, implementation="triton", config=config)
        assert "triton" in lower_for_cuda(call, q, pools, lists).as_text()


def inputs_of(case, op):
    def make():
        pools = inputs.make_pools(case)
        pools = inputs.to_fp8(pools) if op.kv_dtype else pools
        return inputs.make_query(case), pools, inputs.make_lists(jax.random.key(0), case)

    return jax.eval_shape(make)


def filled(tree):
    """Random numbers and valid ids of the same shapes."""
    rng = np.random.default_rng(0)

    def fill(array):
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        values = rng.standard_normal(array.shape) if floating else rng.integers(0, 8, array.shape)
        return jnp.asarray(values, array.dtype)

    return jax.tree.map(fill, tree)


class Fake:
    """A chain with made-up times, one for each look."""

    def __init__(self, *times, compiles=True, result=1.0):
        self.times, self.looks, self.compiles, self.result = times, 0, compiles, result

    def compile(self):
        if not self.compiles:
            raise RuntimeError("does not fit\nshared memory")

    def time(self, effort):
        microseconds = self.times[min(self.looks, len(self.times) - 1)]
        self.looks += 1
        if microseconds is None:
            raise RuntimeError("launch failed")
        return timing.Timing(microseconds, microseconds, microseconds, first=jnp.full((2, 4), self.result))


A, B, C, D, E = (Config(splits=splits) for splits in range(1, 6))


def run_search(chains):
    expected = jnp.ones((2, 4))
    return search(tuple(chains), chains.__getitem__, lambda result: tuner.wrong(result, expected, 1e-3))


def test_the_fastest_wins():
    outcome = run_search({OWN: Fake(10.0), A: Fake(12.0), B: Fake(8.0), C: Fake(9.0)})
    assert outcome == Outcome(B, 8.0, 10.0, tried=4, dropped={})


def test_a_gain_within_the_noise_is_none():
    slower, faster = 10 * (1 - MARGIN) + 0.01, 10 * (1 - MARGIN) - 0.01
    assert run_search({OWN: Fake(10.0), A: Fake(slower)})[:3] == (OWN, 10.0, 10.0)
    assert run_search({OWN: Fake(10.0), A: Fake(faster)})[:3] == (A, faster, 10.0)


def test_one_lucky_look_does_not_win():
    outcome = run_search({OWN: Fake(10.0), A: Fake(5.0, 11.0), B: Fake(9.0)})
    assert outcome.config == B


def test_only_the_best_few_and_the_own_choice_are_looked_at_again():
    chains = {OWN: Fake(20.0), A: Fake(10.0), B: Fake(11.0), C: Fake(12.0), D: Fake(13.0)}
    outcome = run_search(chains)
    assert outcome[:3] == (A, 10.0, 20.0)
    assert [chain.looks for chain in chains.values()] == [6, 6, 6, 6, 1]


def test_what_fails_or_is_wrong_is_dropped_with_its_reason():
    chains = {
        OWN: Fake(10.0),
        A: Fake(1.0, compiles=False),
        B: Fake(None),
        C: Fake(2.0, result=1.1),
        D: Fake(3.0, result=jnp.nan),
        E: Fake(9.0),
    }
    outcome = run_search(chains)
    assert outcome.config == E
    assert outcome.dropped[A] == "RuntimeError: does not fit shared memory"
    assert outcome.dropped[B] == "RuntimeError: launch failed"
    assert "wrong result: relative error 1.0e-01" in outcome.dropped[C]
    assert "wrong result: relative error nan" in outcome.dropped[D]


def test_a_single_wrong_row_is_wrong():
    expected = jnp.ones((64, 8, 16))
    assert tuner.wrong(expected * 1.001, expected, 2e-2) is None
    assert "worst row" in tuner.wrong(expected.at[5, 3, :4].set(1.1), expected, 2e-2)
    assert tuner.wrong(jnp.zeros((2, 3)), jnp.zeros((2, 3)), 2e-2) is None
    assert "worst row" in tuner.wrong(jnp.full((2, 3), 1e-3), jnp.zeros((2, 3)), 2e-2)


def test_an_own_choice_that_does_not_run_is_beaten_by_anything():
    outcome = run_search({OWN: Fake(1.0, compiles=False), A: Fake(50.0), B: Fake(60.0)})
    assert outcome[:3] == (A, 50.0, None)
    assert "own choice does not work here" in tune.report("b1", outcome)[0]
    with pytest.raises(RuntimeError, match=r"no candidate works; the kernel's own choice: .*does not fit"):
        run_search({OWN: Fake(1.0, compiles=False), A: Fake(None)})


@pytest.mark.parametrize("op", TUNED)
def test_the_shape_that_is_written_is_the_one_a_call_looks_up(op):
    op = TUNED[op]
    q, pools, lists = inputs_of(TINY, op)
    tuning = Tuning(entries=((tuner.call_shape(op, q, pools, lists), A),))
    # A shape without an entry would warn, and warnings are errors in tests.
    jax.eval_shape(functools.partial(op.call, implementation="interpret", config=tuning), q, pools, lists)


def test_a_real_run_in_the_interpreter_fills_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "LEAST_CALLS_IN_BODY", 1)
    monkeypatch.setattr(tuner, "BRIEF", timing.Effort(repeats=1, seconds=0.001, calls=1))
    monkeypatch.setattr(tuner, "sets_to_rotate", lambda nbytes: 1)
    monkeypatch.setattr(tuner, "candidates", lambda shape, quick: (OWN, Config(splits=2, block_tokens=16)))
    monkeypatch.setattr(tuner, "tune", functools.partial(tuner.tune, implementation="interpret"))
    path, said, op = tmp_path / "new" / "tuning.json", [], TUNED["token-sparse"]
    q, pools, lists = filled(inputs_of(TINY, op))  # JAX's random numbers would take longer than all the rest
    monkeypatch.setattr(inputs, "make_query", lambda case: q)
    monkeypatch.setattr(inputs, "make_pools", lambda case: pools)
    monkeypatch.setattr(inputs, "make_sets", lambda case, count: [lists])
    assert tune.tune_all([op], [TINY], path, minutes=None, quick=True, show=said.append) == 1, said
    assert len(said) == 1, "none was dropped"
    assert said[0].startswith("tiny, token-sparse: ")
    assert "2 tried" in said[0]
    (entry,) = read_entries(path)
    assert entry["microseconds"] > 0
    assert [shape for shape, _ in load_tuning(path).entries] == [tuner.call_shape(op, q, pools, lists)]


def entry_of(batch):
    return make_entry(Machine("NVIDIA H200", "0.11.2", "0.1.0"), dataclasses.replace(SHAPES[0], batch=batch), A)


@pytest.fixture
def made_up(monkeypatch):
    """Tuning that finds A at once, and fails for dense attention."""

    def found(op, case, q, pools, quick):
        if op.name == "dense":
            raise RuntimeError("out of\nmemory")
        shape = dataclasses.replace(SHAPES[0], batch=case.batch, operation=op.name)
        return shape, Outcome(A, 8.0, 10.0, tried=3, dropped={B: "too large", C: "too large"})

    monkeypatch.setattr(tuner, "tune", found)


def test_one_failure_costs_nothing_else_and_old_entries_stay(made_up, tmp_path):
    path, said = tmp_path / "tuning.json", []
    save_entries(path, [entry_of(1)])
    ops = [TUNED["dense"], TUNED["token-sparse"]]
    only_pages = dataclasses.replace(TINY, name="other", ops=("page-sparse",))
    assert tune.tune_all(ops, [only_pages, TINY], path, minutes=None, quick=False, show=said.append) == 1
    assert said == [
        "other: left out, it is a shape for page-sparse only",
        "tiny, dense: RuntimeError: out of memory",
        "tiny, token-sparse: 8.0 us with splits=1, 3 tried; 10.0 us by the kernel's own choice",
        "  2 dropped: too large",
    ]
    first, second = read_entries(path)
    assert first == entry_of(1)
    assert second["config"] == {"splits": 1}
    assert second["own_choice_microseconds"] == 10.0


def test_no_shape_is_begun_after_the_minutes(made_up, tmp_path):
    path, said = tmp_path / "tuning.json", []
    assert tune.tune_all([TUNED["dense"]], [TINY], path, minutes=-1, quick=False, show=said.append) == 0
    assert said == ["tiny: not begun, -1 minutes were over"]
    assert not path.exists()


def test_inputs_that_do_not_fit_are_said(made_up, monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(inputs, "make_pools", lambda case: 1 / 0)
    tune.tune_all([TUNED["dense"]], [TINY], tmp_path / "x", minutes=None, quick=False, show=said.append)
    assert said == ["tiny: ZeroDivisionError: division by zero"]


def test_shapes_come_by_name_and_by_number():
    usual = [case for case in ATTENTION if not case.ops]
    assert tune.select_shapes([], [], {}, quick=False) == usual
    assert 0 < len(tune.select_shapes([], [], {}, quick=True)) < len(usual)
    wide = tune.select_shapes(["b8-32k", "b1-128k"], [], {"head_dim": 256}, quick=False)
    assert [(case.name, case.batch, case.head_dim) for case in wide] == [("b8-32k", 8, 256), ("b1-128k", 1, 256)]
    given = tune.select_shapes([], [2, 3], {"context": 4096, "page_size": 16}, quick=False)
    assert [(case.batch, case.context, case.page_size) for case in given] == [(2, 4096, 16), (3, 4096, 16)]
    assert len({case.name for case in given}) == 2
    (everything,) = tune.select_shapes([], [], {"context": 4096, "kept_tokens": 4096, "kept_pages": 64}, quick=False)
    assert (everything.kept_tokens, everything.kept_pages) == (4096, 64)


@pytest.mark.parametrize(
    ("names", "numbers", "message"),
    [
        (["b9000"], {}, "unknown case b9000; there are b64-32k"),
        ([], {"dtype": "int4"}, "dtype must be"),
        ([], {"dtype": "float8_e4m3fn"}, "dtype must be"),
        ([], {"page_size": 48}, "power of two"),
        ([], {"context": 100}, "divide the context, got 64 and a context of 100"),
        ([], {"kv_heads": 5}, "multiple of --kv-heads, got 32 and 5"),
        ([], {"context": 4096, "kept_tokens": 4097}, "--kept-tokens must be at most the context, got 4097 of 4096"),
        ([], {"context": 4096, "kept_pages": 65}, "--kept-pages must be at most .*, got 65 of 64"),
    ],
)
def test_what_makes_no_shape_is_refused(names, numbers, message):
    with pytest.raises(ValueError, match=message):
        tune.select_shapes(names, [], numbers, quick=False)


def test_operations_are_those_of_the_suite():
    assert [op.name for op in tune.select_operations([], fp8=False)] == list(tune.OPERATIONS)
    assert [op.name for op in tune.select_operations(["dense"], fp8=True)] == ["dense, fp8 KV"]
    with pytest.raises(ValueError, match="unknown operation sparse; there are token-sparse"):
        tune.select_operations(["sparse"], fp8=False)


@pytest.fixture
def command():
    alone = typer.Typer()
    alone.command()(tune.tune)
    return lambda *arguments: CliRunner().invoke(alone, [str(argument) for argument in arguments])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is something to tune")
def test_without_a_gpu_it_says_so_and_writes_nothing(command, tmp_path):
    path = tmp_path / "tuning.json"
    done = command("--output", path)
    assert done.exit_code == 1
    assert "Nothing to tune: JAX runs on cpu here" in done.stderr
    assert "Traceback" not in done.output
    assert not path.exists()


def test_command_tunes_and_says_how_to_use_the_file(command, made_up, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tune, "select_shapes", lambda names, batches, numbers, quick: [TINY])
    path = tmp_path / "tuning.json"
    done = command("--output", path)
    assert done.exit_code == 0, done.output
    assert f"2 settings are in {path}" in " ".join(done.output.split())
    assert len(json.loads(path.read_text())["entries"]) == 2
    done = command("--output", path, "--operations", "dense")
    assert done.exit_code == 1
    assert "out of memory" in done.output


@pytest.mark.parametrize("wrong", [("--cases", "b9000"), ("--operations", "sparse"), ("--batch", "0")])
def test_command_explains_what_is_wrong(command, monkeypatch, tmp_path, wrong):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    done = command(*wrong, "--output", tmp_path / "tuning.json")
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def test_command_does_not_overwrite_another_file(command, made_up, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    done = command("--output", path)
    assert done.exit_code == 2
    assert "not a tuning file" in " ".join(done.output.split())
    assert path.read_text() == "mine"


@pytest.mark.gpu
def test_tuning_on_a_gpu_finds_settings_that_work(tmp_path):
    case = dataclasses.replace(TINY, context=4096, q_heads=8, head_dim=64, kept_tokens=512, dtype="bfloat16")
    path, said = tmp_path / "tuning.json", []
    op = TUNED["token-sparse"]
    assert tune.tune_all([op], [case], path, minutes=None, quick=True, show=said.append) == 1, said
    assert "wrong" not in " ".join(said)
    q, pools, lists = inputs.make_query(case), inputs.make_pools(case), inputs.make_lists(jax.random.key(0), case)
    got = op.call(q, pools, lists, implementation="triton", config=load_tuning(path)).out
    assert tuner.wrong(got, tuner.meaning(op, q, pools, lists), 2e-2) is None
