"""What a run found: rows, the device they come from, a table for people and JSON for everything else."""

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
import subprocess
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparse_jax.bench.timing import Timing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One operation, of one implementation, at one shape. Times are wall microseconds of one call inside a chain."""

    case: str
    op: str
    implementation: str
    bytes: int  # the fewest that the operation must move
    microseconds: float | None = None  # median; None where nothing was measured, and `note` says why
    low: float | None = None
    high: float | None = None
    kernel_microseconds: float | None = None
    kernels: dict[str, Any] = dataclasses.field(default_factory=dict)  # name: [microseconds, launches] of one call
    terabytes_per_second: float | None = None  # bytes / microseconds
    of_copy: float | None = None  # fraction of the copy bandwidth measured in the same run
    # Relative L2 distance to the plain XLA result of the same inputs; of ids, the fraction that differs from lax.top_k.
    error: float | None = None
    details: dict[str, float] = dataclasses.field(default_factory=dict)  # what only one suite tells, by name
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""

    def timed(self, timing: Timing, copy_bandwidth: float | None, **changes: Any) -> "Row":
        """This row with what was measured. `copy_bandwidth` in bytes per second; None where it is no yardstick."""
        speed = self.bytes / (timing.microseconds * 1e-6)
        return dataclasses.replace(
            self,
            microseconds=timing.microseconds,
            low=timing.low,
            high=timing.high,
            kernel_microseconds=timing.kernel_microseconds,
            kernels={name: list(kernel) for name, kernel in (timing.kernels or {}).items()},
            terabytes_per_second=speed / 1e12,
            of_copy=speed / copy_bandwidth if copy_bandwidth else None,
            **changes,
        )


@dataclasses.dataclass(kw_only=True)
class BenchResult:
    """One run of a suite. Rows are added as they are measured, so that an interrupted run still tells something."""

    suite: str
    quick: bool
    environment: dict[str, str]
    copy_terabytes_per_second: float
    cases: list[dict[str, Any]]
    seconds: float = 0.0  # that the run took, compilation included
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> str:
        """Everything, a case or row a line, with numbers rounded to what they are worth."""
        parts = []
        for name, value in _rounded(dataclasses.asdict(self)).items():
            items = [f"  {json.dumps(item)}" for item in value] if isinstance(value, list) else []
            parts.append(f' "{name}": ' + ("[\n" + ",\n".join(items) + "\n ]" if items else json.dumps(value)))
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def save(self, path: str | pathlib.Path) -> None:
        """Writes `to_json()` to a file, whose folder is made if need be."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")

    def table(self) -> Group:
        """The rows for a terminal. Columns without a number are left out; settings and reasons stand below."""
        columns = {name: [form(row) for row in self.rows] for name, form in COLUMNS.items()}
        for name in dict.fromkeys(name for row in self.rows for name in row.details):
            columns[name] = [_cell(row.details.get(name), ".4g") for row in self.rows]
        columns = {name: cells for name, cells in columns.items() if any(cells) or name == "us"}
        table = Table()
        for name in columns:
            table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", no_wrap=True)
        for cells in zip(*columns.values()):
            table.add_row(*cells)
        copy = f"copy bandwidth {self.copy_terabytes_per_second:.3g} TB/s"
        title = f"{self.suite} on {self.environment['device']}, {copy}, {self.seconds:.0f} s"
        remarks = [f"{row.case} {row.op} {row.implementation}: {remark(row)}" for row in self.rows if remark(row)]
        below = map(Text, remarks + self.notes)
        return Group(Text(title), table, *below) if self.rows else Group(Text(title), *below)


TEXT_COLUMNS = ("case", "operation", "implementation")
COLUMNS: dict[str, Callable[[Row], str]] = {
    "case": lambda row: row.case,
    "operation": lambda row: row.op,
    "implementation": lambda row: row.implementation,
    "us": lambda row: _cell(row.microseconds, ".1f"),
    "spread": lambda row: "" if row.low is None else f"{row.low:.1f}-{row.high:.1f}",
    "kernel us": lambda row: _cell(row.kernel_microseconds, ".1f"),
    "TB/s": lambda row: _cell(row.terabytes_per_second, ".3g"),
    "of copy": lambda row: _cell(row.of_copy, ".2f"),
    "error": lambda row: _cell(row.error, ".1e"),
}


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def remark(row: Row) -> str:
    """Why a row has no number, or the settings that it was measured with."""
    return row.note or " ".join(f"{key}={value}" for key, value in row.settings.items())


def line(row: Row) -> str:
    """A row as one line, for showing progress."""
    name = f"{row.case:<10} {row.op:<22} {row.implementation:<22}"
    if row.microseconds is None:
        return f"{name} {row.note}"
    of_copy = "" if row.of_copy is None else f", {row.of_copy:.2f} of copy"
    told = [f"{name} {value:.4g}" for name, value in row.details.items()]
    rest = "  ".join(filter(None, [", ".join(told), remark(row)]))
    return f"{name} {row.microseconds:10.1f} us, {row.terabytes_per_second:.3g} TB/s{of_copy}  {rest}".rstrip()


def kernel_lines(row: Row) -> list[str]:
    """The kernels of one call, the longest first."""
    return [
        f"    {microseconds:9.2f} us in {launches:6.2f} launches of {name}"
        for name, (microseconds, launches) in row.kernels.items()
    ]


def environment() -> dict[str, str]:
    """The device, its driver where that can be read, versions and the date."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "driver": _driver(),
        "python": platform.python_version(),
    }
    for package in ("sparse-jax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str:
    if jax.default_backend() != "gpu":
        return "none"
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return answer.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
