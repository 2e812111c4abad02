"""The heuristics: a pure function of shapes, within what the hardware has."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

from pallas_kernels.config import WAVE, Config, choose_splits, resolve

SHARED_MEMORY = 227 * 1024
SHAPES = {
    "groups": 8,
    "rows": 4,
    "tokens": 4096,
    "key_width": 128,
    "value_width": 128,
    "dtype": jnp.bfloat16,
    "page_size": 64,
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (80, 96), (256, 256), (576, 512)])
def test_launch_fits_the_hardware(dtype, widths):
    key_width, value_width = widths
    for groups, tokens, rows in itertools.product((1, 8, 64, 512, 65537), (16, 2048, 131072), (1, 4, 48, 2048)):
        shapes = {"groups": groups, "rows": rows, "tokens": tokens, "key_width": key_width, "value_width": value_width}
        launch = resolve(None, **shapes, dtype=dtype, page_size=64)
        stage = launch.block_tokens * sum(widths) * jnp.dtype(dtype).itemsize
        assert stage * launch.num_stages <= SHARED_MEMORY
        assert launch.block_tokens >= 16
        assert launch.block_rows * value_width <= 64 * 128 or launch.block_rows == 16
        assert 1 <= launch.splits <= max(1, tokens // launch.block_tokens // 2)


@pytest.mark.parametrize(
    ("programs", "blocks", "long", "scattered", "splits"),
    [
        (8, 2048, True, False, 33),
        (64, 512, True, False, 4),
        (512, 512, True, False, 5),
        (8, 32, False, False, 16),
        (8, 32, False, True, 32),
        (64, 32, False, True, 8),
        (64, 32, False, False, 4),
        (256, 32, False, True, 2),
        (256, 32, False, False, 1),
        (4096, 32, False, True, 1),
    ],
)
def test_splits_fill_the_chip(programs, blocks, long, scattered, splits):
    assert choose_splits(programs, blocks, long, scattered, exact=False) == splits
    assert programs * splits > WAVE * 0.9 or splits == blocks // 2


def test_contract_12_exact_splits_do_not_depend_on_the_batch():
    for tokens in (128, 4096, 131072):
        shapes = {**SHAPES, "tokens": tokens}
        launches = {resolve(Config(exact=True), **{**shapes, "groups": groups}) for groups in (1, 8, 512, 70000)}
        assert len(launches) == 1


def test_given_fields_are_kept():
    given = Config(block_tokens=32, block_rows=16, num_warps=8, num_stages=2, splits=7)
    assert dataclasses.asdict(resolve(given, **SHAPES)) == dataclasses.asdict(given)
