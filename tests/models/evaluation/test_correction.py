"""The quality of reference correction: methods against NumPy and the library, what is measured, what is told."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from models import decode
from models.checkpoints.families import tensors_of
from models.cli import app
from models.evaluation import correction, correction_report, run
from models.evaluation.correction import METHODS, Method
from models.evaluation.correction_run import Evaluation, Settings, batch_of, outcomes, reads
from models.evaluation.results import Results
from models.evaluation.tasks import Writer
from models.llama import Llama
from models.ouro import Ouro
from models.reference import ReferenceCorrection
from models.tokenizers import ByteTokenizer
from sparse_jax import retained_count, selectors
from tests.models import numpy_corrected
from tests.models.configs import small_llama, small_ouro

ROOT = Path(__file__).parents[3]
CONFIG = small_ouro(vocab_size=264, num_layers=1, loops=4, max_positions=256)
RNG = np.random.default_rng(0)
CONTEXT = RNG.integers(0, 264, (3, 32)).astype(np.int32)
COUNTS = np.int32([21, 32, 1])
ASKED = RNG.integers(0, 264, (5, 3)).astype(np.int32)
TARGETS = np.where(np.arange(5)[:, None] >= 2, np.roll(ASKED, -1, axis=0), -1).astype(np.int32)
BY_NAME = {method.name: method for method in METHODS}


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def cache(model):
    graph, params = nnx.split(model)
    shape = run.Shape(length=48, rows=3, page_size=16, most=1, diagnostics=False)
    return run.prefill(params, np.pad(CONTEXT, ((0, 0), (0, 16))), COUNTS, graph=graph, shape=shape)


def steps_of(model, cache, method, retention):
    graph, params = nnx.split(model)
    held = correction.begin(CONFIG, 3, 48, method, retention)
    _, _, steps = correction.advance(params, jax.tree.map(jnp.copy, cache), held, ASKED, TARGETS, graph=graph)
    return jax.tree.map(np.asarray, steps)


@pytest.mark.parametrize("name", ["correction", "plain sparse", "frozen", "late correction", "late plain"])
def test_each_method_equals_numpy(model, cache, name, monkeypatch):
    method, retention = BY_NAME[name], 0.2
    forms = {
        "correction": numpy_corrected.corrected,
        "plain": lambda q, k, v, kept: numpy_corrected.captured(q, k[kept.ids], v[kept.ids], 1.0)[0],
        "frozen": lambda q, k, v, kept: kept.output,
    }
    monkeypatch.setattr(numpy_corrected, "corrected", forms[method.form])
    steps = steps_of(model, cache, method, retention)
    for request in range(3):
        decoder = numpy_corrected.Decoder(tensors_of(model), CONFIG, retention, method.captures)
        for token in CONTEXT[request, : COUNTS[request]]:
            decoder.step(token, correct=False)
        expected = np.array([decoder.step(token, correct=True)[-1] for token in ASKED[:, request]])
        np.testing.assert_allclose(steps.logits[:, request], expected, atol=2e-4, rtol=0)
        capture = method.captures[0]
        np.testing.assert_allclose(steps.masses[:, capture, request], np.array(decoder.masses)[:, 0], atol=1e-5)
        wrong = np.roll(expected, 1, axis=0)
        assert np.abs(steps.logits[:, request] - wrong).max() > 0.1


def test_the_correction_is_that_of_the_library(model, cache):
    """The operations, selection included, give the logits that the equations of this evaluation give."""
    paged, dense = jax.tree.map(jnp.copy, cache), selectors.get("dense")
    step = jax.jit(
        lambda model, token, paged: decode.decode_step(
            model, token, paged.table.lengths, paged, dense, (), reference=ReferenceCorrection(retention=0.2)
        )
    )
    steps = steps_of(model, cache, BY_NAME["correction"], 0.2)
    for token, expected in zip(ASKED, steps.logits):
        out = step(model, token, paged)
        paged = out.paged
        np.testing.assert_allclose(out.logits, expected, atol=1e-5, rtol=0)


def test_all_methods_and_retentions_share_a_compilation(model, cache):
    steps_of(model, cache, BY_NAME["dense"], 1.0)
    before = correction.advance._cache_size()
    for method in METHODS:
        steps_of(model, cache, method, 0.3)
    assert correction.advance._cache_size() == before


def test_full_retention_changes_nothing_and_holds_all(model, cache):
    dense = steps_of(model, cache, BY_NAME["dense"], 1.0)
    assert (dense.errors == 0).all()
    for name in ("correction", "plain sparse", "late correction"):
        full = steps_of(model, cache, BY_NAME[name], 1.0)
        np.testing.assert_allclose(full.logits, dense.logits, atol=2e-5, rtol=0)
        np.testing.assert_allclose(full.masses[:, 2:], 1.0, atol=1e-5)
        assert full.errors.max() < 1e-5


def test_what_is_measured_by_hand(model, cache):
    """Errors and masses where they belong; a smaller retention holds less and errs more."""
    small, large = (steps_of(model, cache, BY_NAME["correction"], retention) for retention in (0.05, 0.6))
    assert (small.errors[:, :2] == 0).all()
    assert (small.errors[:, 2:].mean(axis=(0, 1)) > large.errors[:, 2:].mean(axis=(0, 1))).all()
    # The capture holds the most that as many keys can hold: later loops see other probabilities.
    assert (small.masses[:, 1:] < large.masses[:, 1:] + 1e-6).all()
    assert small.masses[:, 1].mean() > small.masses[:, 2].mean()
    found = outcomes(small, TARGETS >= 0, CONFIG, large.logits)
    judged = small.logits[2:, 0]
    moved = judged - large.logits[2:, 0]
    moved -= moved.mean(axis=-1, keepdims=True)
    assert found["logit_error"][0] == pytest.approx(np.sqrt((moved**2).mean(axis=-1)).mean(), rel=1e-5)
    log_p = judged - np.log(np.exp(judged).sum(axis=-1, keepdims=True))
    assert found["nll"][0] == pytest.approx(-log_p[np.arange(3), TARGETS[2:, 0]].mean(), rel=1e-5)
    assert found["agree"][0] == (judged.argmax(-1) == large.logits[2:, 0].argmax(-1)).mean()
    assert found["worst"].shape == (4,)
    assert found["worst"][1] == pytest.approx(small.masses[2:, 1].mean(axis=(0, 1)).min(), rel=1e-5)


@pytest.mark.parametrize(
    ("method", "retention", "share"),
    [
        (Method("dense", captures=()), 1.0, 1.0),
        (Method("correction"), 0.1, (2 + 2 * 0.2) / 4),  # each of two query heads reads its own keys
        (Method("frozen", "frozen"), 1.0, 0.5),
        (Method("late", captures=(2,)), 0.1, (3 + 0.2) / 4),
        (Method("again", captures=(1, 2)), 0.1, (3 + 0.2) / 4),
        (Method("full"), 1.0, 1.0),
    ],
)
def test_share_that_is_read(method, retention, share):
    assert reads(CONFIG, method, 100, retention) == pytest.approx(share)


def test_a_batch_judges_the_answer_alone():
    writer = Writer(ByteTokenizer(), text="In the beginning. " * 40)
    prompts = writer.prompts("keys4", 128, 2)
    batch = batch_of(prompts, 128)
    for row, prompt in enumerate(prompts):
        assert batch.counts[row] == len(prompt.context)
        judged = batch.targets[:, row] >= 0
        np.testing.assert_array_equal(batch.targets[judged, row], prompt.answer[prompt.scored])
        fed = batch.tokens[batch.tokens[:, row] >= 0, row]
        np.testing.assert_array_equal(fed, np.concatenate([prompt.question, prompt.answer])[:-1])
        # What is judged after a token is the token that is fed next; the last one is not fed.
        followed = judged[:-1] & (batch.tokens[1:, row] >= 0)
        assert followed.sum() >= judged.sum() - 1
        np.testing.assert_array_equal(batch.targets[:-1, row][followed], batch.tokens[1:, row][followed])


def test_a_run_writes_its_cells_and_goes_on(tmp_path):
    from models import checkpoints

    model = Ouro(dataclasses.replace(CONFIG, bos_id=256, stop_ids=(257,)), rngs=nnx.Rngs(0))
    checkpoints.save(tmp_path / "model", model)
    arguments = ["evaluate-correction", "--model", tmp_path / "model", "--tasks", "text,keys2", "--length", 96]
    arguments += ["--prompts", 2, "--retentions", "0.2", "--out", tmp_path / "found.json"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    cells = json.loads((tmp_path / "found.json").read_text())["cells"]
    assert len(cells) == 2 * len(METHODS)
    assert all(name in done.output for name in ("plain sparse", "late correction", "nats a token", "exact"))
    found = {(cell["task"], cell["method"]): cell for cell in cells}
    assert found["text", "dense"]["more"] == [0, 0, 0]
    assert found["text", "correction"]["masses"][0] is None
    assert found["text", "correction"]["masses"][1][0] > found["text", "correction"]["worst"][1] > 0
    assert found["text", "frozen"]["read"] == 0.5
    assert "exact" in found["keys2", "plain sparse"]
    assert "exact" not in found["text", "plain sparse"]

    settings = Settings(model=str(tmp_path / "model"), tasks=("text",), length=96, prompts=2, retentions=("0.2",))
    again = Evaluation(model, Writer(ByteTokenizer(), text="x"), settings, Results(tmp_path / "found.json"))
    again._prefilled = None  # would fail if anything ran
    seen = []
    again.run(seen.append)
    assert len(seen) == len(METHODS)

    (tmp_path / "other.txt").write_text("Now these are other words, and not those of before.\n" * 40)
    arguments += ["--text", tmp_path / "other.txt", "--tasks", "text"]
    for _ in range(2):  # the second time they are there
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
        cells = json.loads((tmp_path / "found.json").read_text())["cells"]
        assert len(cells) == 3 * len(METHODS)
    other = next(cell for cell in cells if cell["method"] == "dense" and "text" in cell["settings"])
    assert other["nll"] != found["text", "dense"]["nll"]
    assert f"{other['nll'][0]:.3f}" in done.output


def test_the_committed_run_is_that_of_the_default_options(monkeypatch, tmp_path):
    """Nothing of it is run again."""
    committed = ROOT / correction_report.FOLDER / "ouro-tiny.json"
    out = tmp_path / "ouro-tiny.json"
    out.write_text(committed.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(Evaluation, "_prefilled", None)
    done = CliRunner().invoke(app, ["evaluate-correction", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "nats a token" in done.output
    assert out.read_bytes() == committed.read_bytes()


def test_a_model_with_one_loop_is_refused():
    model = Llama(small_llama(num_layers=1), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="a model with 1 loop has none to correct"):
        Evaluation(model, None, Settings(model="x", length=64), Results())


@pytest.mark.parametrize("retention", ["0", "1.5", "many"])
def test_retentions_are_shares(retention):
    with pytest.raises(ValueError, match=r"retention|many"):
        Settings(model="x", retentions=(retention,))


def test_the_document_says_what_the_run_found():
    text = (ROOT / correction_report.DOCUMENT).read_text(encoding="utf-8")
    assert correction_report.document(ROOT) == text, "run python -m models.evaluation.correction_report"
    assert correction_report.NO_RUN not in text
    runs = correction_report.load(ROOT)
    assert set(runs) == set(re.findall(r"<!-- correction ([\w.-]+) ", text))
    for name, data in runs.items():
        assert (ROOT / correction_report.FOLDER / f"{name}.svg").exists()
        for cell in data["cells"]:
            assert cell["tokens"] == retained_count(cell["length"], float(cell["budget"] or 1.0))
