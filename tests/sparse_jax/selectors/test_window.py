"""Sinks and recent tokens: which pages the window keeps."""

import numpy as np
import pytest

from sparse_jax import selectors
from tests.sparse_jax.selectors.helpers import chosen, make_cache, queries, select


def kept(length, page_size, **options):
    cache = make_cache([length], page_size=page_size, table_width=-(-16 // page_size) * 4, kv_heads=1)
    (pages,) = chosen(select(selectors.get("window", **options), cache, queries(1, 1, 2)))
    return sorted(pages)


def test_case_WINDOW_1_no_token_of_the_window_is_lost():
    """WINDOW-1: window 6, P 4, S 9 (positions 3-8): three pages."""
    assert kept(9, 4, sinks=0, recent=6) == [0, 1, 2]


def test_case_WINDOW_2_the_own_token_counts():
    """WINDOW-2: window 4 at position 9: keys 6-9."""
    assert kept(10, 1, sinks=0, recent=4) == [6, 7, 8, 9]
    assert kept(10, 2, sinks=0, recent=4) == [3, 4]
    assert kept(10, 4, sinks=0, recent=4) == [1, 2]


def test_recent_alone_keeps_just_the_window():
    assert kept(60, 4, sinks=5, recent=6) == [0, 1, 13, 14]
    assert kept(60, 4, sinks=0, recent=1) == [14]
    assert kept(60, 4, sinks=3, recent=0) == [0]


def test_a_budget_is_spent_on_the_latest_tokens():
    assert kept(60, 4, budget=20, sinks=3) == [0, 11, 12, 13, 14]
    assert kept(60, 4, budget=20, sinks=3, recent=2) == [0, 11, 12, 13, 14]
    assert kept(60, 4, budget=4, sinks=3, recent=9) == [0, 12, 13, 14]  # the window needs more than the budget


@pytest.mark.parametrize("length", range(1, 34))
def test_every_budget_keeps_as_many_of_the_latest_pages_as_fit(length):
    pages = kept(length, 4, budget=12, sinks=0)
    last = (length - 1) // 4
    np.testing.assert_array_equal(pages, range(max(0, last - 2), last + 1))
