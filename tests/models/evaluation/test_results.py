import json
import re
from pathlib import Path

import numpy as np
import pytest

from models.evaluation import report, statistics
from models.evaluation.results import Results

ROOT = Path(__file__).parents[3]


def a_cell(method="quest", budget="1/8", length=512, task="keys8", exact=0.5, **changes):
    values = {"exact": exact, "margin": 1.25, "nll": 0.7, "read": 0.125, "of_oracle": 0.9, "recall": 0.5, "error": 0.1}
    cell = {"model": "tiny", "method": method, "task": task, "length": length, "budget": budget}
    cell |= {"settings": {"prompts": 2, "dtype": "float32"}, "tokens": 64, "depths": [0.25, 0.75], "answered": "10"}
    return cell | {name: [value, value - 0.1, value + 0.1] for name, value in values.items()} | changes


# Intervals


def test_interval_covers_the_mean_and_repeats():
    values = np.random.default_rng(0).normal(3, 2, 64)
    mean, low, high = statistics.interval(values)
    assert mean == pytest.approx(values.mean())
    assert low < mean < high
    error = values.std() / 8
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    assert [mean, low, high] == statistics.interval(values)


def test_interval_of_equal_values_is_a_point_and_of_none_an_error():
    assert statistics.interval([2.0] * 5) == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="at least one value"):
        statistics.interval([])


def test_interval_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    held = [low <= 0.7 <= high for _, low, high in (statistics.interval(rng.random(64) < 0.7) for _ in range(200))]
    assert 0.89 <= np.mean(held) <= 0.99


def test_paired_differences_are_narrower_than_two_intervals():
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 5, 64)  # some prompts are harder, for both
    one, other = hard + rng.normal(1, 0.1, 64), hard + rng.normal(0, 0.1, 64)
    mean, low, high = statistics.paired(one, other)
    assert low < 1 < high
    assert high - low < 0.1 < statistics.interval(one)[2] - statistics.interval(one)[1]
    with pytest.raises(ValueError, match="as many on both sides"):
        statistics.paired([1.0], [])
    assert mean == pytest.approx(1, abs=0.1)


def test_mass_beside_the_oracle_is_that_of_each_prompt():
    outcomes = [
        {"exact": 1.0, "margin": 2.0, "nll": 0.1, "read": 0.1, "mass": 0.3, "recall": 1.0, "error": 0.0}
        | {"mass_by_plane": np.array([0.2, 0.4]), "oracle_by_plane": np.array([0.4, 0.8])},
        {"exact": 0.0, "margin": -2.0, "nll": 0.1, "read": 0.1, "mass": 0.9, "recall": 1.0, "error": 0.0}
        | {"mass_by_plane": np.array([0.9, 0.9]), "oracle_by_plane": np.array([0.9, 0.9])},
    ]
    cell = statistics.summary(outcomes)
    assert cell["of_oracle"][0] == pytest.approx(0.75)
    assert cell["answered"] == "10"
    assert cell["margins"] == [2.0, -2.0]


# The file


def test_file_is_continued_and_never_half_written(tmp_path):
    path = tmp_path / "deep" / "results.json"
    results = Results(path)
    results.add(a_cell())
    assert a_cell() in results
    assert a_cell(budget="1/4") not in results
    assert a_cell(settings={"prompts": 3, "dtype": "float32"}) not in results
    again = Results(path)
    again.add(a_cell(budget="1/4", exact=1 / 3))
    assert [cell["budget"] for cell in Results(path)] == ["1/8", "1/4"]
    assert next(iter(Results(path)))["exact"] == [0.5, 0.4, 0.6]
    assert [cell["exact"][0] for cell in Results(path)] == [0.5, 0.3333]  # four digits
    assert len(Results(path).environments) == 2
    assert [cell["environment"] for cell in Results(path)] == [0, 1]
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("content", ["{}", "no JSON", '{"format": 99, "environments": [], "cells": []}', "[1]"])
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other.json holds no results"):
        Results(path)
    assert path.read_text() == content


# Tables and plots


