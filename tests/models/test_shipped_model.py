"""The model that the package carries: what its card promises, and that its files belong together."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from models import checkpoints, tasks, train
from models.cli import app
from models.generate import generate
from models.speculation import Speculation
from models.training import corpora, model_card, promises, quality

pytestmark = pytest.mark.optimised
FOLDER = checkpoints.resolve("ouro-tiny")
METRICS = json.loads((FOLDER / "metrics.json").read_text())


# Its files


def test_default_recipe_is_the_one_it_was_made_with():
    def plain(fields):
        return json.loads(json.dumps(fields), parse_float=lambda number: round(float(number), 9))

    assert plain(train.ouro_tiny().fingerprint()) == plain(METRICS["config"])
    assert METRICS["command"] == train.ouro_tiny(minutes=3.3, seed=0).command()


def test_card_tells_what_was_measured():
    card, heading, notes = (FOLDER / "README.md").read_text().partition(model_card.NOTES)
    assert card == model_card.card(METRICS)
    assert heading
    assert "## Limits" in notes


def test_promises_are_kept_in_what_was_measured():
    assert METRICS["gates"] == promises.ouro(METRICS)
    assert all(METRICS["gates"].values())
    assert (FOLDER / "model.safetensors").stat().st_size <= 12 * 2**20


def test_card_gives_perplexity_and_keeps_notes(tmp_path):
    (tmp_path / "README.md").write_text("# Old\n" + model_card.NOTES + "kept by hand\n")
    model_card.write(tmp_path, METRICS)
    card = (tmp_path / "README.md").read_text()
    assert "Old" not in card
    assert card.endswith(model_card.NOTES + "kept by hand\n")
    assert f"{math.exp(METRICS['text']['kjv']['4096']['ce'][-1]):.2f} |" in card


# Its quality, measured again


@pytest.fixture(scope="module")
def model():
    return checkpoints.load("ouro-tiny", dtype=jnp.float32)[1]


@pytest.fixture(scope="module")
def score(model):
    return quality.Scorer(model, 8192)


@pytest.mark.slow
def test_it_finds_one_of_four_keys(score):
    result = quality.task(score, "keys4", 1024, [corpora.excerpt()], count=16, seed=1)
    assert result.exact[-1] >= 0.95


@pytest.mark.slow
def test_it_predicts_held_out_text(score):
    result = quality.text(score, corpora.excerpt(), 1024)  # a shape that is compiled already
    assert result.ce[-1] <= 1.06
    assert result.ce[-1] <= result.ce[1]


@pytest.mark.slow
def test_long_chains_need_the_last_loop(score):
    result = quality.task(score, "chain6", 512, [corpora.excerpt()], count=32, seed=1)
    assert result.exact[-1] >= result.exact[1] + 0.5
    assert result.exact[-1] >= result.exact[2] + 0.5
    assert result.exits[-1] >= 0.9  # and the gate knows it


# Speculation

BOUND = 1e-3  # two logits as close as this may change places where rows are batched differently


def continued(model, prompts, speculation=None):
    made = generate(model, prompts, max_tokens=16, chunk=16, page_size=16, speculation=speculation)
    for _ in made:
        pass
    return made


@pytest.mark.slow
def test_speculation_gives_the_texts_of_plain_decoding(model):
    """128 prompts of 4 to 40 bytes in batches of 64; equal but where two logits are within BOUND."""
    margins = jax.jit(lambda tokens: jax.lax.top_k(model.logits(model.forward(tokens).hidden[-1]), 2)[0])
    text, rng = corpora.excerpt(), np.random.default_rng(0)
    different, rates = 0, []
    for _ in range(2):
        places, lengths = rng.integers(0, len(text) - 64, 64), rng.integers(4, 41, 64)
        prompts = [[256, *text[at : at + n].tolist()] for at, n in zip(places, lengths)]
        found, expected = continued(model, prompts, Speculation(drafts=3, draft_loops=2)), continued(model, prompts)
        rates.append((found.stats().acceptance, found.stats().tokens_per_round))
        for prompt, a, b in zip(prompts, expected.tokens, found.tokens):
            if a != b:
                at = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
                whole = prompt + a[:at]
                best = margins(jnp.array(whole + [0] * (64 - len(whole)))[None])[0, len(whole) - 1]
                assert float(best[0] - best[1]) < BOUND
                different += 1
    assert different <= 1  # of 128
    # A trained model drafts well: most drafts of two loops are right.
    assert np.min(rates, axis=0)[0] > 0.5
    assert np.min(rates, axis=0)[1] > 2


# Generation from a part of the KV cache

PROMPT = 2000


def passkey_prompts(rng: np.random.Generator, gaps: list[int]) -> tuple[list[str], list[str]]:
    """Prompts of PROMPT bytes of held-out text and their pass keys; gap: bytes between the key and the prompt's end."""
    source, texts, keys = corpora.excerpt(), [], []
    for gap in gaps:
        key = tasks.digits(rng, 5)
        statement = tasks.passkey_statement(key).text
        question = tasks.passkey_question(key).text.partition(key)[0]
        room = PROMPT - len(statement) - len(question)
        start = int(rng.integers(len(source) - room))
        filler = source[start : start + room].tobytes()
        cut = room - gap + len(b". Remember it.\n") + len(question)
        texts.append((filler[:cut] + statement + filler[cut:] + question).decode())
        keys.append(key.decode())
        assert len(texts[-1]) == PROMPT
        assert texts[-1].rindex(keys[-1]) + len(key) == PROMPT - gap
    return texts, keys


GAPS = [1900, 1700, 1400, 1100, 900, 600, 400, 120]  # the last one alone lies inside a window of 256 latest tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "gaps", "found"), [("dense", GAPS[::3], 3), ("quest", GAPS, 8), ("window", GAPS[5:], 1)]
)
def test_generate_finds_the_pass_key_in_2000_bytes(method, gaps, found, tmp_path):
    texts, keys = passkey_prompts(np.random.default_rng(0), gaps)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in texts))
    budget = [] if method == "dense" else ["--budget", "256"]
    done = CliRunner().invoke(
        app, ["generate", "--method", method, *budget, "--batch-file", str(path), "--max-tokens", "6"]
    )
    assert done.exit_code == 0, done.output
    answers = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    right = [answer.startswith(key + ".") for answer, key in zip(answers, keys, strict=True)]
    assert sum(right) == found, list(zip(answers, keys))
    assert right[-1]
