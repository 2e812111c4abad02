"""What is said about a checkpoint that does not fit."""

from pathlib import Path

KINDS = ("unknown", "missing", "duplicate", "misplaced", "shape", "dtype")


class CheckpointError(ValueError):
    """A checkpoint that is not what its configuration says; the message names every tensor or field."""


class Problems:
    """Collects what is wrong with the tensors of a checkpoint, so that all of it comes in one message."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, text: str) -> None:
        """Note a tensor under one of KINDS."""
        self.found[kind].append(text)

    def judge_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Whether the shape is the expected one; noted if not."""
        if shape != expected:
            self.add("shape", f"{name} (is {list(shape)}, should be {list(expected)})")
        return shape == expected

    def check(self, place: Path) -> None:
        """Raise CheckpointError if anything was noted."""
        if any(self.found.values()):
            lines = [f"  {kind}: {_shortened(names)}" for kind, names in self.found.items() if names]
            raise CheckpointError("\n".join([f"the weights in {place} do not fit its configuration:", *lines]))


def _shortened(names: list[str], limit: int = 12) -> str:
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
