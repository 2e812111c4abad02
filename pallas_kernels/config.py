"""Tuning values of the decode kernels and their defaults, a pure function of shapes and dtypes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels import lowering

# Programs that run at once where each holds three stages of 32 KB: two on each multiprocessor.
WAVE = 2 * lowering.MULTIPROCESSORS
INT32_MAX = 2**31 - 1
MOST_STAGE_BYTES = 160 * 1024  # of 227 KB shared memory; queries and probabilities need some too


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning values of one decode kernel. A field left None is chosen from the shapes.

    block_tokens: keys that a program reads in one step; a power of two from 16 up.
    block_rows: query rows (T * G of one KV head) of a program; a power of two from 16 up.
    num_warps, num_stages: warps of a program, depth of its software pipeline.
    splits: programs that share the keys of one row; their results are merged.
    exact: split boundaries depend on the widths of the arrays alone, never on the number of rows or on their lengths,
        so that a row's bits do not depend on what else is in the batch.

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


def resolve(
    config: Config | None,
    *,
    groups: int,
    rows: int,
    tokens: int,
    key_width: int,
    value_width: int,
    dtype: jnp.dtype,
) -> Launch:
    """Decides every field of a config from shapes and dtypes.

    groups: (request, KV head) pairs of `rows` query rows. tokens: keys of a row, the static bound (table width or list
    length), because true lengths are on the device. dtype: that of the cache.
    """
    config = config or Config()
    # Accumulators of 64 x 128 float32 are half of a program's registers.
    most_rows = max(16, min(64, 8192 // next_power_of_two(value_width)))
    block_rows = config.block_rows or min(most_rows, max(16, next_power_of_two(rows)))
    programs = groups * -(-rows // block_rows)
    # Short lists of many rows start and end often: small programs overlap that better (H200: 148 against 152 us).
    many_short = programs > WAVE and tokens <= 8192 and not config.exact
    stage_bytes = (16 if many_short else 32) * 1024
    row_bytes = (key_width + value_width) * max(jnp.dtype(dtype).itemsize, 2)
    block_tokens = config.block_tokens or max(16, min(64, next_power_of_two(stage_bytes // row_bytes + 1) // 2))
    stages = max(1, min(4 if many_short else 3, MOST_STAGE_BYTES // (row_bytes * block_tokens)))
    blocks = -(-tokens // block_tokens)
    return Launch(
        block_tokens=block_tokens,
        block_rows=block_rows,
        num_warps=config.num_warps or (2 if many_short else 4),
        num_stages=config.num_stages or stages,
        splits=config.splits or choose_splits(programs, blocks, config.exact),
        exact=config.exact,
    )


def choose_splits(programs: int, blocks: int, exact: bool) -> int:
    """How many programs share the keys of one row, of which there are `blocks` blocks.

    One wave of programs that fills the chip, or so many that an uneven last wave does not matter: between the two, half
    of the chip waits (H200, 512 programs of equal length: 2,372 us; cut into 2,048: 2,029 us). At least two blocks
    each, or the merge costs more than it gives. `exact`: a fixed number, whatever else is in the batch.
    """
    if exact:
        wanted = 16
    elif programs <= WAVE // 2:
        wanted = WAVE // programs
    else:
        wanted = -(-8 * WAVE // programs)
    return max(1, min(wanted, blocks // 2))
