"""Prompts of an exact length with what is asked at a chosen depth: plain NumPy, the same for the same seed.

A prompt is three rows of ids: the context, which is in the cache before the question is known, the question, and the
answer. Together they have the length asked for. The same prompt is put to every method and budget.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Sequence

import numpy as np

from models.evaluation.filler import Filler, Sentences, Text, WordList
from models.evaluation.phrasing import English, Material, Phrasing, Trained
from models.tokenizers import ByteTokenizer, Tokenizer

TEXT_TASK = "text"
TEXT_TOKENS = 64
"""Tokens of a text that are judged, after a context of all before them."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question; all arrays are i32 but `scored`."""

    task: str
    context: np.ndarray  # i32[tokens]
    question: np.ndarray  # i32[tokens], at least one
    answer: np.ndarray  # i32[tokens]
    scored: np.ndarray  # bool[tokens of the answer], False where wording is given
    depth: float | None  # where what is asked begins, as a share of the context; None: everywhere
    seed: tuple[int, ...]

    @property
    def size(self) -> int:
        """Tokens of context, question and answer."""
        return len(self.context) + len(self.question) + len(self.answer)


class Writer:
    """Makes prompts for one tokenizer.

    phrasing: default the training's own for a byte tokenizer, English for others. text: sentences around the
    statements; generated ones by default.
    """

    def __init__(self, tokenizer: Tokenizer, phrasing: Phrasing | None = None, text: str | None = None):
        self.begin = tokenizer.encode("")  # a first token where the tokenizer adds one
        self.tokenizer = tokenizer
        self.phrasing = phrasing or (Trained() if isinstance(tokenizer, ByteTokenizer) else English())
        self.text = None if text is None else Text(self.encode, text)
        self.filler: Filler = self.text or Sentences(self.encode)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without the first token."""
        return self.tokenizer.encode(text)[len(self.begin) :]

    def prompts(self, task: str, length: int, count: int, seed: int = 0) -> list[Prompt]:
        """`count` prompts with depths spread evenly over the context. Raises ValueError where `prompt` does."""
        return [self.prompt(task, length, (number + 0.5) / count, (seed, number)) for number in range(count)]

    def prompt(self, task: str, length: int, depth: float, seed: Sequence[int]) -> Prompt:
        """One prompt of `length` tokens, answer included.

        Raises ValueError for an unknown task, one without its text, and a length that the statements do not fit into.
        """
        seed = (*seed, length, zlib.crc32(task.encode()))
        rng = np.random.default_rng(seed)
        if task == TEXT_TASK:
            return self._text(rng, length, seed)
        material = self.phrasing.material(rng, task)
        question, answer, scored = self._ask(material)
        filler = self.filler if material.words is None else WordList(self.encode, *material.words)
        context, start = self._context(rng, material, filler, length - len(question) - len(answer), depth)
        place = None if start is None else start / len(context)
        return Prompt(task, _ids(context), _ids(question), _ids(answer), np.array(scored), place, seed)

    def _ask(self, material: Material) -> tuple[list[int], list[int], list[bool]]:
        """Ids of question and answer, encoded together, as a model meets them; and which of the answer count."""
        parts = [(material.question, False), *material.answer]
        ends = list(itertools.accumulate(len(text) for text, _ in parts))
        text = "".join(text for text, _ in parts)
        ids, scored, at = self.encode(text), [], 0
        for end, (_, wanted) in zip(ends, parts):
            size = len(ids) if end == len(text) else _common(ids, self.encode(text[:end]))
            scored += [wanted] * (size - at)
            at = size
        # A space that is a token of its own belongs to the wording before it.
        for index, wanted in enumerate(scored):
            if wanted and not self.tokenizer.decode(ids[index : index + 1]).strip():
                scored[index] = False
        first = scored.index(True)
        return ids[:first], ids[first:], scored[first:]

    def _context(
        self, rng: np.random.Generator, material: Material, filler: Filler, length: int, depth: float
    ) -> tuple[list[int], int | None]:
        """Ids of a context of `length` tokens, and where the target statement begins in it."""
        begin = self.begin + (self.encode(material.begin) if material.begin else [])
        statements = [self.encode(statement) for statement in material.statements]
        room = length - len(begin) - sum(map(len, statements))
        if room < 0:
            raise ValueError(f"the statements need {-room} tokens more than there are; take a greater length")
        segments = filler.segments(rng, room) if room else []
        ends = np.concatenate([[0], np.cumsum([len(segment) for segment in segments])]).astype(int)
        wanted = _places(rng, len(statements), material.target, depth, material.in_order) * room
        gaps = np.abs(ends[None] - wanted[:, None]).argmin(axis=1)  # the end of a segment that is nearest
        ids, start = list(begin), None
        for gap in range(len(segments) + 1):
            here = [number for number in np.argsort(wanted, kind="stable") if gaps[number] == gap]
            for number in here:
                start = len(ids) if number == material.target else start
                ids += statements[number]
            ids += segments[gap] if gap < len(segments) else []
        return ids, start

    def _text(self, rng: np.random.Generator, length: int, seed: tuple[int, ...]) -> Prompt:
        if self.text is None:
            raise ValueError(f"the task {TEXT_TASK!r} judges a text of yours: give one")
        judged = min(TEXT_TOKENS, (length - len(self.begin)) // 2)
        if judged < 1:
            raise ValueError(f"a text has at least {len(self.begin) + 2} tokens, got {length}; take a greater length")
        segments = self.text.segments(rng, length - len(self.begin))
        ids = _ids(self.begin + [token for segment in segments for token in segment])
        context, question, answer = np.split(ids, [length - judged - 1, length - judged])
        return Prompt(TEXT_TASK, context, question, answer, np.ones(judged, bool), None, seed)


def _places(rng: np.random.Generator, count: int, target: int | None, depth: float, in_order: bool) -> np.ndarray:
    """Where statements go, as shares of the filler: the target at `depth`, the others anywhere.

    In order, those before the target come before it and those behind it come behind it.
    """
    places = rng.random(count)
    if target is None or not count:
        return places
    if in_order:
        places[:target] = np.sort(places[:target]) * depth
        places[target + 1 :] = depth + np.sort(places[target + 1 :]) * (1 - depth)
    places[target] = depth
    return places


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two rows begin with alike."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    return sum(1 for _ in pairs)


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)
