"""What every selector promises: the registry, options, and the cases of page counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import selectors
from tests.sparse_jax.selectors.helpers import PAGE_SELECTORS, chosen, filled, make_cache, queries, select


@pytest.mark.parametrize("name", selectors.names())
def test_every_name_works_without_options(name):
    cache = make_cache([5, 0], page_size=4, table_width=3)
    selector = selectors.get(name)
    assert selector == selectors.get(name)
    assert hash(selector) == hash(selectors.get(name))
    pages = selector.select(filled(selector, cache), queries(2, 1, 4), cache.view, kv_heads=2, page_size=4)
    if name == "dense":
        assert pages is None
    else:
        assert chosen(np.asarray(pages)) == [{0, 1}, {0, 1}, set(), set()]


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'qest'.*dense, quest, window"):
        selectors.get("qest")


def test_unknown_option_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'window' has no option 'sink'; its options: budget, sinks, recent"):
        selectors.get("window", sink=4)


@pytest.mark.parametrize("name", [None, 3, ["quest"], {"name": "quest"}, b"quest", selectors.Quest])
def test_a_name_that_is_no_string_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="known selectors: dense, quest, window"):
        selectors.get(name)


BAD_OPTIONS = [
    {"budget": 0},
    {"budget": -5},
    {"budget": True},
    {"budget": 64.0},
    {"sinks": -1},
    {"sinks": "4"},
    {"sinks": None},
    {"recent": 2.5},
    {"recent": -1},
    {"recent": float("nan")},
]


@pytest.mark.parametrize("options", BAD_OPTIONS)
@pytest.mark.parametrize("name", selectors.names())
def test_options_are_checked(name, options):
    ((option, value),) = options.items()
    with pytest.raises(ValueError, match=f"{option} is a whole number of tokens, at least [01]; got {value!r}"):
        selectors.get(name, **options)


def test_numpy_integers_are_options_like_any_other():
    selector = selectors.get("quest", budget=np.int64(64))
    assert selector == selectors.get("quest", budget=64)
    assert type(selector.budget) is int


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="already taken by Quest"):
        selectors.register("quest")(selectors.Window)


@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_case_TOPK_1_everything_is_read_when_it_fits_the_budget(name):
    """TOPK-1: P 16, budget 64, S 50: all four pages; and at any other length up to the budget."""
    for length in (50, 1, 16, 17, 49, 63, 64):
        cache = make_cache([length], page_size=16, table_width=8)
        pages = select(selectors.get(name, budget=64, sinks=4, recent=8), cache, queries(1, 1, 4))
        assert pages.shape == (1, 2, 4)
        assert chosen(pages) == [set(range(-(-length // 16)))] * 2


@pytest.mark.parametrize("name", PAGE_SELECTORS)
@pytest.mark.parametrize("table_width", [2, 3, 4, 16])
def test_case_TOPK_2_the_width_does_not_follow_the_length(name, table_width):
    """TOPK-2: four ids asked for, two exist: two ids, then -1, -1; as far as the table is wide."""
    cache = make_cache([2], page_size=1, table_width=table_width)
    pages = select(selectors.get(name, budget=4, sinks=1, recent=1), cache, queries(1, 1, 4))
    assert pages.tolist() == [[[0, 1, -1, -1][:table_width]] * 2]


HUGE = [
    {"budget": 10**9},
    {"budget": 10**30},
    {"recent": 10**10},
    {"sinks": 10**10},
    {"budget": 2**31 - 1, "sinks": 2**31 - 1, "recent": 2**31 - 1},
]


@pytest.mark.parametrize("name", PAGE_SELECTORS)
@pytest.mark.parametrize("options", HUGE)
@pytest.mark.parametrize("rows", [1, 3])
def test_options_beyond_the_table_mean_all_of_it(name, options, rows):
    """The work and the memory follow the table, not the budget."""
    cache = make_cache([61, 0, 30], page_size=4, table_width=16)
    pages = select(selectors.get(name, **options), cache, queries(3, rows, 4))
    assert pages.shape == (3, 2, 16)
    assert chosen(pages) == [set(range(16))] * 2 + [set()] * 2 + [set(range(8))] * 2


@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_case_EVICT_3_something_is_always_kept(name):
    """EVICT-3: S 1 and 2 with a budget that rounds to less than a page still keep a page; the query's own."""
    for length in (1, 2):
        cache = make_cache([length], page_size=1, table_width=4)
        for budget in (max(1, int(0.4 * length)), 1):
            pages = select(selectors.get(name, budget=budget, sinks=0), cache, queries(1, 1, 4))
            assert chosen(pages) == [{length - 1}] * 2


