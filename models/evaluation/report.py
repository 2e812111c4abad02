"""Tables of committed evaluations: `python -m models.evaluation.report` writes those of docs/evaluation/README.md."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from models.evaluation.methods import INTERESTING

FOLDER = "docs/evaluation"
NO_RUN = "No run is committed yet.\n"
COLUMNS = (
    "task",
    "length",
    "method",
    "budget",
    "read",
    "exact",
    "margin",
    "perplexity",
    "of oracle",
    "recall",
    "error",
)
Cells = list[dict[str, Any]]


def rows(cells: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row of `COLUMNS` for each cell, ordered by task, length, budget and method."""
    return [tuple(_text(cell, name) for name in COLUMNS) for cell in sorted(cells, key=_order)]


def _order(cell: dict[str, Any]) -> tuple:
    return cell["model"], cell["task"], cell["length"], cell["tokens"] * (cell["budget"] is not None), _rank(cell)


def _rank(cell: dict[str, Any]) -> tuple[int, int, str]:
    name = cell["method"]
    number = int("".join(filter(str.isdigit, name)) or 0)  # dsa:k=64 before dsa:k=128
    return (INTERESTING.index(name) if name in INTERESTING else len(INTERESTING)), number, name


def _text(cell: dict[str, Any], column: str) -> str:
    if column in ("task", "method"):
        return cell[column]
    if column == "length":
        return f"{cell['length']:,}"
    if column == "budget":
        return "" if cell["budget"] is None else f"{cell['budget']} ({cell['tokens']:,})"
    name = {"of oracle": "of_oracle", "perplexity": "nll"}.get(column, column)
    of_text = {"perplexity": True, "exact": False}.get(column, cell["task"] == "text")
    if name not in cell or of_text != (cell["task"] == "text"):
        return ""
    mean, low, high = cell[name]
    if column == "perplexity":
        return f"{2.718281828459045**mean:.2f}"
    if column == "read":
        return f"{100 * mean:.1f} %"
    digits = 1 if column == "margin" else 2
    spread = f" ({low:.{digits}f} .. {high:.{digits}f})" if column in ("exact", "margin") else ""
    return f"{mean:.{digits}f}{spread}"


def markdown(names: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table without the columns that are empty throughout."""
    columns = [column for column in zip(names, *lines) if any(column[1:])]
    table = list(zip(*columns))
    table.insert(1, ("---",) * len(columns))
    return "\n".join(f"| {' | '.join(row)} |" for row in table) + "\n"


def overview(cells: Cells, metric: str = "exact") -> str:
    """Methods down, (length, budget) across: a metric as the mean over the tasks, the text apart."""
    cells = [cell for cell in cells if cell["task"] != "text" and metric in cell]
    places = sorted({(cell["length"], cell["tokens"], cell["budget"]) for cell in cells if cell["budget"] is not None})
    places = places or sorted({(cell["length"], 0, None) for cell in cells})  # methods that take none, such as dsa
    lines = []
    for method in dict.fromkeys(cell["method"] for cell in sorted(cells, key=_rank)):
        own = [cell for cell in cells if cell["method"] == method]
        line = [method]
        for length, _, budget in places:
            found = [c[metric][0] for c in own if c["length"] == length and c["budget"] in (None, budget)]
            line.append(f"{sum(found) / len(found):.2f}" if found else "")
        lines.append(line)
    heads = [f"{length:,}, {budget}" if budget else f"{length:,}" for length, _, budget in places]
    return markdown(["method", *heads], lines) if lines else NO_RUN


def about(data: dict[str, Any]) -> str:
    """Prompts, device and versions of a run."""
    cells = data["cells"]
    prompts = sorted({cell["settings"]["prompts"] for cell in cells})
    kinds = dict.fromkeys((e["device"], e["jax"], e["date"][:10]) for e in data["environments"])
    devices = "; ".join(f"{device}, JAX {version}, {date}" for device, version, date in kinds)
    counts = " or ".join(map(str, prompts))
    return f"{counts} prompts a cell, {cells[0]['settings']['dtype']}; {devices}.\n"


def load(root: Path) -> dict[str, dict[str, Any]]:
    """The committed runs by the name of their file, such as `smollm2-135m`."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / FOLDER).glob("*.json"))}


def part(runs: dict[str, dict[str, Any]], name: str, what: str) -> str:
    """What a marked part of a document says: `overview`, `margin`, `mass` or `cells` of a run."""
    if name not in runs:
        return NO_RUN
    cells = runs[name]["cells"]
    metrics = {"overview": "exact", "margin": "margin", "mass": "of_oracle"}
    if what in metrics:
        return overview(cells, metrics[what]) + "\n" + about(runs[name])
    if what == "cells":
        return markdown(COLUMNS, rows(cells)) + "\n" + about(runs[name])
    raise ValueError(f"no table {what!r}; there are {', '.join(metrics)} and cells")


def documents(root: Path) -> dict[Path, str]:
    """What each document with generated parts should say."""
    runs = load(root)

    def content(match: re.Match[str]) -> str:
        return match.group(1) + part(runs, match.group(2), match.group(3)) + match.group(4)

    # <!-- evaluation RUN TABLE: ... --> ... <!-- end of evaluation RUN TABLE -->
    block = re.compile(r"(<!-- evaluation ([\w.-]+) (\w+):[^>]*-->\n).*?(<!-- end of evaluation \2 \3 -->)", re.DOTALL)
    paths = [path for path in (root / "README.md", root / FOLDER / "README.md") if path.exists()]
    return {path: block.sub(content, path.read_text(encoding="utf-8")) for path in paths}


def main(root: Path) -> None:
    """Writes the documents, and the plots of every run where matplotlib is installed."""
    for path, text in documents(root).items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}")
    try:
        from models.evaluation import plots
    except ImportError as error:
        print(f"no plots: {error.name} is not installed; pip install 'sparse-jax[notebooks]' brings it")
        return
    for data in load(root).values():
        for path in plots.draw(data["cells"], root / FOLDER):
            print(f"written: {path}")


if __name__ == "__main__":
    main(Path.cwd())
