"""What stands around the statements of a prompt: sentences from word lists, sentences of a text, or words of a list.

A filler hands out segments, each the ids of one sentence (or word), that together have exactly the tokens asked for.
Statements go between segments, so that none cuts a sentence in two.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

Encode = Callable[[str], list[int]]
"""Text to ids, without a first token for the beginning."""


def listed(text: str, separator: str | None = None) -> list[str]:
    """Words, or what stands between separators."""
    return text.split(separator)


NOUNS = listed(
    "river garden winter market teacher window village carpenter mountain kitchen sailor engine forest letter farmer "
    "bridge painter harbor doctor railway museum orchard baker tower meadow library captain valley singer factory "
    "island gardener chapel miller lantern neighbor stable weaver canal potter cottage ferry printer pasture school"
)
ADJECTIVES = listed(
    "quiet old warm narrow bright patient heavy distant green careful wooden gentle broad early cold busy plain steady "
    "warm grey honest tall empty deep simple young slow clean round weary"
)
VERBS = listed(
    "watched crossed repaired followed described remembered painted visited measured carried closed admired "
    "avoided found reached cleaned opened praised built left"
)
PLACES = listed(
    "near the water; before the rain; after breakfast; in the early morning; behind the hill; on the way home; "
    "without a word; for many years; at the end of the road; during the summer; before the bell rang; "
    "under a pale sky; with great care; on market day; when the wind turned",
    "; ",
)
KEY_WORDS = listed(
    "amber falcon marble copper velvet thunder orchid saffron granite willow comet walnut crystal dragon harvest "
    "ivory jasmine kettle lemon magnet nectar onyx pepper quartz ribbon silver timber umbrella violet whistle zebra "
    "anchor basket candle donkey emerald feather goblet hammer indigo jungle kitten ladder mirror needle oyster "
    "parrot rabbit"
)
"""Names of keys, and the words of word lists; none of them stands in the sentences."""

POOL = 2048
"""Sentences that are written and encoded once; prompts draw from them."""


def sentence(rng: np.random.Generator) -> str:
    """One English sentence that says nothing of interest, with a space in front."""

    def one(words: Sequence[str]) -> str:
        return words[int(rng.integers(len(words)))]

    subject, object_ = (f"the {one(ADJECTIVES)} {one(NOUNS)}" for _ in range(2))
    place = one(PLACES)
    if rng.random() < 0.3:
        return f" {place[0].upper()}{place[1:]}, {subject} {one(VERBS)} {object_}."
    return f" {subject[0].upper()}{subject[1:]} {one(VERBS)} {object_} {place}."


class Sentences:
    """Sentences made from the word lists above: nobody's text, the same for the same seed."""

    def __init__(self, encode: Encode, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.pool = [encode(sentence(rng)) for _ in range(POOL)]

    def segments(self, rng: np.random.Generator, tokens: int) -> list[list[int]]:
        """Sentences in random order, `tokens` tokens in all; the first one may lack its beginning."""
        found, count = [], 0
        while count < tokens:
            found.append(self.pool[int(rng.integers(len(self.pool)))])
            count += len(found[-1])
        return cut(found, tokens)


class Text:
    """Consecutive sentences of a text, from a random place on; a text that ends begins anew.

    Raises ValueError for a text without words.
    """

    def __init__(self, encode: Encode, text: str):
        self.encode = encode
        self.sentences = re.findall(r"\S.*?(?:[.!?:]\s+|\n|$)", text, re.DOTALL)
        if not self.sentences:
            raise ValueError("the text is empty; filler needs some sentences")
        self.encoded: dict[int, list[int]] = {}

    def segments(self, rng: np.random.Generator, tokens: int) -> list[list[int]]:
        """A stretch of the text, `tokens` tokens in all; the first sentence may lack its beginning."""
        at, found, count = int(rng.integers(len(self.sentences))), [], 0
        while count < tokens:
            if at not in self.encoded:
                self.encoded[at] = self.encode(self.sentences[at])
            found.append(self.encoded[at])
            count += len(found[-1])
            at = (at + 1) % len(self.sentences)
        return cut(found, tokens)


class WordList:
    """Words of a list in random order, one of them far more often than any other."""

    def __init__(self, encode: Encode, common: str, others: Sequence[str], share: float = 0.5):
        self.words = [encode(f" {word},") for word in (common, *others)]
        self.odds = np.array([share, *[(1 - share) / len(others)] * len(others)])

    def segments(self, rng: np.random.Generator, tokens: int) -> list[list[int]]:
        """Words with commas, `tokens` tokens in all; the first one may lack its beginning."""
        drawn = rng.choice(len(self.words), size=tokens, p=self.odds / self.odds.sum())
        sizes = np.cumsum([len(self.words[word]) for word in drawn])
        return cut([self.words[word] for word in drawn[: int(np.searchsorted(sizes, tokens)) + 1]], tokens)


Filler = Sentences | Text | WordList


def cut(segments: list[list[int]], tokens: int) -> list[list[int]]:
    """The segments without what their first one has too much, so that `tokens` ids are left."""
    extra = sum(map(len, segments)) - tokens
    while segments and extra >= len(segments[0]):
        extra -= len(segments[0])
        segments = segments[1:]
    return [segments[0][extra:], *segments[1:]] if segments else []
