"""How a task is put into words: what is hidden in the context, the question about it, and its answer.

Two phrasings: the one that ouro-tiny was trained on (`models.tasks`), and English sentences for models that read them,
after the tasks of RULER (arXiv 2404.06654): one key, one of several keys, a chain of variables, the commonest word.
A question ends where the answer begins, so no model has to follow an instruction.
"""

import re
from typing import ClassVar, NamedTuple

import numpy as np

from models import tasks
from models.evaluation.filler import KEY_WORDS

CHAINS = 2
"""Chains of an English variable prompt, the one that is asked included."""


class Material(NamedTuple):
    """One question without its filler."""

    statements: list[str]
    target: int | None  # the statement whose place is the depth; None: the answer is everywhere
    in_order: bool  # statements keep their order
    question: str
    answer: tuple[tuple[str, bool], ...]  # parts, and whether they must be found: False is wording, which is given
    begin: str = ""  # stands before the context
    words: tuple[str, tuple[str, ...]] | None = None  # (commonest word, others): the context is a list of these


def parse(task: str, known: dict[str, int | None]) -> tuple[str, int]:
    """("keys", 8) of "keys8". `known`: kinds with their default number, None for a kind without one.

    Raises ValueError for another task, listing the known ones.
    """
    match = re.fullmatch(r"([a-z]+?)(\d*)", task)
    kind = match[1] if match else ""
    if kind not in known or (known[kind] is None and match and match[2]):
        names = ", ".join(name if number is None else f"{name}{number}" for name, number in known.items())
        raise ValueError(f"no task {task!r} for this model: {names} are known (numbers may differ)")
    number = int(match[2] or known[kind] or 1) if match else 1
    if number < 1:
        raise ValueError(f"task {task!r} needs a number of at least 1")
    return kind, number


class English:
    """Ordinary sentences."""

    known: ClassVar[dict[str, int | None]] = {"passkey": None, "keys": 8, "chain": 2, "common": None}
    default = ("passkey", "keys8", "chain2", "common")

    def material(self, rng: np.random.Generator, task: str) -> Material:
        """Draw one question of a task. Raises ValueError for an unknown one."""
        kind, number = parse(task, self.known)
        return getattr(self, f"_{kind}")(rng, number)

    def _passkey(self, rng: np.random.Generator, number: int) -> Material:
        key = tasks.digits(rng, 5).decode()
        statement = f" The pass key is {key}. Remember it. {key} is the pass key."
        return Material([statement], 0, False, "\nWhat is the pass key? The pass key is", ((f" {key}", True),))

    def _keys(self, rng: np.random.Generator, number: int) -> Material:
        if number > len(KEY_WORDS):
            raise ValueError(f"at most {len(KEY_WORDS)} keys, got {number}")
        names = [KEY_WORDS[index] for index in rng.permutation(len(KEY_WORDS))[:number]]
        values = [tasks.digits(rng, 5).decode() for _ in names]
        statements = [f" The magic number for {name} is {value}." for name, value in zip(names, values)]
        target = int(rng.integers(number))
        asked = f"magic number for {names[target]}"
        question = f"\nWhat is the {asked} mentioned in the text? The {asked} is"
        return Material(statements, target, False, question, ((f" {values[target]}", True),))

    def _chain(self, rng: np.random.Generator, number: int) -> Material:
        """Chains of words: the first is a number, each other one is the word before. Asked: the way from last to first.

        Each link must be found; the words between them are given.
        """
        if CHAINS * (number + 1) > len(KEY_WORDS):
            raise ValueError(f"at most {len(KEY_WORDS) // CHAINS - 1} hops, got {number}")
        names = [KEY_WORDS[index] for index in rng.permutation(len(KEY_WORDS))[: CHAINS * (number + 1)]]
        statements: list[str] = []
        for chain in range(CHAINS):
            own = names[chain * (number + 1) : (chain + 1) * (number + 1)]
            sources = [tasks.digits(rng, 5).decode(), *own]
            statements += [f" Let {name} be {source}." for name, source in zip(own, sources)]
            if chain == 0:
                links = [(f" {source}", True) for source in reversed(sources[: number + 1])]
                words = [(f". Let {name} be", False) for name in own[-2::-1]]
                answer = tuple(part for pair in zip(links, [*words, ("", False)]) for part in pair)[:-1]
                question = f"\nWhat is the value of {own[-1]}? Let {own[-1]} be"
        return Material(statements, 0, True, question, answer)

    def _common(self, rng: np.random.Generator, number: int) -> Material:
        common, *others = (KEY_WORDS[index] for index in rng.permutation(len(KEY_WORDS)))
        question = '\nThe most frequent word in the list is "'
        answer = ((common, True),)
        return Material([], None, False, question, answer, "Count the words in this list:", (common, tuple(others)))


class Trained:
    """The statements and questions that ouro-tiny was trained on."""

    known: ClassVar[dict[str, int | None]] = {"passkey": None, "keys": 8, "chain": 2, "copy": 16}
    default = ("passkey", "keys8", "chain2", "copy16")

    def material(self, rng: np.random.Generator, task: str) -> Material:
        """Draw one question of a task. Raises ValueError for an unknown one."""
        kind, number = parse(task, self.known)
        pieces, target, question, value = getattr(self, f"_{kind}")(rng, number)
        text = question.text.decode()
        start = text.rindex(value.decode())
        statements = [piece.text.decode() for piece in pieces]
        return Material(statements, target, kind == "chain", text[:start], ((value.decode(), True),))

    def _passkey(self, rng: np.random.Generator, number: int) -> tuple:
        value = tasks.digits(rng, 5)
        return [tasks.passkey_statement(value)], 0, tasks.passkey_question(value), value

    def _keys(self, rng: np.random.Generator, number: int) -> tuple:
        names: list[bytes] = []
        while len(names) < number:
            name = tasks.letters(rng, int(rng.integers(2, 5)))
            names += [name] * (name not in names)
        pairs = [(name, tasks.digits(rng, 5)) for name in names]
        target = int(rng.integers(number))
        statements = [tasks.key_statement(*pair) for pair in pairs]
        return statements, target, tasks.key_question(*pairs[target]), pairs[target][1]

    def _copy(self, rng: np.random.Generator, number: int) -> tuple:
        if number < 4:
            raise ValueError(f"copy needs at least 4 letters, of which 3 are given; got {number}")
        string = tasks.letters(rng, number)
        return [tasks.copy_statement(string)], 0, tasks.copy_question(string), string[3:]

    def _chain(self, rng: np.random.Generator, number: int) -> tuple:
        """One chain is asked, three others of as many hops end in other digits."""
        chains = tasks.EVALUATION_CHAINS
        if chains * (number + 1) > len(tasks.NAMES):
            raise ValueError(f"at most {len(tasks.NAMES) // chains - 1} hops, got {number}")
        names = [bytes([name]) for name in rng.permutation(np.frombuffer(tasks.NAMES, np.uint8))]
        asked, target, question = int(rng.integers(chains)), 0, None
        statements: list[tasks.Piece] = []
        for chain, digit in enumerate(rng.permutation(10)[:chains].tolist()):
            own = names[chain * (number + 1) : (chain + 1) * (number + 1)]
            if chain == asked:
                target, question, value = len(statements), tasks.chain_question(own[-1], digit), b"%d" % digit
            statements += [tasks.chain_statement(name, source) for name, source in zip(own, [b"%d" % digit, *own])]
        return statements, target, question, value


Phrasing = English | Trained
