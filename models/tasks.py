"""Retrieval tasks in real text: passkey, several keys, variable chains, copying. Plain NumPy, repeatable by seed.

A training sequence is BOS and `length - 1` bytes: statements and questions at random bytes of a stretch of text. Every
byte has a label that says what it is; `models.training.objective` gives each label its weight in the loss. Each
statement and each question begins with a line end:

    passkey   The pass key is 48213. Remember it.     What is the pass key? The pass key is 48213.
    keys      Key: amos is 48213.                     Ask: amos is 48213.
    copy      String kqzhwtrv...                      String kqzhwtrv...        three letters are given
    chain     Let k=4.   Let z=k.   Let Q=z.          Now Q4.                   two hops

Following a chain from the question alone is hardly ever learnt: as long as one link fails, no link is worth anything.
So training may ask at every link: where the full stop of `Let z=k.` is to be predicted, the digit behind k is the
target instead. It never stands in the text, so the next link can only use what the model itself worked out. A question
has the digit right after the name for the same reason: it then needs nothing but what the end of a link needs.

An evaluation instance is a prompt that ends in a question and the bytes of its answer.
"""

import dataclasses
import re
from typing import NamedTuple

import numpy as np

BOS = 256

UNKNOWN, TEXT, TEMPLATE, FILLER, ANSWER, CHAIN, BEHIND = range(7)
"""Labels of a byte: random where first stated, text, a template's words, text around statements, an answer, a chain's
answer; BEHIND + d: a byte in whose place the digit d is to be predicted, the one behind the link that ends here."""

LETTERS = b"abcdefghijklmnopqrstuvwxyz"
NAMES = LETTERS + LETTERS.upper()
HOPS = np.array([0.08, 0.17, 0.18, 0.16, 0.14, 0.10, 0.08, 0.05, 0.04])
"""How often a training chain has 0, 1, 2, ... hops."""

EVALUATION_TASKS = ("passkey", "keys4", "keys8", "copy16", *(f"chain{hops}" for hops in (1, 2, 3, 4, 6, 8)))
EVALUATION_CHAINS = 4
LINK = 17
"""Bytes of a chain's statement and question."""


class Piece(NamedTuple):
    """A statement or a question: its bytes and their labels."""

    text: bytes
    labels: bytes


