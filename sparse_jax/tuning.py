"""Measured settings of the kernels: the file that `sparse-jax tune` writes, and what `config=` takes from it.

The file holds a list of entries, each for one GPU, one version of JAX and of this library, and one shape of call:

    {"device": "NVIDIA H200", "jax": "0.11.2", "sparse_jax": "0.1.0", "shape": {fields of CallShape},
     "config": {fields of Config; none: the kernels' own choice was the fastest}, ...}
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import typing
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from pallas_kernels import Config

FORMAT = "sparse_jax tuning, version 1"
_Fields = TypeVar("_Fields", "CallShape", Config)


class TuningWarning(UserWarning):
    """A tuning file has nothing usable for this entry, machine or call; the kernels choose for themselves instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallShape:
    """What a measured setting belongs to: the shapes and dtypes of a call.

    It leaves out what else is static and may change the speed: `window`, `return_weights`, which kinds of scales and
    which positions are given.
    """

    operation: str  # name of the public function
    batch: int  # B
    rows: int  # T
    q_heads: int  # Hq
    kv_heads: int  # Hkv
    key_width: int  # D
    value_width: int  # Dv
    page_size: int  # P
    tokens: int  # keys a row can read: table width * P, chosen pages * P, or chosen tokens
    lists_per_row: bool  # each of the T rows has its own list of ids
    cache_dtype: str
    q_dtype: str

    @staticmethod
    def of(operation: str, q: Any, k_pages: Any, v_pages: Any, ids: Any, *, by_page: bool) -> CallShape:
        """The shape of a call with q [B, T, Hq, D].

        ids: what lists the keys of a row, [B, Hkv or 1, n] or, where it may differ by row, [B, T or 1, Hkv, n].
        by_page: they are pages, not tokens.
        """
        batch, rows, q_heads, key_width = q.shape
        _, kv_heads, page_size, value_width = v_pages.shape
        return CallShape(
            operation=operation,
            batch=batch,
            rows=rows,
            q_heads=q_heads,
            kv_heads=kv_heads,
            key_width=key_width,
            value_width=value_width,
            page_size=page_size,
            tokens=ids.shape[-1] * (page_size if by_page else 1),
            lists_per_row=ids.ndim == 4 and ids.shape[1] > 1,
            cache_dtype=k_pages.dtype.name,
            q_dtype=q.dtype.name,
        )

    def __str__(self) -> str:
        fields = dataclasses.asdict(self)
        return f"{fields.pop('operation')}({', '.join(f'{name}={value}' for name, value in fields.items())})"


