"""FP8 weights with one scale for each block of 128 x 128, as DeepSeek releases them: back to float32.

Beside NAME.weight, float8_e4m3fn [out, in], lies NAME.weight_scale_inv, float32 [ceil(out / 128), ceil(in / 128)]: what
each block is multiplied by.
"""

import functools
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BLOCK = 128
DTYPE = "F8_E4M3"


def scale_of(name: str) -> str:
    """The name of the scales of a tensor."""
    return f"{name}_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a matrix [out, in]."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantised(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float8_e4m3fn [out, in] and its scales -> float32 [out, in]."""
    by_row = np.repeat(np.asarray(scale, np.float32), BLOCK, axis=0)[: weight.shape[0]]
    return weight.astype(np.float32) * np.repeat(by_row, BLOCK, axis=1)[:, : weight.shape[1]]


def read(file: Path, name: str) -> np.ndarray:
    """A tensor of float8_e4m3fn, which safetensors does not hand out as NumPy's."""
    stat = file.stat()
    start, entries = _header(file, (stat.st_mtime_ns, stat.st_size))
    begin, end = entries[name]["data_offsets"]
    with open(file, "rb") as handle:
        handle.seek(start + begin)
        return np.frombuffer(handle.read(end - begin), ml_dtypes.float8_e4m3fn).reshape(entries[name]["shape"])


@functools.lru_cache(maxsize=2)
def _header(file: Path, written: tuple[int, int]) -> tuple[int, dict[str, Any]]:
    """Where the data of a file begins, and what is in it; `written` tells a file from an older one in its place."""
    del written
    with open(file, "rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        return 8 + length, json.loads(handle.read(length))
