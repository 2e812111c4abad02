"""The console app, with a random model of some thousand parameters."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from typer.testing import CliRunner

from models import checkpoints, cli_options, prompts, terminal
from models.cli import add_xla_flag, app, explanation
from models.ouro import Ouro
from models.stats import Stats
from sparse_jax import selectors
from tests.models import numpy_llama
from tests.models.checkpoints.gguf_writing import TOKENS, write_gguf
from tests.models.configs import small_llama, small_ouro

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of random weights with the byte vocabulary."""
    config = small_ouro(vocab_size=264, max_positions=256, num_layers=1, loops=2, bos_id=256, stop_ids=(257,))
    path = tmp_path_factory.mktemp("model")
    checkpoints.save(path, Ouro(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32))
    return str(path)


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def generate(folder, *arguments, **options):
    arguments = arguments if "--method" in arguments else ("--method", "dense", *arguments)  # compiles fastest
    return run("generate", "--model", folder, "--max-tokens", 8, *arguments, **options)


@pytest.mark.parametrize("command", [(), ("generate",), ("fetch",), ("train",), ("info",), ("bench",), ("tune",)])
def test_help_names_every_option_in_words(command):
    done = run(*command, "--help")
    assert done.exit_code == 0
    assert "Usage" in done.output
    assert "Example" in done.output or command in ((), ("info",))


def test_help_lists_the_methods_of_the_registry():
    shown = " ".join(CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "2000"}).output.split())
    assert ", ".join(selectors.names()) in shown
    assert "{methods}" not in shown


@pytest.mark.parametrize(
    ("text", "value"), [("256", 256), ("1", 1), ("1.0", 1.0), ("0.125", 0.125), ("1/8", 0.125), (".5", 0.5)]
)
def test_a_budget_is_tokens_or_a_share(text, value):
    assert repr(cli_options.read_budget(text)) == repr(value)


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "9/8", "1/0", "many", ""])
def test_other_budgets_are_a_usage_error(folder, text):
    done = generate(folder, "--prompt", "x", "--budget", text)
    assert done.exit_code == 2
    assert "neither a number of tokens nor a share" in " ".join(done.stderr.replace("│", " ").split())


def test_a_gguf_file_chats(tmp_path):
    """A Llama-style model of random weights, with its own tokenizer and chat template."""
    config = small_llama(num_layers=1, vocab_size=len(TOKENS))
    path = write_gguf(tmp_path / "model.gguf", numpy_llama.random_tensors(config), config)
    done = generate(str(path), "--prompt", "the 12", "--chat")
    assert done.exit_code == 0, done.output
    # <|im_start|>, "user", end of line, "the", " ", "1", "2", <|im_end|>, end of line, <|im_start|>, "assistant", ...
    assert "1 layers, on" in done.stderr
    assert f"{1 + 4 + 1 + 4 + 2 + 1 + 9 + 1} prompt tokens" in done.stderr
    account = re.search(r"KV tokens read ([\d,]+) of ([\d,]+)", " ".join(done.stderr.split()))
    assert account is not None, done.stderr
    assert account[1] == account[2]


def test_text_goes_to_stdout_and_the_account_to_stderr(folder):
    done = generate(folder, "--prompt", "In the beginning")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("\n")
    assert "tokens/s" not in done.stdout
    assert "In the beginning" in done.stderr
    account = re.search(r"KV tokens read ([\d,]+) of ([\d,]+)", " ".join(done.stderr.split()))
    assert account is not None, done.stderr
    assert account[1] == account[2]
    assert "tokens/s" in done.stderr
    assert "peak memory" in done.stderr


def test_a_budget_reads_less_than_dense(folder):
    done = generate(folder, "--prompt", "x" * 100, "--method", "quest", "--budget", 48)
    assert done.exit_code == 0, done.output
    share = re.search(r"\((\d+\.\d) %\)", done.stderr)
    assert share is not None, done.stderr
    assert 10 < float(share[1]) < 70


