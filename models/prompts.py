"""Where the command line takes its prompts from: an option, a file, a pipe, a batch, or a built-in demonstration."""

import importlib.resources
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

DEMOS = ("passkey",)


class Prompts(NamedTuple):
    """Texts to continue, and how their results are shown."""

    texts: list[str]  # bytes that are not UTF-8 are kept as surrogate escapes
    batch: bool = False  # shown one after the other when all are done, not streamed
    json: bool = False  # a batch that came as JSON lines is answered as JSON lines
    answer: str | None = None  # what a demonstration should find


def choose(*, prompt: str | None, prompt_file: Path | None, batch_file: Path | None, demo: str | None) -> Prompts:
    """The prompts from the one source that was given; standard input where none was and something is piped in.

    Raises ValueError for no source, several, or an empty one, and OSError for a file that cannot be read.
    """
    given = {"--prompt": prompt, "--prompt-file": prompt_file, "--batch-file": batch_file, "--demo": demo}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} were given; one of them is the prompt, so leave out the others")
    if batch_file is not None:
        return read_batch(batch_file)
    if demo is not None:
        return read_demo(demo)
    if prompt is None:
        prompt = _read(prompt_file)
    if not prompt:
        raise ValueError('the prompt is empty: give one with --prompt "some text", or try --demo passkey')
    return Prompts([prompt])


def read_demo(name: str) -> Prompts:
    """A built-in prompt. Raises ValueError for an unknown name."""
    if name not in DEMOS:
        raise ValueError(f"no demonstration {name!r}; there are {', '.join(DEMOS)}")
    text = (importlib.resources.files("models") / "demos" / f"{name}.txt").read_text(encoding="utf-8")
    hidden = re.search(r"The pass key is (\d+)\. Remember it\.", text)
    assert hidden is not None
    return Prompts([text], answer=hidden[1])


def read_batch(path: Path) -> Prompts:
    """Prompts of a batch file: JSON lines if it is named .jsonl, else one prompt on each line that is not empty.

    Raises ValueError, with the line, for what is not a prompt.
    """
    lines = [(number, line) for number, line in enumerate(_text(path.read_bytes()).splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompt")
    if path.suffix != ".jsonl":
        return Prompts([line for _, line in lines], batch=True)
    texts = []
    for number, line in lines:
        try:
            texts.append(json.loads(line)["prompt"])
            if not (isinstance(texts[-1], str) and texts[-1]):
                raise TypeError
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f'line {number} of {path} is not of the form {{"prompt": "some text"}}') from None
    return Prompts(texts, batch=True, json=True)


def _read(path: Path | None) -> str:
    """A file, or standard input for "-" and None, without the one line end that editors and echo leave behind."""
    if path is not None and str(path) != "-":
        return _text(path.read_bytes()).removesuffix("\n")
    if path is None and sys.stdin.isatty():
        raise ValueError('no prompt: give one with --prompt "some text" or --prompt-file, or try --demo passkey')
    return _text(sys.stdin.buffer.read()).removesuffix("\n")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
