"""Table, plot and document of the quality of reference correction: `python -m models.evaluation.correction_report`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from models.evaluation.correction import METHODS
from models.evaluation.report import NO_RUN, about, markdown
from models.evaluation.statistics import paired
from models.evaluation.tasks import TEXT_TASK

FOLDER = "docs/evaluation/correction"
DOCUMENT = "docs/evaluation/correction/README.md"
Cells = list[dict[str, Any]]
TEXT_COLUMNS = (
    "retention",
    "method",
    "read",
    "nats a token",
    "more than dense",
    "more than plain",
    "logit error",
    "same arg max",
    "output error, from loop 2",
    "mass, from the capture",
    "worst head",
)
QUESTIONS = "questions"
"""Stands for all tasks but the text."""


def text_rows(cells: Cells) -> list[tuple[str, ...]]:
    """One row of `TEXT_COLUMNS` for each cell of the text, by retention and method."""
    found = {(cell["budget"], cell["method"]): cell for cell in cells if cell["task"] == TEXT_TASK}
    return [
        (
            cell["budget"] or "",
            cell["method"],
            f"{100 * cell['read']:.0f} %",
            f"{cell['nll'][0]:.3f}",
            _signed(cell["more"]),
            _more_than_plain(cell, found),
            f"{cell['logit_error'][0]:.2f}",
            f"{100 * cell['agree'][0]:.0f} %",
            _numbers([mean[0] for mean in cell["errors"][2:]]),
            _numbers([None if mean is None else mean[0] for mean in cell.get("masses", ())]),
            _numbers(cell.get("worst", ())),
        )
        for cell in ordered(cell for cell in cells if cell["task"] == TEXT_TASK)
    ]


def question_columns(cells: Cells) -> tuple[str, ...]:
    """The columns of `question_rows`: two for each task."""
    return ("retention", "method", *(f"{task}: {what}" for task in questions(cells) for what in ("exact", "margin")))


def question_rows(cells: Cells) -> list[tuple[str, ...]]:
    """One row for each method and retention, over all tasks but the text."""
    tasks = questions(cells)
    found = {(cell["task"], cell["budget"], cell["method"]): cell for cell in cells}
    rows = []
    for cell in ordered(cell for cell in cells if cell["task"] == tasks[0]):
        own = [found[task, cell["budget"], cell["method"]] for task in tasks]
        told = [text for c in own for text in (f"{c['exact'][0]:.2f}", _spread(c["margin"], 1))]
        rows.append((cell["budget"] or "", cell["method"], *told))
    return rows


def questions(cells: Cells) -> list[str]:
    """The tasks but the text, in the order of the cells."""
    return [task for task in dict.fromkeys(cell["task"] for cell in cells) if task != TEXT_TASK]


def ordered(cells: Any) -> Cells:
    """Dense and frozen first, then by retention, in the order of the methods."""
    names = [method.name for method in METHODS]
    return sorted(cells, key=lambda cell: (float(cell["budget"] or 0), names.index(cell["method"])))


def _more_than_plain(cell: dict[str, Any], found: dict[tuple[str | None, str], dict[str, Any]]) -> str:
    """A correction against plain sparse attention over the same keys, on the same prompts."""
    plain = {"correction": "plain sparse", "late correction": "late plain"}.get(cell["method"])
    other = found.get((cell["budget"], plain or ""))
    return "" if other is None else _signed(paired(cell["nlls"], other["nlls"]))


def _spread(value: list[float], digits: int) -> str:
    mean, low, high = (f"{x:.{digits}f}" for x in value)
    return mean if low == high == mean else f"{mean} ({low} .. {high})"


def _signed(value: list[float]) -> str:
    mean, low, high = (f"{x + 0.0:+.3f}" if abs(x) >= 5e-4 else "0.000" for x in value)
    return mean if low == high == mean else f"{mean} ({low} .. {high})"


def _numbers(values: Any) -> str:
    return ", ".join(f"{value:.2f}" for value in values if value is not None)


def tables(cells: Cells) -> dict[str, str]:
    """The table of the text, `TEXT_TASK`, and that of `QUESTIONS`, of a run that has cells for them."""
    found = {}
    if any(cell["task"] == TEXT_TASK for cell in cells):
        found[TEXT_TASK] = markdown(TEXT_COLUMNS, text_rows(cells))
    if questions(cells):
        found[QUESTIONS] = markdown(question_columns(cells), question_rows(cells))
    return found


def part(data: dict[str, Any] | None, what: str) -> str:
    """What a marked part of the document says: a table of one run, without full retention, where all are dense."""
    cells = [] if data is None else [cell for cell in data["cells"] if float(cell["budget"] or 0) < 1]
    found = tables(cells)
    if data is None or what not in found:
        return NO_RUN
    return f"{found[what]}\n{cells[0]['length']:,} tokens, {about(data)}"


def load(root: Path) -> dict[str, dict[str, Any]]:
    """The committed runs by the name of their file."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / FOLDER).glob("*.json"))}


def document(root: Path) -> str:
    """What the document should say."""
    runs = load(root)

    def content(match: re.Match[str]) -> str:
        return match.group(1) + part(runs.get(match.group(2)), match.group(3)) + match.group(4)

    # <!-- correction RUN TABLE: ... --> ... <!-- end of correction RUN TABLE -->
    block = re.compile(r"(<!-- correction ([\w.-]+) (\w+):[^>]*-->\n).*?(<!-- end of correction \2 \3 -->)", re.DOTALL)
    return block.sub(content, (root / DOCUMENT).read_text(encoding="utf-8"))


def main(root: Path) -> None:
    """Writes the document, and the plot of every run where matplotlib is installed."""
    (root / DOCUMENT).write_text(document(root), encoding="utf-8")
    print(f"written: {root / DOCUMENT}")
    try:
        from models.evaluation import correction_plots
    except ImportError as error:
        print(f"no plots: {error.name} is not installed; pip install 'sparse-jax[notebooks]' brings it")
        return
    for name, data in load(root).items():
        print(f"written: {correction_plots.draw(data['cells'], root / FOLDER / f'{name}.svg')}")


if __name__ == "__main__":
    main(Path.cwd())
