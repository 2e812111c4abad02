"""Table, plot and document of the quality of reference correction: `python -m models.evaluation.correction_report`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from models.evaluation.correction import METHODS
from models.evaluation.report import NO_RUN, about, markdown
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
    "logit error",
    "same arg max",
    "output error, loops 2, 3",
    "mass, loops 1, 2, 3",
    "worst head",
)
TASK_COLUMNS = ("retention", "method", "read", "exact", "margin", "logit error", "output error, loops 2, 3")


def text_rows(cells: Cells) -> list[tuple[str, ...]]:
    """One row of `TEXT_COLUMNS` for each cell of the text, by retention and method."""
    return [
        (
            *_head(cell),
            f"{cell['nll'][0]:.3f}",
            _signed(cell["more"]),
            f"{cell['logit_error'][0]:.2f}",
            f"{100 * cell['agree'][0]:.0f} %",
            _errors(cell),
            _numbers([None if mean is None else mean[0] for mean in cell.get("masses", ())]),
            _numbers(cell.get("worst", ())),
        )
        for cell in ordered(cell for cell in cells if cell["task"] == TEXT_TASK)
    ]


def task_rows(cells: Cells) -> list[tuple[str, ...]]:
    """One row of `TASK_COLUMNS` for each cell of one task."""
    return [
        (
            *_head(cell),
            _spread(cell["exact"], 2),
            _spread(cell["margin"], 1),
            f"{cell['logit_error'][0]:.2f}",
            _errors(cell),
        )
        for cell in ordered(cells)
    ]


def ordered(cells: Any) -> Cells:
    """Dense and frozen first, then by retention, in the order of the methods."""
    names = [method.name for method in METHODS]
    return sorted(cells, key=lambda cell: (float(cell["budget"] or 0), names.index(cell["method"])))


def _head(cell: dict[str, Any]) -> tuple[str, str, str]:
    return cell["budget"] or "", cell["method"], f"{100 * cell['read']:.0f} %"


def _spread(value: list[float], digits: int) -> str:
    mean, low, high = (f"{x:.{digits}f}" for x in value)
    return mean if low == high == mean else f"{mean} ({low} .. {high})"


def _signed(value: list[float]) -> str:
    mean, low, high = (f"{x + 0.0:+.3f}" if abs(x) >= 5e-4 else "0.000" for x in value)
    return mean if low == high == mean else f"{mean} ({low} .. {high})"


def _numbers(values: Any, digits: int = 2) -> str:
    return ", ".join("" if value is None else f"{value:.{digits}f}" for value in values if value is not None)


def _errors(cell: dict[str, Any]) -> str:
    return _numbers([mean[0] for mean in cell["errors"][2:]])


def part(data: dict[str, Any] | None, what: str) -> str:
    """What a marked part of the document says: `text`, or the name of a task, of one run."""
    cells = [] if data is None else [cell for cell in data["cells"] if cell["task"] == what]
    if data is None or not cells:
        return NO_RUN
    if what == TEXT_TASK:
        table = markdown(TEXT_COLUMNS, text_rows(cells))
    else:
        table = markdown(TASK_COLUMNS, task_rows(cells))
    return f"{table}\n{cells[0]['length']:,} tokens, {about(data | {'cells': cells})}"


def load(root: Path) -> dict[str, dict[str, Any]]:
    """The committed runs by the name of their file."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / FOLDER).glob("*.json"))}


def document(root: Path) -> str:
    """What the document should say."""
    runs = load(root)

    def content(match: re.Match[str]) -> str:
        return match.group(1) + part(runs.get(match.group(2)), match.group(3)) + match.group(4)

    # <!-- correction RUN TASK: ... --> ... <!-- end of correction RUN TASK -->
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