def test_later_loops_are_corrected_and_the_account_says_so(folder):
    done = generate(folder, "--prompt", "x" * 100, "--method", "reference", "--capture-loop", 0, "--retention", 0.1)
    assert done.exit_code == 0, done.output
    shown = " ".join(done.stderr.split())
    assert "reads the whole KV cache up to loop 0, and 10 % of the keys in the loops after it" in shown
    # One loop of two reads everything, the other 11 of about 105 keys for each of the two heads of a group.
    share = float(re.search(r"that dense reads \((\d+\.\d) %\)", shown)[1])
    assert 100 * (1 + 2 * 11 / 102) / 2 - 1 < share < 100 * (1 + 2 * 11 / 102) / 2 + 1
    kept = re.search(r"references of 10 % of the keys held (\d+\.\d) % .*\((\d+\.\d) % in the worst head\)", shown)
    assert kept is not None, shown
    assert 0 < float(kept[2]) < float(kept[1]) < 100


def test_speculation_gives_the_same_text_and_tells_its_share(folder):
    plain = generate(folder, "--prompt", "In the beginning")
    done = generate(folder, "--prompt", "In the beginning", "--speculate", 3, "--draft-loops", 1)
    assert done.exit_code == 0, done.output
    assert done.stdout == plain.stdout
    told = re.search(r"(\d+) % of the drafts accepted, (\d\.\d\d) tokens a round", " ".join(done.stderr.split()))
    assert told is not None, done.stderr
    assert 0 <= int(told[1]) <= 100
    assert 1 <= float(told[2]) <= 4
    assert terminal.drafting(3, None, small_ouro(), "it").draft_loops == 2


def test_a_retention_beside_a_method_adds_the_correction():
    selector, reference = terminal.reading("quest", 48, 0.2, None)
    assert (selector, reference.retention, reference.capture_loops) == (selectors.get("quest", budget=48), 0.2, (1,))
    assert terminal.reading("quest", 48, None, None)[1] is None
    assert terminal.reading("dense", 48, None, [2, 1, 2])[1].capture_loops == (1, 2)
    selector, reference = terminal.reading("reference", 48, None, None)
    assert (selector, reference.retention) == (selectors.get("dense"), 0.1)
    words = terminal.share_read("quest", 48, reference)
    assert words.startswith(
        "at most about 48 tokens of the KV cache (quest) before loop 1, all of it there, and 10 % of the keys"
    )


