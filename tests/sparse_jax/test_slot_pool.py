"""The slot pool: leases, holders, the liveness check, and calls with anything in them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import slot_pool

I32_MIN, I32_MAX = -(2**31), 2**31 - 1


def i32(*values):
    return jnp.array(values, jnp.int32)


def take(pool, count, of=None):
    return slot_pool.take(pool, jnp.arange(of or count) < count)


def invariants(pool):
    """Free slots are on the stack once and have no holder; all others have one."""
    free, holders = np.asarray(pool.free)[: int(pool.free_count)], np.asarray(pool.holders)
    assert len(set(free.tolist())) == len(free)
    np.testing.assert_array_equal(np.sort(free), np.flatnonzero(holders == 0))
    assert (holders >= 0).all()


def same(a, b):
    chex.assert_trees_all_equal(a, b)


def test_slots_go_out_in_order_and_come_back():
    pool, ids, incarnations = take(slot_pool.create_slots(4), 3)
    np.testing.assert_array_equal(ids, [0, 1, 2])
    np.testing.assert_array_equal(incarnations, [1, 1, 1])
    pool, stale = slot_pool.release(pool, ids[1:2], incarnations[1:2])
    assert (int(stale), int(pool.free_count)) == (0, 2)
    pool, ids, incarnations = take(pool, 1)
    np.testing.assert_array_equal((ids[0], incarnations[0]), (1, 2))
    invariants(pool)


def test_take_gives_none_where_none_is_wanted_or_left():
    pool, ids, incarnations = slot_pool.take(slot_pool.create_slots(2), jnp.array([False, True, False, True, True]))
    np.testing.assert_array_equal(ids, [-1, 0, -1, 1, -1])
    np.testing.assert_array_equal(incarnations, [-1, 1, -1, 1, -1])
    assert int(pool.free_count) == 0
    same(slot_pool.take(pool, jnp.array([True]))[0], pool)
    invariants(pool)


def test_contract_10_incarnations_grow_and_are_never_reset():
    pool = slot_pool.create_slots(1)
    for lease in range(1, 6):
        pool, ids, incarnations = take(pool, 1)
        assert int(incarnations[0]) == lease
        pool, _ = slot_pool.release(pool, ids, incarnations)
        assert int(pool.incarnation[0]) == lease


def test_contract_10_a_pair_is_live_only_while_held_and_of_this_incarnation():
    pool, ids, first = take(slot_pool.create_slots(2), 1)
    assert bool(slot_pool.live(pool, ids, first)[0])
    assert not bool(slot_pool.live(pool, ids, first + 1)[0])
    pool, _ = slot_pool.release(pool, ids, first)
    assert not bool(slot_pool.live(pool, ids, first)[0]), "free"
    pool, again, second = take(pool, 1)
    assert int(again[0]) == int(ids[0])
    assert not bool(slot_pool.live(pool, ids, first)[0]), "of the new owner"
    assert bool(slot_pool.live(pool, ids, second)[0])


def test_contract_1_ids_out_of_range_are_never_live_and_change_nothing():
    pool, _, _ = take(slot_pool.create_slots(3), 3)
    ids, incarnations = i32(-1, 3, -2, -3, I32_MIN, I32_MAX), i32(1, 1, 1, 1, 1, 1)
    assert not slot_pool.live(pool, ids, incarnations).any()
    for change in (slot_pool.hold, slot_pool.release):
        after, stale = change(pool, ids, incarnations)
        same(after, pool)
        assert int(stale) == 5, "all but -1"


def test_contract_10_double_release_does_no_harm():
    pool, ids, incarnations = take(slot_pool.create_slots(3), 2)
    pool, _ = slot_pool.release(pool, ids, incarnations)
    again, stale = slot_pool.release(pool, ids, incarnations)
    same(again, pool)
    assert int(stale) == 2
    invariants(again)


def test_contract_10_holders_count_every_holder():
    pool, ids, incarnations = take(slot_pool.create_slots(2), 1)
    pool, _ = slot_pool.hold(pool, jnp.tile(ids, 3), jnp.tile(incarnations, 3))
    assert int(slot_pool.holders_of(pool, ids, incarnations)[0]) == 4
    pool, stale = slot_pool.release(pool, jnp.tile(ids, 3), jnp.tile(incarnations, 3))
    assert (int(pool.holders[0]), int(stale), int(pool.free_count)) == (1, 0, 1)


def test_contract_10_pairs_released_too_often_in_one_call_free_the_slot_once():
    pool, ids, incarnations = take(slot_pool.create_slots(3), 2)
    pool, _ = slot_pool.hold(pool, ids[:1], incarnations[:1])
    pool, stale = slot_pool.release(pool, i32(0, 1, 0, 0, 1, 0), i32(1, 1, 1, 1, 1, 1))
    assert int(stale) == 3, "slot 0 had two holders, slot 1 one"
    assert int(pool.free_count) == 3
    invariants(pool)


def test_contract_10_stale_hold_does_not_revive_a_slot():
    pool, ids, incarnations = take(slot_pool.create_slots(1), 1)
    pool, _ = slot_pool.release(pool, ids, incarnations)
    after, stale = slot_pool.hold(pool, ids, incarnations)
    same(after, pool)
    assert int(stale) == 1


def test_random_calls_match_releasing_one_after_the_other():
    rng = np.random.default_rng(0)
    together, single = jax.jit(slot_pool.release), jax.jit(slot_pool.release)
    pool, _, _ = take(slot_pool.create_slots(5), 4)
    pool, _ = slot_pool.hold(pool, i32(0, 0, 2), i32(1, 1, 1))
    for _ in range(50):
        ids, incarnations = rng.integers(-2, 7, 12).astype(np.int32), rng.integers(1, 3, 12).astype(np.int32)
        at_once, stale = together(pool, ids, incarnations)
        one_by_one, total = pool, 0
        for i in range(12):
            one_by_one, count = single(one_by_one, ids[i : i + 1], incarnations[i : i + 1])
            total += int(count)
        assert int(stale) == total
        np.testing.assert_array_equal(at_once.holders, one_by_one.holders)
        assert int(at_once.free_count) == int(one_by_one.free_count)
        invariants(at_once)


@pytest.mark.parametrize("x64", [False, True])
def test_contract_9_state_dtypes_and_weak_types_are_the_same_in_and_out(x64):
    with jax.enable_x64(x64):
        pool = slot_pool.create_slots(4)

        def step(pool, _):
            pool, ids, incarnations = slot_pool.take(pool, jnp.array([True, False]))
            pool, held = slot_pool.hold(pool, ids, incarnations)
            pool, stale = slot_pool.release(pool, ids, incarnations)
            return pool, (ids, incarnations, held, stale)

        after, outputs = jax.lax.scan(step, pool, None, length=3)
        for leaf in jax.tree.leaves((pool, after, outputs)):
            assert leaf.dtype == jnp.int32
            assert not leaf.weak_type


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_contract_1_wide_ids_of_numpy_saturate_without_64_bit_mode(dtype):
    """JAX narrows a host array by wrapping: 2**32 would be slot 0."""
    pool, _, _ = take(slot_pool.create_slots(2), 2)
    wide = [2**31, 2**32 - 1] if dtype == np.uint32 else [2**32, 2**32 + 1, 2**63 - 1]
    wide = np.array(wide + [-1, -(2**32), -(2**63)] * (dtype == np.int64), dtype)
    ones = np.ones(wide.shape, dtype)
    assert not slot_pool.live(pool, wide, ones).any()
    assert not slot_pool.live(pool, ones - 1, wide).any(), "incarnations, too"
    for change in (slot_pool.hold, slot_pool.release):
        after, stale = change(pool, wide, ones)
        same(after, pool)
        assert int(stale) == sum(int(x) != -1 for x in wide)
    assert slot_pool.live(pool, np.array([0, 1], dtype), np.ones(2, dtype)).all()


def test_contract_1_wide_ids_saturate_and_never_wrap():
    with jax.enable_x64(True):
        pool, _, _ = take(slot_pool.create_slots(2), 2)
        ids = jnp.array([2**32, -(2**32), 2**32 + 1], jnp.int64)
        assert not slot_pool.live(pool, ids, jnp.ones(3, jnp.int64)).any()


def test_contract_8_arguments_are_checked():
    pool = slot_pool.create_slots(2)
    with pytest.raises(ValueError, match=r"got 0"):
        slot_pool.create_slots(0)
    with pytest.raises(ValueError, match=r"ids \[2\] and incarnations \[3\]"):
        slot_pool.live(pool, i32(0, 1), i32(1, 1, 1))
    with pytest.raises(ValueError, match="float32"):
        slot_pool.live(pool, jnp.zeros(2), i32(0, 1))
    with pytest.raises(ValueError, match="want is bool"):
        slot_pool.take(pool, i32(1))
