"""deepseek-tiny as the package carries it: what its card promises, and that its files belong together."""

import importlib.resources
import json
import re

import pytest
from typer.testing import CliRunner

from models import checkpoints, prompts, train
from models.cli import app
from models.training import model_card, promises

FOLDER = importlib.resources.files("models") / "pretrained" / "deepseek_tiny"
pytestmark = pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason="deepseek-tiny is not shipped")


@pytest.fixture(scope="module")
def metrics():
    return json.loads((FOLDER / "metrics.json").read_text(encoding="utf-8"))


def test_its_files_belong_together(metrics):
    folder = checkpoints.resolve("deepseek-tiny")
    config = train.deepseek_tiny()
    assert checkpoints.read_config(folder) == config.model
    checkpoints.locate(folder, config.model)
    assert (folder / "model.safetensors").stat().st_size <= 12e6
    card, _, notes = (folder / "README.md").read_text(encoding="utf-8").partition(model_card.NOTES)
    assert card == model_card.card(metrics)
    assert "Limits" in notes


def test_it_was_made_by_the_recipe(metrics):
    def plain(fields):
        return json.loads(json.dumps(fields), parse_float=lambda number: round(float(number), 9))

    config = train.deepseek_tiny(minutes=metrics["config"]["minutes"])
    assert plain(config.fingerprint()) == plain(metrics["config"])
    assert metrics["command"] == config.command()


def test_its_promises_are_kept_in_what_was_measured(metrics):
    assert metrics["gates"] == promises.latent(metrics)
    assert all(metrics["gates"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "most"),  # per cent of what dense reads; rejected drafts have read, too
    [((), 8), (("--method", "dense"), 100), (("--budget", "64", "--speculate", "3"), 10)],
)
def test_it_finds_the_pass_key(more, most):
    done = CliRunner().invoke(app, ["generate", "--model", "deepseek-tiny", "--demo", "passkey", *more])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(prompts.read_demo("passkey").answer)
    share = re.search(r"\((\d+\.\d) %\)", done.stderr)
    assert share is not None
    assert float(share[1]) <= most
