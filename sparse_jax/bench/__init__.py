"""Measuring: named shapes, peers in the same run, table and JSON. See `python -m sparse_jax.bench --help`."""

from sparse_jax.bench.report import BenchResult, Row
from sparse_jax.bench.suites import SUITES, run

__all__ = ["SUITES", "BenchResult", "Row", "run"]
