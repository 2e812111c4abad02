"""The small tier: the shipped model, 512 tokens, few prompts; enough to tell a broken selector from a sound one.

Sound means: it answers where the window does not, its margin is near that of dense attention, and what it reads has
most of the mass that as many tokens can have. Mass alone would not do: a window has nearly as much as a method that
finds the answer.
"""

import importlib.resources
from collections.abc import Iterable
from typing import Any

from models.evaluation.engine import Settings
from models.evaluation.methods import Method, parse

METHODS = ("dense", "oracle", "quest", "window", "random")
LENGTH, BUDGET, PROMPTS, TASK = 512, "1/8", 8, "keys4"
EXACT = 0.85
"""Share of the answers that a sound method finds."""
MARGIN = 3.0
"""Nats by which a sound method's answers lead, on average; dense attention has 11."""
OF_ORACLE = 0.7
"""Share of the oracle's mass that a sound method reads."""
ERROR = 1e-2
"""Output error of dense attention, which is none but for rounding."""


def settings(methods: Iterable[Method] | None = None) -> Settings:
    """What the tier runs."""
    chosen = tuple(map(parse, METHODS)) if methods is None else tuple(methods)
    return Settings(
        model="ouro-tiny",
        methods=chosen,
        tasks=(TASK,),
        lengths=(LENGTH,),
        budgets=(BUDGET,),
        prompts=PROMPTS,
        batch_tokens=PROMPTS * LENGTH,
        workers=2,
    )


def filler() -> str:
    """Held-out text of the book that ouro-tiny was trained on; it lies beside the model."""
    resource = importlib.resources.files("models") / "pretrained" / "ouro_tiny" / "excerpt.txt"
    return resource.read_text(encoding="utf-8")


def sound(cell: dict[str, Any]) -> bool:
    """Whether a cell is that of a selector which works."""
    return cell["exact"][0] >= EXACT and cell["margin"][0] >= MARGIN and cell["of_oracle"][0] >= OF_ORACLE


def verdicts(results: Iterable[dict[str, Any]]) -> dict[str, bool]:
    """What should hold of the tier's cells, and whether it does."""
    cells = {cell["method"]: cell for cell in results if (cell["task"], cell["length"]) == (TASK, LENGTH)}
    kept = {f"{name} works": sound(cells[name]) for name in ("dense", "oracle", "quest") if name in cells}
    kept |= {
        f"{name} is told from a sound one": not sound(cells[name]) for name in ("window", "random") if name in cells
    }
    if "dense" in cells:
        kept["dense attention is what the method computes"] = cells["dense"]["error"][0] <= ERROR
    if "oracle" in cells:
        kept["the oracle reads the largest mass"] = cells["oracle"]["of_oracle"][0] >= 0.99
    return kept