class Group(NamedTuple):
    """Statements, and questions that each need the first `needs` of them."""

    statements: list[Piece]
    questions: list[tuple[int, Piece]]
    in_order: bool = False  # statements and questions keep their order

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(len(piece.text) for piece in self.statements) + sum(len(piece.text) for _, piece in self.questions)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What a training sequence is. The shares are of sequences, the kinds are of groups in a task sequence."""

    text: float = 0.35  # plain text, a quarter of it with one stretch repeated
    chains: float = 0.30  # variable chains first, other groups in what room is left
    dense: float = 0.5  # share of the chain sequences with hardly any text between the statements
    guided: float = 0.5  # share of the chain sequences that ask at every link
    max_hops: int = 8
    max_keys: int = 8
    kinds: tuple[float, float, float] = (0.12, 0.65, 0.23)  # passkey, keys, copy
    jargon: float = 0.25  # share of the Jargon File among all text


@dataclasses.dataclass(frozen=True)
class Instance:
    """One question: BOS, `prompt` and `answer` together fill a sequence of the length asked for."""

    task: str
    prompt: bytes
    answer: bytes

    def tokens(self) -> np.ndarray:
        """i32[length] with BOS in front; the answer stands at the end."""
        text = np.frombuffer(self.prompt + self.answer, np.uint8)
        return np.concatenate([[BOS], text]).astype(np.int32)


def piece(*parts: tuple[bytes, int]) -> Piece:
    """Join (bytes, label) parts."""
    return Piece(b"".join(text for text, _ in parts), b"".join(bytes([label]) * len(text) for text, label in parts))


def letters(rng: np.random.Generator, count: int) -> bytes:
    """Random small letters."""
    return bytes(rng.integers(97, 123, count, dtype=np.uint8))


def digits(rng: np.random.Generator, count: int) -> bytes:
    """A random number without leading zero."""
    return b"%d" % rng.integers(10 ** (count - 1), 10**count)


# Statements and questions


def passkey_statement(value: bytes) -> Piece:
    """The sentence that tells the pass key."""
    return piece((b"\nThe pass key is ", TEMPLATE), (value, UNKNOWN), (b". Remember it.\n", TEMPLATE))


def passkey_question(value: bytes) -> Piece:
    """The question about the pass key, with its answer."""
    return piece((b"\nWhat is the pass key? The pass key is ", TEMPLATE), (value, ANSWER), (b".\n", TEMPLATE))


def key_statement(name: bytes, value: bytes) -> Piece:
    """A named value."""
    return piece((b"\nKey: ", TEMPLATE), (name, UNKNOWN), (b" is ", TEMPLATE), (value, UNKNOWN), (b".\n", TEMPLATE))


def key_question(name: bytes, value: bytes) -> Piece:
    """The question about a named value, with its answer."""
    return piece((b"\nAsk: ", TEMPLATE), (name, UNKNOWN), (b" is ", TEMPLATE), (value, ANSWER), (b".\n", TEMPLATE))


def copy_statement(string: bytes) -> Piece:
    """A random string."""
    return piece((b"\nString ", TEMPLATE), (string, UNKNOWN), (b"\n", TEMPLATE))


def copy_question(string: bytes) -> Piece:
    """The same string again; three letters are given."""
    return piece((b"\nString ", TEMPLATE), (string[:3], UNKNOWN), (string[3:], ANSWER), (b"\n", TEMPLATE))


def chain_statement(name: bytes, source: bytes, behind: int | None = None) -> Piece:
    """A variable set to a digit or to another variable. `behind` is the digit to predict at its end."""
    end = TEMPLATE if behind is None else BEHIND + behind
    return piece((b"\nLet ", TEMPLATE), (name, UNKNOWN), (b"=", TEMPLATE), (source, UNKNOWN), (b".", end))


def chain_question(name: bytes, digit: int) -> Piece:
    """The digit behind a variable."""
    return piece((b"\nNow ", TEMPLATE), (name, UNKNOWN), (b"%d" % digit, CHAIN), (b".", TEMPLATE))


# Groups of a training sequence


def passkey_group(rng: np.random.Generator) -> Group:
    """One pass key and one question."""
    value = digits(rng, 5)
    return Group([passkey_statement(value)], [(1, passkey_question(value))])


def key_value(rng: np.random.Generator) -> bytes:
    """Mostly five digits, else another number or a few letters."""
    if rng.random() < 0.75:
        return digits(rng, 5)
    return digits(rng, int(rng.integers(2, 8))) if rng.random() < 0.6 else letters(rng, int(rng.integers(3, 7)))


def key_group(rng: np.random.Generator, count: int, words: list[bytes], used: set[bytes]) -> Group:
    """`count` named values and one to `count` + 1 questions; the names are new in this sequence."""
    pairs: list[tuple[bytes, bytes]] = []
    while len(pairs) < count:
        name = words[rng.integers(len(words))] if rng.random() < 0.5 else letters(rng, int(rng.integers(1, 5)))
        if name not in used:
            used.add(name)
            pairs.append((name, key_value(rng)))
    statements = [key_statement(*pair) for pair in pairs]
    questions = []
    for _ in range(int(rng.integers(1, count + 2))):
        index = int(rng.integers(count))
        questions.append((index + 1, key_question(*pairs[index])))
    return Group(statements, questions)


def copy_group(rng: np.random.Generator, used: set[bytes]) -> Group:
    """One string of 6 to 32 letters and one or two copies."""
    string = letters(rng, int(rng.integers(6, 33)))
    while string[:3] in used:
        string = letters(rng, len(string))
    used.add(string[:3])
    return Group([copy_statement(string)], [(1, copy_question(string))] * int(rng.integers(1, 3)))


def chain_group(rng: np.random.Generator, names: list[bytes], digit: int, guided: bool) -> Group:
    """A chain names[0] = digit, names[1] = names[0], ...: the last name is asked first, then perhaps others.

    A question after a shallower one would be no full chain any more, hence the order.
    """
    sources = [b"%d" % digit, *names]
    behind = digit if guided else None
    statements = [chain_statement(name, source, behind) for name, source in zip(names, sources)]
    asked = [index for index in reversed(range(len(names))) if index == len(names) - 1 or rng.random() < 0.5]
    return Group(statements, [(index + 1, chain_question(names[index], digit)) for index in asked], in_order=True)


def chain_groups(rng: np.random.Generator, room: int, max_hops: int, guided: bool) -> list[Group]:
    """Two to ten chains that together need at most `room` bytes, each with a digit of its own.

    In half of all cases they have the same number of hops, so that their lengths tell nothing.
    """
    names = [bytes([name]) for name in rng.permutation(np.frombuffer(NAMES, np.uint8))]
    digits = rng.permutation(10).tolist()
    most = min(max_hops, max(room // (2 * LINK) - 1, 0))  # two chains of so many hops fit
    odds = HOPS[: most + 1] / HOPS[: most + 1].sum()
    hops, same = int(rng.choice(len(odds), p=odds)), rng.random() < 0.5
    groups: list[Group] = []
    for _ in range(int(rng.integers(2, 11))):
        group = chain_group(rng, names[: hops + 1], digits[len(groups)], guided)
        if len(names) <= hops or group.size > room:
            break
        groups.append(group)
        names, room = names[hops + 1 :], room - group.size
        hops = hops if same else int(rng.choice(len(odds), p=odds))
    return groups


# Sequences


def arrange(rng: np.random.Generator, groups: list[Group], questions_last: bool) -> list[Piece]:
    """Put all pieces into one order in which no question comes before what it needs."""
    timed: list[tuple[float, Piece]] = []
    for group in groups:
        times = rng.random(len(group.statements)) * (0.5 if questions_last else 1.0)
        if group.in_order:
            times.sort()
        timed += zip(times.tolist(), group.statements)
        earliest = 0.5 if questions_last else 0.0
        previous = earliest
        for needs, question in group.questions:
            start = max(times[:needs].max(), earliest)
            time = start + (1 - start) * rng.random()
            if question.labels.find(CHAIN) >= 0:  # the chain's last name is asked first
                time = max(time, np.nextafter(previous, 2))
                previous = time
            timed.append((float(time), question))
    return [item for _, item in sorted(timed, key=lambda pair: pair[0])]


def fill(
    rng: np.random.Generator, pieces: list[Piece], source: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Spread pieces over one stretch of text -> (tokens i16[length], labels u8[length]). Pieces must fit."""
    room = length - 1 - sum(len(item.text) for item in pieces)
    if room < 0:
        raise ValueError(f"{len(pieces)} pieces need {-room} bytes more than a sequence of {length} has")
    start = int(rng.integers(len(source) - room + 1))
    filler = source[start : start + room].tobytes()
    text, labels, at = [], [b"\0"], 0
    for cut, item in zip(np.sort(rng.integers(0, room + 1, len(pieces))).tolist(), pieces):
        text += [filler[at:cut], item.text]
        labels += [bytes([FILLER]) * (cut - at), item.labels]
        at = cut
    text.append(filler[at:])
    labels.append(bytes([FILLER]) * (room - at))
    tokens = np.empty(length, np.int16)
    tokens[0] = BOS
    tokens[1:] = np.frombuffer(b"".join(text), np.uint8)
    return tokens, np.frombuffer(b"".join(labels), np.uint8)


