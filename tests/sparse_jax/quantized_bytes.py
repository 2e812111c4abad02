"""The byte layouts of quantised caches once more, in NumPy and float64, from their description alone."""

import math

import ml_dtypes
import numpy as np


def e4m3_value(code):
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = np.array([e4m3_value(code) for code in range(127)])  # 127 is NaN, 128 and up are negative
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(values, table, sign_bit):
    """Codes of the nearest entries, ties to the even code; what is too large gets the last one. No NaN."""
    size = np.abs(values)
    high = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    middle = (table[high - 1] + table[high]) / 2
    up = (size > middle) | ((size == middle) & (high % 2 == 0))
    return np.where(up, high, high - 1) | np.where(np.signbit(values), sign_bit, 0)


def e4m3_codes(values):
    codes = nearest(np.nan_to_num(values, nan=0.0, posinf=1e300, neginf=-1e300), E4M3, 128)
    return np.where(np.isnan(values), 127, codes).astype(np.uint8)


def amax_of(values):
    return np.float32(max([abs(float(v)) for v in values if np.isfinite(v)], default=0.0))


def fp8_scale(amax, scales, least=None):
    quotient = np.float32(amax) / np.float32(448)
    if scales == "raw":
        return np.float32(max(quotient, np.finfo(np.float32).tiny if least is None else np.float32(least)))
    return np.float32(2.0 ** math.ceil(math.log2(max(float(quotient), 1e-4 if least is None else least))))


def scaled_e4m3(values, scale):
    with np.errstate(over="ignore"):
        return e4m3_codes((values / np.float32(scale)).astype(np.float64))  # the quotient is float32 first


def fp8_record(row, latent_dim, scales):
    """The bytes of one token: x f32[d_c + d_r]."""
    codes, factors = [], []
    for start in range(0, latent_dim, 128):
        group = row[start : min(start + 128, latent_dim)]
        factors.append(fp8_scale(amax_of(group), scales))
        codes.append(scaled_e4m3(group, factors[-1]))
    rope = row[latent_dim:].astype(ml_dtypes.bfloat16)
    return np.concatenate([*codes, np.array(factors, np.float32).view(np.uint8), rope.view(np.uint8)])


def nvfp4_record(row, latent_dim):
    rope_dim, blocks = len(row) - latent_dim, latent_dim // 16
    record = np.zeros(-(-(latent_dim // 2 + rope_dim + blocks) // 16) * 16, np.uint8)
    for s in range(blocks):
        block = row[16 * s : 16 * s + 16].astype(np.float64)
        wanted = max(float(amax_of(block)) / 6, 2.0**-9)
        code = min(int(np.searchsorted(E4M3, wanted)), 126)  # the first that is not smaller
        at = blocks // 4 * (s & 3) + (s >> 2) if blocks % 4 == 0 else s
        record[latent_dim // 2 + rope_dim + at] = code
        nibbles = nearest(np.nan_to_num(block / E4M3[code], nan=0.0, posinf=1e300, neginf=-1e300), E2M1, 8)
        for column, nibble in enumerate(nibbles):
            record[8 * s + column // 2] |= nibble << (4 * (column % 2))
    record[latent_dim // 2 : latent_dim // 2 + rope_dim] = e4m3_codes(row[latent_dim:].astype(np.float64))
    return record


def records(x, format, latent_dim, scales="power_of_two"):
    x = np.asarray(x, np.float32)
    if format == "fp8_ds_mla":
        return np.stack([fp8_record(row, latent_dim, scales) for row in x])
    return np.stack([nvfp4_record(row, latent_dim) for row in x])


def index_page(x, scales="power_of_two"):
    """The bytes of one page of index keys f32[P, d]: all keys, then all scales."""
    factors = np.array([fp8_scale(max(amax_of(row), np.float32(1e-4)), scales, least=0.0) for row in x], np.float32)
    keys = [scaled_e4m3(row, factor) for row, factor in zip(x, factors, strict=True)]
    return np.concatenate([*keys, factors.view(np.uint8)])


def ugly(rng, rows, columns):
    """Numbers of many magnitudes, with zeros of both signs, ties, subnormals, infinities and NaN among them."""
    x = (
        rng.standard_normal((rows, columns))
        * np.exp2(rng.integers(-20, 12, (rows, columns // 8 + 1))).repeat(8, 1)[:, :columns]
    )
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, 448.0, 464.0, -480.0, 0.25, 1.25, -2.5, 5.0, 3e38, 1e-30, 1e-40]
    at = rng.random(x.shape)
    x = np.where(at < 0.15, rng.choice(special[:2] + special[5:12], x.shape), x)
    x[0] = np.where(at[0] < 0.15, rng.choice(special, columns), x[0])
    x[1] = 0.0
    x[2] = np.round(x[2] * 2) / 2
    return x.astype(np.float32)