class Machine(NamedTuple):
    """What measured times depend on beside the shape."""

    device: str
    jax: str
    sparse_jax: str

    @staticmethod
    def here() -> Machine:
        """The default device and the installed versions."""
        try:
            version = importlib.metadata.version("sparse-jax")
        except importlib.metadata.PackageNotFoundError:  # run from a checkout
            version = "not installed"
        return Machine(jax.devices()[0].device_kind, jax.__version__, version)

    def __str__(self) -> str:
        return f"{self.device} with jax {self.jax} and sparse_jax {self.sparse_jax}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Measured settings by shape of call, to be passed as `config=`; hashable, so static under `jax.jit`.

    A call takes the Config of exactly its shape; without one, the kernels choose as they do for `config=None`.
    """

    entries: tuple[tuple[CallShape, Config], ...] = ()
    source: str = dataclasses.field(default="a Tuning", compare=False)  # for messages

    def find(self, shape: CallShape) -> Config | None:
        """The Config of a shape. None, with a TuningWarning, where it is not there."""
        config = dict(self.entries).get(shape)
        if config is None and self.entries:  # an empty one has been reported when it was loaded
            warnings.warn(
                f"{self.source} has no setting for {shape}: the kernel chooses for itself. `sparse-jax tune` measures "
                "this shape.",
                TuningWarning,
                stacklevel=2,
            )
        return config


def load_tuning(path: str | os.PathLike[str]) -> Tuning:
    """Reads the settings measured on this GPU with these versions of JAX and this library.

    What cannot be used is left out with a TuningWarning: a broken entry, which is named, or all entries, where the
    file is for other machines. Raises FileNotFoundError, and ValueError for a file that is no tuning file.
    """
    here, found, others = Machine.here(), {}, set()
    for number, entry in enumerate(read_entries(path)):
        try:
            machine = _machine(entry)
            if machine == here:
                found[_build(CallShape, entry.get("shape"))] = _build(Config, entry.get("config"))
            else:
                others.add(str(machine))
        except (TypeError, ValueError) as error:
            warnings.warn(f"{path}: entry {number} is skipped: {error}", TuningWarning, stacklevel=2)
    if not found:
        warnings.warn(
            f"{path} has no setting for {here}: the kernels choose for themselves. It is for "
            f"{'; '.join(sorted(others)) or 'no machine at all'}.",
            TuningWarning,
            stacklevel=2,
        )
    return Tuning(entries=tuple(found.items()), source=str(path))


def read_entries(path: str | os.PathLike[str]) -> list[Any]:
    """The entries of a file, unchecked. Raises FileNotFoundError, and ValueError for a file that is no tuning file."""
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no text at all
        raise ValueError(f"{path} is not a tuning file: {error}") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT or not isinstance(content.get("entries"), list):
        raise ValueError(
            f"{path} is not a tuning file of this version: it needs the format {FORMAT!r} and a list of entries, and "
            f"its format is {found!r}"
        )
    return content["entries"]


def make_entry(machine: Machine, shape: CallShape, config: Config, **measured: Any) -> dict[str, Any]:
    """An entry of the file; `measured` is for people to read."""
    fields = dataclasses.fields(config)
    chosen = {field.name: getattr(config, field.name) for field in fields}
    changed = {field.name: chosen[field.name] for field in fields if chosen[field.name] != field.default}
    return {**machine._asdict(), "shape": dataclasses.asdict(shape), "config": changed, **measured}


def save_entries(path: str | os.PathLike[str], entries: Sequence[dict[str, Any]]) -> None:
    """Adds entries to a file, or makes it. They replace those of the same machine and shape; all others stay.

    The file is never half-written: a new one takes its place. Raises ValueError for a file that is no tuning file.
    """
    path = pathlib.Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {_identity(entry): entry for entry in (read_entries(path) if path.exists() else [])}
    kept |= {_identity(entry): entry for entry in entries}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        text = json.dumps({"format": FORMAT, "entries": list(kept.values())}, indent=1) + "\n"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _machine(entry: Any) -> Machine:
    if not isinstance(entry, dict):
        raise TypeError(f"it is no object but {entry!r}")
    for name in Machine._fields:
        if not isinstance(entry.get(name), str):
            raise TypeError(f"{name} must be a text, got {entry.get(name)!r}")
    return Machine(*(entry[name] for name in Machine._fields))


def _identity(entry: Any) -> str:
    """Equal for entries that replace each other."""
    if isinstance(entry, dict):
        entry = [entry.get(name) for name in (*Machine._fields, "shape")]
    return json.dumps(entry, sort_keys=True)


def _build(cls: type[_Fields], values: Any) -> _Fields:
    """A dataclass from its fields as JSON has them. Raises TypeError or ValueError that says what is wrong."""
    types = typing.get_type_hints(cls)
    if not isinstance(values, dict):
        raise TypeError(f"the fields of {cls.__name__} must be an object, got {values!r}")
    for name, value in values.items():
        if name not in types:
            raise ValueError(f"{cls.__name__} has no field {name!r}")
        # To Python, True is an int too.
        if not isinstance(value, types[name]) or (isinstance(value, bool) and types[name] is not bool):
            raise TypeError(f"{name} of {cls.__name__} must be {types[name]}, got {value!r}")
    return cls(**values)
