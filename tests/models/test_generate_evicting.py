"""Generation with selectors that forget tokens: the whole way through prefill, decode and release."""

import functools

import numpy as np
import pytest
from flax import nnx

from models.generate import generate
from models.ouro import Ouro
from sparse_jax import selectors
from sparse_jax.selectors import H2OEvicting
from tests.models.configs import small_ouro

PROMPTS, NEW, BUDGET = [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]], 12, 8


@functools.cache
def run(selector):
    model = Ouro(small_ouro(num_layers=1, loops=2), rngs=nnx.Rngs(0))
    generation = generate(model, PROMPTS, selector=selector, max_tokens=NEW, page_size=4, chunk=4)
    pages = []
    for _ in generation:
        paged = generation.state.paged
        pages.append(paged.kv.pages - int(paged.pool.free_count))
    return generation, pages


DENSE = selectors.get("dense")
METHODS = [
    (H2OEvicting(budget=BUDGET), (3, 0), 4),
    (selectors.get("tova", budget=BUDGET), (3, 0), 4),
    (selectors.get("snapkv", budget=BUDGET, window=4), (NEW, 0), 4 + 5),
    (selectors.get("rocketkv", prompt_budget=64, budget=64), (NEW, NEW), 4 + 6),
]


@pytest.mark.parametrize(("selector", "as_dense", "most_pages"), METHODS, ids=lambda x: type(x).__name__)
def test_generate_with_methods_that_forget(selector, as_dense, most_pages):
    """As long as nothing was dropped the tokens are those of dense attention; as_dense: the first tokens of each."""
    generation, pages = run(selector)
    assert [len(tokens) for tokens in generation.tokens] == [NEW, NEW]
    for tokens, dense, count in zip(generation.tokens, run(DENSE)[0].tokens, as_dense, strict=True):
        assert tokens[:count] == dense[:count]
    assert max(pages) <= most_pages
    stats = generation.stats()
    assert stats.stale == 0
    assert stats.kv_tokens_dense == run(DENSE)[0].stats().kv_tokens_dense
    assert (stats.kv_fraction == 1) == (as_dense == (NEW, NEW))
    generation.release([0, 1])
    assert int(generation.state.paged.pool.free_count) == generation.state.paged.kv.pages
    assert not np.asarray(generation.state.paged.table.lengths).any()
