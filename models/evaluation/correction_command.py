"""The command line of the quality of reference correction, mounted as `sparse-jax evaluate-correction`."""

import hashlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def evaluate_correction(
    model: Annotated[str, typer.Option(help="A looped model: ouro-tiny, a folder, or owner/name of a hub.")] = (
        "ouro-tiny"
    ),
    tasks: Annotated[
        str, typer.Option(help="text, and questions such as passkey, keys8, chain6, copy16; separated by commas.")
    ] = "text,keys8,chain4,chain6,copy16",
    length: Annotated[int, typer.Option(min=32, help="Tokens of context, question and answer.")] = 512,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 20,
    retentions: Annotated[str, typer.Option(help="Shares of the keys that a reference keeps.")] = (
        "0.01,0.02,0.05,0.1,0.25,1.0"
    ),
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same prompts.")] = 0,
    text: Annotated[Path | None, typer.Option(help="A text; default the excerpt beside ouro-tiny.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the model, such as bfloat16; default its own.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file; cells that are in it already are not run again.")] = None,
    plot: Annotated[Path | None, typer.Option(help="SVG file for the plot; needs matplotlib.")] = None,
) -> None:
    """Measure what reference correction costs in quality, beside plain sparse and frozen attention.

    Text and answers are fed token by token after a dense prompt, and each loop is held against dense attention.

    Example: `sparse-jax evaluate-correction --retentions 0.05,0.1 --length 1024 --out results.json`
    """
    from models import checkpoints, tokenizers
    from models.evaluation import correction_report as report
    from models.evaluation import quick
    from models.evaluation.command import check_dtype, progress
    from models.evaluation.correction_run import Evaluation, Settings
    from models.evaluation.results import Results, key
    from models.evaluation.tasks import Writer

    console = Console() if sys.stdout.isatty() else Console(width=160)
    names, shares = ([part.strip() for part in parts.split(",") if part.strip()] for parts in (tasks, retentions))
    given = None if text is None else text.read_text(encoding="utf-8", errors="replace")
    settings = Settings(
        model=model,
        tasks=tuple(names),
        length=length,
        prompts=prompts,
        retentions=tuple(shares),
        seed=seed,
        text=None if given is None else hashlib.sha256(given.encode()).hexdigest()[:12],
    )
    check_dtype(dtype)
    _, network = checkpoints.load(model, dtype=dtype)
    writer = Writer(tokenizers.for_folder(checkpoints.resolve(model)), text=quick.filler() if given is None else given)
    results = Results(out)
    evaluation = Evaluation(network, writer, settings, results)
    wanted = evaluation.cells()
    with progress(console) as bar:
        task = bar.add_task("compiling", total=len(wanted))
        evaluation.run(lambda cell: bar.update(task, advance=1, description=f"{cell['task']} {cell['method']}"))
    found = [results.cells[key(cell)] for cell in wanted]
    for name, table in report.tables(found).items():
        console.print(f"\n{name}, {length:,} tokens\n{table}", highlight=False, soft_wrap=True)
    if plot is not None:
        from models.evaluation import correction_plots

        console.print(f"written: {correction_plots.draw(found, plot)}", highlight=False)
