"""The command line of the benchmark, mounted by `python -m sparse_jax.bench` and by `sparse-jax bench`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


def bench(
    suite: Annotated[str, typer.Argument(help="What to measure: attention.")] = "attention",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and shorter measurements.")] = False,
    cases: Annotated[str, typer.Option(help="Shapes by name, separated by commas, such as b64-32k,b1-128k.")] = "",
    config: Annotated[
        str, typer.Option(help="Settings for our kernels instead of their own choice, such as splits=4,num_warps=8.")
    ] = "",
    peers: Annotated[bool, typer.Option(help="Measure other implementations too, where they are installed.")] = True,
    minutes: Annotated[float | None, typer.Option(help="Begin no further shape after this many minutes.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file as well.")] = None,
) -> None:
    """Measure sparse and dense decode attention on this machine.

    Times are wall microseconds of one call inside a chain of calls: the median, and the fastest and slowest repeat.
    "of copy" compares the bytes that a call must move with what a plain copy on this device reaches in the same run.
    On a machine without a GPU, small shapes are measured with plain XLA.

    Example: `--quick --json result.json`
    """
    from sparse_jax.bench.report import BenchResult, Row, line
    from sparse_jax.bench.suites import run

    console = Console() if sys.stdout.isatty() else Console(width=130)

    def show(result: BenchResult, row: Row) -> None:
        console.print(line(row), soft_wrap=True, markup=False, highlight=False)
        if json is not None:
            result.save(json)

    try:
        names = [name.strip() for name in cases.split(",") if name.strip()]
        result = run(
            suite,
            quick=quick,
            cases=names,
            config=parse_config(config),
            with_peers=peers,
            minutes=minutes,
            on_row=show,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console.print(result.table())
    if json is not None:
        result.save(json)
        console.print(f"written to {json}", highlight=False)


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
