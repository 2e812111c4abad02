"""Plots of committed runs, as SVG: time against context, speed-up against the kept fraction, rooflines, corrections."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS = "triton"
# Text as text, and no random names or dates: the same run gives the same file.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sparse_jax",
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 9,
}
COLORS = {
    "dense": "tab:gray",
    "page-sparse": "tab:blue",
    "token-sparse": "tab:orange",
    "select + page-sparse": "tab:green",
    "select + token-sparse": "tab:red",
}
LATENT = {
    "dense MLA": ("tab:gray", "o"),
    "sparse MLA": ("tab:orange", "o"),
    "sparse MLA, fp8_ds_mla": ("tab:orange", "s"),
    "sparse MLA, nvfp4_ds_mla": ("tab:orange", "^"),
    "indexer": ("tab:blue", "o"),
    "indexer, fp8 keys": ("tab:blue", "s"),
    "select + sparse MLA": ("tab:green", "o"),
    "select + sparse MLA, fp8": ("tab:green", "s"),
}
CORRECTION = {"dense": "tab:gray", "capture": "tab:purple", "consume": "tab:cyan"}
PEERS = {
    "jax paged_attention": "v",
    "torch SDPA, contiguous": "^",
    "jax cudnn, contiguous": "<",
    "tokamax, contiguous": ">",
    "xla": "x",
}


def draw(runs: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the plots that the runs have numbers for."""
    written = []
    with matplotlib.rc_context(STYLE):
        for name, (suite, plot) in PLOTS.items():
            if suite not in runs:
                continue
            run, path = runs[suite], folder / f"{name}.svg"
            figure = plot(run)
            figure.text(0.995, 0.005, origin(run), ha="right", va="bottom", fontsize=6, color="gray")
            figure.savefig(path, metadata={"Date": None})
            written.append(path)
    return written


def origin(run: dict[str, Any]) -> str:
    """Where the numbers of a plot come from; stands in its corner."""
    environment = run["environment"]
    return f"{environment['device']}, JAX {environment['jax']}, {environment['date']}"


def _measured(run: dict[str, Any], implementations: Iterable[str] = (OURS,)) -> Iterator[tuple[dict, dict]]:
    cases = {case["name"]: case for case in run["cases"]}
    for row in run["rows"]:
        if row["microseconds"] is not None and row["implementation"] in implementations:
            yield cases[row["case"]], row


def time_by_context(run: dict[str, Any]) -> Figure:
    """Microseconds of our operations against the tokens in the cache, 2,048 of which are kept: one panel a batch."""
    batches = sorted({case["batch"] for case, _ in _measured(run)})
    figure = Figure(figsize=(3.2 * len(batches), 3.2), layout="constrained")
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for batch, axes in zip(batches, panels):
        for op, color in COLORS.items():
            points = sorted(
                (case["context"], row["microseconds"])
                for case, row in _measured(run)
                if (case["batch"], row["op"], case["kept_tokens"]) == (batch, op, 2048)
            )
            if points:
                axes.plot(*zip(*points), marker="o", markersize=3, color=color, label=op)
        axes.set(xscale="log", yscale="log", title=f"B {batch}", xlabel="tokens in the cache")
        contexts = sorted({case["context"] for case, _ in _measured(run)})
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.minorticks_off()
    panels[0].set_ylabel("us per call")
    panels[0].legend()
    return figure


def speedup_by_kept(run: dict[str, Any]) -> Figure:
    """Dense time over sparse time, against the fraction of 32,768 tokens that is read."""
    context = 32_768
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes: Axes = figure.subplots()
    dense = {
        case["batch"]: row["microseconds"]
        for case, row in _measured(run)
        if row["op"] == "dense" and case["context"] == context and case["batch"] > 1
    }
    fractions: set[float] = set()
    for batch, style in zip(sorted(dense, reverse=True), ("-", "--")):
        for op in ("page-sparse", "token-sparse"):
            points = sorted(
                (case["kept_tokens"] / context, dense[batch] / row["microseconds"])
                for case, row in _measured(run)
                if (case["batch"], case["context"], row["op"]) == (batch, context, op)
            )
            if points:
                axes.plot(*zip(*points), style, marker="o", markersize=3, color=COLORS[op], label=f"{op}, B {batch}")
            fractions.update(fraction for fraction, _ in points)
    ideal = sorted(fractions)
    axes.plot(ideal, [1 / fraction for fraction in ideal], color="black", linewidth=0.8, label="1 / fraction")
    axes.set(xscale="log", yscale="log", xlabel="fraction of the tokens that is read", ylabel="times faster than dense")
    axes.set_xticks(ideal, [f"{100 * fraction:.3g} %" for fraction in ideal])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_title(f"{context:,} tokens in the cache")
    axes.legend()
    return figure


