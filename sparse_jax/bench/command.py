"""The command line of the benchmark, mounted by `python -m sparse_jax.bench` and by `sparse-jax bench`."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="What to measure: attention, topk, select, step, reference, mla, ouro, speculation."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and shorter measurements.")] = False,
    cases: Annotated[str, typer.Option(help="Shapes by name or pattern, separated by commas: b64-32k,b1-*.")] = "",
    only: Annotated[str, typer.Option(help="Measure operations whose name contains this, such as token-sparse.")] = "",
    config: Annotated[
        str, typer.Option(help="Settings for our kernels instead of their own choice, such as splits=4,num_warps=8.")
    ] = "",
    peers: Annotated[bool, typer.Option(help="Measure other implementations too, where they are installed.")] = True,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no shape after this many minutes.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Show the kernels of each call, on a GPU.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file as well; for one suite.")] = None,
    json_dir: Annotated[Path | None, typer.Option(help="The same, to a file of this folder for each suite.")] = None,
) -> None:
    """Measure sparse and dense decode attention, top-k and whole decode steps on this machine.

    Times are wall microseconds of one call inside a chain of calls: the median, and the fastest and slowest repeat.
    "of copy" compares the bytes that a call must move with what a plain copy on this device reaches in the same run.
    On a machine without a GPU, small shapes are measured with plain XLA.

    Example: `sparse-jax bench attention topk --quick --json-dir results`
    """
    from sparse_jax.bench.report import BenchResult, Row, kernel_lines, line
    from sparse_jax.bench.suites import run, select_cases

    console = Console() if sys.stdout.isatty() else Console(width=160)
    suites = suites or ["attention"]
    patterns = [name.strip() for name in cases.split(",") if name.strip()]

    def path(result: BenchResult) -> Path | None:
        return json_dir / file_name(result.suite, result.environment["device"]) if json_dir else json

    def show(result: BenchResult, row: Row) -> None:
        for text in [line(row), *(kernel_lines(row) if kernels else [])]:
            console.print(text, soft_wrap=True, markup=False, highlight=False)
        if target := path(result):
            result.save(target)

    try:
        settings = parse_config(config)
        if json and len(suites) > 1:
            raise ValueError("--json is for one suite; take --json-dir for several")
        for suite in suites:
            select_cases(suite, patterns, quick)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    measured = 0
    for suite in suites:
        result = run(
            suite,
            quick=quick,
            cases=patterns,
            only=only,
            config=settings,
            with_peers=peers,
            minutes=minutes,
            on_row=show,
        )
        console.print(result.table())
        measured += len(result.rows)
        if (result.rows or not only) and (target := path(result)):
            result.save(target)
            console.print(f"written to {target}", highlight=False)
    if only and not measured:
        raise typer.BadParameter(f"no operation that was to be measured has {only!r} in its name", param_hint="--only")


def file_name(suite: str, device: str) -> str:
    """`attention-h200.json` for an NVIDIA H200."""
    words = re.findall(r"[a-z0-9]+", device.lower().replace("nvidia", ""))
    return f"{'-'.join([suite, *words])}.json"


def parse_config(text: str) -> Any:
    """A `sparse_jax.Config` from "splits=4,num_warps=8"; None from an empty text. ValueError where it is not one."""
    if not text.strip():
        return None
    from sparse_jax import Config

    words = {"true": True, "false": False}
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            fields[name] = words[value.lower()] if value.lower() in words else int(value)
        except ValueError:
            raise ValueError(f"{part.strip()!r} is not a setting; write name=number, such as splits=4") from None
    try:
        return Config(**fields)
    except TypeError as error:
        raise ValueError(f"config: {error}") from None
