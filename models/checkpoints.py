"""Reading and writing Ouro checkpoints: safetensors in one file or in indexed shards, with a `config.json`.

A checkpoint is judged by its headers alone, name by name, before anything is allocated. Linear weights are stored
[out, in], which is how `models.ouro` holds them, so a tensor only ever changes its dtype.
"""

import importlib.resources
import json
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from models.ouro import InitConfig, Ouro, OuroConfig

SHIPPED = {"ouro-tiny": "ouro_tiny"}
"""Models inside the package: name -> folder under `models/pretrained`."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "BF16", "F16")
DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # recomputed in float32; some writers store it rounded


class CheckpointError(ValueError):
    """A checkpoint that is not what its configuration says; the message names every tensor or field."""


# Where a checkpoint is


def resolve(name: str | Path) -> Path:
    """The folder of a model: a shipped name (`ouro-tiny`), else a local folder, else `owner/name[@revision]` of a hub.

    Raises FileNotFoundError for what is none of these, and ImportError for a hub name without the `hub` extra.
    """
    text = str(name)
    if text in SHIPPED:
        folder = Path(str(importlib.resources.files("models") / "pretrained" / SHIPPED[text]))
        if not (folder / SINGLE).is_file():
            raise FileNotFoundError(f"this installation does not contain the model {text!r} (looked in {folder})")
        return folder
    if Path(text).is_dir():
        return Path(text)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", text) and not text.startswith("."):
        return _from_hub(*text.split("@", 1))
    raise FileNotFoundError(
        f"no model {text!r}: neither a folder, nor a shipped model ({', '.join(SHIPPED)}), nor owner/name of a hub"
    )


def _from_hub(repository: str, revision: str | None = None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"{repository!r} is no local folder, and fetching it from a hub needs: pip install 'sparse-jax[hub]'"
        ) from error
    return Path(snapshot_download(repository, revision=revision, allow_patterns=["*.safetensors", "*.json"]))


# config.json


def config_from_json(data: dict[str, Any]) -> OuroConfig:
    """The configuration in Hugging Face field names. Raises CheckpointError for what this model does not compute."""
    missing = [
        key
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if key not in data
    ]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    rope = data.get("rope_parameters") or {}
    _refuse_other_models(data, rope)
    heads, eos = data["num_attention_heads"], data.get("eos_token_id")
    stops = {eos} if isinstance(eos, int) else set(eos or ())
    if stops & {0, 2}:  # the released files say 0, chat ends with 2, one converted copy says 2
        stops |= {0, 2}
    std = data.get("initializer_range", 0.02)
    return OuroConfig(
        vocab_size=data["vocab_size"],
        hidden_size=data["hidden_size"],
        intermediate_size=data["intermediate_size"],
        num_layers=data["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=data.get("num_key_value_heads") or heads,
        head_dim=data.get("head_dim") or data["hidden_size"] // heads,
        loops=data.get("total_ut_steps", 4),
        rope_theta=float(rope.get("rope_theta", data.get("rope_theta", 1e6))),
        norm_eps=data.get("rms_norm_eps", 1e-6),
        max_positions=data.get("max_position_embeddings", 65_536),
        exit_threshold=float(data.get("early_exit_threshold", 1.0)),
        exit_step=data.get("early_exit_step"),
        bos_id=data.get("bos_token_id"),
        stop_ids=tuple(sorted(stops)),
        init=InitConfig(embedding_std=std, matrix_std=std, head_std=std, gate_std=std),
    )


def _refuse_other_models(data: dict[str, Any], rope: dict[str, Any]) -> None:
    """Each field that would change the computation must say what this model does."""
    allowed: dict[str, tuple[Any, ...]] = {
        "model_type": ("ouro",),
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "tie_word_embeddings": (False,),
        "use_sliding_window": (False,),
        "attention_bias": (False,),
    }
    wrong = [
        f"{key} = {data[key]!r} (supported: {', '.join(map(repr, values))})"
        for key, values in allowed.items()
        if key in data and data[key] not in values
    ]
    if rope.get("rope_type", "default") != "default":
        wrong.append(f"rope_parameters.rope_type = {rope['rope_type']!r} (supported: 'default')")
    if other := set(data.get("layer_types") or ()) - {"full_attention"}:
        wrong.append(f"layer_types = {sorted(other)} (supported: full_attention)")
    if wrong:
        raise CheckpointError("config.json asks for what this Ouro does not compute: " + "; ".join(wrong))


def config_to_json(config: OuroConfig) -> dict[str, Any]:
    """The fields of `config.json`, in Hugging Face names."""
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "total_ut_steps": config.loops,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "early_exit_threshold": config.exit_threshold,
        "early_exit_step": config.exit_step,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.num_layers,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.stop_ids),
    }


def read_config(folder: str | Path) -> OuroConfig:
    """The configuration of a checkpoint folder. Raises FileNotFoundError or CheckpointError."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no configuration at {path}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    return config_from_json(data)


# Tensors


def tensor_name(path: Iterable[Any]) -> str:
    """The checkpoint's name of a parameter: ('layers', 0, 'mlp', 'up_proj') -> model.layers.0.mlp.up_proj.weight."""
    parts = [str(part) for part in path]
    if parts[-1] not in ("weight", "bias"):
        parts.append("weight")
    return ".".join(parts if parts[0] == "lm_head" else ["model", *parts])


