"""Sizes of a reference store: room, growth, bytes counted beforehand, arguments that do not fit."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import (
    Reference,
    checked,
    reference_capture,
    reference_consume,
    reference_store,
    retained_count,
    retained_counts,
)
from sparse_jax.reference_store import CAPTURE, CONSUME, DENSE, Lease
from tests.compare import assert_same_bits
from tests.sparse_jax.test_reference_store import (
    HEADS,
    attention,
    captured,
    consumed,
    counts_of,
    later,
    make,
    planned,
    reserve,
    rows_of,
)  # fmt: skip

GIB = 2**30


@pytest.mark.parametrize("retention", [0.02, 0.07, 0.1, 0.3, 1])
def test_requirement_1_2_host_and_device_counts_agree_and_fit_the_default_capacity(retention):
    most = 65_536
    table = jnp.asarray(retained_counts(most, retention))
    n = jnp.arange(1, most + 1, dtype=jnp.int32)
    on_device = np.asarray(jax.jit(lambda table, n: table[n])(table, n))
    exact = [min(k, max(1, math.ceil(k * retention))) for k in range(1, most + 1)]
    np.testing.assert_array_equal(on_device, exact)
    store = jax.eval_shape(lambda: make(max_length=most, retention=retention))
    assert store.capacity == max(exact) == retained_count(most, retention)


def test_requirement_2_a_capacity_below_the_worst_case_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"capacity must be at least 7 \(max_length 100, retention 0.061\), got 6"):
        make(max_length=100, retention=0.061, capacity=6)
    assert make(max_length=100, retention=0.061, capacity=6 + 1).capacity == 7
    assert make(max_length=100, retention=0.061, capacity=9, initial_capacity=2).capacity == 2


def test_requirement_2_capacity_changes_no_result():
    loop = attention(1, 2)
    after, outs = later(loop), []
    for capacity in (6, 9):
        store, lease = reserve(make(capacity=capacity), 2)
        store = captured(store, lease, loop)
        outs.append(consumed(store, lease, 1, after)[0])
    assert_same_bits(*outs)


def test_requirement_5_bytes_of_a_slot():
    store = make()
    of_slot = reference_store.bytes_per_slot(layers=2, heads=HEADS, value_width=3, capacity=6)
    held = sum(x.nbytes for x in jax.tree.leaves(store)) - store.pool.free_count.nbytes
    assert held == store.slots * of_slot


@pytest.mark.parametrize(
    ("requests", "retention", "expected"),
    [(32, 1, 24.09), (32, 0.1, 2.49), (32, 1 / 128, 0.28), (64, 1, 48.19), (64, 0.1, 4.99), (64, 1 / 128, 0.56)],
)
def test_requirement_5_the_published_table_of_sizes(requests, retention, expected):
    """24 layers, 16 heads, Dv 128, two rounds of three drafts: the figures of the review, in GiB."""
    capacity = retained_count(65_536, retention)
    of_slot = reference_store.bytes_per_slot(layers=24, heads=16, value_width=128, capacity=capacity)
    assert round(requests * 4 * 2 * of_slot / GIB, 2) == expected


def test_requirement_5_memory_is_counted_beforehand_with_the_peak_of_growth():
    shape = {"slots": 256, "layers": 24, "heads": 16, "value_width": 128}
    setting = shape | {"max_length": 65_536, "retention": 1}
    alone = 256 * reference_store.bytes_per_slot(layers=24, heads=16, value_width=128, capacity=65_536)
    sizes = reference_store.capacities(65_536, 40_000)
    assert sizes == (40_000, 65_536)
    peak = reference_store.peak_bytes(**shape, capacities=sizes)
    assert peak == alone + 256 * 24 * 16 * 4 * 40_000
    for limit, initial in ((alone - 1, None), (peak - 1, 40_000)):  # nothing of 24 GiB is allocated for the answer
        with pytest.raises(ValueError, match=f"memory_limit of {limit} bytes is too small: 256 slots .*{alone} bytes"):
            reference_store.create(**setting, initial_capacity=initial, memory_limit=limit)
    jax.eval_shape(lambda: reference_store.create(**setting, memory_limit=alone))
    jax.eval_shape(lambda: reference_store.create(**setting, initial_capacity=40_000, memory_limit=peak))


def test_capacities_double_up_to_the_last_one():
    assert reference_store.capacities(6554) == (6554,)
    assert reference_store.capacities(6554, 512) == (512, 1024, 2048, 4096, 6554)
    assert reference_store.capacities(4, 1) == (1, 2, 4)
    assert [reference_store.capacity_for(count, (1, 2, 4)) for count in range(5)] == [1, 1, 2, 4, 4]
    with pytest.raises(ValueError, match=r"count must be at most the largest capacity of \(1, 2, 4\), got 5"):
        reference_store.capacity_for(5, (1, 2, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "slots must be from 1 to 2147483647, got 0"),
        ({"layers": -1}, "layers must be from 1"),
        ({"heads": 0.5}, "heads must be an integer"),
        ({"value_width": 0}, "value_width must be from 1"),
        ({"max_length": 0}, "capacity must be from 1"),
        ({"retention": -0.1}, "retention must be at least 0, got -0.1"),
        ({"slots": 2**20, "layers": 2**12}, r"slots \* layers must fit in 32 bits, got 1048576 \* 4096 = 4294967296"),
        ({"initial_capacity": 7}, "initial_capacity must be at most the capacity, got 7 and 6"),
        ({"initial_capacity": 0}, "initial_capacity must be from 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused_at_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_growth_keeps_live_contents_leases_and_plans():
    loop = attention(1, 2)
    after, short = later(loop), jnp.array([3, 2], jnp.int32)
    store, lease = reserve(make(initial_capacity=3), 2)
    plan, reading = planned(store, lease, CAPTURE), planned(store, lease, CONSUME)
    _, store, _ = reference_store.capture(store, plan, 0, *loop, short)
    before = reference_store.consume(store, reading, 0, *after)[0]
    grow = jax.jit(reference_store.grow, static_argnums=1)
    larger = grow(store, 6)
    assert (larger.capacity, larger.references.indices.dtype) == (6, jnp.int32)
    assert (np.asarray(larger.references.indices[..., 3:]) == -1).all()
    assert_same_bits(reference_store.consume(larger, reading, 0, *after)[0], before)
    _, larger, stale = reference_store.capture(larger, plan, 0, *loop, counts_of(loop))
    assert int(stale) == 0
    assert larger.references.count[:2, 0].tolist() == counts_of(loop).tolist(), "now there is room"
    assert reference_store.grow(larger, 6) is larger
    with pytest.raises(ValueError, match="capacity must be at least that of the store, 6, got 5"):
        reference_store.grow(larger, 5)


def test_arguments_that_do_not_fit_are_refused():
    store, lease = reserve(make(), 2)
    loop, plan = attention(1, 2), planned(store, lease, CAPTURE)
    _, reference = reference_capture(*loop, counts_of(loop), capacity=6)
    wider = dataclasses.replace(reference, indices=jnp.full((2, HEADS, 7), -1, jnp.int32))
    refused = {
        "rows must be bool, got int32": lambda: reference_store.reserve(store, jnp.ones(2, jnp.int32)),
        r"modes must have the shape \[2\] or \[\], got \[3\]": lambda: reference_store.plan(
            store, lease, np.zeros(3, int)
        ),
        r"layer must have the shape \[\], got \[1\]": lambda: reference_store.write(store, plan, [0], reference),
        "reference.indices has room for 7, the store only for 6": lambda: reference_store.write(store, plan, 0, wider),
        "reference must be a Reference, got Lease": lambda: reference_store.write(store, plan, 0, lease),
        r"reference.indices must have the shape \[2, 3, \*\]": lambda: reference_store.write(
            make(heads=3), plan, 0, reference
        ),
        r"counts must have the shape \[2\]": lambda: reference_store.capture(store, plan, 0, *loop, np.array([1])),
        r"plan.modes must have the shape \[3\]": lambda: reference_store.consume(store, plan, 0, *attention(1, 3)),
        r"reference.indices must have the shape \[8, 2, 4, \*\]": lambda: reference_store.consume(
            make(heads=2), plan, 0, *loop
        ),
        r"lease.slots must have the shape \[\*, \*\], got \[2\]": lambda: reference_store.accept(store, lease, [0]),
        r"accepted must have the shape \[1\]": lambda: reference_store.accept(store, rows_of(lease, None), [0, 0]),
        "must have one shape": lambda: reference_store.release(store, Lease(lease.slots, lease.incarnations[:1])),
        "ids must hold integers, got float32": lambda: reference_store.release(
            store, Lease(lease.slots + 0.5, lease.incarnations)
        ),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_a_reference_in_store_keeps_what_a_smaller_one_left_unread():
    """Fewer indices than the store has room for overwrite the first ones; what is behind the count is never read."""
    store, lease = reserve(make(), 2)
    loop = attention(9, 2)
    store = captured(store, lease, loop)
    small = jnp.array([2, 1], jnp.int32)
    _, reference = reference_capture(*loop, small, capacity=2)
    store, stale = reference_store.write(store, planned(store, lease, CAPTURE), 0, reference)
    assert (int(stale), store.references.count[:2, 0].tolist()) == (0, [2, 1])
    after = later(loop)
    out, _, _ = consumed(store, lease, 0, after)
    assert_same_bits(out, reference_consume(*after, reference))


def test_requirement_2_a_count_above_the_room_publishes_nothing_and_checked_raises():
    store, lease = reserve(make(), 2)
    loop = attention(9, 2)
    plan = planned(store, lease, CAPTURE)
    _, after, stale = reference_store.capture(store, plan, 0, *loop, jnp.array([7, 3]))
    assert (int(stale), after.references.count[:2, 0].tolist()) == (0, [0, 3])
    with pytest.raises(Exception, match="counts: must be at most the capacity of 6, got 7"):
        checked(reference_store.capture)(store, plan, 0, *loop, jnp.array([7, 3]))
    second, _ = reference_store.plan(store, lease, jnp.array([DENSE, CAPTURE]))
    checked(reference_store.capture)(store, second, 0, *loop, jnp.array([7, 3]))  # of a row that does not capture
    reference = Reference(*jax.tree.leaves(rows_of(after.references, slice(0, 2), 0)))
    reference = dataclasses.replace(reference, count=jnp.array([3, 7], jnp.int32))
    again, _ = reference_store.write(store, plan, 1, reference)
    assert again.references.count[:2, 1].tolist() == [3, 0]
    with pytest.raises(Exception, match=r"reference.count: must be at most the capacity of 6, got 7"):
        checked(reference_store.write)(store, plan, 1, reference)