@pytest.mark.parametrize("name", PAGE_SELECTORS)
@pytest.mark.parametrize(("page_size", "rows"), [(1, 1), (4, 1), (4, 3), (16, 2)])
def test_sinks_and_the_window_of_every_row_are_kept(name, page_size, rows):
    sinks, recent = 5, 6
    lengths = [0, 1, 2, 7, 33, 61, 64]
    cache = make_cache(lengths, page_size=page_size, table_width=64 // page_size)
    selector = selectors.get(name, budget=16, sinks=sinks, recent=recent)
    pages = select(selector, cache, queries(len(lengths), rows, 4))
    assert pages.shape[-1] == selector.width(page_size=page_size, table_width=64 // page_size, rows=rows)
    for b, length in enumerate(lengths):
        first = max(0, length - rows - recent + 1)  # of row 0, whose position is length - rows
        tokens = {*range(min(sinks, length)), *range(first, length)}
        for kept in chosen(pages[b]):
            assert {token // page_size for token in tokens} <= kept
            assert all(page * page_size < length for page in kept)


@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_absent_and_stale_pages_are_never_chosen(name):
    """A table entry of -1 inside the length, and a length past the table."""
    cache = make_cache([32, 32], page_size=4, table_width=8)
    selector = selectors.get(name, budget=16, sinks=1, recent=4)
    state = filled(selector, cache)
    table = cache.view.page_table.at[0, jnp.array([0, 3, 7])].set(-1).at[1].set(-1)
    holes = cache._replace(view=cache.view._replace(page_table=table, lengths=jnp.array([99, -5], jnp.int32)))
    kept = chosen(select(selector, holes, queries(2, 1, 4), state))
    for pages in kept[:2]:
        assert len(pages) == 4
        assert not pages & {0, 3, 7}
    assert kept[2:] == [set(), set()]


@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_tables_and_lengths_may_be_per_kv_head(name):
    """Two heads with tables of their own choose like two requests with one head each."""
    cache = make_cache([61, 9], page_size=4, table_width=16, kv_heads=1)
    selector = selectors.get(name, budget=16, sinks=2, recent=3)
    q = queries(2, 2, 3)
    expected = select(selector, cache, q)
    joined_q = jnp.concatenate([q[0], q[1]], axis=1)[None]  # [1, T, 6, D]
    kv = type(cache.kv)(*(jnp.concatenate([x, x], axis=2) for x in cache.kv))
    keys = np.concatenate([cache.keys, cache.keys], axis=2)
    both = cache._replace(kv=kv, keys=keys)
    state = filled(selector, both)
    view = type(cache.view)(cache.view.page_table[None], cache.view.lengths[None])
    pages = selector.select(state, joined_q, view, kv_heads=2, page_size=4)
    np.testing.assert_array_equal(pages[0], expected[:, 0])


@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_a_row_does_not_depend_on_its_neighbours(name):
    cache = make_cache([61, 13, 40], page_size=4, table_width=16)
    selector = selectors.get(name, budget=16, sinks=2, recent=3)
    state, q = filled(selector, cache), queries(3, 1, 6)
    together = select(selector, cache, q, state)
    for b in range(3):
        one = cache._replace(view=type(cache.view)(*(x[b : b + 1] for x in cache.view)))
        np.testing.assert_array_equal(select(selector, one, q[b : b + 1], state)[0], together[b])


def test_budgets_round_up_to_pages():
    def width(page_size, rows=1, table_width=100, **options):
        return selectors.get("quest", **options).width(page_size=page_size, table_width=table_width, rows=rows)

    assert width(16, budget=65, sinks=0, recent=1) == 5
    assert width(16, budget=65, sinks=0, recent=1, table_width=4) == 4
    assert width(16, budget=1, sinks=17, recent=1) == 3
    assert width(16, budget=1, sinks=0, recent=18) == 3  # 18 tokens can touch 3 pages
    assert width(16, budget=1, sinks=0, recent=17, rows=2) == 3
    assert width(1, budget=1, sinks=0, recent=9) == 9
    assert width(16) == 64


def test_tokens_read_counts_tokens_not_slots():
    cache = make_cache([9, 0, 16], page_size=4, table_width=4)
    indices = jnp.array([[[0, 2, -1], [2, 9, -1]], [[0, 1, 2]] * 2, [[1, -1, 3]] * 2], jnp.int32)
    read = selectors.tokens_read(indices, cache.view, kv_heads=2, page_size=4)
    assert read.tolist() == [[5, 1], [0, 0], [8, 8]]
    dense = selectors.tokens_read(None, cache.view, kv_heads=2, page_size=4)
    assert dense.tolist() == [[9, 9], [0, 0], [16, 16]]


def test_q_shapes_are_checked():
    cache = make_cache([9], page_size=4, table_width=4)
    selector = selectors.get("quest")
    state = filled(selector, cache)
    with pytest.raises(ValueError, match=r"q must be .* multiple of 2 KV heads, got \[1, 1, 3, 8\]"):
        selector.select(state, queries(1, 1, 3), cache.view, kv_heads=2, page_size=4)
    flat = selector.select(state, queries(1, 1, 4)[:, 0], cache.view, kv_heads=2, page_size=4)
    np.testing.assert_array_equal(flat, select(selector, cache, queries(1, 1, 4)))


@pytest.mark.parametrize("name", PAGE_SELECTORS)
@pytest.mark.parametrize(
    ("table", "lengths", "message"),
    [
        ((2, 4), (2,), "q must have the 2 requests of view.page_table, got 1"),
        ((1, 0), (1,), r"view.page_table must be .* got \[1, 0\]"),
        ((4,), (1,), r"view.page_table must be .* got \[4\]"),
        ((1, 3, 4), (1,), r"view.page_table must be \[B, W\] or \[B, 2, W\] .* got \[1, 3, 4\]"),
        ((1, 4), (2,), r"view.lengths must be \[1\] or \[1, 2\], got \[2\]"),
        ((1, 4), (1, 3), r"view.lengths must be \[1\] or \[1, 2\], got \[1, 3\]"),
    ],
)
def test_view_shapes_are_checked(name, table, lengths, message):
    cache = make_cache([9], page_size=4, table_width=4)
    selector = selectors.get(name)
    view = type(cache.view)(jnp.zeros(table, jnp.int32), jnp.ones(lengths, jnp.int32))
    with pytest.raises(ValueError, match=message):
        selector.select(selector.init(cache.kv), queries(1, 1, 4), view, kv_heads=2, page_size=4)


@pytest.mark.parametrize("name", selectors.names())
def test_state_is_a_scan_carry_and_lengths_do_not_retrace(name):
    """Contract 9: dtypes and weak types stay, in 64-bit mode too, and one compilation serves all lengths."""
    cache = make_cache([0, 0], page_size=4, table_width=4)
    table = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    selector = selectors.get(name, budget=8, sinks=1, recent=2)
    traces = []

    def step(carry, key):
        traces.append(1)
        state, lengths = carry
        slots = jnp.take_along_axis(table, lengths[:, None] // 4, axis=1)[:, 0] * 4 + lengths % 4
        state = selector.write(state, key, slots)
        state = selector.copy(state, jnp.array([-1], jnp.int32), jnp.array([-1], jnp.int32))
        view = type(cache.view)(table, lengths + 1)
        pages = selector.select(state, key.repeat(2, axis=1), view, kv_heads=2, page_size=4)
        return (state, lengths + 1), pages

    @jax.jit
    def run(state, lengths, keys):
        return jax.lax.scan(step, (state, lengths), keys)

    keys = jnp.asarray(cache.keys[:, :6].swapaxes(0, 1))
    (state, _), pages = run(selector.init(cache.kv), cache.view.lengths, keys)
    run(state, jnp.array([3, 1], jnp.int32), keys)
    assert run._cache_size() == 1
    if name != "dense":
        assert pages.dtype == jnp.int32
    with jax.enable_x64(True):
        (wide, _), _ = run(selector.init(cache.kv), cache.view.lengths, keys)
    for leaf, again in zip(jax.tree.leaves(state), jax.tree.leaves(wide)):
        assert leaf.dtype == again.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, again)


def test_selectors_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        selectors.get("quest").budget = 3
