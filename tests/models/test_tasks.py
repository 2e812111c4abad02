"""Tasks: repeatable by seed, labelled byte by byte, and answered rightly as a plain solver finds them in the prompt."""

import re

import numpy as np
import pytest

from models import tasks
from models.training import corpora

FILLER = corpora.excerpt()
WORDS = tasks.common_words(FILLER)
SOURCES = (FILLER, FILLER[::-1].copy())


def links(data: bytes) -> dict[bytes, bytes]:
    """What each variable is set to."""
    return dict(re.findall(rb"\nLet ([a-zA-Z])=(\d|[a-zA-Z])\.", data))


def solve(prompt: bytes) -> bytes:
    """The answer to the question that a prompt ends with, by reading its statements."""
    question = prompt[prompt.rfind(b"\n") + 1 :]
    if question.startswith(b"What is the pass key?"):
        return re.search(rb"\nThe pass key is (\d+)\. Remember it\.\n", prompt)[1]
    if match := re.fullmatch(rb"Ask: (\w+) is ", question):
        return re.search(rb"\nKey: " + match[1] + rb" is (\w+)\.\n", prompt)[1]
    if match := re.fullmatch(rb"String (\w{3})", question):
        return re.search(rb"\nString " + match[1] + rb"(\w+)\n", prompt)[1]
    name = re.fullmatch(rb"Now ([a-zA-Z])", question)[1]
    values = links(prompt)
    while name in values:
        name = values[name]
    return name


@pytest.mark.parametrize("task", [*tasks.EVALUATION_TASKS, "keys1", "keys2", "chain0", "chain1", "chain12"])
@pytest.mark.parametrize("length", [512, 1024])
def test_evaluation_answer_is_in_the_prompt(task, length):
    for seed in range(12):
        item = tasks.instance(task, seed, length, FILLER)
        assert solve(item.prompt) == item.answer
        tokens = item.tokens()
        assert tokens.shape == (length,)
        assert tokens[0] == tasks.BOS
        assert tokens[1:].astype(np.uint8).tobytes() == item.prompt + item.answer


def test_chains_end_in_different_digits_and_every_variable_is_set_before_use():
    prompt = tasks.instance("chain2", 3, 512, FILLER).prompt
    known: list[bytes] = []
    for name, source in links(prompt).items():
        assert source.isdigit() or source in known
        known.append(name)
    found = [source for source in links(prompt).values() if source.isdigit()]
    assert len(found) == len(set(found)) == tasks.EVALUATION_CHAINS


def test_instances_repeat_by_seed_and_differ_between_seeds():
    first, again, other = (tasks.instance("keys4", seed, 512, FILLER) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", ["passkey4", "keys", "chain", "riddle3"])
def test_unknown_task_is_refused(name):
    with pytest.raises(ValueError, match="no task"):
        tasks.instance(name, 0, 512, FILLER)


def test_statements_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="bytes more than"):
        tasks.instance("keys8", 0, 128, FILLER)
    with pytest.raises(ValueError, match="at most 12 hops"):
        tasks.instance("chain13", 0, 4096, FILLER)


def sequences(count: int, length: int, mixture: tasks.Mixture, seed: int = 0):
    rng = np.random.default_rng(seed)
    return [tasks.training_sequence(rng, SOURCES, WORDS, length, mixture) for _ in range(count)]


@pytest.mark.parametrize("length", [128, 256, 1024])
def test_training_sequences_have_their_length_and_repeat(length):
    first, again = (sequences(20, length, tasks.Mixture()) for _ in range(2))
    for (tokens, labels), (same_tokens, same_labels) in zip(first, again):
        assert tokens.shape == labels.shape == (length,)
        assert tokens[0] == tasks.BOS
        assert tokens[1:].max() < 256
        assert labels[0] == tasks.UNKNOWN
        np.testing.assert_array_equal(tokens, same_tokens)
        np.testing.assert_array_equal(labels, same_labels)


def test_training_answers_are_labelled_and_right():
    """Every question of a sequence is cut out as a prompt of its own and solved; its answer has the answer labels."""
    seen = set()
    for tokens, labels in sequences(60, 1024, tasks.Mixture(text=0.0, chains=0.5)):
        data = tokens[1:].astype(np.uint8).tobytes()
        marks = labels[1:]
        for kind in (tasks.ANSWER, tasks.CHAIN):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], (marks == kind).astype(int), [0]])))
            for start, stop in edges.reshape(-1, 2):
                assert solve(data[:start]) == data[start:stop]
                seen.add(data[data[:start].rfind(b"\n") + 1 : start].split(b" ")[0])
    assert seen == {b"What", b"Ask:", b"String", b"Now"}


def test_first_statements_are_labelled_unknown():
    (tokens, labels), *_ = sequences(1, 512, tasks.Mixture(text=0.0, chains=1.0, guided=0.0))
    data = tokens[1:].astype(np.uint8).tobytes()
    found = list(re.finditer(rb"\nLet (\w)=(\w)\.", data))
    assert found
    for match in found:
        marks = labels[1:][match.start() : match.end()]
        assert (marks[[5, 7]] == tasks.UNKNOWN).all()
        assert (marks[[0, 1, 2, 3, 4, 6, 8]] == tasks.TEMPLATE).all()


def test_guided_links_are_labelled_with_the_digit_behind_them():
    behind = set()
    for tokens, labels in sequences(20, 512, tasks.Mixture(text=0.0, chains=1.0, guided=1.0)):
        data = tokens[1:].astype(np.uint8).tobytes()
        for match in re.finditer(rb"\nLet (\w)=\w\.", data):
            label = labels[1:][match.end() - 1]
            assert b"%d" % (label - tasks.BEHIND) == solve(data[: match.end()] + b"\nNow " + match[1])
            behind.add(int(label) - tasks.BEHIND)
        assert (labels >= tasks.BEHIND).sum() == len(links(data))
    assert behind == set(range(10))


def test_mixture_shares():
    kinds = [labels for _, labels in sequences(400, 256, tasks.Mixture(text=0.4, chains=0.3))]
    text_share = np.mean([labels[1] == tasks.TEXT for labels in kinds])
    chain_share = np.mean([(labels == tasks.CHAIN).any() for labels in kinds])
    assert abs(text_share - 0.4) < 0.08
    assert abs(chain_share - 0.3) < 0.08
    assert all((labels[1:] == tasks.TEXT).all() for labels in kinds if labels[1] == tasks.TEXT)


def test_hops_are_limited():
    for tokens, _ in sequences(30, 256, tasks.Mixture(text=0.0, chains=1.0, max_hops=2)):
        values = links(tokens[1:].astype(np.uint8).tobytes())
        for name in values:
            hops = -1
            while name in values:
                name, hops = values[name], hops + 1
            assert hops <= 2


def test_some_text_comes_twice():
    """A repeated stretch is the only way for 24 equal bytes at two places of a text without repetition."""
    unique = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint8)
    rng = np.random.default_rng(1)
    twice = 0
    for _ in range(80):
        tokens, _ = tasks.text_sequence(rng, unique, 512)
        data = tokens[1:].astype(np.uint8).tobytes()
        twice += any(data.find(data[at : at + 16], at + 1) > 0 for at in range(0, 480, 4))
    assert 8 <= twice <= 36
