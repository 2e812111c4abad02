"""What evaluations found: one JSON file that grows cell by cell, and can be continued after a stop."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparse_jax.bench.report import environment

FORMAT = 1
KEY = ("model", "method", "task", "length", "budget", "settings")
"""What tells one cell from another: settings are a dictionary of all else that its numbers depend on."""


class Results:
    """The cells of a file, which need not exist yet; every `add` writes the file anew, whole or not at all.

    Raises ValueError for a file that is something else.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self.environments: list[dict[str, str]] = []
        self.cells: dict[str, dict[str, Any]] = {}
        self._here: int | None = None
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError
            self.environments, cells = data["environments"], data["cells"]
            self.cells = {key(cell): cell for cell in cells}
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path} holds no results of an evaluation in format {FORMAT}; name another file"
            ) from None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.cells.values())

    def __contains__(self, cell: dict[str, Any]) -> bool:
        return key(cell) in self.cells

    def add(self, cell: dict[str, Any]) -> None:
        """Take a cell in, in place of one with the same key, and write the file."""
        self.cells[key(cell)] = rounded(cell) | {"environment": self._environment()}
        if self.path is not None:
            self.save(self.path)

    def _environment(self) -> int:
        if self._here is None:
            self.environments.append(environment())
            self._here = len(self.environments) - 1
        return self._here

    def save(self, path: Path) -> None:
        """Write everything, a cell a line, through a file beside it that then takes its place."""
        lines = ",\n".join(f"  {json.dumps(cell)}" for cell in self.cells.values())
        head = f' "format": {FORMAT},\n "environments": {json.dumps(self.environments)},\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(f'{{\n{head} "cells": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        os.replace(beside, path)


def key(cell: dict[str, Any]) -> str:
    """The identity of a cell as text."""
    return json.dumps([cell[name] for name in KEY], sort_keys=True)


def rounded(value: Any) -> Any:
    """Floats with four significant digits, in lists and dictionaries too."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value
