"""What runs on every change: ouro-tiny answers through sound selectors, and not through broken ones.

The sound ones are the shipped selectors. The broken ones share one compilation, a selector that is wrong in another way
for every third request: a sound one that reads the pages of the lowest scores, one that always reads the first pages,
and one that reads random ones. Each must fail what the sound ones pass.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from models import checkpoints
from models.evaluation import quick
from models.evaluation.engine import Evaluation
from models.evaluation.methods import PAGE_SIZE, Method, parse
from models.evaluation.tasks import Writer
from models.tokenizers import ByteTokenizer
from sparse_jax.selectors import Quest

WAYS = ("lowest bounds", "first pages", "random pages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Broken(Quest):
    """Wrong in the way `WAYS[request % 3]`."""

    def score(self, state, q, pages):
        bound = super().score(state, q, pages)
        chance = jax.random.uniform(jax.random.key(0), bound.shape)
        way = jnp.arange(bound.shape[0])[:, None, None] % len(WAYS)
        return jnp.select([way == 0, way == 1], [-bound, -pages.first.astype(jnp.float32) + 0 * bound], chance)


@pytest.fixture(scope="module")
def evaluated():
    _, model = checkpoints.load("ouro-tiny", dtype=jnp.float32)
    broken = Method("broken", Broken(recent=1), PAGE_SIZE)
    # That dense attention misses nothing is tested on a smaller model (test_engine.py); `--tier quick` runs it, too.
    settings = quick.settings([*map(parse, ("oracle", "quest")), broken])
    evaluation = Evaluation(model, Writer(ByteTokenizer(), text=quick.filler()), settings)
    return {cell["method"]: cell for cell in evaluation.run()}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["oracle", "quest"])
def test_sound_selectors_pass(evaluated, method):
    assert quick.sound(evaluated[method]), evaluated[method]


@pytest.mark.slow
def test_the_ends_are_where_they_belong(evaluated):
    assert quick.verdicts(evaluated.values()) == dict.fromkeys(quick.verdicts(evaluated.values()), True)
    assert evaluated["oracle"]["of_oracle"][0] == pytest.approx(1, abs=1e-3)
    assert evaluated["quest"]["of_oracle"][0] < evaluated["oracle"]["of_oracle"][0]
    assert evaluated["quest"]["read"][0] < 0.14


@pytest.mark.slow
@pytest.mark.parametrize("way", range(len(WAYS)), ids=WAYS)
def test_broken_selectors_fail(evaluated, way):
    cell = evaluated["broken"]
    margins = np.array(cell["margins"])[way :: len(WAYS)]
    answered = [right == "1" for right in cell["answered"][way :: len(WAYS)]]
    assert margins.mean() < quick.MARGIN
    assert np.mean(answered) < quick.EXACT
    assert not quick.sound(cell)


def test_verdicts_tell_what_is_broken():
    good = {"exact": [1, 1, 1], "margin": [9, 9, 9], "of_oracle": [0.8] * 3, "error": [0.2] * 3}
    good |= {"task": quick.TASK, "length": quick.LENGTH}
    cells = [good | {"method": name} for name in quick.METHODS]
    verdicts = quick.verdicts(cells)
    assert verdicts["quest works"]
    assert not verdicts["window is told from a sound one"]
    assert not verdicts["dense attention is what the method computes"]
    assert not verdicts["the oracle reads the largest mass"]
    for name, value in (("exact", 0.5), ("margin", 1.0), ("of_oracle", 0.6)):
        assert not quick.sound(good | {name: [value] * 3})


def test_command_says_what_is_wrong(tmp_path):
    import typer

    from models.evaluation.command import evaluate

    app = typer.Typer()
    app.command()(evaluate)

    def error(*arguments):
        return str(CliRunner().invoke(app, list(arguments)).exception)

    assert "no tier 'slow'" in error("--tier", "slow")
    assert "Unknown selector 'nothing'" in error("--methods", "nothing")
    assert "such as 1/64" in error("--budgets", "2/1")
    assert "4096 positions" in error("--lengths", "5000")
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "holds no results" in error("--out", str(other))
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert shown.exit_code == 0
    for option in ("--methods", "--tasks", "--budgets", "--out", "--plots", "--tier", "--no-diagnostics"):
        assert option in shown.output
