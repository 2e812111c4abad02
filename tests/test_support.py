"""docs/support.md is what the scenarios and the errors say now, and the tests that it names run all that it claims."""

import importlib

import pytest

from tests import gqa_scenarios as scenarios
from tests import support_table


def function(test):
    """The test function of "path::name"."""
    path, name = test.split("::")
    return getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)


def marks(test):
    return list(getattr(function(test), "pytestmark", []))


def test_document_is_what_the_tests_say():
    committed = support_table.DOCUMENT.read_text(encoding="utf-8")
    assert committed == support_table.document(), "run python -m tests.support_table"


@pytest.mark.parametrize("name", support_table.LISTS)
def test_every_scenario_is_tested_in_plain_jnp_and_as_a_kernel(name):
    _, test = support_table.LISTS[name]
    assert not [mark.name for mark in marks(test) if mark.name != "parametrize"], (
        "none may be skipped or expected to fail"
    )
    (cases,) = (mark.args[1] for mark in marks(test) if mark.args[0] == ("case", "implementation"))
    run = {(case.values[0], case.values[1]): [mark.name for mark in case.marks] for case in cases}
    for scenario in getattr(scenarios, name):
        assert run[scenario, "xla"] == []
        assert run[scenario, "triton"] == ["gpu"]


def test_every_list_of_scenarios_is_in_the_table():
    lists = {name for name, value in vars(scenarios).items() if name.isupper() and isinstance(value, list)}
    assert lists - {"DECODE", "ATTENTION", "BENCHMARK"} == set(support_table.LISTS)
    listed = [case for name in support_table.LISTS if name != "COMPACTION" for case in getattr(scenarios, name)]
    assert sorted(map(repr, listed)) == sorted(map(repr, scenarios.ATTENTION))


@pytest.mark.parametrize("what", support_table.ALSO)
def test_named_tests_exist_and_are_not_skipped(what):
    for test in support_table.ALSO[what]:
        assert function(test).__name__.startswith("test_")
        assert not [mark.name for mark in marks(test) if mark.name != "parametrize"]


def test_what_is_refused_must_raise():
    with pytest.raises(AssertionError, match="not refused any more"):
        support_table.refusal(lambda: None)
