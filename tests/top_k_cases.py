"""Rows of scores that are hard to select from, and the right ids by NumPy, independent of the packages."""

import numpy as np

SMALLEST = float(np.finfo(np.float32).smallest_subnormal)

# Each makes one row of n scores.
KINDS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "tied": lambda rng, n: rng.integers(-1, 3, n),
    "equal": lambda rng, n: np.full(n, -2.5),
    "signed_zeros": lambda rng, n: rng.choice([0.0, -0.0], n),
    "two_thirds_zero": lambda rng, n: np.where(rng.random(n) < 2 / 3, 0.0, rng.standard_normal(n)),
    "relu": lambda rng, n: np.maximum(rng.standard_normal(n), 0.0),
    "masked_in_part": lambda rng, n: np.where(
        rng.random(n) < 0.7, rng.choice([np.nan, -np.nan, -np.inf], n), rng.standard_normal(n)
    ),
    "infinities": lambda rng, n: rng.choice([np.inf, -np.inf, np.nan, 3e38, -3e38], n),
    "denormal": lambda rng, n: rng.integers(-n, n, n) * SMALLEST,
    "denormal_ties": lambda rng, n: rng.choice([0.0, -0.0, SMALLEST, -SMALLEST, 2 * SMALLEST], n),
    "huge": lambda rng, n: rng.standard_normal(n) * 1e37,
    "heavy_tail": lambda rng, n: np.exp(np.clip(20 * rng.standard_normal(n), -100, 88)),
    "negative_heavy_tail": lambda rng, n: -np.exp(np.clip(20 * rng.standard_normal(n), -100, 88)),
    "neighbours": lambda rng, n: 1.0 + rng.integers(0, 6, n) * 2.0**-23,
    "one_outlier": lambda rng, n: np.where(np.arange(n) == rng.integers(n), 3e38, rng.standard_normal(n) * 1e-30),
    "ascending": lambda rng, n: np.arange(n) - n / 2,
    "descending": lambda rng, n: n / 2 - np.arange(n),
    "one_valid": lambda rng, n: np.where(np.arange(n) == rng.integers(n), -3.0, -np.inf),
    "all_masked": lambda rng, n: rng.choice([-np.inf, np.nan], n),
    "any_bits": lambda rng, n: rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32),
}


def make_rows(seed, size):
    """f32[len(KINDS), size]: one row of each kind."""
    rng = np.random.default_rng(seed)
    return np.stack([np.asarray(make(rng, size), np.float32) for make in KINDS.values()])


def make_lengths(seed, rows, size, k):
    """i32[rows], half of them the whole row, the others from nothing to far beyond it."""
    rng = np.random.default_rng(seed)
    odd = rng.choice([0, 1, -5, k, size // 2, size - 1, size + 9, 2**31 - 1, -(2**31)], rows)
    return np.where(rng.random(rows) < 0.5, size, odd).astype(np.int32)


def right_ids(scores, k, lengths=None, order="score"):
    """i32[rows, k] for scores [rows, S], lengths None or [rows]: a stable sort of the bits, as 64-bit integers."""
    scores = np.asarray(scores).astype(np.float32)
    rows, size = scores.shape
    lengths = np.full(rows, size) if lengths is None else np.asarray(lengths)
    bits = np.ascontiguousarray(scores).view(np.int32).astype(np.int64)
    keys = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    masked = np.isnan(scores) | np.isneginf(scores) | (np.arange(size) >= lengths[:, None])
    ids = np.argsort(np.where(masked, 2**40, -keys), axis=-1, kind="stable")[:, :k]
    ids = np.where(np.take_along_axis(masked, ids, axis=-1), size, ids)
    ids = np.sort(ids, axis=-1) if order == "id" else ids
    ids = np.pad(ids, [(0, 0), (0, k - ids.shape[1])], constant_values=size)
    return np.where(ids == size, -1, ids).astype(np.int32)


def assert_right(ids, scores, k, lengths=None, order="score"):
    """Every id, in its place; names the first row that is wrong."""
    expected, ids = right_ids(scores, k, lengths, order), np.asarray(ids)
    assert ids.dtype == np.int32
    assert ids.shape == expected.shape
    wrong = np.argwhere(ids != expected)
    if len(wrong):
        row, place = wrong[0]
        kind = list(KINDS)[row % len(KINDS)]
        raise AssertionError(
            f"row {row} ({kind}, if the rows are those of make_rows), place {place}: id {ids[row, place]}, "
            f"expected {expected[row, place]}; {len(wrong)} of {ids.size} ids differ"
        )