def text_sequence(rng: np.random.Generator, source: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A stretch of text; in a quarter of all, 24 to 300 bytes come a second time."""
    tokens, labels = fill(rng, [], source, length)
    labels = np.where(labels == FILLER, np.uint8(TEXT), labels)
    if rng.random() < 0.25 and length >= 128:
        size = int(rng.integers(24, min(300, length // 3) + 1))
        first, second = np.sort(rng.integers(1, length - 2 * size + 1, 2))
        tokens[second + size : second + 2 * size] = tokens[first : first + size]
    return tokens, labels


def task_sequence(
    rng: np.random.Generator, source: np.ndarray, length: int, mixture: Mixture, words: list[bytes], chains: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Groups of tasks that fill a random share of the sequence, with text around them."""
    dense = chains and rng.random() < mixture.dense
    share = rng.random() * (0.1 if dense else 0.97)
    room = min(max(int((length - 1) * (1 - share)), 120), length - 1)
    groups = chain_groups(rng, room, mixture.max_hops, rng.random() < mixture.guided) if chains else []
    room -= sum(group.size for group in groups)
    names: set[bytes] = set()
    prefixes: set[bytes] = set()
    passkey = misses = 0
    while misses < 3:
        kind = rng.choice(3, p=mixture.kinds)
        if kind == 0:
            group = passkey_group(rng)
            if passkey:
                misses += 1
                continue
        elif kind == 1:
            group = key_group(rng, int(rng.integers(1, mixture.max_keys + 1)), words, names)
        else:
            group = copy_group(rng, prefixes)
        if group.size > room:
            misses += 1
            continue
        passkey |= kind == 0
        groups.append(group)
        room -= group.size
    return fill(rng, arrange(rng, groups, rng.random() < 0.4), source, length)


def training_sequence(
    rng: np.random.Generator, sources: tuple[np.ndarray, np.ndarray], words: list[bytes], length: int, mixture: Mixture
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence of a mixture -> (tokens i16[length], labels u8[length]). `sources` are KJV and Jargon File."""
    source = sources[int(rng.random() < mixture.jargon)]
    kind = rng.random()
    if kind < mixture.text:
        return text_sequence(rng, source, length)
    return task_sequence(rng, source, length, mixture, words, chains=kind < mixture.text + mixture.chains)


def common_words(source: np.ndarray) -> list[bytes]:
    """Words of 3 to 8 small letters of a text, for names of keys."""
    found = sorted(set(re.findall(rb"\b[a-z]{3,8}\b", source.tobytes())))
    return found or [b"amos", b"joel", b"ruth"]


# Evaluation


def instance(task: str, seed: int | tuple[int, ...], length: int, filler: np.ndarray) -> Instance:
    """One question of `task` at the end of a sequence of `length` tokens, with text of `filler` around the statements.

    Tasks: "passkey"; "keys{n}" (n named values); "copy{n}" (n letters, three given); "chain{n}" (n hops, with three
    other chains of n hops that end in other digits).
    Raises ValueError for another name and for a length that the statements do not fit into.
    """
    rng = np.random.default_rng(seed)
    statements, question = _statements(rng, task)
    answer = bytes(byte for byte, label in zip(question.text, question.labels) if label in (ANSWER, CHAIN))
    prompt = question.text[: question.text.rfind(answer)]
    if len(filler) < length:
        filler = np.resize(filler, length)
    tokens, _ = fill(rng, statements, filler, length - len(prompt) - len(answer))
    return Instance(task, tokens[1:].astype(np.uint8).tobytes() + prompt, answer)


def _statements(rng: np.random.Generator, task: str) -> tuple[list[Piece], Piece]:
    """The statements of a task and the question about one of them."""
    match = re.fullmatch(r"(passkey|keys|copy|chain)(\d*)", task)
    if match is None or (match[1] == "passkey") == bool(match[2]):
        raise ValueError(f"no task {task!r}: passkey, keys4, copy16, chain2 and such are known")
    count = int(match[2] or 1)
    if match[1] == "passkey":
        value = digits(rng, 5)
        return [passkey_statement(value)], passkey_question(value)
    if match[1] == "keys":
        keys: set[bytes] = set()
        while len(keys) < count:
            keys.add(letters(rng, int(rng.integers(2, 5))))
        pairs = [(key, digits(rng, 5)) for key in sorted(keys)]
        rng.shuffle(pairs)
        return [key_statement(*pair) for pair in pairs], key_question(*pairs[rng.integers(count)])
    if match[1] == "copy":
        string = letters(rng, count)
        return [copy_statement(string)], copy_question(string)
    names = [bytes([name]) for name in rng.permutation(np.frombuffer(NAMES, np.uint8))]
    groups, asked = [], int(rng.integers(EVALUATION_CHAINS))
    for index, digit in enumerate(rng.permutation(10)[:EVALUATION_CHAINS].tolist()):
        chain = names[index * (count + 1) : (index + 1) * (count + 1)]
        if len(chain) <= count:
            raise ValueError(f"{task}: at most {len(NAMES) // EVALUATION_CHAINS - 1} hops")
        groups.append(Group(chain_group(rng, chain, digit, guided=False).statements, [], in_order=True))
        if index == asked:
            question = chain_question(chain[-1], digit)
    return arrange(rng, groups, questions_last=False), question
