"""Page selectors at work: a whole step over real pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import page_sparse_attention, paging, selectors
from tests.compare import assert_same_bits
from tests.sparse_jax.selectors.helpers import (
    COUNTING,
    LENGTHS,
    PAGE_SELECTORS,
    SELECTORS,
    common_cache,
    filled,
    make_cache,
    queries,
    quick_jit,
    select,
)

attend = quick_jit(
    lambda selector, state, q, kv, view, options: selector.attend(state, q, *paging.flat(kv), view, **dict(options)),
    static_argnums=(0, 5),
)
sparse = quick_jit(lambda q, kv, view, pages: page_sparse_attention(q, *paging.flat(kv), *view, pages))


def run(selector, cache, q, **options):
    return attend(selector, filled(selector, cache), q, cache.kv, cache.view, tuple(options.items()))


@pytest.mark.parametrize("name", COUNTING)
def test_cases_TOPK_1_and_2_output_equals_dense_when_everything_fits(name):
    """TOPK-1, TOPK-2: equal to dense attention whenever S <= budget; also where fewer keys exist than ids."""
    cache = make_cache([50, 63, 64, 2], page_size=16, table_width=8)
    q = queries(4, 1, 4)
    found = run(selectors.get(name, budget=64, recent=8), cache, q)
    dense = run(selectors.get("dense"), cache, q)
    np.testing.assert_allclose(found.output.out, dense.output.out, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.output.lse, dense.output.lse, rtol=1e-6)
    assert found.tokens_read.tolist() == dense.tokens_read.tolist() == [[50] * 2, [63] * 2, [64] * 2, [2] * 2]


def test_case_WINDOW_1_the_value_of_the_case():
    """WINDOW-1: window 6, P 4, S 9, scores 0, v = position: 5.5, the mean of 3-8."""
    cache = make_cache([9], page_size=4, table_width=4, kv_heads=1)
    _, v = paging.flat(cache.kv)
    for page, index in zip(np.asarray(cache.view.page_table[0]), range(3)):
        v = v.at[page].set(jnp.arange(index * 4, index * 4 + 4.0)[:, None])
    cache = cache._replace(kv=cache.kv._replace(v=v[None]))
    q = jnp.zeros((1, 1, 1, 8))
    window = selectors.get("window", sinks=0, recent=6)
    np.testing.assert_allclose(run(window, cache, q, window=6).output.out, 5.5, rtol=1e-6)
    np.testing.assert_allclose(run(window, cache, q).output.out, 4.0, rtol=1e-6)  # whole pages: 0-8


KEEPING = [name for name in selectors.names() if not isinstance(selectors.get(name), selectors.Evicting)]


@pytest.mark.parametrize("name", KEEPING)
def test_the_pool_is_flattened(name):
    cache = make_cache([9], page_size=1, table_width=12)
    selector = selectors.get(name)
    with pytest.raises(ValueError, match=r"k_pages must be \[planes \* N, Hkv, P, D\], got \[1, 14, 2, 1, 8\]"):
        selector.attend(selector.init(cache.kv), queries(1, 1, 4), *cache.kv, cache.view)


@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_attend_is_select_then_attention_and_says_what_was_read(name):
    """T25, T26: unused and foreign bytes are NaN, and other physical pages give the same bits."""
    cache, q, selector = common_cache(), queries(len(LENGTHS), 1, 6), SELECTORS[name]
    state = filled(selector, cache)
    output, after, read, positions = run(selector, cache, q)
    pages = select(selector, cache, q, state)
    expected = sparse(q, cache.kv, cache.view, pages)
    assert_same_bits(output.out, expected.out)
    assert np.isfinite(output.out).all()
    assert not np.asarray(output.out[1]).any()
    assert np.isneginf(output.lse[1]).all()
    for b, length in enumerate(LENGTHS):
        for head in range(2):
            row = np.asarray(positions[b, head])
            chosen = pages[b, head][pages[b, head] >= 0]
            tokens = [t for page in chosen for t in range(page * 4, min(page * 4 + 4, length))]
            assert sorted(row[row >= 0].tolist()) == tokens
            assert int(read[b, head]) == len(tokens)
    for leaf, before in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert_same_bits(leaf, before)

    other = common_cache(seed=9)
    pages = [np.asarray(c.view.page_table)[np.asarray(c.view.page_table) >= 0] for c in (cache, other)]
    kv = [jnp.full_like(x, jnp.nan) for x in cache.kv]
    kv = [
        new.reshape(-1, *new.shape[2:]).at[pages[1]].set(old.reshape(-1, *old.shape[2:])[pages[0]]).reshape(old.shape)
        for new, old in zip(kv, cache.kv)
    ]
    moved = run(selector, other._replace(kv=type(cache.kv)(*kv), keys=cache.keys), q)
    assert_same_bits(moved.output.out, output.out)
    assert_same_bits(moved.positions, positions)
