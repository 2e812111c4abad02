"""What every selector promises: the registry, options, and the cases of page counts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paging, selectors
from tests.sparse_jax.selectors.helpers import (
    COUNTING,
    LENGTHS,
    PAGE_SELECTORS,
    SELECTORS,
    chosen,
    common_cache,
    filled,
    make_cache,
    queries,
    quick_jit,
    select,
)


def whole_run(selector, paged, q, k, v):
    """A prompt of five tokens beside an empty request, then a step."""
    state = selector.init(paged.kv, 2)
    counts = jnp.array([5, 0], jnp.int32)
    paged, state, room = selector.reserve_prompt(paged, state, counts, 5)
    paged, state, _ = selector.store_prompt(paged, state, 0, room, q[:, :5], k[:, :5], v[:, :5])
    positions = selector.next_positions(paged, state)
    paged, state, room = selector.reserve(paged, state, jnp.array([1, 0], jnp.int32), 1)
    paged, state, _ = selector.store(paged, state, 0, room, k[:, 5:], v[:, 5:])
    attended = selector.attend(state, q[:, 5:], *paging.flat(paged.kv), paging.view(paged, 0))
    return positions, attended.output.out, attended.tokens_read, attended.positions


def run_inputs():
    paged = paging.create(planes=1, pages=16, page_size=1, kv_heads=2, key_width=8, requests=2, pages_per_request=8)
    k, v = np.random.default_rng(3).standard_normal((2, 2, 6, 2, 8)).astype(np.float32)
    return paged, queries(2, 6, 4), k, v


@pytest.mark.parametrize("name", [name for name in selectors.names() if name != "dsa"])
def test_every_name_works_without_options(name):
    """Traced, not run: each method has tests of its own that run it. A model's own indexer needs the model."""
    selector = selectors.get(name)
    assert selector == selectors.get(name)
    assert hash(selector) == hash(selectors.get(name))
    positions, out, read, where = jax.eval_shape(functools.partial(whole_run, selector), *run_inputs())
    assert (positions.shape, positions.dtype) == ((2,), jnp.int32)
    assert (out.shape, out.dtype) == ((2, 1, 4, 8), jnp.float32)
    assert (read.shape, read.dtype) == ((2, 2), jnp.int32)
    assert (where.shape[:2], where.dtype) == ((2, 2), jnp.int32)


@pytest.mark.parametrize("name", ["quest", "tova"])  # one that keeps all, one that forgets
def test_what_fits_is_attended_as_by_dense(name):
    paged, q, k, v = run_inputs()
    positions, out, read, where = quick_jit(whole_run, static_argnums=0)(selectors.get(name), paged, q, k, v)
    assert positions.tolist() == [5, 0]
    assert read.tolist() == [[6, 6], [0, 0]]
    for row in np.asarray(where[0]):
        assert sorted(row[row >= 0].tolist()) == list(range(6))
    assert (np.asarray(where[1]) == -1).all()
    score = np.einsum("kgd,skd->kgs", np.asarray(q[0, 5], np.float64).reshape(2, 2, 8), k[0]) / 8**0.5
    weight = np.exp(score) / np.exp(score).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(out[0, 0].reshape(2, 2, 8), np.einsum("kgs,skd->kgd", weight, v[0]), atol=1e-5)
    assert not np.asarray(out[1]).any()


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'qest'.*centroid, dense, .*quest, .*window"):
        selectors.get("qest")


def test_unknown_option_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'window' has no option 'sink'; its options: budget, sinks, recent"):
        selectors.get("window", sink=4)


@pytest.mark.parametrize("name", [None, 3, ["quest"], {"name": "quest"}, b"quest", selectors.Quest])
def test_a_name_that_is_no_string_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"known selectors: .*dense, .*quest, .*window"):
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
    {"most": 0},
]


@pytest.mark.parametrize("name", selectors.names())
def test_options_are_checked(name):
    known = {field.name for field in dataclasses.fields(selectors.get(name))}
    for options in BAD_OPTIONS:
        ((option, value),) = options.items()
        assert option in known
        with pytest.raises(ValueError, match=f"{option} is a whole number of tokens, at least [01]; got {value!r}"):
            selectors.get(name, **options)


def test_numpy_integers_are_options_like_any_other():
    selector = selectors.get("quest", budget=np.int64(64))
    assert selector == selectors.get("quest", budget=64)
    assert type(selector.budget) is int


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="already taken by Quest"):
        selectors.register("quest")(selectors.Window)


def test_selectors_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        selectors.get("quest").budget = 3