def test_file_pipe_and_option_give_the_same_text(folder, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Now these are the names\n")
    results = [
        generate(folder, "--prompt", "Now these are the names"),
        generate(folder, "--prompt-file", path),
        generate(folder, input="Now these are the names\n"),
        generate(folder, "--prompt-file", "-", input="Now these are the names\n"),
    ]
    assert len({done.stdout for done in results}) == 1
    assert all(done.exit_code == 0 for done in results)


def test_seed_decides_what_is_drawn(folder):
    def draw(seed):
        return generate(
            folder, "--prompt", "x", "--temperature", 1, "--top-k", 50, "--top-p", 0.9, "--seed", seed
        ).stdout

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_batch_of_lines_is_answered_in_order(folder, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a first line\n\na second, longer line\n")
    done = generate(folder, "--batch-file", path)
    assert done.exit_code == 0, done.output
    assert re.findall(r"--- (\d) ---", done.stdout) == ["1", "2"]


def test_batch_of_json_lines_is_answered_as_json_lines(folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "two\\nlines"}\n{"prompt": "one"}\n')
    done = generate(folder, "--batch-file", path)
    assert done.exit_code == 0, done.output
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["two\nlines", "one"]
    assert all(answer["finished"] in ("stop", "length") for answer in answers)


def test_demonstration_says_whether_it_found_the_pass_key():
    demo = prompts.read_demo("passkey")
    (text,) = demo.texts
    assert len(text.encode()) == 2000
    assert text.endswith("The pass key is ")
    assert text.count(demo.answer) == 1
    assert "Found" in terminal.verdict(f" {demo.answer}.\nmore", demo.answer)
    assert "Not found" in terminal.verdict("12345", demo.answer)


@pytest.mark.parametrize("method", ["quest"])
def test_the_shipped_model_finds_the_pass_key(method):
    done = run("generate", "--demo", "passkey", "--method", method, "--budget", 256)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(prompts.read_demo("passkey").answer)
    assert "Found" in done.stderr
    share = float(re.search(r"\((\d+\.\d) %\)", done.stderr)[1])
    assert share == 100 if method == "dense" else share < 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "--prompt"),
        (("--prompt", "x", "--demo", "passkey"), "leave out the others"),
        (("--demo", "poem"), "there are passkey"),
        (("--prompt-file", "no-such-file"), "no-such-file"),
        (("--prompt", "x", "--method", "magic"), "quest"),
        (("--prompt", "x", "--temperature", "-1"), "temperature"),
        (("--prompt", "x" * 300), "shorten the prompt"),
        (("--prompt", "x", "--implementation", "triton"), "use auto, xla"),
        (("--prompt", "x", "--chat"), "leave out --chat"),
        (("--prompt", "x", "--draft-loops", "1"), "belongs to --speculate"),
        (("--prompt", "x", "--speculate", "2"), "draft_loops must leave a loop to verify with: the model has 2, got 2"),
        (("--prompt", "x", "--method", "reference"), "a model with 2 loops has none to correct"),
        (
            ("--prompt", "x", "--capture-loop", "0", "--capture-loop", "1"),
            "none to correct after the capture_loops (0, 1)",
        ),
        (("--prompt", "x", "--method", "h2o", "--capture-loop", "0"), "cannot be combined with the selector H2O"),
    ],
)
def test_what_a_user_can_mend_is_said_in_one_line(folder, arguments, message):
    done = generate(folder, *arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.output
    assert done.stdout == ""
    assert "prompt tokens" not in done.stderr  # nothing is announced that does not come


def test_speculation_asks_for_a_looped_model(tmp_path):
    checkpoints.save(tmp_path, Ouro(small_ouro(vocab_size=264, num_layers=1, loops=1), rngs=nnx.Rngs(0)))
    done = generate(tmp_path, "--prompt", "x", "--speculate", 2)
    assert done.exit_code == 1
    assert f"or an extra layer: {tmp_path} has neither" in " ".join(done.stderr.split())


def test_a_model_without_its_tokenizer_is_not_read_as_bytes(tmp_path):
    checkpoints.save(tmp_path, Ouro(small_ouro(num_layers=1, loops=1), rngs=nnx.Rngs(0)))
    done = generate(tmp_path, "--prompt", "x")
    assert done.exit_code == 1
    assert "no tokenizer that fits a vocabulary of 64" in " ".join(done.stderr.split())


def test_a_model_that_is_not_there_is_named():
    done = run("generate", "--model", "no-such-model", "--prompt", "x")
    assert done.exit_code == 1
    assert "no-such-model" in done.stderr


@pytest.mark.parametrize("line", ["not json", '{"text": "x"}', '{"prompt": 3}', '{"prompt": ""}', "[1]"])
def test_a_broken_batch_names_its_line(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        prompts.read_batch(path)


def test_only_what_a_user_can_mend_is_explained():
    assert explanation(ValueError("too long")) == "too long"
    assert "out of memory" in explanation(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert explanation(KeyError("x")) is None


def test_traceback_on_demand(folder, monkeypatch):
    monkeypatch.setenv("SPARSE_JAX_TRACEBACK", "1")
    assert isinstance(generate(folder, "--demo", "poem").exception, ValueError)


def test_closing_line_leaves_out_what_is_not_known():
    stats = Stats(
        prompt_tokens=3,
        tokens=1,
        compile_seconds=1.0,
        prefill_seconds=0.1,
        decode_seconds=0.0,
        tokens_per_second=None,
        kv_tokens_read=0,
        kv_tokens_dense=0,
        exit_loops=(1,),
        stale=0,
        peak_memory_bytes=None,
        peak_memory_of="process",
    )
    assert terminal.closing_line(stats) == "1 tokens"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "large"), "there are ouro-tiny, smoke"),
        (("--minutes", 1, "--steps", 2), "not both"),
        (("--preset", "smoke", "--variant", "wide"), "--variant belongs"),
        (("--preset", "smoke", "--text", "nowhere"), "python -m models.training.corpora"),
    ],
)
def test_training_explains_what_is_missing(tmp_path, arguments, message):
    done = run("train", "--out", tmp_path / "run", *arguments)
    assert done.exit_code == 1, done.output
    assert message in " ".join(done.stderr.split())


