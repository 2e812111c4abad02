"""The files that tell what a training run gave: metrics.json, curves.png and README.md, the model card."""

import json
import math
import os
import pathlib
from typing import Any

from models.training import latent_card

SIZES = (
    "{layers} layers of width {width} (FFN {ffn}), run {loops} times; {heads} query heads and {kv_heads} KV heads of "
    "{head}."
)
"""Of a looped model."""

TEMPLATE = """# {name}

A byte-level {kind} of {parameters:,} parameters, trained {start} in {minutes:.1f} minutes on one {device}
(JAX {jax}) by this project, so that its commands, tests and notebooks have a real {short} without a download.

{sizes}
Vocabulary: 256 bytes, BOS 256 in front of every sequence, 257 ends one (never trained), 264 rows. Context {context}.

Make it again (on Debian, `apt-get install bible-kjv dict-jargon` first):

    python -m models.training.corpora --out .data
    {command}

The same seed does not give the same bits where the run is counted in minutes.

## Data

King James Bible (Debian `bible-kjv-text`, last 4 % held out): its copyright has expired. Jargon File 4.4.7 (Debian
`dict-jargon`, last 6 % held out): in the public domain. Both as the packages say; nothing else of them is used.
Between stretches of text: generated questions, `models/tasks.py`. {tokens:.0f} million bytes in {steps:,} steps.

## Recipe

{recipe}

## Quality

Greedy exact match by teacher forcing, held-out text around the statements; all on the bfloat16 weights as shipped.

{tables}

## Curves

![curves](curves.png)
"""

NOTES = "\n## Notes\n"
"""Where a card's part begins that is written by hand; `write` keeps it."""

CHAINS = " (a chain has three others around it: a guess among their digits is worth 0.25)"
"""What to know about the chains in a table of exact matches."""

LABELS = ("random strings where first stated", "text", "templates", "filler", "answers", "chain answers", "links")
"""The labels of `models.tasks`, in their order, in words."""


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


def _looped(metrics: dict[str, Any]) -> bool:
    return "loops" in metrics["config"]["model"]


def tables(metrics: dict[str, Any]) -> list[str]:
    """Lines of Markdown: accuracy by task and length, text by corpus and length, and the gates."""
    lengths = [str(length) for length in metrics["config"]["evaluation_lengths"]]
    head = [f"| {{}} | {' | '.join(lengths)} |", f"| --- |{' --- |' * len(lengths)}"]
    ways, of_chains = ("loops 1, 2, ...", CHAINS) if _looped(metrics) else (latent_card.ways(metrics["config"]), "")
    lines = [f"Exact match, {ways}{of_chains}", ""]
    lines += [head[0].format("task"), head[1]]
    for name, results in metrics["tasks"].items():
        lines.append(f"| {name} | {' | '.join(_loops(results[length]['exact'], 2) for length in lengths)} |")
    lines += ["", f"Held-out text, nats per byte, {ways}", "", head[0].format("text"), head[1]]
    for name, results in metrics["text"].items():
        cells = [_loops(results[length]["ce"], 3) if length in results else "-" for length in lengths]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"Held-out text, perplexity per byte (exp of the above), {ways}", ""]
    lines += [head[0].format("text"), head[1]]
    for name, results in metrics["text"].items():
        cells = [_loops(map(math.exp, results[length]["ce"]), 2) if length in results else "-" for length in lengths]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if _looped(metrics):
        lines += ["", f"Mean exit probabilities, {ways}", "", head[0].format("bytes of"), head[1]]
    for name, results in {**metrics["text"], **metrics["tasks"]}.items() if _looped(metrics) else ():
        cells = [_loops(results[length]["exits"], 2) if length in results else "-" for length in lengths]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", *(f"- {'kept' if kept else 'MISSED'}: {gate}" for gate, kept in metrics["gates"].items())]
    return lines


