"""Selectors at work: a whole step over real pages, and side data that follows pages through a `PagedState`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import page_sparse_attention, paged_attention, paging, selectors
from tests.sparse_jax.selectors.helpers import PAGE_SELECTORS, filled, make_cache, queries

attend = jax.jit(
    lambda selector, state, q, kv, view, options: selector.attend(state, q, *paging.flat(kv), view, **dict(options)),
    static_argnums=(0, 5),
)


def run(selector, cache, q, **options):
    return attend(selector, filled(selector, cache), q, cache.kv, cache.view, tuple(options.items()))


@pytest.mark.parametrize("name", PAGE_SELECTORS)
@pytest.mark.parametrize("length", [50, 63, 64])
def test_case_TOPK_1_output_equals_dense_when_everything_fits(name, length):
    """TOPK-1: equal to dense attention whenever S <= budget."""
    cache = make_cache([length], page_size=16, table_width=8)
    q = queries(1, 1, 4)
    sparse = run(selectors.get(name, budget=64), cache, q)
    dense = run(selectors.get("dense"), cache, q)
    np.testing.assert_allclose(sparse.output.out, dense.output.out, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sparse.output.lse, dense.output.lse, rtol=1e-6)
    assert sparse.tokens_read.tolist() == dense.tokens_read.tolist() == [[length] * 2]


@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_case_TOPK_2_output_equals_dense_over_the_two_keys(name):
    cache = make_cache([2], page_size=1, table_width=3)
    q = queries(1, 1, 4)
    sparse = run(selectors.get(name, budget=4, sinks=1, recent=1), cache, q)
    np.testing.assert_allclose(sparse.output.out, run(selectors.get("dense"), cache, q).output.out, rtol=1e-6)


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


@pytest.mark.parametrize("name", PAGE_SELECTORS)
@pytest.mark.parametrize("options", [{"budget": 10**9}, {"recent": 10**10}, {"sinks": 10**10}])
def test_options_beyond_the_table_attend_to_everything(name, options):
    cache = make_cache([61, 30], page_size=4, table_width=16)
    q = queries(2, 2, 4)
    sparse, dense = run(selectors.get(name, **options), cache, q), run(selectors.get("dense"), cache, q)
    np.testing.assert_allclose(sparse.output.out, dense.output.out, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(sparse.tokens_read, dense.tokens_read)


@pytest.mark.parametrize("name", selectors.names())
def test_the_pool_is_flattened(name):
    cache = make_cache([9], page_size=4, table_width=4)
    selector = selectors.get(name)
    with pytest.raises(ValueError, match=r"k_pages must be \[planes \* N, Hkv, P, D\], got \[1, 6, 2, 4, 8\]"):
        selector.attend(selector.init(cache.kv), queries(1, 1, 4), *cache.kv, cache.view)


@pytest.mark.parametrize("name", selectors.names())
@pytest.mark.parametrize("rows", [1, 2])
def test_attend_is_select_then_attention(name, rows):
    cache = make_cache([61, 0, 30], page_size=4, table_width=16)
    q = queries(3, rows, 6)
    selector = selectors.get(name, budget=16, sinks=1, recent=2)
    output, state, read, _ = run(selector, cache, q)
    pages = selector.select(filled(selector, cache), q, cache.view, kv_heads=2, page_size=4)
    arguments = (q, *paging.flat(cache.kv), *cache.view)
    if name == "dense":
        expected = paged_attention(*arguments)
    else:
        expected = page_sparse_attention(*arguments, pages)
        assert (np.asarray(read) < [[61], [1], [30]]).all()
    np.testing.assert_allclose(output.out, expected.out, rtol=1e-6, atol=1e-6)
    assert not np.asarray(output.out[1]).any()
    assert np.isneginf(output.lse[1]).all()
    assert jax.tree.structure(state) == jax.tree.structure(filled(selector, cache))


def paged(planes=2, pages=8, requests=2):
    sizes = dict(planes=planes, pages=pages, page_size=4, kv_heads=2, key_width=8)
    return paging.create(**sizes, requests=requests, pages_per_request=6)


@functools.partial(jax.jit, static_argnums=0)
def append(selector, state, side, keys, counts):
    """Appends keys [planes, B, width, Hkv, D] and tells the selector what was copied and written."""
    state, reservation = paging.reserve(state, counts, keys.shape[2])
    side = selector.copy(side, *paging.flat_copies(state, reservation))
    for plane, k in enumerate(keys):
        slots = paging.flat_slots(state, plane, reservation)
        state, _ = paging.write(state, plane, reservation, k, k)
        side = selector.write(side, k, slots)
    return state, side


def envelope_of(side, state, plane, request):
    """What the state holds for the pages of a request, in their order."""
    table = np.asarray(paging.view(state, plane).page_table[request])
    table = table[table >= 0]
    return np.asarray(side.lo)[table], np.asarray(side.hi)[table]


def expected_envelope(state, plane, request):
    keys, _ = paging.gather(state, plane, request)
    length = int(state.table.lengths[request])
    parts = [np.asarray(keys[first : min(first + 4, length)]) for first in range(0, length, 4)]
    return np.stack([part.min(axis=0) for part in parts]), np.stack([part.max(axis=0) for part in parts])


def assert_right(side, state, requests):
    for plane in range(state.kv.planes):
        for request in requests:
            for found, expected in zip(
                envelope_of(side, state, plane, request), expected_envelope(state, plane, request)
            ):
                np.testing.assert_array_equal(found, expected)


def random_keys(seed, *, planes=2, requests=2, width=7, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, (planes, requests, width, 2, 8)), jnp.float32)


def test_case_PREFIX_1_copy_before_write_takes_the_envelope_along():
    """PREFIX-1: a shared, partly filled page is copied before it is written, and its envelope with it."""
    quest, state = selectors.get("quest"), paged()
    side = quest.init(state.kv)
    state, side = append(quest, state, side, random_keys(0), jnp.array([7, 0], jnp.int32))
    state, _ = paging.share(state, jnp.int32(0), jnp.int32(1), jnp.int32(7))
    before = [envelope_of(side, state, plane, 0) for plane in range(2)]
    state, side = append(quest, state, side, random_keys(1, width=1, scale=9.0), jnp.array([0, 1], jnp.int32))
    assert state.table.pages[0, 1] != state.table.pages[1, 1]
    assert_right(side, state, [0, 1])
    for plane in range(2):
        for found, expected in zip(envelope_of(side, state, plane, 0), before[plane]):
            np.testing.assert_array_equal(found, expected)


def test_released_pages_begin_anew_for_the_next_request():
    quest, state = selectors.get("quest"), paged(pages=3)
    side = quest.init(state.kv)
    for seed in range(4):
        counts = jnp.array([7, 0], jnp.int32) if seed % 2 else jnp.array([0, 7], jnp.int32)
        state, side = append(quest, state, side, random_keys(seed, scale=10.0 ** (2 - seed)), counts)
        paging.check(state)
        state, side = append(quest, state, side, random_keys(seed + 10, width=1), jnp.minimum(counts, 1))
        assert_right(side, state, [int(counts[0] == 0)])
        state, _ = paging.release(state, jnp.array([True, True]))


def test_a_failed_request_writes_nothing():
    """Out of pages: every slot is -1, so the envelopes keep every bit."""
    quest, state = selectors.get("quest"), paged(pages=2)
    side = quest.init(state.kv)
    state, side = append(quest, state, side, random_keys(0), jnp.array([7, 0], jnp.int32))
    failed, after = append(quest, state, side, random_keys(1, scale=50.0), jnp.array([0, 7], jnp.int32))
    assert failed.table.status.tolist() == [paging.OK, paging.OUT_OF_PAGES]
    for leaf, expected in zip(jax.tree.leaves(after), jax.tree.leaves(side)):
        np.testing.assert_array_equal(leaf, expected)
