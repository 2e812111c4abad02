"""Measured settings: what a file gives, what of it is left out with which warning, and how a call finds its entry."""

import dataclasses
import functools
import json
import os
import warnings

import jax
import jax.numpy as jnp
import pytest

from sparse_jax import Config, Tuning, TuningWarning, load_tuning, selectors, token_sparse_attention
from sparse_jax.paging import PageView
from sparse_jax.tuning import FORMAT, CallShape, Machine, make_entry, read_entries, save_entries
from tests.attention_cases import CASES, OPS, call, make_inputs

HERE = Machine.here()
ELSEWHERE = Machine("NVIDIA H200", "0.11.2", "0.0.9")
SHAPE = CallShape(
    operation="token_sparse_attention",
    batch=2,
    rows=1,
    q_heads=4,
    kv_heads=2,
    key_width=16,
    value_width=16,
    page_size=8,
    tokens=64,
    lists_per_row=False,
    cache_dtype="float32",
    q_dtype="float32",
)
EVERY_FIELD = Config(block_tokens=32, block_rows=16, num_warps=2, num_stages=4, splits=3, exact=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuning.json"


def write(path, *entries):
    path.write_text(json.dumps({"format": FORMAT, "entries": entries}))


def arguments(chosen=64, batch=2):
    """Arrays of `SHAPE` for token-sparse attention."""
    pool = jax.random.normal(jax.random.key(0), (8, 2, 8, 16))
    q = jax.random.normal(jax.random.key(1), (batch, 4, 16))
    slots = jax.random.permutation(jax.random.key(2), 64)[:chosen].astype(jnp.int32)
    return q, pool, pool, jnp.broadcast_to(slots, (batch, 2, chosen))


def launches(function, *args):
    """The grids of the kernels in a function, read off its jaxpr: they tell the number of splits."""

    def kernels(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["grid_mapping"].grid
                continue
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from kernels(inner)

    return list(kernels(jax.make_jaxpr(function)(*args).jaxpr))


def attend_with(config, implementation="interpret"):
    """Token-sparse attention as a function of its arrays."""
    return lambda *args: token_sparse_attention(*args, implementation=implementation, config=config).out


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Config)])
def test_every_field_of_a_config_survives_the_file(path, field):
    value = getattr(EVERY_FIELD, field)
    assert value != getattr(Config(), field), "EVERY_FIELD lacks a field"
    config = Config(**{field: value})
    save_entries(path, [make_entry(HERE, SHAPE, config)])
    assert load_tuning(path).entries == ((SHAPE, config),)


def test_file_is_for_people_too(path):
    save_entries(path, [make_entry(HERE, SHAPE, Config(splits=4), microseconds=12.5)])
    (entry,) = json.loads(path.read_text())["entries"]
    assert entry["config"] == {"splits": 4}
    assert entry["microseconds"] == 12.5
    assert entry["device"] == jax.devices()[0].device_kind
    assert entry["jax"] == jax.__version__


def test_tuning_again_replaces_the_same_shape_and_keeps_all_others(path):
    other = dataclasses.replace(SHAPE, batch=64)
    unreadable = {"from": "a later version"}
    write(path, unreadable, make_entry(ELSEWHERE, SHAPE, Config(splits=9)))
    save_entries(path, [make_entry(HERE, SHAPE, Config(splits=2)), make_entry(HERE, other, Config(splits=5))])
    save_entries(path, [make_entry(HERE, SHAPE, Config(splits=3))])
    assert unreadable in read_entries(path)
    assert make_entry(ELSEWHERE, SHAPE, Config(splits=9)) in read_entries(path)
    assert len(read_entries(path)) == 4
    with pytest.warns(TuningWarning, match="entry 0"):
        tuning = load_tuning(path)
    assert dict(tuning.entries) == {SHAPE: Config(splits=3), other: Config(splits=5)}


def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch):
    save_entries(path, [make_entry(HERE, SHAPE, Config(splits=2))])
    before = path.read_text()

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        save_entries(path, [make_entry(HERE, SHAPE, Config(splits=3))])
    assert path.read_text() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_link_to_a_shared_file_stays_a_link(path):
    link = path.parent / "link.json"
    link.symlink_to(path)
    save_entries(link, [make_entry(HERE, SHAPE, Config(splits=2))])
    assert link.is_symlink()
    assert load_tuning(path) == load_tuning(link)