def recipe(config: dict[str, Any]) -> list[str]:
    """Lines of Markdown about the settings of a run, from the fingerprint of its configuration."""
    goal = config["objective"]
    weights = zip(LABELS, goal["label_weights"], strict=True)
    lines = [
        f"- Muon for the layers' matrices (momentum {config['momentum']}, weight decay {config['weight_decay']}), "
        "AdamW for the rest",
        f"- Rate {config['rate']}, {config['warmup']} steps of warm-up, from {config['decay_from']:.0%} on linear to "
        f"{config['last_rate']:.0%} of it; clip {config['clip']}",
        f"- {config['tokens_per_step']:,} bytes a step, {config['dtype']}, float32 parameters, seed {config['seed']}",
        f"- Loss: Ouro's objective with entropy weight {goal['entropy']}; {goal['floor']:.0%} of it is the loss of the "
        f"loops in fixed shares ({', '.join(map(str, goal['shares']))})"
        if "entropy" in goal
        else latent_card.loss(goal),
        f"- Weights: {', '.join(f'{name} {weight:g}' for name, weight in weights)}; dropout {goal['dropout']} on both "
        "branches in plain text alone",
    ]
    for phase in config["phases"]:
        lengths = ", ".join(f"{length} ({share:.0%})" for length, share in phase["lengths"])
        mix = phase["mixture"]
        lines.append(
            f"- Until {phase['until']:.0%}: lengths {lengths}; {mix['text']:.0%} text, {mix['chains']:.0%} chains "
            f"of at most {mix['max_hops']} hops ({mix['guided']:.0%} of them guided), the rest other tasks, "
            f"up to {mix['max_keys']} keys" + latent_card.stage(phase)
        )
    return lines


def curves(path: pathlib.Path, metrics: dict[str, Any]) -> bool:
    """Draw training losses and quick evaluations. Gives False, and draws nothing, without matplotlib."""
    lines = ((1, ":", "loop 2"), (-1, "-", "loop last"))  # what is drawn of each result
    losses_of, looks_of = (lines, lines) if _looped(metrics) else (latent_card.LOSSES, latent_card.LOOKS)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, kept, accuracy = figure.subplots(1, 3)
    for index, kind in enumerate(("text", "answers", "chains", "links")):
        seen = [record for record in metrics["training"] if kind in record]
        for column, style, what in losses_of:
            values = [max(record[kind][column], 1e-3) for record in seen]
            losses.plot([r["seconds"] for r in seen], values, style, color=f"C{index}", label=f"{kind}, {what}")
    losses.set(title="training loss", xlabel="seconds", yscale="log")
    history = metrics["history"]
    names = [name for name, value in (history[0] if history else {}).items() if isinstance(value, list | tuple)]
    for index, name in enumerate(names):
        axis = accuracy if name.startswith(("keys", "chain")) else kept
        for column, style, what in looks_of:
            times, values = [seen["seconds"] for seen in history], [seen[name][column] for seen in history]
            axis.plot(times, values, style, color=f"C{index}", label=f"{name}, {what}")
    kept.set(title="held-out text, nats a byte", xlabel="seconds")
    accuracy.set(title="accuracy", xlabel="seconds", ylim=(-0.02, 1.02))
    for axis in (losses, kept, accuracy):
        if axis.lines:
            axis.legend(fontsize=6)
    figure.savefig(path, dpi=90)
    return True


def card(metrics: dict[str, Any]) -> str:
    """The Markdown of a model card, from what metrics.json holds."""
    config = metrics["config"]
    model = config["model"]
    preset, _, variant = metrics["name"].partition(":")
    if _looped(metrics):
        sizes = SIZES.format(
            layers=model["num_layers"],
            width=model["hidden_size"],
            ffn=model["intermediate_size"],
            loops=model["loops"],
            heads=model["num_heads"],
            kv_heads=model["num_kv_heads"],
            head=model["head_dim"],
        )
        kind, short = "Ouro", "looped model"
    else:
        kind, short, sizes = latent_card.KIND, latent_card.KIND, latent_card.sizes(model)
    return TEMPLATE.format(
        name=f"{preset} (recipe `{variant}`)" if variant else preset,
        kind=kind,
        short=short,
        sizes=sizes,
        parameters=metrics["parameters"],
        start=f"from the weights in `{config['start_from']}`" if config["start_from"] else "from nothing",
        minutes=metrics["seconds"] / 60,
        device=metrics["device"],
        jax=metrics["jax"],
        context=model["max_positions"],
        command=metrics["command"],
        tokens=metrics["tokens"] / 1e6,
        steps=metrics["steps"],
        recipe="\n".join(recipe(config)),
        tables="\n".join(tables(metrics)),
    )


def write(folder: pathlib.Path, metrics: dict[str, Any]) -> None:
    """Write README.md and, where matplotlib is there, curves.png. Notes in a card that is there already stay."""
    path = folder / "README.md"
    _, found, notes = path.read_text(encoding="utf-8").partition(NOTES) if path.is_file() else ("", "", "")
    text = card(metrics)
    if not curves(folder / "curves.png", metrics):
        text = text[: text.index("\n## Curves")]
    path.write_text(text + found + notes, encoding="utf-8")
