"""Writes the benchmark tables and plots of the documents from committed runs: `python -m sparse_jax.bench.readme`."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = "docs/benchmarks"
DEVICE = "h200"
OURS = "triton"
Run = dict[str, Any]  # what a suite wrote; older runs lack some fields
# One row each in the README: suite, case, operation.
HEADLINE = (
    ("attention", "b64-32k", "dense"),
    ("attention", "b64-32k", "page-sparse"),
    ("attention", "b64-32k", "token-sparse"),
    ("attention", "b64-32k", "token-sparse, fp8 KV"),
    ("attention", "b64-32k", "select + page-sparse"),
    ("attention", "b64-128k", "select + page-sparse"),
    ("attention", "b8-32k", "dense"),
    ("attention", "b8-32k", "page-sparse"),
    ("attention", "b8-32k", "token-sparse"),
    ("attention", "b1-128k", "dense"),
    ("attention", "b1-128k", "page-sparse"),
    ("attention", "b1-128k", "token-sparse"),
    ("select", "b64-32k", "h2o accumulate, mean"),
    ("select", "b64-32k", "h2o accumulate, max"),
    ("select", "b64-32k", "step: quest"),
    ("select", "b64-32k", "step: gqa_h2o_sparse_attention"),
    ("select", "b64-128k", "step: quest"),
    ("select", "b64-128k", "step: gqa_h2o_sparse_attention"),
    ("topk", "64x32k", "top-k by id"),
    ("topk", "1x128k", "top-k by id"),
    ("mla", "b128-32k-h128", "dense MLA"),
    ("mla", "b128-32k-h128", "sparse MLA"),
    ("mla", "b128-32k-h128", "sparse MLA, fp8_ds_mla"),
    ("mla", "b128-32k-h16", "sparse MLA"),
    ("mla", "b128-32k-h16", "sparse MLA, fp8_ds_mla"),
    ("mla", "b8-128k-h128", "sparse MLA"),
    ("mla", "b1-128k-h128", "sparse MLA"),
    ("mla", "b128-32k-h16", "indexer"),
    ("mla", "b128-32k-h16", "indexer, fp8 keys"),
    ("mla", "b128-32k-h16", "select + sparse MLA"),
    ("mla", "b8-128k-h128", "select + sparse MLA"),
    ("reference", "b1-32k", "capture"),
    ("reference", "b1-32k", "consume"),
    ("reference", "b16-8k", "consume"),
    ("ouro", "b8-8k", "step: dense"),
    ("ouro", "b8-8k", "step: reference 0.1"),
)
# What a reader of the README must be told of an operation, whose name is enough inside its suite.
PREFIX = {"reference": "reference correction: ", "ouro": "Ouro-1.4B, "}
PICTURES = {
    "mla": "TFLOP/s against FLOP per byte of sparse MLA",
    "reference": "Time of capture and consume beside dense",
}
NO_RUN = "No run is committed yet.\n"


def load(root: Path) -> dict[str, Run]:
    """The committed runs by suite."""
    paths = sorted((root / FOLDER).glob(f"*-{DEVICE}.json"))
    return {run["suite"]: run for run in (json.loads(path.read_text(encoding="utf-8")) for path in paths)}


def documents(root: Path) -> dict[Path, str]:
    """What each document with generated parts should say."""
    runs = load(root)

    def part(name: str) -> str:
        if name == "headline":
            return headline(runs)
        return (picture(name) if name in runs else "") + suite_table(runs.get(name))

    def content(match: re.Match[str]) -> str:
        return match.group(1) + part(match.group(2)) + match.group(3)

    # <!-- benchmark NAME: ... --> ... <!-- end of benchmark NAME -->
    block = re.compile(r"(<!-- benchmark (\w+):[^>]*-->\n).*?(<!-- end of benchmark \2 -->)", re.DOTALL)
    paths = (root / "README.md", root / FOLDER / "README.md")
    return {path: block.sub(content, path.read_text(encoding="utf-8")) for path in paths}


def picture(suite: str) -> str:
    """The plot of a suite that has one of its own, see `plots.py`."""
    return f"![{PICTURES[suite]}]({suite}.svg)\n\n" if suite in PICTURES else ""


def headline(runs: dict[str, Run]) -> str:
    """The README's table: our time of each operation, and that of the others beside it."""
    lines, told = [], {}
    for suite, case_name, op in HEADLINE:
        run = runs.get(suite, {"rows": [], "cases": []})
        measured = {
            row["implementation"]: row
            for row in run["rows"]
            if row["case"] == case_name and row["microseconds"] is not None and _compares(row, op)
        }
        if OURS not in measured:
            continue
        ours, case = measured.pop(OURS), _case(run, case_name)
        xla, details = measured.pop("xla", None), ours.get("details", {})
        told[suite] = run
        others = [
            f"{name.removesuffix(', contiguous')} {microseconds(row['microseconds'])}" for name, row in measured.items()
        ]
        lines.append(
            (
                _shape(case),
                PREFIX.get(suite, "") + _operation(case, op),
                f"**{microseconds(ours['microseconds'])}**",
                microseconds(ours["kernel_microseconds"]),
                number(ours["of_copy"]),
                microseconds(xla["microseconds"] if xla else None),
                ", ".join(others),
                microseconds(details.get("TFLOP/s")),
                _detail(_times_dense(details)),
            )
        )
    names = ("case", "operation", "us", "kernel us", "of copy", "plain XLA, us", "others, us", "TFLOP/s", "times dense")
    return markdown(names, lines) + "\n" + about(told)