def test_a_missing_file_is_not_found(path):
    with pytest.raises(FileNotFoundError):
        load_tuning(path)


@pytest.mark.parametrize(
    "content", ["", "{", "\x80", "[]", "3", '{"entries": []}', json.dumps({"format": FORMAT}), '{"format": "2"}']
)
def test_a_file_of_another_kind_is_refused_and_never_overwritten(path, content):
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"tuning\.json is not a tuning file"):
        load_tuning(path)
    with pytest.raises(ValueError, match=r"tuning\.json is not a tuning file"):
        save_entries(path, [make_entry(HERE, SHAPE, Config())])
    assert path.read_bytes() == content.encode("latin-1")


def broken(**changes):
    entry = make_entry(HERE, SHAPE, Config(splits=2))
    for name, value in changes.items():
        entry = {**entry, name: {**entry[name], **value} if isinstance(value, dict) else value}
    return entry


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (broken(config={"stripes": 3}), "Config has no field 'stripes'"),
        (broken(config={"splits": 0}), "splits must be at least 1, got 0"),
        (broken(config={"splits": "4"}), "splits of Config must be"),
        (broken(config={"splits": 2.0}), "splits of Config must be"),
        (broken(config={"splits": True}), "splits of Config must be"),
        (broken(config={"exact": 1}), "exact of Config must be"),
        (broken(config=[]), "Config must be an object"),
        (broken(shape={"color": "red"}), "CallShape has no field 'color'"),
        (broken(shape={"batch": None}), "batch of CallShape must be"),
        (broken(shape=None), "CallShape must be an object"),
        ({**broken(), "shape": {"batch": 1}}, "CallShape.*missing"),
        (broken(device=None), "device must be a text"),
        ("nonsense", "no object but 'nonsense'"),
    ],
)
def test_a_broken_entry_is_skipped_and_named(path, entry, message):
    other = dataclasses.replace(SHAPE, batch=64)
    write(path, make_entry(HERE, other, Config(splits=5)), entry)
    with pytest.warns(TuningWarning, match=rf"tuning\.json: entry 1 is skipped: .*{message}") as caught:
        tuning = load_tuning(path)
    assert len(caught) == 1
    assert tuning.entries == ((other, Config(splits=5)),)


@pytest.mark.parametrize("part", Machine._fields)
def test_entries_of_other_machines_are_kept_apart_without_a_word(path, part):
    other = HERE._replace(**{part: "another"})
    write(path, make_entry(other, SHAPE, Config(splits=9)), make_entry(HERE, SHAPE, Config(splits=2)))
    assert load_tuning(path).entries == ((SHAPE, Config(splits=2)),)


def test_a_file_for_other_machines_says_once_which(path):
    newer = ELSEWHERE._replace(jax="0.12.0")
    entry = {**make_entry(newer, SHAPE, Config()), "config": {"a_field_of_later": 1}}
    write(path, make_entry(ELSEWHERE, SHAPE, Config(splits=9)), entry)
    with pytest.warns(TuningWarning) as caught:
        tuning = load_tuning(path)
    (message,) = (str(warning.message) for warning in caught)
    assert f"{path} has no setting for {HERE}" in message
    assert str(ELSEWHERE) in message
    assert str(newer) in message
    # The reason has been said; a call does not repeat it.
    jax.eval_shape(lambda *args: token_sparse_attention(*args, config=tuning), *arguments())


@pytest.mark.parametrize("splits", [2, 4])
def test_a_tuning_reaches_the_kernel_inside_jit(path, splits):
    config = Config(splits=splits, block_tokens=16)
    save_entries(path, [make_entry(HERE, SHAPE, config)])
    attend = jax.jit(attend_with(load_tuning(path)))
    assert launches(attend, *arguments()) == launches(attend_with(config), *arguments())
    assert launches(attend, *arguments()) != launches(attend_with(None), *arguments())
    expected = attend_with(None, "xla")(*arguments())
    assert jnp.allclose(attend(*arguments()), expected, atol=1e-5)


