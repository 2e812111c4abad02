"""The console app with a DeepSeek-style model of random weights."""

import json

import pytest
from flax import nnx
from typer.testing import CliRunner

from models import checkpoints
from models.cli import app
from models.deepseek import Deepseek
from models.evaluation.methods import default
from tests.models.deepseek_setting import small_deepseek


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with the byte vocabulary, one layer, an indexer that chooses 5 tokens, and an extra layer."""
    sizes = {"vocab_size": 264, "num_layers": 1, "mtp_layers": 1, "max_positions": 256, "experts": None}
    path = tmp_path_factory.mktemp("model")
    checkpoints.save(path, Deepseek(small_deepseek(**sizes, bos_id=256, stop_ids=(257,)), rngs=nnx.Rngs(0)))
    return path


def run(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


def generate(folder, *arguments):
    return run("generate", "--model", folder, "--max-tokens", 8, "--prompt", "x" * 40, *arguments)


def test_it_reads_by_its_indexer_and_drafts_with_its_extra_layer(folder):
    code, text, told = generate(folder)
    assert code == 0, told
    assert "about 5 tokens of the KV cache (dsa" in told
    code, drafted, told = generate(folder, "--speculate", 2)
    assert (code, drafted) == (0, text)
    assert "of the drafts accepted" in told


def test_it_reads_a_quantised_cache(folder):
    code, text, told = generate(folder, "--cache-dtype", "fp8")
    assert code == 0, told
    assert len(text) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speculate", 2, "--draft-loops", 1), "drafts with its extra layer, it has no loops"),
        (("--method", "quest"), "latent attention is read by the selectors 'dsa' and 'dense'"),
        (("--budget", "1/8"), "takes a number of tokens as its budget"),
        (("--speculate", 2, "--capture-loop", 0), "there is none for reference correction"),
        (("--exit-threshold", 0.5), "has one loop, so there is none to choose"),
        (("--cache-dtype", "float8_e4m3fn"), "cache_dtype must be float32, bfloat16, float16 or fp8_ds_mla"),
    ],
)
def test_what_it_cannot_do_is_said_in_one_line(folder, arguments, message):
    code, _, told = generate(folder, *arguments)
    assert code == 1
    assert message in told


def test_evaluation_tells_how_much_each_k_reads(folder):
    assert default(str(folder)) == ["dense", "dsa:k=1", "dsa:k=2", "dsa:k=5"]
    arguments = ("--tasks", "passkey", "--lengths", 160, "--prompts", 2, "--out", folder / "found.json")
    code, _, told = run("evaluate", "--model", folder, "--methods", "dense,dsa:k=4", *arguments)
    assert code == 0, told
    cells = json.loads((folder / "found.json").read_text())["cells"]
    read = {cell["method"]: cell["read"][0] for cell in cells}
    assert len(cells) == len(read)  # budgets mean nothing to these
    assert read["dense"] == pytest.approx(1.0)
    assert read["dsa:k=4"] == pytest.approx(4 / 160, rel=0.05)
    assert run("evaluate", "--model", folder, "--dense-layers", 1)[0] == 1
    arguments = "--methods", "dense,dsa:k=4", *arguments
    code, table, told = run("evaluate", "--model", folder, "--cache-dtype", "fp8", *arguments)
    assert code == 0, told
    assert table.count("passkey") == 2  # not those of the plain cache
    quantised = json.loads((folder / "found.json").read_text())["cells"][len(cells) :]
    assert [cell["settings"]["cache_dtype"] for cell in quantised] == ["fp8_ds_mla"] * 2
    for cell, plain in zip(quantised, cells, strict=True):
        assert cell["read"] == plain["read"]
        assert cell["margins"] != plain["margins"]
        assert cell["nll"][0] == pytest.approx(plain["nll"][0], rel=0.05)
    code, _, told = run("evaluate", "--model", folder, "--cache-dtype", "float8_e4m3fn", *arguments)
    assert code == 1
    assert "cache_dtype must be float32, bfloat16, float16 or fp8_ds_mla" in told