@pytest.mark.parametrize("name", COUNTING)
def test_case_TOPK_1_everything_is_read_when_it_fits_the_budget(name):
    """TOPK-1: P 16, budget 64, S 50: all four pages; and at any other length up to the budget."""
    lengths = [50, 1, 16, 17, 49, 63, 64]
    cache = make_cache(lengths, page_size=16, table_width=8)
    pages = select(selectors.get(name, budget=64, sinks=4, recent=8), cache, queries(len(lengths), 1, 4))
    assert pages.shape == (len(lengths), 2, 4)
    assert chosen(pages) == [set(range(-(-length // 16))) for length in lengths for _ in range(2)]


@pytest.mark.parametrize("name", COUNTING)
def test_case_TOPK_2_the_width_does_not_follow_the_length(name):
    """TOPK-2: four ids asked for, two exist: two ids, then -1, -1; as far as the table is wide."""
    for table_width in (3, 16):
        cache = make_cache([2], page_size=1, table_width=table_width)
        pages = select(selectors.get(name, budget=4, sinks=1, recent=1), cache, queries(1, 1, 4))
        assert pages.tolist() == [[[0, 1, -1, -1][:table_width]] * 2]


HUGE = {"budget": 10**9}, {"budget": 10**30}, {"recent": 10**10}, {"sinks": 10**10}
EVERYTHING_HUGE = {"budget": 2**31 - 1, "sinks": 2**31 - 1, "recent": 2**31 - 1}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, EVERYTHING_HUGE) for name in COUNTING),
        *(("quest", options) for options in HUGE),
    ],
)
def test_options_beyond_the_table_mean_all_of_it(name, options):
    """The work and the memory follow the table, not the budget."""
    cache = common_cache()
    pages = select(selectors.get(name, **options), cache, queries(len(LENGTHS), 3, 4))
    assert pages.shape == (len(LENGTHS), 2, 16)
    assert chosen(pages) == [set(range(-(-length // 4))) for length in LENGTHS for _ in range(2)]


@pytest.mark.parametrize("name", ["window", "quest"])
def test_case_EVICT_3_something_is_always_kept(name):
    """EVICT-3: S 1 and 2 with a budget that rounds to less than a page still keep a page; the query's own."""
    cache = make_cache([1, 2], page_size=1, table_width=4)
    pages = select(selectors.get(name, budget=1, sinks=0), cache, queries(2, 1, 4))
    assert chosen(pages) == [{0}] * 2 + [{1}] * 2


@pytest.mark.parametrize("name", PAGE_SELECTORS)
@pytest.mark.parametrize("rows", [1, 3])
def test_sinks_and_the_window_of_every_row_are_kept(name, rows):
    """A budget of six pages, two of sinks, two or three of the window. The H2O flows count pages: their last two."""
    pages = select(SELECTORS[name], common_cache(), queries(len(LENGTHS), rows, 6))
    assert pages.shape[-1] == SELECTORS[name].width(page_size=4, table_width=16, rows=rows) == 6
    for b, length in enumerate(LENGTHS):
        held = -(-length // 4)
        first = max(0, length - rows - 5)  # of row 0, whose position is length - rows
        must = {token // 4 for token in (*range(min(5, length)), *range(first, length))}
        if name.endswith("h2o_sparse_attention"):
            must = {page for page in (0, 1, held - 2, held - 1) if 0 <= page < held}
        for kept in chosen(pages[b]):
            assert must <= kept
            assert len(kept) == min(6, held)
            assert max(kept, default=0) < max(held, 1)


@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_absent_and_stale_pages_are_never_chosen(name):
    """Table entries of -1 inside the length, and a length past the table or below 0."""
    cache = common_cache()
    table = cache.view.page_table.at[0, jnp.array([0, 3, 7, 12])].set(-1).at[4].set(-1)
    lengths = cache.view.lengths.at[0].set(99).at[5].set(-5)
    holes = cache._replace(view=cache.view._replace(page_table=table, lengths=lengths))
    kept = chosen(select(SELECTORS[name], holes, queries(len(LENGTHS), 1, 6), filled(SELECTORS[name], cache)))
    for pages in kept[:2]:
        assert len(pages) == 6
        assert not pages & {0, 3, 7, 12}
    assert kept[8:] == [set()] * 4


@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_tables_and_lengths_may_be_per_kv_head(name):
    """A table for each head, of other pages of the pool; and lengths of their own."""
    cache = common_cache()
    q = queries(len(LENGTHS), 1, 6)
    state = filled(SELECTORS[name], cache)
    shared = select(SELECTORS[name], cache, q, state)
    view = cache.view._replace(
        page_table=jnp.stack([cache.view.page_table, jnp.roll(cache.view.page_table, 1, axis=0)], axis=1),
        lengths=jnp.stack([cache.view.lengths, jnp.roll(cache.view.lengths, 1)], axis=1),
    )
    split = select(SELECTORS[name], cache._replace(view=view), q, state)
    np.testing.assert_array_equal(split[:, 0], shared[:, 0])
    again = select(SELECTORS[name], cache, jnp.roll(q, -1, axis=0), state)
    np.testing.assert_array_equal(np.roll(split[:, 1], -1, axis=0), again[:, 1])


@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_a_row_does_not_depend_on_its_neighbours_or_on_placement(name):
    """T25: without its neighbours, among others, and in other physical pages and planes: the same choice."""
    cache, q = common_cache(), queries(len(LENGTHS), 1, 6)
    state = filled(SELECTORS[name], cache)
    together = select(SELECTORS[name], cache, q, state)
    order = np.array([4, 2, 0, 5, 1, 3])
    moved = cache._replace(view=type(cache.view)(*(x[order] for x in cache.view)))
    np.testing.assert_array_equal(select(SELECTORS[name], moved, q[order], state), together[order])
    alone = cache._replace(view=cache.view._replace(lengths=cache.view.lengths.at[1:].set(0)))
    np.testing.assert_array_equal(select(SELECTORS[name], alone, q, state)[0], together[0])
    elsewhere = common_cache(seed=9)._replace(keys=cache.keys)
    assert (np.asarray(elsewhere.view.page_table) != np.asarray(cache.view.page_table)).any()
    np.testing.assert_array_equal(select(SELECTORS[name], elsewhere, q), together)


def test_budgets_round_up_to_pages():
    def width(page_size, rows=1, table_width=100, name="quest", **options):
        return selectors.get(name, **options).width(page_size=page_size, table_width=table_width, rows=rows)

    assert width(16, budget=65, sinks=0, recent=1) == 5
    assert width(16, budget=65, sinks=0, recent=1, table_width=4) == 4
    assert width(16, budget=1, sinks=17, recent=1) == 3
    assert width(16, budget=1, sinks=0, recent=18) == 3  # 18 tokens can touch 3 pages
    assert width(16, budget=1, sinks=0, recent=17, rows=2) == 3
    assert width(1, budget=1, sinks=0, recent=9) == 9
    assert width(16) == 64
    h2o = "h2o_sparse_attention"
    assert width(16, name=h2o, budget=65, sinks=0, recent=0) == 5
    assert width(16, name=h2o, budget=1, sinks=17, recent=18) == 2 + 1 + 2
    assert width(1, name=h2o, budget=44, sinks=4, recent=8) == 44


def test_tokens_read_counts_tokens_not_slots():
    cache = make_cache([9, 0, 16], page_size=4, table_width=4)
    indices = jnp.array([[[0, 2, -1], [2, 9, -1]], [[0, 1, 2]] * 2, [[1, -1, 3]] * 2], jnp.int32)
    sizes = {"kv_heads": 2, "page_size": 4}
    assert selectors.tokens_read(indices, cache.view, **sizes).tolist() == [[5, 1], [0, 0], [8, 8]]
    assert selectors.tokens_read(None, cache.view, **sizes).tolist() == [[9, 9], [0, 0], [16, 16]]
    positions = np.asarray(selectors.positions_read(indices, cache.view, **sizes))
    assert positions[0].tolist() == [[0, 1, 2, 3, 8, *[-1] * 7], [8, *[-1] * 11]]
    assert (positions[1] == -1).all()
    assert positions[2, 0].tolist() == [4, 5, 6, 7, *[-1] * 4, 12, 13, 14, 15]


def test_q_shapes_are_checked():
    cache = make_cache([9], page_size=4, table_width=4)
    selector = selectors.get("window")
    with pytest.raises(ValueError, match=r"q must be .* multiple of 2 KV heads, got \[1, 1, 3, 8\]"):
        selector.select((), queries(1, 1, 3), cache.view, kv_heads=2, page_size=4)
    flat = selector.select((), queries(1, 1, 4)[:, 0], cache.view, kv_heads=2, page_size=4)
    np.testing.assert_array_equal(flat, select(selector, cache, queries(1, 1, 4)))


@pytest.mark.parametrize("name", ["random", "h2o_sparse_attention"])
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


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", PAGE_SELECTORS)
def test_state_is_a_scan_carry(name, x64):
    """Contract 9: dtypes and weak types stay, in 64-bit mode too. A scan refuses a carry that changes."""
    cache = make_cache([0, 0], page_size=4, table_width=4)
    table = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    selector = selectors.get(name, budget=8, sinks=1, recent=2)

    def step(carry, key):
        state, lengths = carry
        slots = jnp.take_along_axis(table, lengths[:, None] // 4, axis=1)[:, 0] * 4 + lengths % 4
        state = selector.write(state, key, slots)
        state = selector.copy(state, jnp.array([-1], jnp.int32), jnp.array([-1], jnp.int32))
        view = type(cache.view)(table, lengths + 1)
        pages = selector.select(state, key.repeat(2, axis=1), view, kv_heads=2, page_size=4)
        return (state, lengths + 1), pages

    state = selector.init(cache.kv)
    with jax.enable_x64(x64):
        (after, _), pages = jax.eval_shape(
            lambda *carry: jax.lax.scan(step, carry, jnp.zeros((6, 2, 2, 8), jnp.float32)), state, cache.view.lengths
        )
    assert pages.dtype == jnp.int32
    for leaf, before in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert (leaf.dtype, leaf.shape) == (before.dtype, before.shape)
