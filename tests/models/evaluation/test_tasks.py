import numpy as np
import pytest

from models.evaluation.filler import KEY_WORDS, Sentences, Text, cut
from models.evaluation.phrasing import English, Trained
from models.evaluation.quick import filler
from models.evaluation.tasks import Writer
from models.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()


class Words:
    """A tokenizer with a first token, whose tokens are words with the space before them; a space alone is one, too."""

    vocab_size = 1 << 16

    def __init__(self):
        self.ids: dict[str, int] = {}

    def encode(self, text):
        pieces, word = [], ""
        for character in text:
            if character in " \n" or character.isdigit() or (word and word[-1].isdigit()):
                pieces, word = [*pieces, word], ""
            word += character
        return [0, *(self.ids.setdefault(piece, len(self.ids) + 1) for piece in [*pieces, word] if piece)]

    def decode(self, ids):
        names = {number: piece for piece, number in self.ids.items()}
        return "".join(names.get(token, "") for token in ids)


def writers():
    return {
        "trained": Writer(BYTES, text=filler()),
        "english bytes": Writer(BYTES, English()),
        "english words": Writer(Words()),
        "english text": Writer(Words(), text=filler()),
    }


@pytest.mark.parametrize("name", ["trained", "english bytes", "english words", "english text"])
def test_prompts_have_the_length_and_the_depth_asked_for(name):
    writer = writers()[name]
    for task in writer.phrasing.default:
        prompts = writer.prompts(task, 700, 4, seed=3)
        assert [prompt.size for prompt in prompts] == [700] * 4
        assert [list(prompt.context[: len(writer.begin)]) for prompt in prompts] == [writer.begin] * 4
        for number, prompt in enumerate(prompts):
            assert len(prompt.question) >= 1
            assert prompt.scored.shape == prompt.answer.shape
            assert prompt.scored[0]
            if prompt.depth is not None:
                assert abs(prompt.depth - (number + 0.5) / 4) < 0.25
        assert len({prompt.context.tobytes() for prompt in prompts}) == 4


def test_the_answer_stands_in_the_context_at_its_depth():
    for writer in (writers()["trained"], writers()["english words"]):
        for task in ("passkey", "keys4"):
            prompt = writer.prompt(task, 500, 0.4, (1,))
            decode = writer.tokenizer.decode
            answer, context = decode(prompt.answer[prompt.scored]), decode(prompt.context)
            assert len(answer) == 5
            assert answer in context
            assert answer in decode(prompt.context[int(prompt.depth * len(prompt.context)) :][:60])
            assert answer not in decode(prompt.question)


def test_same_seed_same_prompt_and_another_seed_another():
    one, again, other = (writers()["trained"].prompt("keys4", 400, 0.5, (seed,)) for seed in (1, 1, 2))
    assert one.context.tobytes() == again.context.tobytes()
    assert one.context.tobytes() != other.context.tobytes()


def test_chains_can_be_followed():
    rng = np.random.default_rng(0)
    english = English().material(rng, "chain3")
    values = dict(statement.removeprefix(" Let ").removesuffix(".").split(" be ") for statement in english.statements)
    name, found = english.question.rsplit(" ", 2)[1], []
    while name in values:
        name = values[name]
        found.append(f" {name}")
    assert found == [text for text, scored in english.answer if scored]
    assert len(found) == 4
    trained = Trained().material(rng, "chain3")
    values = dict(statement.strip()[4:-1].split("=") for statement in trained.statements)
    name = trained.question.removeprefix("\nNow ")
    while name in values:
        name = values[name]
    assert ((name, True),) == trained.answer


def test_the_commonest_word_is_asked():
    writer = writers()["english words"]
    prompt = writer.prompt("common", 600, 0.5, (0,))
    words = writer.tokenizer.decode(prompt.context).replace(",", "").split()
    counts = {word: words.count(word) for word in KEY_WORDS}
    assert writer.tokenizer.decode(prompt.answer).strip(' "') == max(counts, key=lambda word: counts[word])
    assert sorted(counts.values())[-2] * 3 < max(counts.values())


def test_text_is_continued():
    prompt = writers()["trained"].prompt("text", 400, 0.5, (0,))
    assert prompt.size == 400
    assert len(prompt.answer) == 64
    assert prompt.scored.all()
    assert BYTES.decode(np.concatenate([prompt.context, prompt.question, prompt.answer]))[-40:] in filler()


def test_no_key_word_stands_in_the_sentences():
    sentences = Sentences(lambda text: list(text.encode()))
    text = b"".join(map(bytes, sentences.pool)).decode().lower()
    assert not [word for word in KEY_WORDS if f" {word}" in text]


def test_segments_have_as_many_tokens_as_asked_for():
    rng = np.random.default_rng(0)
    text = Text(lambda text: list(text.encode()), "One. Two is longer! Three?")
    for tokens in (1, 7, 26, 100):
        assert sum(map(len, text.segments(rng, tokens))) == tokens
    assert cut([[1, 2], [3], [4, 5]], 3) == [[3], [4, 5]]


def test_what_does_not_fit_is_refused():
    writer = writers()["trained"]
    with pytest.raises(ValueError, match=r"no task 'common'.*passkey, keys8"):
        writer.prompt("common", 512, 0.5, (0,))
    with pytest.raises(ValueError, match="no task 'passkey3'"):
        writer.prompt("passkey3", 512, 0.5, (0,))
    with pytest.raises(ValueError, match="tokens more than there are"):
        writer.prompt("keys8", 100, 0.5, (0,))
    with pytest.raises(ValueError, match="a text of yours"):
        writers()["english words"].prompt("text", 512, 0.5, (0,))
    with pytest.raises(ValueError, match="some sentences"):
        Writer(BYTES, text=" \n ")
