"""The files that tell what a training run gave: metrics.json, curves.png and README.md, the model card."""

import json
import math
import os
import pathlib
from typing import Any

TEMPLATE = """# {name}

A byte-level Ouro of {parameters:,} parameters ({layers} layers, {loops} loops), trained {start} in
{minutes:.1f} minutes on one {device} by this project, so that its commands, tests and notebooks have a real looped
model without a download.
Vocabulary: 256 bytes, BOS 256 in front of every sequence, 257 ends one (never trained), 264 rows. Context {context}.

Make it again: `python -m models.text --out .data`, then `{command}`.
The same seed does not give the same bits where the run is counted in minutes.

## Data

King James Bible (Debian `bible-kjv`, last 4 % held out) and Jargon File 4.4.7 (Debian `dict-jargon`, last 6 % held
out); both are free of copyright. Between stretches of them: generated questions, `models/tasks.py`.
{tokens:.0f} million bytes in {steps:,} steps.

## Recipe

{recipe}

## Quality

Greedy exact match by teacher forcing, held-out text around the statements; all on the bfloat16 weights as shipped.

{tables}

## Curves

![curves](curves.png)
"""


def write_json(path: pathlib.Path, data: dict[str, Any]) -> None:
    """Write JSON; numbers that are no numbers become null."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(_finite(data), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _loops(values, digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def tables(metrics: dict[str, Any]) -> list[str]:
    """Lines of Markdown: accuracy by task and length, text by corpus and length, and the gates."""
    lengths = [str(length) for length in metrics["config"]["evaluation_lengths"]]
    head = [f"| {{}} | {' | '.join(lengths)} |", f"| --- |{' --- |' * len(lengths)}"]
    lines = [
        "Exact match, loops 1, 2, ... (a chain has three others around it: a guess among their digits is worth 0.25)",
        "",
    ]
    lines += [head[0].format("task"), head[1]]
    for name, results in metrics["tasks"].items():
        lines.append(f"| {name} | {' | '.join(_loops(results[length]['exact'], 2) for length in lengths)} |")
    lines += ["", "Held-out text, nats per byte, loops 1, 2, ...", "", head[0].format("text"), head[1]]
    for name, results in metrics["text"].items():
        cells = [_loops(results[length]["ce"], 3) if length in results else "-" for length in lengths]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Mean exit probabilities, loops 1, 2, ...", "", head[0].format("bytes of"), head[1]]
    for name, results in {**metrics["text"], **metrics["tasks"]}.items():
        cells = [_loops(results[length]["exits"], 2) if length in results else "-" for length in lengths]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", *(f"- {'kept' if kept else 'MISSED'}: {gate}" for gate, kept in metrics["gates"].items())]
    return lines


def recipe(config: dict[str, Any]) -> list[str]:
    """Lines of Markdown about the settings of a run, from the fingerprint of its configuration."""
    goal = config["objective"]
    lines = [
        f"- Muon for the layers' matrices (momentum {config['momentum']}, weight decay {config['weight_decay']}), "
        "AdamW for the rest",
        f"- Rate {config['rate']}, {config['warmup']} steps of warm-up, from {config['decay_from']:.0%} on linear to "
        f"{config['last_rate']:.0%} of it; clip {config['clip']}",
        f"- {config['tokens_per_step']:,} bytes a step, {config['dtype']}, float32 parameters, seed {config['seed']}",
        f"- Loss: floor {goal['floor']} with shares {goal['shares']}, entropy {goal['entropy']}",
        f"- Weights by label {goal['label_weights']}; dropout {goal['dropout']} on both branches in plain text alone",
    ]
    for phase in config["phases"]:
        lengths = ", ".join(f"{length} ({share:.0%})" for length, share in phase["lengths"])
        mix = phase["mixture"]
        lines.append(
            f"- Until {phase['until']:.0%}: lengths {lengths}; {mix['text']:.0%} text, {mix['chains']:.0%} chains "
            f"of at most {mix['max_hops']} hops ({mix['guided']:.0%} of them guided), the rest other tasks, "
            f"up to {mix['max_keys']} keys"
        )
    return lines


def curves(path: pathlib.Path, metrics: dict[str, Any]) -> bool:
    """Draw training losses and quick evaluations. Gives False, and draws nothing, without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, kept, accuracy = figure.subplots(1, 3)
    for kind in ("text", "answers", "chains", "links"):
        seen = [record for record in metrics["training"] if kind in record]
        for loop, style in ((1, ":"), (-1, "-")):
            values = [max(record[kind][loop], 1e-3) for record in seen]
            losses.plot([r["seconds"] for r in seen], values, style, label=f"{kind}, loop {'last' if loop < 0 else 2}")
    losses.set(title="training loss", xlabel="seconds", yscale="log")
    history = metrics["history"]
    names = [name for name, value in (history[0] if history else {}).items() if isinstance(value, list | tuple)]
    for name in names:
        axis = accuracy if name.startswith(("keys", "chain")) else kept
        for loop, style in ((1, ":"), (-1, "-")):
            label = f"{name}, loop {'last' if loop < 0 else 2}"
            axis.plot([seen["seconds"] for seen in history], [seen[name][loop] for seen in history], style, label=label)
    kept.set(title="held-out text, nats a byte", xlabel="seconds")
    accuracy.set(title="accuracy", xlabel="seconds", ylim=(-0.02, 1.02))
    for axis in (losses, kept, accuracy):
        if axis.lines:
            axis.legend(fontsize=6)
    figure.savefig(path, dpi=90)
    return True


def write(folder: pathlib.Path, metrics: dict[str, Any]) -> None:
    """Write README.md and, where matplotlib is there, curves.png."""
    config = metrics["config"]
    card = TEMPLATE.format(
        name=metrics["name"],
        parameters=metrics["parameters"],
        layers=config["model"]["num_layers"],
        loops=config["model"]["loops"],
        start=f"from the weights in `{config['start_from']}`" if config["start_from"] else "from nothing",
        minutes=metrics["seconds"] / 60,
        device=metrics["device"],
        context=config["model"]["max_positions"],
        command=metrics["command"],
        tokens=metrics["tokens"] / 1e6,
        steps=metrics["steps"],
        recipe="\n".join(recipe(config)),
        tables="\n".join(tables(metrics)),
    )
    if not curves(folder / "curves.png", metrics):
        card = card[: card.index("\n## Curves")]
    (folder / "README.md").write_text(card, encoding="utf-8")
