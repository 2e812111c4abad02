"""Writes the benchmark tables of the documents from committed results: `python -m sparse_jax.bench.readme`."""

import json
import re
from pathlib import Path
from typing import Any

RESULTS = "docs/benchmarks/attention-h200.json"
BLOCK = re.compile(r"(<!-- benchmark table:[^>]*-->\n).*?(<!-- end of benchmark table -->)", re.DOTALL)
HEADLINE_CASES = ("b64-32k", "b8-32k", "b1-128k")


def table(results: dict[str, Any], cases: tuple[str, ...] | None = None, *, all_columns: bool = False) -> str:
    """A Markdown table of the rows that were measured."""
    environment = results["environment"]
    sizes = {case["name"]: case for case in results["cases"]}
    names = ["case", "operation", "implementation", "us", "kernel us", "TB/s", "of copy"]
    names += ["spread, us"] if all_columns else []
    lines = [f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    for row in results["rows"]:
        if row["microseconds"] is None or (cases and row["case"] not in cases):
            continue
        case = sizes[row["case"]]
        kept = "" if row["op"] == "dense" else f", {case['kept_tokens']:,} tokens kept"
        cells = [
            f"B {case['batch']} x {case['context']:,}",
            row["op"] + kept,
            "**this library**" if row["implementation"] == "triton" else row["implementation"],
            microseconds(row["microseconds"]),
            microseconds(row["kernel_microseconds"]),
            f"{row['terabytes_per_second']:.2f}",
            f"{row['of_copy']:.2f}",
        ]
        if all_columns:
            cells.append(f"{row['low']:,.1f} - {row['high']:,.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    shape = results["cases"][0]
    lines += [
        "",
        f"{environment['device']}, driver {environment['driver']}, JAX {environment['jax']}, "
        f"{environment['date'][:10]}: "
        f"{shape['dtype']}, Hq {shape['q_heads']}, Hkv {shape['kv_heads']}, D {shape['head_dim']}, "
        f"P {shape['page_size']}; copy bandwidth {results['copy_terabytes_per_second']:.2f} TB/s.",
    ]
    return "\n".join(lines) + "\n"


def microseconds(value: float | None) -> str:
    """Three or more digits; nothing where it was not read."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def updated(text: str, content: str) -> str:
    """The document with its benchmark table replaced."""
    return BLOCK.sub(lambda match: match.group(1) + content + match.group(2), text)


def documents(root: Path) -> dict[Path, str]:
    """What each document with a benchmark table should say."""
    results = json.loads((root / RESULTS).read_text(encoding="utf-8"))
    tables = {
        root / "README.md": table(results, HEADLINE_CASES),
        root / "docs/benchmarks/README.md": table(results, all_columns=True),
    }
    return {path: updated(path.read_text(encoding="utf-8"), content) for path, content in tables.items()}


if __name__ == "__main__":
    for path, text in documents(Path.cwd()).items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}")