def test_training_passes_its_options_on(tmp_path, monkeypatch):
    import models.train

    calls = []
    monkeypatch.setattr(models.train, "train", lambda config, **places: calls.append((config, places)))
    done = run(
        "train", "--preset", "smoke", "--steps", 3, "--seed", 5, "--out", tmp_path, "--text", "texts", "--resume"
    )
    assert done.exit_code == 0, done.output
    ((config, places),) = calls
    assert (config.steps, config.seed, config.workers) == (3, 5, 0)
    assert places == {"texts": places["texts"], "out": tmp_path, "resume": True}
    assert str(places["texts"]) == "texts"


def test_training_takes_the_same_options_as_a_module(tmp_path, monkeypatch):
    import models.train

    calls = []
    monkeypatch.setattr(models.train, "train", lambda config, **places: calls.append(config))
    options = ["--minutes", "1.5", "--variant", "deep", "--rate", "0.001", "--weight-decay", "0.2"]
    options += ["--start-from", "ouro-tiny", "--workers", "3", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train", *options])
    with pytest.raises(SystemExit) as end:
        models.train.main()
    assert end.value.code == 0
    assert run("train", *options).exit_code == 0
    assert calls[0] == calls[1]
    config = calls[0]
    assert (config.minutes, config.name, config.rate, config.weight_decay) == (1.5, "ouro-tiny:deep", 0.001, 0.2)
    assert (config.start_from, config.workers) == ("ouro-tiny", 3)


def test_xla_flags_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    for _ in range(2):
        add_xla_flag("--xla_gpu_enable_triton_gemm=false")
        assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x --xla_gpu_enable_triton_gemm=false"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    add_xla_flag("--xla_gpu_enable_triton_gemm=false")
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_enable_triton_gemm=true"


def test_the_app_starts_without_jax():
    code = "import models.cli, sys; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_bench_passes_its_options_on():
    done = run("bench", "attention", "--cases", "no-such-shape", "--quick")
    assert done.exit_code == 2, done.output
    assert "no-such-shape" in done.output
    assert run("bench", "--no-such-option").exit_code == 2


def test_tune_passes_its_options_on():
    assert run("tune", "--no-such-option").exit_code == 2


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is something to tune")
def test_without_a_gpu_there_is_nothing_to_tune(tmp_path):
    done = run("tune", "--quick", "--output", tmp_path / "tuning.json")
    assert done.exit_code == 1
    assert "Nothing to tune: JAX runs on cpu here" in done.stderr
    assert os.listdir(tmp_path) == []


def test_info_shows_each_operation():
    done = run("info")
    assert done.exit_code == 0, done.output
    for name in ("paged_attention", "token_sparse_attention", "top_k"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--prompt", "hi", "--seed", "9" * 23], "--seed"),
        (["generate", "--prompt-file", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["train", "--preset", "smoke", "--minutes", "-1"], "minutes must be positive, got -1"),
        (["train", "--preset", "smoke", "--steps", "0"], "steps must be positive, got 0"),
    ],
)
def test_bad_values_are_refused_by_name(arguments, said, tmp_path):
    arguments = arguments + ["--out", str(tmp_path / "run")] if arguments[0] == "train" else arguments
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code != 0
    assert said in " ".join((done.output + done.stderr).split())
    assert "Traceback" not in done.output