def test_every_implementation_takes_a_tuning(path):
    """None has the kernel in its branch for GPUs. Plain XLA has none, and so misses no setting either."""
    config = Config(splits=2, block_tokens=16)
    save_entries(path, [make_entry(HERE, SHAPE, config)])
    tuning = load_tuning(path)
    assert launches(attend_with(tuning, None), *arguments()) == launches(attend_with(config), *arguments())
    assert launches(attend_with(tuning, "xla"), *arguments()) == []
    assert launches(attend_with(tuning, "xla"), *arguments(batch=7)) == []


def test_loading_twice_traces_once(path):
    save_entries(path, [make_entry(HERE, SHAPE, Config(splits=2))])
    traces = []

    def attend(args, config):
        traces.append(config)
        return token_sparse_attention(*args, implementation="interpret", config=config).out

    attend = jax.jit(attend, static_argnames="config")
    first, second = load_tuning(path), load_tuning(path)
    assert first is not second
    assert hash(first) == hash(second)
    attend(arguments(), config=first)
    attend(arguments(), config=second)
    assert len(traces) == 1
    save_entries(path, [make_entry(HERE, SHAPE, Config(splits=1))])
    attend(arguments(), config=load_tuning(path))
    assert len(traces) == 2


def test_an_unknown_shape_warns_once_and_the_kernel_chooses(path):
    config = Config(splits=4, block_tokens=16)
    save_entries(path, [make_entry(HERE, SHAPE, config)])
    tuning = load_tuning(path)
    attend = attend_with(tuning, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            attend(*arguments(batch=3))
            jax.jit(attend)(*arguments(batch=3))
    (warning,) = caught
    assert warning.category is TuningWarning
    assert str(path) in str(warning.message)
    assert "token_sparse_attention(batch=3, rows=1, q_heads=4" in str(warning.message)
    args = arguments(batch=5)
    with pytest.warns(TuningWarning, match="batch=5"):
        fallback = launches(attend_with(tuning), *args)
    assert fallback == launches(attend_with(None), *args)
    assert fallback != launches(attend_with(config), *args)


@pytest.mark.parametrize("case", ["gqa4", "draft3_row_lists_window", "g3_d80_dv96", "bf16_cache_f32_query"])
@pytest.mark.parametrize("op", OPS)
def test_a_call_finds_the_entry_of_its_shape(op, case):
    case = CASES[case]
    tokens = {"paged": case.W * case.P, "page_sparse": case.C * case.P, "token_sparse": case.C * 13}[op]
    shape = CallShape(
        operation=f"{op}_attention",
        batch=case.B,
        rows=case.T,
        q_heads=case.Hq,
        kv_heads=case.Hkv,
        key_width=case.D,
        value_width=case.Dv,
        page_size=case.P,
        tokens=tokens,
        lists_per_row=case.row_lists and op != "paged",
        cache_dtype=case.cache_dtype or case.dtype,
        q_dtype=case.dtype,
    )
    config = Config(splits=4, block_tokens=16)
    tuning = Tuning(entries=((shape, config),))

    def run(config):
        return functools.partial(call, op, case, implementation="interpret", config=config)

    x = make_inputs(case)
    assert launches(run(tuning), x) == launches(run(config), x) != launches(run(None), x)


def test_a_selector_passes_a_tuning_on():
    pool = jnp.ones((4, 2, 8, 16))
    table = jnp.arange(4, dtype=jnp.int32)[None]
    view = PageView(page_table=table, lengths=jnp.array([32], jnp.int32), stale=jnp.int32(0))
    q = jnp.ones((1, 4, 16))
    shape = CallShape.of("paged_attention", q[:, None], pool, pool, table, by_page=True)
    config = Config(splits=2, block_tokens=16)
    tuning, selector = Tuning(entries=((shape, config),)), selectors.get("dense")

    def attend(config):
        return lambda q: selector.attend((), q, pool, pool, view, implementation="interpret", config=config).output.out

    assert launches(attend(tuning), q) == launches(attend(config), q) != launches(attend(None), q)


def test_what_is_no_config_is_refused():
    with pytest.raises(ValueError, match="config must be a Config or a Tuning, got 'fast'"):
        token_sparse_attention(*arguments(), config="fast")
