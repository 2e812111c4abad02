"""Boxes and sums: right for the keys that were written, anew for each owner, moved and copied with their page."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paging, selectors
from sparse_jax.selectors.summaries import Envelope, Sums
from tests.sparse_jax.selectors.helpers import KV, View, equal_bits, filled, make_cache, quick_jit, write

KINDS = ["quest", "lserve", "centroid", "h2o_sparse_attention"]
PAGE_SIZE = 32  # two boxes of `lserve`
copy = quick_jit(lambda selector, *arguments: selector.copy(*arguments), static_argnums=0)


@functools.cache
def common_cache():
    return make_cache([70, 0, 32], page_size=PAGE_SIZE, table_width=3, planes=2, plane=1)


def parts(state):
    return [state] if isinstance(state, Envelope | Sums) else list(state)


def assert_right(state, page, keys):
    """What the state holds of a page, against its keys [t, Hkv, D]."""
    for part in parts(state):
        if isinstance(part, Sums):
            np.testing.assert_allclose(part.total[page], keys.astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-5)
            assert int(part.count[page]) == len(keys)
            continue
        tokens = part.page_size // part.boxes
        for box in range(-(-len(keys) // tokens)):
            inside = keys[box * tokens : (box + 1) * tokens]
            np.testing.assert_array_equal(part.lo[page * part.boxes + box], inside.min(axis=0))
            np.testing.assert_array_equal(part.hi[page * part.boxes + box], inside.max(axis=0))


def assert_close(state, other):
    """The same up to the rounding of a sum; boxes bit for bit."""
    for part, expected in zip(parts(state), parts(other), strict=True):
        if isinstance(part, Sums):
            np.testing.assert_allclose(part.total, expected.total, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(part.count, expected.count)
        else:
            equal_bits(part, expected)


@pytest.mark.parametrize("name", KINDS)
def test_a_summary_is_that_of_the_keys_of_its_page(name):
    cache = common_cache()
    state = filled(selectors.get(name), cache)
    table = np.asarray(cache.view.page_table)
    for b, length in enumerate(np.asarray(cache.view.lengths)):
        for index in range(-(-int(length) // PAGE_SIZE)):
            assert_right(state, table[b, index], cache.keys[b, index * PAGE_SIZE : length][:PAGE_SIZE])
    for leaf in jax.tree.leaves(state):
        boxes = leaf.shape[0] // (2 * 11)
        untouched = np.setdiff1d(np.arange(2 * 11), table)
        assert not np.asarray(leaf).reshape(2 * 11, boxes, -1)[untouched].any()


@pytest.mark.parametrize("name", KINDS)
def test_tokens_one_by_one_at_once_and_in_any_order(name):
    cache, selector = common_cache(), selectors.get(name)
    keys = cache.keys.copy()
    keys[:, ::3, :, ::2] = 0.0  # equal values and zeros of both signs: a box must not depend on the order
    keys[:, 1::3, :, ::2] = -0.0
    keys[0, 5, 0, 3] = np.nan
    at_once = filled(selector, cache._replace(keys=keys))

    def step(state, token):
        return selector.write(state, *token), None

    tokens = jnp.asarray(keys.swapaxes(0, 1)), jnp.asarray(cache.slots.T)
    one_by_one, _ = quick_jit(functools.partial(jax.lax.scan, step))(selector.init(cache.kv), tokens)
    assert_close(at_once, one_by_one)
    order = np.random.default_rng(3).permutation(keys.shape[1])
    shuffled = write(selector, selector.init(cache.kv), keys[:, order], cache.slots[:, order])
    equal_bits(shuffled, at_once)


@pytest.mark.parametrize(
    ("pool", "box"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("float8_e4m3fn", "bfloat16")],
)
def test_boxes_have_the_type_of_the_pool(pool, box):
    """Wider keys are rounded as the pool rounds them, so that the box is exactly that of the stored keys."""
    cache = make_cache([7], page_size=4, table_width=2)
    kv = KV(*(x.astype(pool) for x in cache.kv))
    loud = cache.keys * 3.0
    loud[0, 1, 0, 0], loud[0, 2, 0, 1], loud[0, 3, 0, 2] = np.inf, -np.inf, 3.4e38
    state = filled(selectors.get("quest"), cache._replace(kv=kv, keys=loud))
    assert state.lo.dtype == state.hi.dtype == jnp.dtype(box)
    largest = float(jnp.finfo(box).max)
    stored = np.asarray(jnp.asarray(np.clip(loud[0], -largest, largest)).astype(box), np.float32)
    for index, page in enumerate(np.asarray(cache.view.page_table[0])):
        keys = stored[index * 4 : min(7, index * 4 + 4)]
        np.testing.assert_array_equal(np.asarray(state.lo[page], np.float32), keys.min(axis=0))
        np.testing.assert_array_equal(np.asarray(state.hi[page], np.float32), keys.max(axis=0))


@pytest.mark.parametrize("name", KINDS)
def test_a_reused_page_begins_anew(name):
    """The next owner inherits nothing, whether it fills the page at once or token by token; the others keep all."""
    cache, selector = common_cache(), selectors.get(name)
    page = int(cache.view.page_table[0, 1])
    loud = filled(selector, cache._replace(keys=cache.keys * 100))
    fresh = np.random.default_rng(5).standard_normal((3, 2, 8)).astype(np.float32)
    slots = page * PAGE_SIZE + np.arange(3, dtype=np.int32)
    at_once, one_by_one = write(selector, loud, fresh, slots), loud
    for t in range(3):
        one_by_one = write(selector, one_by_one, fresh[t], slots[t])
    for state in (at_once, one_by_one):
        assert_right(state, page, fresh)
        for leaf, before in zip(jax.tree.leaves(state), jax.tree.leaves(loud)):
            boxes = len(leaf) // 22
            others = np.delete(np.arange(len(leaf)), page * boxes)
            np.testing.assert_array_equal(np.asarray(leaf)[others], np.asarray(before)[others])
    # A mutation: keys from offset 1 on do not begin the page anew, and the old owner shows.
    late = write(selector, loud, fresh, slots + 1)
    with pytest.raises(AssertionError):
        assert_right(late, page, fresh)


BAD_IDS = [-1, -2, -(2**31), 2**31 - 1]


@pytest.mark.parametrize("name", KINDS)
def test_cases_PAD_2_and_OOB_1_absent_slots_and_pages_do_nothing(name):
    """PAD-2, OOB-1: -1 and ids out of range reach no page; the last page least of all."""
    cache, selector = common_cache(), selectors.get(name)
    state = filled(selector, cache)
    pool = 22 * PAGE_SIZE
    bad = np.array([*BAD_IDS, pool, pool + PAGE_SIZE], np.int32)
    equal_bits(write(selector, state, np.full((6, 2, 8), 1e6, np.float32), bad), state)
    mixed = write(selector, state, np.full((2, 2, 8), 1e6, np.float32), np.array([-1, PAGE_SIZE + 1], np.int32))
    changed = [np.asarray(x) != np.asarray(y) for x, y in zip(jax.tree.leaves(mixed), jax.tree.leaves(state))]
    assert {page for leaf in changed for page in np.flatnonzero(leaf.reshape(22, -1).any(axis=1))} == {1}
    bad, good = np.array([*BAD_IDS, 22], np.int32), np.zeros(5, np.int32)
    equal_bits(copy(selector, state, bad, good), state)
    equal_bits(copy(selector, state, good, bad), state)


def test_wide_numpy_ids_do_not_wrap():
    """Contract 1: 2 ** 32 is out of range, not slot 0."""
    cache, selector = common_cache(), selectors.get("quest")
    state, wide = filled(selector, cache), np.array([2**32, -(2**32), 2**33 + 4])
    equal_bits(selector.write(state, np.full((3, 2, 8), 9.0, np.float32), wide), state)
    equal_bits(selector.copy(state, np.array([1, 1, 1]), wide), state)


@pytest.mark.parametrize("name", KINDS)
def test_case_PREFIX_1_side_data_moves_with_its_page(name):
    """PREFIX-1: copies happen at once (a swap, a page both read and overwritten); nothing else changes."""
    cache, selector = common_cache(), selectors.get(name)
    state = filled(selector, cache)
    first, second, third = (int(page) for page in cache.view.page_table[0])
    sources, targets = [first, second, -1, third, 5], [second, first, 4, 9, -1]
    moved = copy(selector, state, np.array(sources, np.int32), np.array(targets, np.int32))
    for leaf, before in zip(jax.tree.leaves(moved), jax.tree.leaves(state)):
        before = np.asarray(before).reshape(22, -1)
        expected = before.copy()
        expected[[second, first, 9]] = before[[first, second, third]]
        np.testing.assert_array_equal(np.asarray(leaf).reshape(22, -1), expected)


@pytest.mark.parametrize("name", KINDS)
def test_a_sick_request_leaves_finite_summaries(name):
    cache, selector = common_cache(), selectors.get(name)
    keys = cache.keys.copy()
    keys[0], keys[0, ::2], keys[0, ::5] = np.inf, -np.inf, np.nan
    keys[2, :, :, 0] = np.inf
    state = filled(selector, cache._replace(keys=keys))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("name", "dtype"), [("quest", "float32"), ("quest", "bfloat16"), ("h2o_sparse_attention", "float32")]
)
def test_a_step_does_not_copy_the_state(name, dtype):
    """Two layers inside lax.scan, the keys of the second made of what the first one chose: the state exists once."""
    selector = selectors.get(name, budget=2 * PAGE_SIZE, sinks=1, recent=2)
    pages = 1024
    kv = KV(*(jnp.zeros((2, pages, 2, PAGE_SIZE, 8), dtype) for _ in range(2)))
    state = selector.init(kv)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    view = View(jnp.arange(24, dtype=jnp.int32).reshape(3, 8), jnp.full(3, 200, jnp.int32))

    def step(state, token):
        keys, slots = token
        for plane in range(2):
            state = selector.write(state, keys, jnp.where(slots >= 0, slots + plane * pages * PAGE_SIZE, -1))
            table = view._replace(page_table=view.page_table + plane * pages)
            q = keys.astype(jnp.float32)[:, None]
            chosen = selector.select(state, q, table, kv_heads=2, page_size=PAGE_SIZE)
            keys = keys + chosen.sum(axis=-1, keepdims=True).astype(keys.dtype)
        return state, None

    def run(state, keys, slots):
        return jax.lax.scan(step, state, (keys, slots))[0]

    arguments = (state, jnp.ones((8, 3, 2, 8), dtype), jnp.zeros((8, 3), jnp.int32))
    compiled = jax.jit(run, donate_argnums=0).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < size / 4


def drafting(name):
    """Six tokens, a loud draft of three (two in page 1, which stays, one in page 2), and the tokens that come instead.

    Returns the selector, the cache with all nine true tokens, the state before the draft and the state after it.
    """
    selector = selectors.get(name)
    cache = make_cache([9], page_size=4, table_width=3)
    before = write(selector, selector.init(cache.kv), cache.keys[0, :6], cache.slots[0, :6])
    draft = np.random.default_rng(7).normal(0, 50, (3, 2, 8)).astype(np.float32)
    return selector, cache, before, write(selector, before, draft, cache.slots[0, 6:9])


@pytest.mark.parametrize("name", ["quest", "centroid"])
def test_case_SPEC_4_a_rejected_draft_stays_in_its_page_only(name):
    """SPEC-4: in a box, which only grows, and in a sum; a page that began with the draft is right again."""
    selector, cache, before, drafted = drafting(name)
    never, after = (write(selector, state, cache.keys[0, 6:9], cache.slots[0, 6:9]) for state in (before, drafted))
    page = int(cache.view.page_table[0, 1])
    for leaf, exact in zip(jax.tree.leaves(after), jax.tree.leaves(never)):
        differs = np.asarray(leaf) != np.asarray(exact)
        assert np.flatnonzero(differs.reshape(len(leaf), -1).any(axis=1)).tolist() == [page]
    if name == "quest":
        assert (np.asarray(after.lo) <= np.asarray(never.lo)).all()
        assert (np.asarray(after.hi) >= np.asarray(never.hi)).all()


@pytest.mark.parametrize("name", ["quest", "h2o_sparse_attention"])
def test_case_SPEC_4_the_old_state_gives_the_bits_of_no_draft(name):
    """SPEC-4: the state before the draft, or its touched pages put back, then only the accepted tokens."""
    selector, cache, before, drafted = drafting(name)
    touched = cache.view.page_table[0, 1:]
    put_back = jax.tree.map(lambda new, old: new.at[touched].set(old[touched]), drafted, before)
    for accepted in range(4):
        kept = np.where(np.arange(12) < 6 + accepted, cache.slots[0], -1)[6:9]
        never = write(selector, before, cache.keys[0, 6:9], kept)
        equal_bits(write(selector, put_back, cache.keys[0, 6:9], kept), never)
        assert_right(never, int(touched[0]), cache.keys[0, 4 : min(8, 6 + accepted)])


@pytest.mark.parametrize("shape", [(3, 2, 7), (3, 1, 8), (2, 2, 8), (2, 8), (1, 3, 2, 8), (3, 8, 2), (16, 3)])
def test_key_shapes_are_checked(shape):
    selector = selectors.get("centroid")
    state = selector.init(make_cache([8], page_size=4, table_width=2).kv)
    with pytest.raises(ValueError, match=r"keys must have the shape \[3, 2, 8\].* got \[" + ", ".join(map(str, shape))):
        selector.write(state, jnp.zeros(shape), jnp.arange(3, dtype=jnp.int32))


def test_slots_and_copies_are_checked():
    selector = selectors.get("quest")
    state = selector.init(make_cache([8], page_size=4, table_width=2).kv)
    with pytest.raises(ValueError, match=r"slots must hold integers, got float32"):
        selector.write(state, jnp.zeros((3, 2, 8)), jnp.zeros(3))
    with pytest.raises(ValueError, match=r"sources and targets must have one shape, got \[1\] and \[2\]"):
        selector.copy(state, jnp.zeros(1, jnp.int32), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"targets must hold integers, got float32"):
        selector.copy(state, jnp.zeros(1, jnp.int32), jnp.zeros(1))


# Through a `PagedState`


def paged(pages=8):
    sizes = dict(planes=2, pages=pages, page_size=4, kv_heads=2, key_width=8)
    return paging.create(**sizes, requests=2, pages_per_request=6)


@functools.partial(quick_jit, static_argnums=0)
def append(selector, state, side, keys, counts):
    """Appends keys [planes, B, width, Hkv, D] as a model does."""
    state, side, room = selector.reserve(state, side, counts, keys.shape[2])
    for plane, k in enumerate(keys):
        state, side, _ = selector.store(state, side, plane, room, k, k)
    return state, side


def assert_follows(side, state, requests):
    for plane in range(2):
        for request in requests:
            keys = np.asarray(paging.gather(state, plane, request)[0])
            table = np.asarray(paging.view(state, plane).page_table[request])
            for index in range(-(-int(state.table.lengths[request]) // 4)):
                length = int(state.table.lengths[request])
                assert_right(side, table[index], keys[index * 4 : min(length, index * 4 + 4)])


def random_keys(seed, *, width=7, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, (2, 2, width, 2, 8)).astype(np.float32)


STATISTICS = selectors.get("gqa_h2o_sparse_attention")  # boxes and sums


def test_case_PREFIX_1_copy_before_write_takes_the_summary_along():
    """PREFIX-1: a shared, partly filled page is copied before it is written, and its summaries with it."""
    state = paged()
    state, side = append(STATISTICS, state, STATISTICS.init(state.kv), random_keys(0), np.array([7, 0], np.int32))
    state, _ = selectors.share(STATISTICS, state, jnp.int32(0), jnp.int32(1), jnp.int32(7))
    state, side = append(STATISTICS, state, side, random_keys(1, scale=9.0), np.array([0, 1], np.int32))
    assert state.table.pages[0, 1] != state.table.pages[1, 1]
    assert_follows(side, state, [0, 1])


def test_released_pages_begin_anew_for_the_next_request():
    state = paged(pages=3)
    side = STATISTICS.init(state.kv)
    for seed in range(3):
        counts = np.array([7, 0] if seed % 2 else [0, 7], np.int32)
        state, side = append(STATISTICS, state, side, random_keys(seed, scale=10.0 ** (2 - seed)), counts)
        paging.check(state)
        state, side = append(STATISTICS, state, side, random_keys(seed + 10), np.minimum(counts, 1))
        assert_follows(side, state, [int(counts[0] == 0)])
        state, _ = paging.release(state, jnp.array([True, True]))


def test_a_failed_request_writes_nothing():
    """Out of pages: every slot is -1, so the summaries keep every bit."""
    state = paged(pages=2)
    state, side = append(STATISTICS, state, STATISTICS.init(state.kv), random_keys(0), np.array([7, 0], np.int32))
    failed, after = append(STATISTICS, state, side, random_keys(1, scale=50.0), np.array([0, 7], np.int32))
    assert failed.table.status.tolist() == [paging.OK, paging.OUT_OF_PAGES]
    equal_bits(after, side)


def test_options_of_the_state_are_static():
    state = selectors.get("lserve").init(common_cache().kv)
    assert (state.page_size, state.boxes) == (PAGE_SIZE, 2)
    assert len(jax.tree.leaves(state)) == len(dataclasses.fields(state)) - 2
