"""A reference store in plain Python, to compare with: a lease is an object, and identity needs no counter."""

import dataclasses

DENSE, CAPTURE, CONSUME, ABSENT = 0, 1, 2, -1


@dataclasses.dataclass(eq=False)
class Slot:
    """One lease of a slot. Not `held`: given back, and every reference to it is stale for ever."""

    held: bool = True
    kept: dict = dataclasses.field(default_factory=dict)  # of each layer that was captured: what was published


class Model:
    """Rows are lists of Slot or None (no slot); plans are lists of (mode, Slot or None)."""

    def __init__(self, slots: int):
        self.free = slots

    def reserve(self, wanted: list[bool]) -> tuple[list[Slot | None], int]:
        """A slot for each row that wants one, or for none; and how many were missing."""
        missing = max(0, sum(wanted) - self.free)
        if missing:
            return [None] * len(wanted), missing
        self.free -= sum(wanted)
        return [Slot() if want else None for want in wanted], 0

    def plan(self, rows: list[Slot | None], modes: list[int]) -> tuple[list[tuple[int, Slot | None]], int]:
        """The plan, and how many rows of it are stale."""
        made, stale = [], 0
        for slot, mode in zip(rows, modes):
            if mode in (CAPTURE, CONSUME):
                stale += slot is not None and not slot.held
                live = slot is not None and slot.held
                made.append((mode, slot) if live else (ABSENT, None))
            else:
                made.append((mode, None))
        return made, stale

    def write(self, plan, layer: int, references: list) -> int:
        """Each row that captures keeps its reference; returns how many are stale."""
        stale = 0
        for (mode, slot), reference in zip(plan, references):
            if mode == CAPTURE and slot.held:
                slot.kept[layer] = reference
            stale += mode == CAPTURE and not slot.held
        return stale

    def consume(self, plan, layer: int) -> tuple[list, int, int]:
        """What each row reads (None: nothing), how many are stale, and how many are live with nothing to read."""
        found = [slot.kept.get(layer) if mode == CONSUME and slot.held else None for mode, slot in plan]
        stale = sum(mode == CONSUME and not slot.held for mode, slot in plan)
        empty = sum(mode == CONSUME and slot.held for mode, slot in plan) - sum(x is not None for x in found)
        return found, stale, empty

    def accept(self, rows: list[Slot | None], width: int, accepted: list[int]) -> int:
        """Of each request's `width` rows, those after the accepted ones lose what they kept."""
        for i, slot in enumerate(rows):
            if slot is not None and slot.held and i % width > max(accepted[i // width], 0):
                slot.kept = {}
        return sum(slot is not None and not slot.held for slot in rows)

    def release(self, rows: list[Slot | None]) -> int:
        """Returns how many are stale."""
        stale = 0
        for slot in rows:
            if slot is not None:
                stale += not slot.held
                self.free += slot.held
                slot.held = False
        return stale
