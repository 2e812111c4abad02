"""What the console app says about options that do not fit, each in one line."""

import pytest
from typer.testing import CliRunner

from models.cli import app


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
    ],
)
def test_an_evaluation_checks_tasks_and_lengths_before_it_begins(arguments, said):
    assert said in refused("evaluate", *arguments)