def expected_shapes(config: OuroConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape; allocates nothing."""
    model = nnx.eval_shape(lambda: Ouro(config, rngs=nnx.Rngs(0)))
    return {tensor_name(path): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def locate(folder: str | Path, config: OuroConfig) -> dict[str, Path]:
    """The file of every tensor, after all headers agree with the configuration by name, shape and dtype.

    Reads headers only. Raises FileNotFoundError without weights and CheckpointError that names every tensor that is
    unknown, missing, there twice, not where the index says, of another shape, or of a dtype that is no float here.
    """
    folder = Path(folder)
    index = _read_index(folder)
    files = [folder / SINGLE] if index is None else [folder / name for name in sorted(set(index.values()))]
    expected = expected_shapes(config)
    found: dict[str, Path] = {}
    problems: dict[str, list[str]] = {
        "unknown": [],
        "missing": [],
        "duplicate": [],
        "misplaced": [],
        "shape": [],
        "dtype": [],
    }
    for file in files:
        for name, dtype, shape in _read_header(file):
            if DERIVED.search(name):
                continue
            if name not in expected:
                problems["unknown"].append(name)
            elif name in found:
                problems["duplicate"].append(f"{name} (in {found[name].name} and {file.name})")
            elif index is not None and index.get(name) != file.name:
                problems["misplaced"].append(f"{name} (in {file.name}, the index says {index.get(name)})")
            elif shape != expected[name]:
                problems["shape"].append(f"{name} (is {list(shape)}, should be {list(expected[name])})")
            elif dtype not in DTYPES:
                problems["dtype"].append(f"{name} (is {dtype}, should be one of {', '.join(DTYPES)})")
            found.setdefault(name, file)
    problems["missing"] = [name for name in expected if name not in found]
    if any(problems.values()):
        lines = [f"  {kind}: {_shortened(names)}" for kind, names in problems.items() if names]
        raise CheckpointError("\n".join([f"the weights in {folder} do not fit its config.json:", *lines]))
    return {name: found[name] for name in expected}


def _shortened(names: list[str], limit: int = 12) -> str:
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name of a sharded checkpoint, None for one file."""
    if (folder / SINGLE).is_file():
        return None
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"no weights in {folder}: neither {SINGLE} nor {INDEX}")
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / INDEX} is no index of safetensors: {error!r}") from error
    for name in set(index.values()):
        if Path(name).name != name:
            raise CheckpointError(f"{folder / INDEX} points outside its folder: {name!r}")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / INDEX} names the shard {name}, which is not there")
    return index


def _read_header(file: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of each tensor, as often as the header has it: the library keeps the last of two."""
    try:
        with safetensors.safe_open(file, framework="numpy"):
            pass  # offsets and sizes are checked here
        with open(file, "rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            entries = json.loads(handle.read(length), object_pairs_hook=list)
    except (safetensors.SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} is not a sound safetensors file: {error}") from error
    tensors = [(name, dict(entry)) for name, entry in entries if name != "__metadata__"]
    return [(name, entry["dtype"], tuple(entry["shape"])) for name, entry in tensors]


def load(name: str | Path, *, dtype=None, param_dtype=None, **options) -> tuple[OuroConfig, Ouro]:
    """Load a model by shipped name, folder or hub name (see `resolve`).

    dtype is that of the activations: by default float32 on a CPU and bfloat16 elsewhere. param_dtype defaults to dtype.
    Other options go to `Ouro`. Raises what `resolve`, `read_config` and `locate` raise, before anything is allocated.
    """
    folder = resolve(name)
    config = read_config(folder)
    files = locate(folder, config)
    dtype = dtype or (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    abstract = nnx.eval_shape(
        lambda: Ouro(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype or dtype, **options)
    )
    graph, state = nnx.split(abstract)
    flat = nnx.to_flat_state(state)
    paths = {tensor_name(path): (path, leaf) for path, leaf in flat}
    loaded = []
    for file in sorted(set(files.values())):
        with safetensors.safe_open(file, framework="numpy") as tensors:
            for tensor in (tensor for tensor, at in files.items() if at == file):
                path, leaf = paths[tensor]
                loaded.append((path, leaf.replace(jnp.asarray(tensors.get_tensor(tensor), leaf.dtype))))
    return config, nnx.merge(graph, nnx.from_flat_state(loaded))


def save(folder: str | Path, model: Ouro, *, dtype=None, max_shard_bytes: int | None = None) -> None:
    """Write `config.json` and the weights (in `dtype`, default: as they are) in the format that `load` reads.

    One file, or shards of at most `max_shard_bytes` (a single larger tensor gets a shard of its own) with an index.
    Each file appears under its name only when it is complete.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        tensor_name(path): np.asarray(leaf[...] if dtype is None else leaf[...].astype(dtype))
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    _write(folder / "config.json", (json.dumps(config_to_json(model.config), indent=2) + "\n").encode())
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write(folder / SINGLE, safetensors.numpy.save(shards[0], metadata={"format": "pt"}))
        (folder / INDEX).unlink(missing_ok=True)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, safetensors.numpy.save(shard, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write(folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2).encode())
    (folder / SINGLE).unlink(missing_ok=True)


def _shards(tensors: dict[str, np.ndarray], max_bytes: int | None) -> list[dict[str, np.ndarray]]:
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if max_bytes is not None and shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)
