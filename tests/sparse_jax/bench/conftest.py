"""Suites with one tiny case each."""

import pytest

from sparse_jax.bench import attention, mla, reference, select, step, suites, topk
from tests.sparse_jax.bench.shapes import TINY, TINY_MLA, TINY_STEP, TINY_TOP_K


@pytest.fixture
def tiny_suites(monkeypatch):
    """One tiny case in each suite, and a copy bandwidth that takes no time."""
    shapes = {attention: TINY, topk: TINY_TOP_K, select: TINY, step: TINY_STEP, reference: TINY, mla: TINY_MLA}
    for module, case in shapes.items():
        monkeypatch.setattr(module, "CASES_CPU", (case,))
        monkeypatch.setattr(module, "QUICK", (case.name,))
    monkeypatch.setattr(suites, "copy_bandwidth", lambda: 1e9)
