"""Safetensors files: one file or indexed shards, judged by their headers alone before anything is allocated."""

import contextlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from models.checkpoints import fp8_blocks
from models.checkpoints.errors import CheckpointError, Problems

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "BF16", "F16")
DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # recomputed in float32; some writers store it rounded


def locate(
    folder: str | Path, expected: dict[str, tuple[int, ...]], ignored: Callable[[str], bool] = lambda name: False
) -> dict[str, Path]:
    """The file of every expected tensor, after all headers agree by name, shape and dtype.

    A matrix may be FP8 if its scales are there (`fp8_blocks`); the result has them, too. `ignored` tells which other
    tensors there may be. Reads headers only. Raises FileNotFoundError without weights and CheckpointError that names
    every tensor that is unknown, missing, there twice, not where the index says, of another shape, or of a dtype that
    is no float here.
    """
    folder = Path(folder)
    index = _read_index(folder)
    files = [folder / SINGLE] if index is None else [folder / name for name in sorted(set(index.values()))]
    found: dict[str, Path] = {}
    problems = Problems()
    headers = {file: _read_header(file) for file in files}
    fp8 = {name for header in headers.values() for name, dtype, _ in header if dtype == fp8_blocks.DTYPE}
    fp8 = {name for name in fp8 if len(expected.get(name, ())) == 2}
    expected = expected | {fp8_blocks.scale_of(name): fp8_blocks.scale_shape(expected[name]) for name in fp8}
    for file, header in headers.items():
        for name, dtype, shape in header:
            if DERIVED.search(name) or ignored(name):
                continue
            if name not in expected:
                problems.add("unknown", name)
            elif name in found:
                problems.add("duplicate", f"{name} (in {found[name].name} and {file.name})")
            elif index is not None and index.get(name) != file.name:
                problems.add("misplaced", f"{name} (in {file.name}, the index says {index.get(name)})")
            elif problems.judge_shape(name, shape, expected[name]) and dtype not in DTYPES and name not in fp8:
                problems.add("dtype", f"{name} (is {dtype}, should be one of {', '.join(DTYPES)})")
            found.setdefault(name, file)
    for name in expected:
        if name not in found:
            problems.add("missing", name)
    problems.check(folder)
    return {name: found[name] for name in expected}


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


@contextlib.contextmanager
def reader(files: dict[str, Path]) -> Iterator[Callable[[str], np.ndarray]]:
    """A function that reads a tensor by name from the files that `locate` found."""
    with contextlib.ExitStack() as stack:
        opened = {
            file: stack.enter_context(safetensors.safe_open(file, framework="numpy")) for file in set(files.values())
        }

        def read(name: str) -> np.ndarray:
            if (scale := fp8_blocks.scale_of(name)) in files:
                return fp8_blocks.dequantised(fp8_blocks.read(files[name], name), read(scale))
            return opened[files[name]].get_tensor(name)

        yield read


def write(folder: Path, tensors: dict[str, np.ndarray], max_shard_bytes: int | None) -> None:
    """One file, or shards of at most `max_shard_bytes` (a single larger tensor gets its own) with an index.

    Each file appears under its name only when it is complete.
    """
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_file(folder / SINGLE, safetensors.numpy.save(shards[0], metadata={"format": "pt"}))
        (folder / INDEX).unlink(missing_ok=True)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, safetensors.numpy.save(shard, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_file(folder / INDEX, json.dumps(index, indent=2).encode())
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


def write_file(path: Path, data: bytes) -> None:
    """Write a file that appears under its name only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)