def _times_dense(details: dict[str, float]) -> float | None:
    """How often the call fits into a dense one of its run, whichever way round its suite tells."""
    return 1 / details["of dense"] if "of dense" in details else details.get("times dense")


def _compares(row: dict[str, Any], op: str) -> bool:
    """Whether a row stands beside an operation: peers know one order of a top-k only."""
    return row["op"] == op or (row["implementation"] != OURS and row["op"].startswith("top-k") and op[:5] == "top-k")


def suite_table(run: Run | None) -> str:
    """All rows of a run that were measured, and why others were not."""
    if run is None:
        return NO_RUN
    names = ["case", "operation", "implementation", "us", "spread, us", "kernel us", "TB/s", "of copy", "error"]
    details = list(dict.fromkeys(name for row in run["rows"] for name in row.get("details", {})))
    lines, notes = [], []
    for row in run["rows"]:
        case = _case(run, row["case"])
        if row["microseconds"] is None:
            notes.append(f"- {_shape(case)}, {row['op']}, {row['implementation']}: {row['note']}")
            continue
        cells = [
            _shape(case),
            _operation(case, row["op"]),
            "**this library**" if row["implementation"] == OURS else row["implementation"],
            microseconds(row["microseconds"]),
            f"{microseconds(row['low'])} - {microseconds(row['high'])}",
            microseconds(row["kernel_microseconds"]),
            number(row["terabytes_per_second"] or None),  # suites of whole models may count no bytes
            number(row["of_copy"]),
            "" if row["error"] is None else f"{row['error']:.1e}",
        ]
        lines.append(cells + [_detail(row.get("details", {}).get(name)) for name in details])
    told = "\nNot measured:\n\n" + "\n".join(notes) + "\n" if notes else ""
    return markdown(names + details, lines) + told + "\n" + about({run["suite"]: run})


def about(runs: dict[str, Run]) -> str:
    """Device, versions, shapes and copy bandwidth of the runs."""
    texts = []
    for suite, run in runs.items():
        environment = run["environment"]
        texts.append(
            f"{suite}: {environment['device']}, driver {environment['driver']}, JAX {environment['jax']}, "
            f"{environment['date'][:10]}, copy bandwidth {run['copy_terabytes_per_second']:.2f} TB/s"
        )
        shape = run["cases"][0].get("attention", run["cases"][0])
        if "q_heads" in shape:
            texts[-1] += (
                f"; {shape['dtype']}, Hq {shape['q_heads']}, Hkv {shape['kv_heads']}, D {shape['head_dim']}, "
                f"P {shape['page_size']}"
            )
        elif "latent_dim" in shape:
            texts[-1] += (
                f"; {shape['dtype']}, latents of {shape['latent_dim']} + {shape['rope_dim']}, index keys of "
                f"{shape['index_dim']}, {shape['index_heads']} index heads, P {shape['page_size']}"
            )
    return ".\n".join(texts) + ".\n" if texts else NO_RUN


def markdown(names: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table without the columns that are empty throughout."""
    columns = [column for column in zip(names, *lines) if any(column[1:])]
    rows = list(zip(*columns))
    rows.insert(1, ("---",) * len(columns))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _case(run: Run, name: str) -> dict[str, Any]:
    return next(case for case in run["cases"] if case["name"] == name)


def _shape(case: dict[str, Any]) -> str:
    shape = case.get("attention", case)
    if "prompt" in shape:
        model = "Ouro-1.4B, " if shape.get("model") == "ouro-1.4b" else ""
        return f"{model}B {shape['batch']}, {shape['prompt']:,} + {shape['tokens']:,} tokens"
    if "context" in shape:
        heads = f", Hq {shape['heads']}" if "heads" in shape else ""
        rows = f", T {shape['query_tokens']}" if shape.get("query_tokens", 1) > 1 else ""
        return f"B {shape['batch']} x {shape['context']:,}" + heads + rows
    rows = " x ".join(f"{rows:,}" for rows in case["rows"])
    return f"{rows} x {case['size']:,}, k {case['k']:,}" + (", mostly zeros" if case["zeros"] else "")


def _operation(case: dict[str, Any], op: str) -> str:
    shape = case.get("attention", case)
    return f"{op}, {shape['kept_tokens']:,} kept" if "sparse" in op else op


def microseconds(value: float | None) -> str:
    """Three or more digits; nothing where it was not read."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def number(value: float | None) -> str:
    """Two digits after the point; nothing where it was not read."""
    return "" if value is None else f"{value:.2f}"


def _detail(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def main(root: Path) -> None:
    """Writes the documents, and the plots where matplotlib is installed."""
    for path, text in documents(root).items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}")
    try:
        from sparse_jax.bench import plots
    except ImportError as error:
        print(f"no plots: {error.name} is not installed; pip install 'sparse-jax[notebooks]' brings it")
        return
    for path in plots.draw(load(root), root / FOLDER):
        print(f"written: {path}")


if __name__ == "__main__":
    main(Path.cwd())
