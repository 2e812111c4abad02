"""Tuning values of the decode kernels and their defaults, a pure function of shapes and dtypes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels import lowering


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning values of one decode kernel. A field left None is chosen from the shapes.

    block_tokens: keys that a program reads in one step; a power of two from 16 up.
    block_rows: query rows (T * G of one KV head) of a program; a power of two from 16 up.
    num_warps, num_stages: warps of a program, depth of its software pipeline.
    splits: programs that share the keys of one row; their results are merged.
    exact: split boundaries depend on the widths of the arrays alone, never on the number of rows or on their lengths,
    so that a row's bits do
        not depend on what else is in the batch.

    Raises ValueError for a field that no kernel can use.
    """

    block_tokens: int | None = None
    block_rows: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    splits: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        for name in ("block_tokens", "block_rows"):
            value = getattr(self, name)
            if value is not None and (value < 16 or value & (value - 1)):
                raise ValueError(f"{name} must be a power of two from 16 up, got {value}")
        for name in ("num_warps", "num_stages", "splits"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.num_warps is not None and self.num_warps & (self.num_warps - 1):
            raise ValueError(f"num_warps must be a power of two, got {self.num_warps}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A Config with every field decided."""

    block_tokens: int
    block_rows: int
    num_warps: int
    num_stages: int
    splits: int
    exact: bool


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def resolve(config: Config | None, *, groups: int, rows: int, tokens: int, width: int, dtype: jnp.dtype) -> Launch:
    """Decides every field of a config from shapes and dtypes.

    groups: (request, KV head) pairs, each of `rows` query rows. tokens: keys of a row, the static bound (table width or
    list length), because true lengths are on the device. width: columns of a key and a value together.
    """
    config = config or Config()
    block_rows = config.block_rows or min(64, max(16, next_power_of_two(rows)))
    # 64 keys of 128 + 128 bf16 columns are 32 KB a stage: three stages leave room for two programs on a multiprocessor.
    row_bytes = width * max(jnp.dtype(dtype).itemsize, 2)
    block_tokens = config.block_tokens or max(16, min(64, next_power_of_two(32 * 1024 // row_bytes)))
    num_stages = config.num_stages or 3
    if config.splits:
        splits = config.splits
    else:
        # Two waves of programs hide the uneven ends of rows; at least two blocks each, or the merge costs more than it
        # gives.
        programs = 1 if config.exact else groups * -(-rows // block_rows)
        blocks = -(-tokens // block_tokens)
        wanted = 16 if config.exact else -(-2 * lowering.MULTIPROCESSORS // programs)
        splits = max(1, min(wanted, blocks // 2))
    return Launch(
        block_tokens=block_tokens,
        block_rows=block_rows,
        num_warps=config.num_warps or 4,
        num_stages=num_stages,
        splits=splits,
        exact=config.exact,
    )
