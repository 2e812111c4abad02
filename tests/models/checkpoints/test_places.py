"""Names of models, and where they lead."""

import sys

import pytest

from models import checkpoints
from models.checkpoints import places


def test_names_that_are_no_model():
    with pytest.raises(FileNotFoundError, match=r"no model 'nonsense'.*ouro-tiny, deepseek-tiny, smollm2-135m"):
        checkpoints.resolve("nonsense")
    with pytest.raises(FileNotFoundError, match=r"no model 'models/missing\.gguf'"):
        checkpoints.resolve("models/missing.gguf")


def test_a_fetched_model_is_in_the_cache_or_its_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE_JAX_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="get it with: sparse-jax fetch smollm2-135m"):
        checkpoints.resolve("smollm2-135m")
    (tmp_path / "smollm2-135m").mkdir()
    assert checkpoints.resolve("smollm2-135m") == tmp_path / "smollm2-135m"


def test_the_cache_is_the_users_unless_it_is_moved(monkeypatch):
    monkeypatch.delenv("SPARSE_JAX_CACHE", raising=False)
    monkeypatch.setattr(places.platformdirs, "user_cache_dir", lambda name, appauthor: f"/caches/{name}")
    assert places.cache_folder().as_posix() == "/caches/sparse-jax"
    monkeypatch.setenv("SPARSE_JAX_CACHE", "~/elsewhere")
    assert places.cache_folder() == places.Path.home() / "elsewhere"


def test_files_and_folders_are_themselves(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"")
    assert checkpoints.resolve(tmp_path) == tmp_path
    assert checkpoints.resolve(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"


def test_hub_names_without_the_extra_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'sparse-jax\[hub\]'"):
        checkpoints.resolve("someone/some-ouro")


def test_hub_names_go_to_the_hub_with_their_revision(monkeypatch, tmp_path):
    calls = []

    class Hub:
        @staticmethod
        def snapshot_download(repository, *, revision, allow_patterns):
            calls.append((repository, revision, allow_patterns))
            return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    assert checkpoints.resolve("HuggingFaceTB/SmolLM2-135M-Instruct") == tmp_path
    assert checkpoints.resolve("someone/some-ouro@574fa66c") == tmp_path
    assert [call[:2] for call in calls] == [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", None),
        ("someone/some-ouro", "574fa66c"),
    ]
    assert {"*.safetensors", "*.json"} <= set(calls[0][2])


def test_a_hub_that_is_not_reached_is_told_with_the_name_of_the_model(monkeypatch):
    class Hub:
        @staticmethod
        def snapshot_download(repository, **options):
            raise RuntimeError("no\nnetwork")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    with pytest.raises(FileNotFoundError, match=r"'someone/some-ouro' .* \(no network\); without a hub there are ouro"):
        checkpoints.resolve("someone/some-ouro")


def test_no_name_is_not_the_current_folder():
    with pytest.raises(FileNotFoundError, match="no model '': neither one of ouro-tiny"):
        checkpoints.resolve("")
