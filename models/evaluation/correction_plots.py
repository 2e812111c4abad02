"""The plot of the quality of reference correction, as SVG: what it costs by retention, and where its mass goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models.evaluation.correction import METHODS
from models.evaluation.plots import STYLE
from models.evaluation.tasks import TEXT_TASK

Cells = list[dict[str, Any]]
COLORS = {method.name: f"C{index}" for index, method in enumerate(METHODS)}
LEAST = 1e-4
"""What is less is drawn there: the axes are logarithmic."""


def draw(cells: Cells, path: Path) -> Path:
    """Writes the plot of one run; the cells are those of the text and of tasks."""
    text = [cell for cell in cells if cell["task"] == TEXT_TASK]
    tasks = [task for task in dict.fromkeys(cell["task"] for cell in cells) if task != TEXT_TASK]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 5.6), layout="constrained")
        panels = figure.subplots(2, 3)
        _lines(panels[0, 0], text, lambda cell: cell["more"], "text: nats a token more than dense")
        _lines(panels[0, 1], text, lambda cell: cell["logit_error"], "text: logit error")
        _lines(panels[0, 2], text, lambda cell: cell["errors"][-1], "text: output error, last loop")
        _masses(panels[1, 0], text)
        for axes, task in zip(panels[1, 1:], tasks[-2:]):
            own = [cell for cell in cells if cell["task"] == task]
            _lines(axes, own, lambda cell: cell["margin"], f"{task}: least margin, nats", log=False)
        for axes in panels[1, 1 + len(tasks[-2:]) :]:
            axes.set_axis_off()
        for axes in panels.flat:
            axes.set_xlabel("retention")
        handles, labels = (
            panels[1, 1].get_legend_handles_labels() if tasks else panels[0, 0].get_legend_handles_labels()
        )
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
    return path


def _lines(
    axes: Axes, cells: Cells, value: Callable[[dict[str, Any]], list[float]], title: str, log: bool = True
) -> None:
    for method in METHODS:
        own = sorted(
            (cell for cell in cells if cell["method"] == method.name), key=lambda cell: float(cell["budget"] or 0)
        )
        if not own or (log and method.name == "dense"):
            continue
        mean, low, high = np.array([value(cell) for cell in own]).T
        if own[0]["budget"] is None:
            axes.axhline(mean[0], color=COLORS[method.name], linestyle="--", linewidth=1, label=method.name)
            continue
        mean, low, high = (np.maximum(x, LEAST) if log else x for x in (mean, low, high))
        spread = [np.maximum(mean - low, 0), np.maximum(high - mean, 0)]
        x = [float(cell["budget"]) for cell in own]
        style: dict[str, Any] = {"color": COLORS[method.name], "marker": "o", "markersize": 3, "linewidth": 1}
        axes.errorbar(x, mean, yerr=spread, elinewidth=0.6, label=method.name, **style)
    axes.set_xscale("log")
    if log:
        axes.set_yscale("log")
    axes.set_title(title)


def _masses(axes: Axes, cells: Cells) -> None:
    own = sorted((cell for cell in cells if cell["method"] == "correction"), key=lambda cell: float(cell["budget"]))
    if not own:
        return
    x = [float(cell["budget"]) for cell in own]
    loops = [loop for loop, mean in enumerate(own[0]["masses"]) if mean is not None]
    for loop in loops:
        color = f"C{loop + 5}"
        axes.plot(x, [cell["masses"][loop][0] for cell in own], color=color, marker="o", markersize=3, linewidth=1)
        axes.plot(x, [cell["worst"][loop] for cell in own], color=color, linestyle=":", linewidth=1)
        axes.annotate(f"loop {loop}", (x[0], own[0]["masses"][loop][0]), color=color, fontsize=7)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_title("text: mass of the keys of loop 1 (dotted: worst head)")
