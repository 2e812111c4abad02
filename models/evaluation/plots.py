"""Plots of an evaluation, as SVG: quality, margin and mass against what was read, and depths where it was found."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models.evaluation.methods import INTERESTING

# Text as text, and no random names or dates: the same results give the same file.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sparse_jax",
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 8,
}
COLORS = [matplotlib.colormaps["tab20"](index) for index in (14, 4, 6, 15, 0, 2, 1, 8, 9, 16, 17, 10, 12, 18)]
MARKERS = "oDxs^v<>Pp*Xhd"
DEPTHS = 8
Cells = list[dict[str, Any]]


def draw(results: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes the plots that the cells have numbers for, one set for each model."""
    cells = list(results)
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for model in dict.fromkeys(cell["model"] for cell in cells):
            own = [cell for cell in cells if cell["model"] == model]
            for name, plot in PLOTS.items():
                if (figure := plot(own)) is None:
                    continue
                path = folder / f"{Path(model).name}-{name}.svg"
                figure.savefig(path, metadata={"Date": None})
                written.append(path)
    return written


def methods(cells: Cells) -> list[str]:
    """Methods of the cells, the usual ones in their usual order."""
    found = dict.fromkeys(cell["method"] for cell in cells)
    return [name for name in INTERESTING if name in found] + [name for name in found if name not in INTERESTING]


def style(name: str) -> dict[str, Any]:
    """Colour and marker of a method, the same in every plot."""
    index = INTERESTING.index(name) if name in INTERESTING else sum(map(ord, name))
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def line(method: str) -> str:
    """The line that a method is a point of: choices of the indexer that differ in how many tokens are one."""
    return "dsa" if method.startswith("dsa:k=") else method


def by_budget(metric: str, label: str) -> Callable[[Cells], Figure | None]:
    """A plot of a metric against the share of the cache that was read: tasks down, lengths across."""

    def plot(cells: Cells) -> Figure | None:
        shown = [cell for cell in cells if metric in cell and (metric == "nll") == (cell["task"] == "text")]
        if not shown:
            return None
        tasks = list(dict.fromkeys(cell["task"] for cell in shown))
        lengths = sorted({cell["length"] for cell in shown})
        figure = Figure(figsize=(3.0 * len(lengths) + 1.6, 2.3 * len(tasks)), layout="constrained")
        panels = figure.subplots(len(tasks), len(lengths), squeeze=False, sharey="row", sharex=True)
        for row, task in enumerate(tasks):
            for column, length in enumerate(lengths):
                here = [cell for cell in shown if (cell["task"], cell["length"]) == (task, length)]
                _lines(panels[row][column], here, metric)
                panels[row][column].set_title(f"{task}, {length:,} tokens")
            panels[row][0].set_ylabel(label)
        for axes in panels[-1]:
            axes.set_xlabel("share of the cache that is read")
        handles = {text: line for axes in panels.flat for line, text in zip(*axes.get_legend_handles_labels())}
        figure.legend(handles.values(), handles.keys(), loc="outside right upper")
        return figure

    return plot


def _lines(axes: Axes, cells: Cells, metric: str) -> None:
    cells = [cell | {"method": line(cell["method"])} for cell in cells]
    shares: set[float] = set()
    for name in methods(cells):
        own = sorted((cell for cell in cells if cell["method"] == name), key=lambda cell: cell["read"][0])
        if own[0]["budget"] is None and len(own) == 1:
            axes.axhline(own[0][metric][0], color=style(name)["color"], linewidth=1, linestyle="--", label=name)
            continue
        x = [cell["read"][0] for cell in own]
        mean, low, high = np.array([cell[metric] for cell in own]).T
        spread = [np.maximum(mean - low, 0), np.maximum(high - mean, 0)]
        axes.errorbar(x, mean, yerr=spread, label=name, markersize=3, linewidth=1, elinewidth=0.6, **style(name))
        shares.update(cell["tokens"] / cell["length"] if cell["budget"] else cell["read"][0] for cell in own)
    axes.set_xscale("log")
    ticks = sorted(shares)
    axes.set_xticks(ticks, [f"{100 * share:.3g} %" for share in ticks])
    axes.minorticks_off()


def by_depth(cells: Cells) -> Figure | None:
    """A heat map for each method: share of answers found by depth and length, at the middle budget, over all tasks."""
    shown = [cell for cell in cells if any(depth is not None for depth in cell["depths"])]
    if not shown:
        return None
    lengths, names = sorted({cell["length"] for cell in shown}), methods(shown)
    columns = min(5, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(1.9 * columns + 0.6, 2.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, name in zip(panels.flat, names):
        own = [cell for cell in shown if cell["method"] == name]
        image = axes.imshow(depth_map(own, lengths), vmin=0, vmax=1, aspect="auto", cmap="viridis", origin="upper")
        axes.set_title(name)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks([-0.5, DEPTHS / 2 - 0.5, DEPTHS - 0.5], ["0 %", "50 %", "100 %"])
        axes.grid(False)
    for axes in list(panels.flat)[len(names) :]:
        axes.set_axis_off()
    budgets = ", ".join(dict.fromkeys(str(middle(shown, length)) for length in lengths if middle(shown, length)))
    figure.supxlabel(f"tokens (budget {budgets})" if budgets else "tokens")
    figure.supylabel("depth of what is asked")
    figure.colorbar(image, ax=panels, label="answered", shrink=0.8)
    return figure


def middle(cells: Cells, length: int) -> str | None:
    """The middle one of the budgets at a length; None where there is none."""
    found = {
        cell["tokens"]: cell["budget"] for cell in cells if cell["length"] == length and cell["budget"] is not None
    }
    return found[sorted(found)[len(found) // 2]] if found else None


def depth_map(cells: Cells, lengths: list[int]) -> np.ndarray:
    """Share answered f64[DEPTHS, lengths] of one method at the middle budget; NaN where nothing was asked."""
    total, found = np.zeros((DEPTHS, len(lengths))), np.zeros((DEPTHS, len(lengths)))
    for cell in cells:
        column = lengths.index(cell["length"])
        if cell["budget"] not in (None, middle(cells, cell["length"])):
            continue
        for depth, right in zip(cell["depths"], cell["answered"]):
            if depth is not None:
                row = min(int(depth * DEPTHS), DEPTHS - 1)
                total[row, column] += 1
                found[row, column] += right == "1"
    return np.where(total > 0, found / np.maximum(total, 1), np.nan)


PLOTS: dict[str, Callable[[Cells], Figure | None]] = {
    "exact": by_budget("exact", "answered"),
    "margin": by_budget("margin", "margin, nats"),
    "mass": by_budget("of_oracle", "mass of the oracle's"),
    "text": by_budget("nll", "nats a token"),
    "depth": by_depth,
}
