"""Reference slots: who may read and write them. `requirement_N` is a numbered test requirement of the method."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import (
    checked,
    paged_attention,
    reference_capture,
    reference_consume,
    reference_store,
    retained_counts,
    slot_pool,
)
from sparse_jax.reference import keys_seen
from sparse_jax.reference_store import ABSENT, CAPTURE, CONSUME, Lease, Plan
from tests.compare import assert_close, assert_same_bits

SLOTS, LAYERS, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, PAGE_SIZE, TABLE_WIDTH = 8, 2, 4, 2, 5, 3, 4, 3
MAX_LENGTH, RETENTION = PAGE_SIZE * TABLE_WIDTH, 0.5
I32_MIN, I32_MAX = -(2**31), 2**31 - 1


def make(**changes):
    sizes = {"slots": SLOTS, "layers": LAYERS, "heads": HEADS, "value_width": VALUE_WIDTH}
    return reference_store.create(**(sizes | {"max_length": MAX_LENGTH, "retention": RETENTION} | changes))


def attention(seed, *rows):
    """q [*rows, Hq, D], pages, table and lengths of one loop; `rows` is B, or B and T."""
    rng = np.random.default_rng(seed)
    pages = rows[0] * TABLE_WIDTH

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    table = jnp.asarray(rng.permutation(pages).reshape(rows[0], TABLE_WIDTH), jnp.int32)
    lengths = jnp.asarray(rng.integers(7, MAX_LENGTH + 1, rows[0]), jnp.int32)
    k, v = (draw(pages, KV_HEADS, PAGE_SIZE, width) for width in (WIDTH, VALUE_WIDTH))
    return draw(*rows, HEADS, WIDTH), k, v, table, lengths


def later(loop, seed=100):
    """The same rows one loop later: other queries, keys and values."""
    other = attention(seed, *loop[0].shape[:-2])
    return *other[:3], *loop[3:]


def counts_of(loop):
    q, lengths = loop[0], loop[4]
    seen = keys_seen(lengths, q.shape[1] if q.ndim == 4 else 1, MAX_LENGTH)
    return jnp.asarray(retained_counts(MAX_LENGTH, RETENTION))[seen].reshape(q.shape[:-2])


def pairs(*lease):
    return Lease(*(jnp.array(x, jnp.int32) for x in zip(*lease)))


def reserve(store, *shape):
    store, lease, shortfall = reference_store.reserve(store, np.ones(shape, bool))
    assert int(shortfall) == 0
    return store, lease


def planned(store, lease, mode):
    plan, stale = reference_store.plan(store, lease, mode)
    assert int(stale) == 0
    return plan


def captured(store, lease, loop):
    """The store with references of these rows at all layers; layers differ in their queries."""
    plan, (q, *rest) = planned(store, lease, CAPTURE), loop
    for layer in range(LAYERS):
        _, store, stale = reference_store.capture(store, plan, layer, q + layer, *rest, counts_of(loop))
        assert int(stale) == 0
    return store


def consumed(store, lease, layer, loop, **options):
    """(out, stale, uncaptured) of all rows of a lease."""
    return reference_store.consume(store, planned(store, lease, CONSUME), layer, *loop, **options)


def single_row(loop, after, layer=0, **options):
    """What a row that is alone gives, without a store."""
    capacity = math.ceil(MAX_LENGTH * RETENTION)
    q, *rest = loop
    _, reference = reference_capture(q + layer, *rest, counts_of(loop), capacity=capacity, **options)
    return reference_consume(*after, reference, **options)


def rows_of(tree, *at):
    return jax.tree.map(lambda x: x[at], tree)


def only(loop, row):
    """One request of a batch."""
    q, k, v, table, lengths = loop
    return q[row : row + 1], k, v, table[row : row + 1], lengths[row : row + 1]


def same(a, b):
    chex.assert_trees_all_equal(a, b)


# What each operation does with a pair that is not live: nothing, and it says so.


def plan_is_stale(store, lease):
    plan, stale = reference_store.plan(store, lease, CONSUME)
    assert int(stale) == lease.slots.size
    assert (np.asarray(plan.modes) == ABSENT).all()
    assert (np.asarray(plan.slots) == -1).all()


def capture_is_stale(store, lease):
    loop = attention(7, *lease.slots.shape)
    plan = Plan(jnp.full_like(lease.slots, CAPTURE), lease.slots, lease.incarnations)
    output, after, stale = reference_store.capture(store, plan, 1, *loop, counts_of(loop))
    assert int(stale) == lease.slots.size
    same(after, store)
    assert_same_bits(output.out, paged_attention(*loop).out)


def consume_is_stale(store, lease):
    plan = Plan(jnp.full_like(lease.slots, CONSUME), lease.slots, lease.incarnations)
    out, stale, uncaptured = reference_store.consume(store, plan, 1, *attention(8, *lease.slots.shape))
    assert (int(stale), int(uncaptured)) == (lease.slots.size, 0)
    assert (np.asarray(out) == 0).all()


def accept_is_stale(store, lease):
    after, stale = reference_store.accept(store, rows_of(lease, None), jnp.zeros(1, jnp.int32))
    assert int(stale) == lease.slots.size
    same(after, store)


def release_is_stale(store, lease):
    after, stale = reference_store.release(store, lease)
    assert int(stale) == lease.slots.size
    same(after, store)


STALE = [plan_is_stale, capture_is_stale, consume_is_stale, accept_is_stale, release_is_stale]


def reused_slots():
    """Two slots that A had and B has captured: (store, A's lease, B's lease, B's loop)."""
    store, old = reserve(make(slots=2), 2)
    store = captured(store, old, attention(1, 2))
    store, stale = reference_store.release(store, old)
    assert int(stale) == 0
    store, new = reserve(store, 2)
    assert sorted(new.slots.tolist()) == sorted(old.slots.tolist())
    assert new.incarnations.tolist() == [2, 2]
    loop = attention(2, 2)
    return captured(store, new, loop), old, new, loop


@pytest.mark.parametrize("is_stale", STALE)
def test_requirement_9_10_11_a_pair_of_an_earlier_owner_changes_and_reads_nothing(is_stale):
    """Plans and leases kept by another request, by the same one, or let go of late or twice: identity is the pair."""
    store, old, new, loop = reused_slots()
    is_stale(store, old)
    after = later(loop)
    for layer in range(LAYERS):
        out, stale, uncaptured = consumed(store, new, layer, after)
        assert (int(stale), int(uncaptured)) == (0, 0)
        assert_close(out, single_row(loop, after, layer))


@pytest.mark.parametrize("is_stale", STALE)
def test_requirement_11_a_released_pair_is_stale_before_anyone_else_has_the_slot(is_stale):
    """The counter still matches then; the holder count does not."""
    store, lease = reserve(make(), 2)
    store, _ = reference_store.release(captured(store, lease, attention(1, 2)), lease)
    is_stale(store, lease)


@pytest.mark.parametrize("is_stale", STALE)
def test_contract_1_ids_out_of_range_are_stale(is_stale):
    store, _ = reserve(make(), SLOTS)
    wrong = (SLOTS, 1), (-2, 1), (I32_MIN, 1), (I32_MAX, 1), (3, 0), (3, 2), (3, -1), (3, I32_MAX)
    for first in range(0, len(wrong), 2):
        is_stale(store, pairs(*wrong[first : first + 2]))


@pytest.mark.parametrize("is_stale", STALE)
def test_requirement_12_all_operations_ask_the_one_check(monkeypatch, is_stale):
    """With a check that always says yes (within range) the tests above fail, and each operation does ask it."""
    store, old, _, _ = reused_slots()
    asked = []

    def always(pool, ids, incarnations):
        asked.append(ids)
        return (ids >= 0) & (ids < pool.holders.shape[0])

    monkeypatch.setattr(slot_pool, "live", always)
    with pytest.raises(AssertionError):
        is_stale(store, old)
    assert asked


def test_lifecycle_reserved_captured_consumed_retired_released():
    store, lease = reserve(make(), 2, 3)
    loop, after = attention(3, 2, 3), later(attention(3, 2, 3))

    def consume(store, layer=0):
        return consumed(store, lease, layer, after)

    out, stale, uncaptured = consume(store)
    assert (int(stale), int(uncaptured)) == (0, 6), "live, but nobody has captured yet"
    assert (np.asarray(out) == 0).all()

    output, store, _ = reference_store.capture(store, planned(store, lease, CAPTURE), 0, *loop, counts_of(loop))
    assert_same_bits(output.out, paged_attention(*loop).out)
    out, stale, uncaptured = consume(store)
    assert (int(stale), int(uncaptured)) == (0, 0)
    assert_close(out, single_row(loop, after))
    assert int(consume(store, 1)[2]) == 6, "each layer is captured for itself"

    store, stale = reference_store.accept(store, lease, jnp.array([0, 1], jnp.int32))
    retired, stale, uncaptured = consume(store)
    assert (int(stale), int(uncaptured)) == (0, 3)
    assert_same_bits(retired, jnp.where(np.array([[1, 0, 0], [1, 1, 0]])[..., None, None] > 0, out, 0.0))

    store, stale = reference_store.release(store, lease)
    assert (int(stale), int(store.pool.free_count)) == (0, SLOTS)


def test_worked_example_23_5_with_all_else_of_the_later_loop_poisoned():
    """p = (1/2, 1/4, 1/8, 1/8), values (16, 32, 8, 24): o_ref = 20, m = 0.75, c_ref = 16; later a_u = 26."""

    def column(*values):
        return jnp.array(values, jnp.float32).reshape(1, 1, 4, 1)

    table, lengths, q = jnp.zeros((1, 1), jnp.int32), jnp.array([4], jnp.int32), jnp.ones((1, 1, 1))
    store = make(heads=1, value_width=1, max_length=4)
    store, lease = reserve(store, 1)
    first = q, column(math.log(4), math.log(2), 0, 0), column(16, 32, 8, 24), table, lengths
    output, store, _ = reference_store.capture(store, planned(store, lease, CAPTURE), 1, *first, np.array([2]))
    np.testing.assert_allclose(output.out, 20, rtol=1e-6)
    second = q, column(1, 1, np.nan, np.nan), column(20, 32, np.nan, np.nan), table, lengths
    out, _, _ = consumed(store, lease, 1, second)
    np.testing.assert_allclose(out, 23.5, rtol=1e-6)


def test_modes_out_of_range_are_absent_and_checked_names_them():
    store, lease = reserve(make(), 4)
    plan, stale = reference_store.plan(store, lease, np.array([3, -2, CAPTURE, 2**40]))
    assert (plan.modes.tolist(), plan.slots.tolist(), int(stale)) == ([-1, -1, CAPTURE, -1], [-1, -1, 2, -1], 0)
    with pytest.raises(Exception, match=r"modes: ids must be -1 .absent. or lie in \[0, 3\), got 3"):
        checked(reference_store.plan)(store, lease, jnp.array([0, 3, 1, 2]))


@pytest.mark.parametrize("layer", [-1, LAYERS, I32_MAX])
def test_a_layer_out_of_range_is_absent(layer):
    store, lease = reserve(make(), 2)
    loop = attention(1, 2)
    store = captured(store, lease, loop)
    _, after, stale = reference_store.capture(store, planned(store, lease, CAPTURE), layer, *loop, counts_of(loop))
    assert int(stale) == 2
    same(after, store)
    out, stale, uncaptured = consumed(store, lease, layer, loop)
    assert (int(stale), int(uncaptured), float(jnp.abs(out).max())) == (2, 0, 0.0)


def test_case_DONATE_1_a_store_used_twice_is_named():
    store, lease = reserve(make(), 1)
    plan = planned(store, lease, CONSUME)
    jax.jit(reference_store.release, donate_argnums=0)(store, lease)
    for use in (
        lambda: reference_store.reserve(store, jnp.ones(1, bool)),
        lambda: reference_store.plan(store, lease, CONSUME),
        lambda: reference_store.release(store, lease),
        lambda: reference_store.grow(store, store.capacity + 1),
        lambda: reference_store.consume(store, plan, 0, *attention(1, 1)),
    ):
        with pytest.raises(ValueError, match=r"store\..* was donated to an earlier call: go on with what"):
            use()
