"""What the console app says about options that do not fit, each in one line."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from models import terminal
from models.cli import app
from models.evaluation import engine
from models.generate import check_positions
from models.prompts import Prompts
from models.tokenizers import ByteTokenizer


def refused(*arguments):
    """The one line about it, without a traceback and with exit code 1."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    message = done.stderr.strip()
    assert message.startswith("Error: "), message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tasks", "foo"), "--tasks foo with --lengths 512: no task 'foo' for this model"),
        (("--tasks", "keys4", "--lengths", 10), "--tasks keys4 with --lengths 10: the statements need"),
        (("--tasks", "text", "--lengths", "64,2"), "--tasks text with --lengths 2: a text has at least 3 tokens"),
        (("--lengths", 0), "--lengths takes whole numbers of at least 1, separated by commas, got '0'"),
        (("--lengths", -5), "--lengths takes whole numbers of at least 1"),
        (("--lengths", "abc"), "--lengths takes whole numbers of at least 1"),
        (("--lengths", ","), "--lengths takes whole numbers of at least 1"),
        (("--methods", "quest:page_size=0"), "'quest:page_size=0': page_size must be a whole number of at least 1"),
        (("--dtype", "foo"), "--dtype is float32, bfloat16 or float16, got 'foo'"),
    ],
)
def test_an_evaluation_checks_tasks_and_lengths_before_it_begins(arguments, said):
    assert said in refused("evaluate", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "dense", "--budget", 64), "--budget 64: the method dense reads everything and takes no budget"),
        (
            ("--method", "reference", "--budget", "1/4"),
            "--budget 0.25: the method reference reads everything and takes",
        ),
        (
            ("--model", "deepseek-tiny", "--method", "reference"),
            "deepseek-tiny has one loop, so there is none for refer",
        ),
        (("--model", "deepseek-tiny", "--retention", 0.1), "(--method reference, --retention, --capture-loop) to corr"),
        (("--model", "deepseek-tiny", "--exit-threshold", 0.5), "--exit-threshold 0.5: deepseek-tiny has one loop"),
    ],
)
def test_an_option_without_effect_is_refused(arguments, said):
    assert said in refused("generate", "--prompt", "x", *arguments)


def test_a_prompt_that_is_too_long_by_itself_is_told_so():
    check_positions(0, 8, 1, 8)
    with pytest.raises(ValueError, match=r"prompt 0 has 8 tokens; with 2 new ones .* ask for at most 1 tokens"):
        check_positions(0, 8, 2, 8)
    with pytest.raises(ValueError, match="prompt 3 has 9 tokens, which alone pass the 8 positions of the model"):
        check_positions(3, 9, 1, 8)


def test_an_answer_of_a_chat_begins_on_a_line_of_its_own(monkeypatch):
    monkeypatch.setattr(terminal, "show_stream", lambda chunks, tokenizer: "")
    for end in ("", "\n"):
        shown = io.StringIO()
        console = Console(file=shown, highlight=False)
        terminal.show(Prompts(["a question"]), [], ByteTokenizer(), console, end=end)
        assert shown.getvalue() == "a question" + end


def usage(*arguments):
    """What is said about a call that is not understood, with exit code 2."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 2, done.output
    return " ".join((done.output + done.stderr).replace("│", " ").split())


def test_a_benchmark_that_measures_nothing_says_so(tmp_path):
    told = usage("bench", "attention", "--quick", "--only", "nope", "--json", str(tmp_path / "results.json"))
    assert "no operation that was to be measured has 'nope' in its name" in told
    assert not list(tmp_path.iterdir())
    for command in ("bench", "tune"):
        assert "--minutes" in usage(command, "--minutes", "-1")


def test_an_unknown_suite_is_told_all_there_are():
    assert "reference, mla, and with `sparse-jax bench` ouro, speculation" in usage("bench", "attentoin")


def test_a_budget_that_is_none_is_told_in_our_words_only():
    assert "Invalid value for '--budget': 'many' is neither" in usage("generate", "--budget", "many")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--retentions", "0.1,abc"), "retentions are shares of the keys such as 0.1, got 'abc'"),
        (("--dtype", "foo"), "--dtype is float32, bfloat16 or float16, got 'foo'"),
        (("--tasks", "foo"), "no task 'foo' for this model"),
    ],
)
def test_an_evaluation_of_the_correction_names_what_is_wrong(arguments, said):
    assert said in refused("evaluate-correction", *arguments)


def test_a_method_that_fails_is_told_in_one_line_where_it_is_the_only_one(monkeypatch):
    def failing(*arguments):
        raise ValueError("no room")

    monkeypatch.setattr(engine.Evaluation, "compile_ahead", lambda self: None)
    monkeypatch.setattr(engine.Evaluation, "_cells", failing)
    done = CliRunner().invoke(app, ["evaluate", "--methods", "dense"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 1
    assert done.stdout.strip() == "left out: dense at 512 tokens: ValueError: no room"
    assert done.stderr.strip() == "Error: no room"
