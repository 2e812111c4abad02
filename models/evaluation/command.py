"""The command line of the evaluation, mounted as `sparse-jax evaluate`."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from models.cli_options import CacheDtypeOption

DEVICE_TOKENS, HOST_TOKENS = 524_288, 8192
"""Tokens of a batch on a GPU and on a CPU."""


ModelOption = Annotated[
    str,
    typer.Option(help="ouro-tiny, deepseek-tiny, smollm2-135m (after `fetch`), a folder, or owner/name of a hub."),
]
MethodsOption = Annotated[
    str,
    typer.Option(
        help="Methods, separated by commas; options as quest:page_size=32 or dsa:k=64. Default: the usual ones."
    ),
]
TasksOption = Annotated[
    str, typer.Option(help="passkey, keys8, chain2, common or copy16, text. Default: what suits the model.")
]
BudgetsOption = Annotated[str, typer.Option(help="What a step may read: tokens, or shares of the length.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Tokens of all requests of a batch; default by device.")]
DenseLayersOption = Annotated[int, typer.Option(min=0, help="The first layers read everything; Quest's paper has 2.")]
DiagnosticsOption = Annotated[
    bool, typer.Option(help="Retained mass, recall and output error against dense attention; reads everything.")
]
TierOption = Annotated[
    str | None, typer.Option(help="quick: a small run on the shipped model that tells a broken selector; no other.")
]


def evaluate(
    model: ModelOption = "ouro-tiny",
    methods: MethodsOption = "",
    tasks: TasksOption = "",
    lengths: Annotated[str, typer.Option(help="Tokens of context, question and answer.")] = "512",
    budgets: BudgetsOption = "1/16,1/8,1/4",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each cell.")] = 64,
    batch: BatchOption = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same prompts.")] = 0,
    text: Annotated[Path | None, typer.Option(help="A text for the filler and for the task text (perplexity).")] = None,
    dense_layers: DenseLayersOption = 0,
    diagnostics: DiagnosticsOption = True,
    dtype: Annotated[str | None, typer.Option(help="Of the model, such as bfloat16; default its own.")] = None,
    cache_dtype: CacheDtypeOption = None,
    attention: Annotated[str, typer.Option(help="Of the prompt: auto, xla or cudnn (on a GPU, in 16 bits).")] = "auto",
    workers: Annotated[int | None, typer.Option(min=1, help="Threads that compile ahead; default one a core.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file; cells that are in it already are not run again.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots; needs matplotlib.")] = None,
    tier: TierOption = None,
) -> None:
    """Measure what a method costs in quality: questions about generated texts, asked after the context was stored.

    Each method is run at each length and budget over the same prompts: share answered, logit margin of the answer, and
    against dense attention the probability mass that was read, beside the most that as many tokens can have.

    Example: `sparse-jax evaluate --methods dense,quest,window --lengths 512,2048 --out results.json --plots plots`

    Example: `sparse-jax evaluate --tier quick`
    """
    from models.evaluation.results import Results

    console = Console() if sys.stdout.isatty() else Console(width=160)
    results = Results(out)
    if plots is not None:
        _plotting()
    if tier is not None:
        sound = run_tier(tier, results, console)
    else:
        sound, filler = True, None if text is None else text.read_text(encoding="utf-8", errors="replace")
        settings = _settings(
            model, _split(methods), _split(tasks), _lengths(lengths), _split(budgets), prompts, batch, seed, filler,
            dense_layers, diagnostics, cache_dtype, workers,
        )  # fmt: skip
        settings = run_all(settings, results, console, filler, dtype=dtype, attention=attention)
        _show(results, settings, console)
    _conclude(results, out, plots, console)
    if not sound:
        raise typer.Exit(1)


def _settings(
    model: str,
    methods: list[str],
    tasks: list[str],
    lengths: tuple[int, ...],
    budgets: list[str],
    prompts: int,
    batch: int | None,
    seed: int,
    text: str | None,
    dense_layers: int,
    diagnostics: bool,
    cache_dtype: str | None,
    workers: int | None,
) -> Any:
    from models.evaluation.engine import Settings
    from models.evaluation.methods import default, parse

    return Settings(
        model=model,
        methods=tuple(parse(name) for name in (methods or default(model))),
        tasks=tuple(tasks),
        lengths=lengths,
        budgets=tuple(budgets),
        prompts=prompts,
        seed=seed,
        batch_tokens=batch or (DEVICE_TOKENS if _on_gpu() else HOST_TOKENS),
        dense_layers=dense_layers,
        diagnostics=diagnostics,
        cache_dtype=cache_dtype,
        text=None if text is None else hashlib.sha256(text.encode()).hexdigest()[:12],
        workers=workers or min(16, os.cpu_count() or 1),
    )


def _conclude(results: Any, out: Path | None, plots: Path | None, console: Console) -> None:
    if out is not None:
        console.print(f"written to {out}", highlight=False)
    if plots is not None:
        from models.evaluation.plots import draw

        for path in draw(results, plots):
            console.print(f"written: {path}", highlight=False)


def run_tier(name: str, results: Any, console: Console) -> bool:
    """Runs a tier and says what holds; whether all does. Raises ValueError for an unknown one."""
    from models.evaluation import quick

    if name != "quick":
        raise ValueError(f"no tier {name!r}; there is quick")
    settings = run_all(quick.settings(), results, console, quick.filler())
    _show(results, settings, console)
    verdicts = quick.verdicts(results)
    for what, kept in verdicts.items():
        console.print(f"{'kept' if kept else '[bold red]broken[/]'}: {what}", highlight=False)
    return all(verdicts.values())


def run_all(
    settings: Any,
    results: Any,
    console: Console,
    filler: str | None,
    *,
    dtype: str | None = None,
    attention: str = "auto",
) -> Any:
    """Loads the model and runs what `results` lack, with a bar that counts cells; returns the settings it used.

    Tasks that were left empty become those that suit the model. Raises ValueError for what does not fit together.
    """
    import dataclasses

    from models import checkpoints, tokenizers
    from models.deepseek_config import DeepseekConfig
    from models.evaluation.engine import Evaluation, Failed
    from models.evaluation.tasks import Writer

    check_dtype(dtype)
    place = checkpoints.resolve(settings.model)
    writer = Writer(tokenizers.for_folder(place), text=_filler(settings.model, filler))
    if attention not in ("auto", "xla", "cudnn"):
        raise ValueError(f"--attention is auto, xla or cudnn, got {attention!r}")
    config, network = checkpoints.load(settings.model, dtype=dtype)
    if isinstance(config, DeepseekConfig):  # whose prompts attend block by block, and whose queries have no keys
        if settings.dense_layers:
            raise ValueError(
                f"--dense-layers: layers of a DeepSeek-style model share choices, got {settings.dense_layers}"
            )
        settings = dataclasses.replace(settings, diagnostics=False)
    elif attention == "cudnn" or (attention == "auto" and _on_gpu() and network.dtype.itemsize == 2):
        network.attention = "cudnn"
    else:
        settings = dataclasses.replace(settings, attention_rows=2)
    if (longest := max(settings.lengths)) > config.max_positions:
        raise ValueError(f"--lengths: {settings.model} has {config.max_positions} positions, got {longest}")
    evaluation = Evaluation(network, writer, settings, results)
    _check_tasks(writer, evaluation.settings)
    cells = evaluation.cells()
    with progress(console) as bar:
        task = bar.add_task("compiling", total=len(cells))

        def on_cell(cell: dict[str, Any]) -> None:
            bar.update(task, advance=1, description=f"{cell['method']} {cell['task']} {cell['length']}")

        try:
            evaluation.run(on_cell)
        except Failed as failed:
            console.print(f"[bold red]left out:[/] {escape(str(failed))}", highlight=False)
            if not evaluation.results.cells:
                raise failed.__cause__ or failed from None
    return evaluation.settings


def _check_tasks(writer: Any, settings: Any) -> None:
    """Raises ValueError for a task that there is not, and for a length that its statements do not fit into."""
    for task in settings.tasks:
        for length in settings.lengths:
            try:
                writer.prompt(task, length, 0.5, (settings.seed,))
            except ValueError as error:
                raise ValueError(f"--tasks {task} with --lengths {length}: {error}") from None


def check_dtype(name: str | None) -> None:
    """Raises ValueError for a --dtype that models are not computed in."""
    if name not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype is float32, bfloat16 or float16, got {name!r}")


def progress(console: Console):
    """A bar that shows how many cells are done and how long the rest may take."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)


