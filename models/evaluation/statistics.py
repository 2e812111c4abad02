"""Means with bootstrap intervals, and what is told about one cell of an evaluation."""

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES, LEVEL, SEED = 2000, 0.95, 0


def interval(values: Sequence[float] | np.ndarray, *, resamples: int = RESAMPLES, level: float = LEVEL) -> list[float]:
    """[mean, low, high]: the percentile bootstrap over prompts, with a fixed seed.

    values f[n], n at least 1, one number per prompt. Raises ValueError for none. Source: Efron, 1979.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"an interval is of at least one value, got {list(values.shape)}")
    drawn = np.random.default_rng(SEED).integers(0, len(values), (resamples, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return [float(values.mean()), float(low), float(high)]


def paired(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """[mean, low, high] of the differences of two methods on the same prompts."""
    if len(values) != len(others):
        raise ValueError(f"paired values are as many on both sides, got {len(values)} and {len(others)}")
    return interval(np.asarray(values, np.float64) - np.asarray(others, np.float64))


def summary(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A cell from what each prompt gave (see `run.outcome`): numbers with intervals, and what is kept per prompt.

    "exact" (share answered), "margin" (smallest of an answer, nats), "nll" (mean of an answer's tokens, nats), "read"
    (share of the cached tokens), and where there are diagnostics "mass", "of_oracle" (mass over the oracle's, at as
    many tokens), "recall", "error"; "of_oracle_by_plane" without interval.
    """
    names = [name for name in ("exact", "margin", "nll", "read", "mass", "recall", "error") if name in outcomes[0]]
    cell: dict[str, Any] = {name: interval([outcome[name] for outcome in outcomes]) for name in names}
    if "mass" in outcomes[0]:
        mass, oracle = (
            np.array([outcome[name] for outcome in outcomes]) for name in ("mass_by_plane", "oracle_by_plane")
        )
        cell["of_oracle"] = interval(mass.mean(axis=1) / np.maximum(oracle.mean(axis=1), 1e-12))
        cell["of_oracle_by_plane"] = (mass.mean(axis=0) / np.maximum(oracle.mean(axis=0), 1e-12)).tolist()
    cell["answered"] = "".join("1" if outcome["exact"] else "0" for outcome in outcomes)
    cell["margins"] = [float(f"{outcome['margin']:.3g}") for outcome in outcomes]
    return cell
