"""Where a checkpoint is: inside the package, in the user's cache, in a folder or a GGUF file, or on a hub."""

import importlib.resources
import os
import re
from pathlib import Path

import platformdirs

from models.checkpoints.safetensors_files import SINGLE

SHIPPED = {"ouro-tiny": "ouro_tiny", "deepseek-tiny": "deepseek_tiny"}
"""Models inside the package: name -> folder under `models/pretrained`."""

FETCHED = ("smollm2-135m",)
"""Models that `sparse-jax fetch` brings: names, and folders under `cache_folder()`."""

CACHE = "SPARSE_JAX_CACHE"
"""The environment variable that moves the cache."""


def cache_folder() -> Path:
    """The folder of fetched models: SPARSE_JAX_CACHE, else the user's cache folder of this platform."""
    return Path(os.environ.get(CACHE) or platformdirs.user_cache_dir("sparse-jax", appauthor=False)).expanduser()


def resolve(name: str | Path) -> Path:
    """The folder, or the GGUF file, of a model.

    name: a shipped name (`ouro-tiny`, `deepseek-tiny`), else a fetched one (`smollm2-135m`), else a local folder or
    .gguf file, else `owner/name[@revision]` of a hub.

    Raises FileNotFoundError for what is none of these or cannot be fetched, and ImportError for a hub name without the
    `hub` extra.
    """
    text = str(name)
    if text in SHIPPED:
        folder = Path(str(importlib.resources.files("models") / "pretrained" / SHIPPED[text]))
        if not (folder / SINGLE).is_file():
            raise FileNotFoundError(f"this installation does not contain the model {text!r} (looked in {folder})")
        return folder
    if text in FETCHED:
        folder = cache_folder() / text
        if not folder.is_dir():
            raise FileNotFoundError(
                f"the model {text!r} is not in {folder.parent} yet; get it with: sparse-jax fetch {text}"
            )
        return folder
    path = Path(text).expanduser()
    if (text.strip() and path.is_dir()) or (path.suffix == ".gguf" and path.is_file()):
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", text) and not text.startswith(".") and path.suffix != ".gguf":
        return _from_hub(*text.split("@", 1))
    known = ", ".join([*SHIPPED, *FETCHED])
    raise FileNotFoundError(
        f"no model {text!r}: neither one of {known}, nor a folder or .gguf file, nor owner/name of a hub"
    )


def _from_hub(repository: str, revision: str | None = None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"{repository!r} is no local folder, and fetching it from a hub needs: pip install 'sparse-jax[hub]'"
        ) from error
    patterns = ["*.safetensors", "*.json", "*.jinja"]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of the hub's client or of what it connects with, which differs by its version
        known = ", ".join([*SHIPPED, *FETCHED])
        why = " ".join(str(error).split()) or type(error).__name__
        raise FileNotFoundError(
            f"the model {repository!r} is no local folder and could not be fetched from its hub ({why}); "
            f"without a hub there are {known}, folders and .gguf files"
        ) from error
