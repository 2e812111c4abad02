"""The command line that measures settings, run by `python -m sparse_jax.bench.tune` and by `sparse-jax tune`."""

import collections
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:  # heavy; --help does without
    from sparse_jax.bench.attention import Op
    from sparse_jax.bench.cases import DecodeShape
    from sparse_jax.bench.tuner import Outcome
    from sparse_jax.tuning import CallShape

OPERATIONS = ("token-sparse", "page-sparse", "dense")
NO_GPU = (
    "Nothing to tune: JAX runs on {device} here, where the operations are plain XLA and have no settings. Run this on "
    "the machine with the NVIDIA GPU that the settings are for."
)


def tune(
    operations: Annotated[
        str, typer.Option(help="What to tune, separated by commas; all unless given: token-sparse, page-sparse, dense.")
    ] = "",
    cases: Annotated[
        str, typer.Option(help="Shapes of `bench attention` by name, separated by commas, such as b64-32k,b1-128k.")
    ] = "",
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Requests; may be given several times.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens that a request's page table holds.")] = None,
    q_heads: Annotated[int | None, typer.Option(min=1, help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Width of keys and values.")] = None,
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a page.")] = None,
    kept_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens that token-sparse attention reads.")] = None,
    kept_pages: Annotated[int | None, typer.Option(min=1, help="Pages that page-sparse attention reads.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="Keys and values in float8_e4m3fn, with one scale.")] = False,
    output: Annotated[
        Path, typer.Option(help="The file to write; what it holds for other shapes, GPUs and versions stays.")
    ] = Path("sparse_jax_tuning.json"),
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no shape after this many minutes.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and fewer candidates.")] = False,
) -> None:
    """Find the fastest settings of the attention kernels on this machine's GPU, and write them to a file.

    Shapes come by name, or as numbers, which replace those of the named shapes. A setting is used for exactly the
    shape, GPU and versions that it was measured with: pass `config=sparse_jax.load_tuning(FILE)` to the operations.

    Example: `sparse-jax tune --operations token-sparse --batch 8 --batch 64 --context 32768 --kept-tokens 2048`
    """
    import jax

    console = Console() if sys.stdout.isatty() else Console(width=130)
    if jax.default_backend() != "gpu":
        message = NO_GPU.format(device=jax.devices()[0].device_kind)
        Console(stderr=True).print(message, soft_wrap=True, highlight=False)
        raise typer.Exit(1)
    numbers = {"context": context, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    numbers |= {"page_size": page_size, "kept_tokens": kept_tokens, "kept_pages": kept_pages}
    numbers = {name: value for name, value in numbers.items() if value is not None}

    def show(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    try:
        ops = select_operations(_names(operations), fp8)
        shapes = select_shapes(_names(cases), batch or [], numbers, quick)
        written = tune_all(ops, shapes, output, minutes=minutes, quick=quick, show=show)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not written:
        raise typer.Exit(1)
    show(f"{written} settings are in {output}: config=sparse_jax.load_tuning({str(output)!r})")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def select_operations(names: Sequence[str], fp8: bool) -> list["Op"]:
    """The operations of the attention suite to tune. ValueError for an unknown name."""
    from sparse_jax.bench.attention import OPS

    unknown = sorted(set(names) - set(OPERATIONS))
    if unknown:
        raise ValueError(f"unknown operation {', '.join(unknown)}; there are {', '.join(OPERATIONS)}")
    known = {op.name: op for op in OPS}
    return [known[f"{name}, fp8 KV" if fp8 else name] for name in names or OPERATIONS]


def select_shapes(
    names: Sequence[str], batches: Sequence[int], numbers: dict[str, Any], quick: bool
) -> list["DecodeShape"]:
    """The shapes to tune: named ones, one made of numbers, or the usual ones. ValueError for what makes no shape."""
    from sparse_jax.bench.cases import ATTENTION, ATTENTION_QUICK, ITEMSIZES, DecodeShape

    known = {case.name: case for case in ATTENTION}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown case {', '.join(unknown)}; there are {', '.join(known)}")
    if names:
        chosen = [known[name] for name in names]
    elif batches or numbers:
        chosen = [DecodeShape(name="given", batch=1, context=32_768)]
    else:
        chosen = [case for case in ATTENTION if case.name in ATTENTION_QUICK or not (quick or case.ops)]
    shapes = []
    for case in chosen:
        for batch in batches or [case.batch]:
            name = f"{case.name} B {batch}" if batches else case.name
            shapes.append(dataclasses.replace(case, **numbers, name=name, batch=batch))
    for shape in shapes:
        if shape.dtype not in ITEMSIZES or ITEMSIZES[shape.dtype] < 2:
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {shape.dtype}")
        if shape.page_size & (shape.page_size - 1) or shape.context % shape.page_size:
            raise ValueError(
                f"a page must have a power of two tokens and divide the context, got {shape.page_size} and a context "
                f"of {shape.context}"
            )
        if shape.q_heads % shape.kv_heads:
            raise ValueError(f"--q-heads must be a multiple of --kv-heads, got {shape.q_heads} and {shape.kv_heads}")
        if shape.kept_tokens > shape.context:
            raise ValueError(f"--kept-tokens must be at most the context, got {shape.kept_tokens} of {shape.context}")
        if shape.kept_pages > shape.pages_per_request:
            raise ValueError(
                f"--kept-pages must be at most the pages of the context, got {shape.kept_pages} of "
                f"{shape.pages_per_request}"
            )
    return shapes


def tune_all(
    ops: Sequence["Op"],
    shapes: Sequence["DecodeShape"],
    output: Path,
    *,
    minutes: float | None,
    quick: bool,
    show: Callable[[str], None],
) -> int:
    """Tunes every operation for every shape and writes each result at once. Returns how many were written.

    Raises ValueError, before anything is measured, where `output` is another kind of file.
    """
    from sparse_jax.tuning import Machine, make_entry, read_entries, save_entries

    if output.exists():
        read_entries(output)
    start, machine, written = time.monotonic(), Machine.here(), 0
    for case in shapes:
        wanted = [op for op in ops if not case.ops or op.name.partition(",")[0] in case.ops]
        if not wanted:
            show(f"{case.name}: left out, it is a shape for {' and '.join(case.ops)} only")
            continue
        if minutes is not None and time.monotonic() - start > 60 * minutes:
            show(f"{case.name}: not begun, {minutes:g} minutes were over")
            continue
        for label, shape, outcome in tune_case(wanted, case, quick, show):
            measured = {"microseconds": outcome.microseconds, "own_choice_microseconds": outcome.own_microseconds}
            save_entries(output, [make_entry(machine, shape, outcome.config, **measured)])
            written += 1
            for text in report(label, outcome):
                show(text)
    return written


def tune_case(
    ops: Sequence["Op"], case: "DecodeShape", quick: bool, show: Callable[[str], None]
) -> Iterator[tuple[str, "CallShape", "Outcome"]]:
    """Tunes operations on the same inputs: (label, shape, outcome) of each; one that fails is shown and left out."""
    from sparse_jax.bench import inputs, tuner
    from sparse_jax.bench.timing import short_message

    try:
        q, pools = inputs.make_query(case), inputs.make_pools(case)
        pools = inputs.to_fp8(pools) if any(op.kv_dtype for op in ops) else pools
    except Exception as error:  # most often: does not fit in memory
        show(f"{case.name}: {short_message(error)}")
        return
    for op in ops:
        label = f"{case.name}, {op.name}"
        try:
            found = tuner.tune(op, case, q, pools, quick=quick)
        except Exception as error:  # one shape must not cost the others
            show(f"{label}: {short_message(error)}")
            continue
        yield label, *found


def report(label: str, outcome: "Outcome") -> list[str]:
    """What was found, in a line, and a line for each reason why candidates were dropped."""
    from sparse_jax.bench.tuner import OWN, describe

    own = outcome.own_microseconds
    found = f"{label}: {outcome.microseconds:.1f} us with {describe(outcome.config)}, {outcome.tried} tried"
    if own is None:
        found += "; the kernel's own choice does not work here"
    elif outcome.config != OWN:
        found += f"; {own:.1f} us by the kernel's own choice"
    reasons = collections.Counter(outcome.dropped.values())
    return [found, *(f"  {count} dropped: {why}" for why, count in reasons.most_common())]


if __name__ == "__main__":
    typer.run(tune)
