"""What the README says is true: its code runs, its commands and names exist, its numbers are the committed ones."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sparse_jax
from sparse_jax.bench import readme

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 13
        names: dict = {}
        exec(compile(block, "README.md", "exec"), names)
        kept = names["jax"].numpy.exp(names["sparse"].lse - names["dense"].lse)
        assert names["dense"].out.shape == (1, 8, 64)
        assert (kept > 0).all()
        assert (kept < 1).all()


def test_commands_and_their_options_exist():
    from models.cli import app

    commands = [line.split("#")[0].strip() for line in TEXT.splitlines() if line.startswith("sparse-jax ")]
    assert len(commands) >= 4
    for command in commands:
        _, name, *words = shlex.split(command)
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert shown.exit_code == 0, command
        for word in words:
            if word.startswith("--") and word != "--help":
                assert word in shown.output, f"{command}: {word}"


def test_operations_exist():
    table = TEXT[TEXT.index("## What is there") : TEXT.index("Rules that hold everywhere")]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([a-z0-9_.]+)", cell)]
    assert len(names) >= 9
    for name in names:
        value = sparse_jax
        for part in name.split("."):
            value = getattr(value, part)


@pytest.mark.parametrize(
    "document", ["README.md", "docs/operations.md", "docs/benchmarks/README.md", "CONTRIBUTING.md"]
)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{document}: {target}"


def test_numbers_are_those_of_the_committed_run():
    for path, text in readme.documents(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m sparse_jax.bench.readme"


def test_plots_are_those_of_the_committed_run():
    plots = pytest.importorskip("sparse_jax.bench.plots")
    runs = readme.load(ROOT)
    assert "attention" in runs
    for name, (suite, _) in plots.PLOTS.items():
        if suite in runs:
            drawn = (ROOT / readme.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
            assert plots.origin(runs[suite]) in drawn, f"{name}.svg: run python -m sparse_jax.bench.readme"