def roofline(run: dict[str, Any]) -> Figure:
    """TB/s reached against the bytes that a call must move, and the device's copy bandwidth."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes: Axes = figure.subplots()
    for op, color in COLORS.items():
        rows = [row for _, row in _measured(run) if row["op"].removesuffix(", fp8 KV") == op]
        for narrow, marker in ((False, "o"), (True, "s")):
            points = [_point(row) for row in rows if row["op"].endswith("fp8 KV") == narrow]
            if points:
                label = f"{op}, fp8 KV" if narrow else op
                axes.scatter(*_columns(points), s=18, marker=marker, color=color, label=label)
    for name, marker in PEERS.items():
        points = [_point(row) for _, row in _measured(run, (name,)) if row["op"] == "dense"]
        if points:
            axes.scatter(*_columns(points), s=18, marker=marker, color="black", linewidths=0.8, label=f"dense, {name}")
    copy = run["copy_terabytes_per_second"]
    axes.axhline(copy, color="black", linewidth=0.8)
    axes.annotate(f"copy, {copy:.2f} TB/s", (0.01, copy), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    axes.set(xscale="log", xlabel="bytes that a call must move", ylabel="TB/s", ylim=(0, None))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def latent_roofline(run: dict[str, Any]) -> Figure:
    """TFLOP/s of each operation on latents against its FLOP per byte, and what the copy bandwidth allows."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes: Axes = figure.subplots()
    intensities = []
    for op, (color, marker) in LATENT.items():
        points = []
        for _, row in _measured(run):
            if row["op"] == op:
                flop = row["details"]["TFLOP/s"] * row["microseconds"] * 1e6
                points.append((flop / row["bytes"], row["details"]["TFLOP/s"]))
        if points:
            axes.scatter(*_columns(points), s=20, marker=marker, color=color, label=op)
        intensities += [x for x, _ in points]
    copy = run["copy_terabytes_per_second"]
    ends = [min(intensities), max(intensities)] if intensities else [1, 1]
    axes.plot(ends, [copy * x for x in ends], color="black", linewidth=0.8, label=f"copy, {copy:.2f} TB/s")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that a call must move", ylabel="TFLOP/s")
    for axis, ticks in ((axes.xaxis, (16, 32, 64, 128, 256, 512)), (axes.yaxis, (5, 10, 20, 50, 100, 200, 500, 1000))):
        low, high = axis.get_view_interval()
        axis.set_ticks([tick for tick in ticks if low <= tick <= high])
        axis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def correction_times(run: dict[str, Any]) -> Figure:
    """Microseconds of dense attention, capture and consume, case by case."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes: Axes = figure.subplots()
    measured = list(_measured(run))
    cases = list(dict.fromkeys(f"B {case['batch']} x {case['context']:,}" for case, _ in measured))
    for place, (op, color) in enumerate(CORRECTION.items()):
        bars = [
            (cases.index(f"B {case['batch']} x {case['context']:,}") + 0.27 * (place - 1), row["microseconds"])
            for case, row in measured
            if row["op"] == op
        ]
        if bars:
            axes.bar(*_columns(bars), width=0.25, color=color, label=op)
    axes.set_xticks(range(len(cases)), cases)
    axes.set(yscale="log", ylabel="us per call")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(axis="x", visible=False)
    axes.legend()
    return figure


def _point(row: dict[str, Any]) -> tuple[float, float]:
    return row["bytes"], row["terabytes_per_second"]


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


PLOTS = {
    "time": ("attention", time_by_context),
    "speedup": ("attention", speedup_by_kept),
    "roofline": ("attention", roofline),
    "mla": ("mla", latent_roofline),
    "reference": ("reference", correction_times),
}