def test_tables_say_what_the_cells_say():
    cells = [a_cell(), a_cell("dense", None, tokens=512), a_cell(task="text"), a_cell("window", "1/4", tokens=128)]
    rows = report.rows(cells)
    assert [row[2] for row in rows] == ["dense", "quest", "window", "quest"]
    table = report.markdown(report.COLUMNS, rows)
    assert "| keys8 | 512 | quest | 1/8 (64) | 12.5 % | 0.50 (0.40 .. 0.60) | 1.2 (1.1 .. 1.4) |  | 0.90 |" in table
    assert "| text | 512 | quest | 1/8 (64) | 12.5 % |  |" in table
    assert f"| {np.exp(0.7):.2f} |" in table
    overview = report.overview([*cells, a_cell(task="passkey", exact=1.0)])
    assert "| method | 512, 1/8 | 512, 1/4 |" in overview
    assert "| dense | 0.50 | 0.50 |" in overview
    assert "| quest | 0.75 |  |" in overview


def test_methods_without_a_budget_stand_by_length():
    cells = [a_cell(name, None, length) for name in ("dense", "dsa:k=4") for length in (512, 2048)]
    overview = report.overview(cells)
    assert "| method | 512 | 2,048 |" in overview
    assert "| dsa:k=4 | 0.50 | 0.50 |" in overview


def test_documents_are_filled_between_their_marks(tmp_path):
    folder = tmp_path / report.FOLDER
    folder.mkdir(parents=True)
    marks = "<!-- evaluation tiny overview: made -->\nold\n<!-- end of evaluation tiny overview -->\nkept\n"
    (folder / "README.md").write_text("# Title\n" + marks + marks.replace("tiny", "other"))
    results = Results(folder / "tiny.json")
    results.add(a_cell())
    text = report.documents(tmp_path)[folder / "README.md"]
    assert "| quest | 0.50 |" in text
    assert "old" not in text
    assert text.count("kept") == 2
    assert text.count(report.NO_RUN) == 1
    with pytest.raises(ValueError, match="no table 'what'"):
        report.part(report.load(tmp_path), "tiny", "what")


def test_committed_tables_are_those_of_the_committed_runs():
    for path, text in report.documents(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m models.evaluation.report"


def test_committed_runs_ask_enough():
    for name, data in report.load(ROOT).items():
        assert {cell["settings"]["prompts"] >= 64 for cell in data["cells"]} == {True}, name
        assert all(re.fullmatch("[01]{64,}", cell["answered"]) for cell in data["cells"]), name


def test_plots_are_drawn_and_repeat(tmp_path):
    pytest.importorskip("matplotlib")
    from models.evaluation import plots

    cells = [a_cell("dense", None, length, tokens=length, read=[1.0, 1.0, 1.0]) for length in (512, 2048)]
    for number, budget in enumerate(("1/16", "1/8", "1/4")):
        share = 2.0 ** (number - 4)
        for length in (512, 2048):
            tokens = int(share * length)
            cells += [a_cell(name, budget, length, tokens=tokens, read=[share] * 3) for name in ("quest", "mine:a=1")]
    cells.append(a_cell(task="text"))
    written = plots.draw(cells, tmp_path / "one")
    names = {f"tiny-{name}.svg" for name in ("exact", "margin", "mass", "text", "depth")}
    assert {path.name for path in written} == names
    assert "mine:a=1" in (tmp_path / "one" / "tiny-exact.svg").read_text()
    for path in plots.draw(cells, tmp_path / "two"):
        assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes()
    grid = plots.depth_map([cell for cell in cells if cell["method"] == "quest"], [512, 2048])
    np.testing.assert_array_equal(grid[[2, 6]], [[1, 1], [0, 0]])
    assert np.isnan(grid[[0, 1, 3, 4, 5, 7]]).all()
    assert json.dumps([plots.middle(cells, 512)]) == '["1/8"]'
    assert plots.draw([], tmp_path / "none") == []


def test_choices_of_an_indexer_are_points_of_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    from models.evaluation import plots

    cells = [a_cell("dense", None, read=[1.0] * 3)]
    cells += [a_cell(f"dsa:k={k}", None, read=[k / 512] * 3) for k in (32, 64)]
    plots.draw(cells, tmp_path)
    drawn = (tmp_path / "tiny-exact.svg").read_text()
    assert drawn.count(">dsa<") == 1
    assert all(label in drawn for label in (">6.25 %<", ">12.5 %<"))
    assert "None" not in (tmp_path / "tiny-depth.svg").read_text()
