"""Tuning values of the decode kernels and their defaults, a pure function of shapes and dtypes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels import lowering

# Programs that run at once where each holds three stages of 32 KB: two on each multiprocessor.
WAVE = 2 * lowering.MULTIPROCESSORS
MANY_WAVES = 8  # so many that an uneven last one does not matter
LONG = 8192  # keys of a row from which the merge of a few more splits costs nothing beside them
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
    page_size: int,
) -> Launch:
    """Decides every field of a config from shapes and dtypes.

    groups: (request, KV head) pairs of `rows` query rows. tokens: keys of a row, the static bound (table width or list
    length), because true lengths are on the device. dtype: that of the cache. page_size: tokens that lie side by side.
    """
    config = config or Config()
    # Accumulators of 64 x 128 float32 are half of a program's registers.
    most_rows = max(16, min(64, 8192 // next_power_of_two(value_width)))
    block_rows = config.block_rows or min(most_rows, max(16, next_power_of_two(rows)))
    programs = groups * -(-rows // block_rows)
    itemsize = jnp.dtype(dtype).itemsize
    row_bytes = (key_width + value_width) * itemsize
    block_tokens = config.block_tokens or max(16, min(64, next_power_of_two(32 * 1024 // row_bytes + 1) // 2))
    scattered = page_size < block_tokens  # a block must first read where each of its keys lies
    crowded = programs >= WAVE and not scattered and itemsize > 1 and not config.exact
    # Two stages leave room for a third program on a multiprocessor, which only many programs can use, and only where
    # the next block's place is known at once (H200, 512 programs of 32,768 bf16 keys, D 128: 1,955 us against 2,025).
    stages = max(1, min(2 if crowded else 3, MOST_STAGE_BYTES // (row_bytes * block_tokens)))
    blocks = -(-tokens // block_tokens)
    return Launch(
        block_tokens=block_tokens,
        block_rows=block_rows,
        # Half the bytes to wait for: four programs of two warps hide the widening of one-byte keys better.
        num_warps=config.num_warps or (2 if itemsize == 1 else 4),
        num_stages=config.num_stages or stages,
        splits=config.splits or choose_splits(programs, blocks, tokens > LONG, scattered, config.exact),
        exact=config.exact,
    )


def choose_splits(programs: int, blocks: int, long: bool, scattered: bool, exact: bool) -> int:
    """How many programs share the keys of one row, of which there are `blocks` blocks.

    Too few programs are cut until they fill the chip: once, or twice over where each block must first read where its
    keys lie (H200, 64 rows of 2,048 bf16 keys, D 128: 23.5 us with 8 splits, 26 with 4). Long rows of many programs are
    cut into many waves, because an uneven last one leaves much of the chip waiting (512 programs of 32,768 such keys:
    2,372 us; cut into 2,048: 2,029 us). `exact`: a fixed number, whatever else is in the batch.
    """
    if exact:
        wanted = 16
    elif long and programs > WAVE // 2:
        wanted = -(-MANY_WAVES * WAVE // programs)
    else:
        wanted = (2 * WAVE if scattered else WAVE) // programs
    return max(1, min(wanted, blocks if scattered else blocks // 2))
