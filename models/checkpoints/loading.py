"""Loading and saving whole models, and their configurations."""

import json
from pathlib import Path
from typing import Any

from models.checkpoints import gguf_files, safetensors_files
from models.checkpoints.errors import CheckpointError
from models.checkpoints.families import (
    Config,
    Model,
    abstract_model,
    config_from_json,
    config_to_json,
    default_dtype,
    expected_shapes,
    family_of,
    filled,
    tensors_of,
)
from models.checkpoints.places import resolve


def read_config(place: str | Path) -> Config:
    """The configuration of a checkpoint folder or GGUF file. Raises FileNotFoundError or CheckpointError."""
    if file := gguf_files.find(Path(place)):
        return gguf_files.open_gguf(file).config
    path = Path(place) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no configuration at {path}")
    data = _read_json(path)
    # Chat models name their second end of text only there.
    more = path.with_name("generation_config.json")
    if more.is_file() and (ends := _read_json(more).get("eos_token_id")) is not None:
        data["eos_token_id"] = _as_list(data.get("eos_token_id")) + _as_list(ends)
    return config_from_json(data)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not an object of JSON")
    return data


def _as_list(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def locate(folder: str | Path, config: Config) -> dict[str, Path]:
    """The safetensors file of every tensor, after all headers agree with the configuration by name, shape and dtype.

    Of FP8 tensors, their scales too. Reads headers only. Raises FileNotFoundError without weights and CheckpointError
    that names every tensor that does not fit.
    """

    def ignored(name: str) -> bool:
        return family_of(config).ignored(name, config)

    return safetensors_files.locate(folder, expected_shapes(config), ignored)


def load(name: str | Path, *, dtype: Any = None, param_dtype: Any = None, **options: Any) -> tuple[Config, Model]:
    """Load a model by name, folder, GGUF file or hub name (see `resolve`).

    dtype is that of the activations: by default float32 on a CPU and bfloat16 elsewhere. param_dtype defaults to dtype.
    Other options go to the model. Raises what `resolve`, `read_config` and `locate` raise, before anything is
    allocated.
    """
    place = resolve(name)
    config = read_config(place)
    dtype = dtype or default_dtype()

    def empty() -> Model:
        return abstract_model(config, dtype=dtype, param_dtype=param_dtype or dtype, **options)

    if file := gguf_files.find(place):
        opened = gguf_files.open_gguf(file)
        opened.check(expected_shapes(config))
        return config, filled(empty(), opened.read)
    with safetensors_files.reader(locate(place, config)) as read:
        return config, filled(empty(), read)


def save(folder: str | Path, model: Model, *, dtype: Any = None, max_shard_bytes: int | None = None) -> None:
    """Write `config.json` and the weights (in `dtype`, default: as they are) in the format that `load` reads.

    One file, or shards of at most `max_shard_bytes` (a single larger tensor gets a shard of its own) with an index.
    Each file appears under its name only when it is complete.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_to_json(model.config), indent=2) + "\n"
    safetensors_files.write_file(folder / "config.json", text.encode())
    safetensors_files.write(folder, tensors_of(model, dtype), max_shard_bytes)