def _show(results: Any, settings: Any, console: Console) -> None:
    from models.evaluation.report import COLUMNS, rows

    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("method", "task", "budget") else "right", no_wrap=True)
    names = [method.name for method in settings.methods]
    wanted = [
        cell
        for cell in results
        if cell["model"] == settings.model
        and cell["method"] in names
        and cell["task"] in settings.tasks
        and cell["length"] in settings.lengths
        and cell["budget"] in (None, *settings.budgets)
        and cell["settings"].get("cache_dtype") == settings.cache_dtype
    ]
    for row in rows(wanted):
        table.add_row(*row)
    console.print(table)


def _filler(model: str, text: str | None) -> str | None:
    """The text that was given; for the shipped models, which know no other sentences, an excerpt."""
    from models import checkpoints
    from models.evaluation import quick

    return quick.filler() if text is None and model in checkpoints.SHIPPED else text


def _plotting() -> None:
    """Fails before the run where the plots after it would."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plots needs matplotlib: pip install 'sparse-jax[notebooks]'") from None


def _on_gpu() -> bool:
    import jax

    return jax.default_backend() == "gpu"


def _lengths(text: str) -> tuple[int, ...]:
    """The numbers of --lengths. Raises ValueError for what is none of at least 1."""
    parts = _split(text)
    if not parts or not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"--lengths takes whole numbers of at least 1, separated by commas, got {text!r}")
    return tuple(int(part) for part in parts)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
