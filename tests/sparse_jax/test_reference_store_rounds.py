"""Rounds of drafts over a reference store: overlapping, rejected, replaced, repeated a million times."""

import gc
import re
import tracemalloc
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sparse_jax import Reference, reference_store
from sparse_jax.reference_store import CAPTURE, CONSUME, DENSE, Lease
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax.test_reference_store import (
    LAYERS,
    attention,
    captured,
    consumed,
    counts_of,
    later,
    make,
    only,
    planned,
    reserve,
    rows_of,
    same,
    single_row,
)  # fmt: skip

NEVER = -7.0  # a value that no reference has


def numbered(store, shape, number):
    """References of rows [*shape] that hold `number` wherever they can; full retention."""
    _, _, heads, capacity = store.references.indices.shape
    width = store.references.output.shape[-1]
    ids = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), (*shape, heads, capacity))
    mass, output = (jnp.broadcast_to(jnp.float32(number), (*shape, *end)) for end in ((heads,), (heads, width)))
    return Reference(ids, jnp.full(shape, capacity, jnp.int32), mass, output, output)


def capture_all(store, lease, number):
    plan, stale = reference_store.plan(store, lease, CAPTURE)

    def write(store, layer):
        return reference_store.write(store, plan, layer, numbered(store, lease.slots.shape, number))

    store, ignored = lax.scan(write, store, jnp.arange(store.layers, dtype=jnp.int32))
    return store, stale + jnp.sum(ignored, dtype=jnp.int32)


def read(store, lease):
    """Masses and counts of the slots of a lease; NEVER where it is not live. [..., layers, Hq] and [..., layers]."""
    plan, _ = reference_store.plan(store, lease, CONSUME)
    at, known = jnp.maximum(plan.slots, 0), plan.slots >= 0
    mass, count = store.references.mass[at], store.references.count[at]
    return jnp.where(known[..., None, None], mass, NEVER), jnp.where(known[..., None], count, -1)


def overlapping(store, requests, rows, rounds):
    """Each round is leased and captured before the one before it is accepted and released; all on the device."""

    def step(carry, number):
        store, older = carry
        store, lease, shortfall = reference_store.reserve(store, jnp.ones((requests, rows), bool))
        store, stale = capture_all(store, lease, number)
        before = read(store, lease)
        accepted = (number.astype(jnp.int32) + jnp.arange(requests, dtype=jnp.int32)) % rows
        store, late = reference_store.accept(store, older, accepted)
        kept, _ = read(store, older)
        store, left = reference_store.release(store, older)
        after = read(store, lease)
        unchanged = jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda x, y: jnp.all(x == y), before, after))
        disjoint = jnp.all(lease.slots.reshape(-1, 1) != older.slots.reshape(-1))
        own = jnp.all(before[0] == number) & unchanged & disjoint
        wanted = jnp.where(jnp.arange(rows) <= accepted[:, None], number - 1, 0.0)
        right = jnp.all(kept == jnp.where(number > 1, wanted[..., None, None], NEVER))
        return (store, lease), (shortfall, stale + late + left, own, right)

    empty = jnp.full((requests, rows), -1, jnp.int32)
    return lax.scan(step, (store, Lease(empty, empty)), jnp.arange(1, rounds + 1, dtype=jnp.float32))


def test_requirement_6_7_overlapping_rounds_of_64_requests_at_full_retention():
    """Two rounds are outstanding at any time: disjoint, and the older one's end leaves the newer one bit-unchanged."""
    requests, rows, rounds = 64, 4, 30
    store = make(slots=2 * requests * rows, heads=2, value_width=1, max_length=5, retention=1)
    run = jax.jit(overlapping, static_argnums=(1, 2, 3), donate_argnums=0)
    (store, last), (shortfall, stale, own, right) = run(store, requests, rows, rounds)
    assert not np.asarray(shortfall).any()
    assert not np.asarray(stale).any()
    assert np.asarray(own).all()
    assert np.asarray(right).all(), "of the older round, the accepted rows and the root are still readable"
    store, stale = reference_store.release(store, last)
    assert (int(stale), int(store.pool.free_count)) == (0, store.slots)
    assert int(jnp.sum(store.pool.incarnation)) == requests * rows * rounds


def test_requirement_6_a_short_warm_up_proves_nothing():
    """One slot too few: the first round is fine."""
    store = make(slots=2 * 4 * 2 - 1, heads=2, value_width=1, max_length=5, retention=1)
    _, (shortfall, *_) = overlapping(store, 4, 2, 4)
    assert shortfall.tolist() == [0, 1, 0, 1], "the second waits until the first is released"


@pytest.mark.parametrize("accepted", range(-1, 5))
def test_requirement_22_rejection_at_every_draft(accepted):
    """Rows after the accepted ones are retired, the root never; the other request and all vectors stay as they were."""
    store, lease = reserve(make(heads=2), 2, 4)
    store, _ = capture_all(store, lease, 3)
    after, stale = reference_store.accept(store, lease, jnp.array([accepted, 3], jnp.int32))
    assert int(stale) == 0
    mass, count = map(np.asarray, read(after, lease))
    kept = np.arange(4) <= max(accepted, 0)
    assert (count[0] > 0).tolist() == [[k] * LAYERS for k in kept]
    assert (mass[0] == np.where(kept, 3.0, 0.0)[:, None, None]).all()
    assert (count[1] > 0).all()
    assert (mass[1] == 3).all()
    for name in ("indices", "output", "contribution"):
        assert_same_bits(getattr(after.references, name), getattr(store.references, name))
    same(after.pool, store.pool)


def test_requirement_22_a_replacement_at_the_same_position_and_a_delayed_completion():
    """Row 1 is rejected. The token that takes its position gets a new lease; what comes late for the old is lost."""
    loop, wanted = attention(1, 2), attention(2, 2)
    store, lease = reserve(make(), 1, 2)
    old = rows_of(lease, 0)
    store = captured(store, old, loop)
    late = planned(store, old, CAPTURE)
    store, _ = reference_store.accept(store, lease, jnp.zeros(1, jnp.int32))
    store, stale = reference_store.release(store, rows_of(old, slice(1, 2)))
    store, new = reserve(store, 1)
    assert (int(stale), new.slots[0] == old.slots[1], int(new.incarnations[0])) == (0, True, 2)

    store = captured(store, new, only(wanted, 1))
    references = store.references
    _, store, stale = reference_store.capture(store, late, 0, *attention(9, 2), counts_of(loop))
    assert int(stale) == 1, "the root is still its own"
    same(rows_of(store.references, new.slots), rows_of(references, new.slots))
    after = only(later(wanted), 1)
    out, _, _ = consumed(store, new, 0, after)
    assert_close(out, single_row(only(wanted, 1), after))
    for held, left in ((new, 0), (lease, 1)):  # the old lease: its root is live, its other row is stale
        store, stale = reference_store.release(store, held)
        assert int(stale) == left
    assert int(store.pool.free_count) == store.slots


def test_requirement_17_in_one_program_retirement_comes_after_the_work_it_retires():
    """Consume, retire, release, and another owner's capture into the same memory, all donated."""
    loop = attention(1, 2)
    store, lease = reserve(make(slots=2), 2)
    store = captured(store, lease, loop)
    after = later(loop)
    expected, _, _ = consumed(store, lease, 0, after)

    def step(store, lease, after):
        plan, _ = reference_store.plan(store, lease, CONSUME)
        out, _, _ = reference_store.consume(store, plan, 0, *after)
        store, _ = reference_store.accept(store, Lease(lease.slots[None], lease.incarnations[None]), jnp.zeros(1, int))
        store, _ = reference_store.release(store, lease)
        store, lease, _ = reference_store.reserve(store, jnp.ones(2, bool))
        store, _ = capture_all(store, lease, jnp.nan)
        return out, store, lease

    out, store, _ = jax.jit(step, donate_argnums=0)(store, lease, after)
    assert_close(out, expected)
    assert np.isnan(store.references.mass).all()


def test_requirement_25_13_a_round_is_one_program_without_host_reads_that_keeps_all_types():
    """Loops and layers are traced; store, lease and plans go through scans with unchanged dtypes and weak types."""
    loop = attention(1, 2, 2)
    q, *rest = loop
    counts = counts_of(loop)

    def layer(carry, layer):
        store, lease, mode = carry
        plan, stale = reference_store.plan(store, lease, mode)
        out, store, ignored = reference_store.capture(store, plan, layer, q, *rest, counts)
        corrected, missing, uncaptured = reference_store.consume(store, plan, layer, q, *rest)
        out = jnp.where((plan.modes == CONSUME)[..., None, None], corrected, out.out)
        return (store, lease, mode), (out, stale + ignored + missing + uncaptured)

    def one_loop(carry, u):
        store, lease = carry
        mode = jnp.minimum(u, CONSUME)
        (store, lease, _), results = lax.scan(layer, (store, lease, mode), jnp.arange(LAYERS, dtype=jnp.int32))
        return (store, lease), results

    def round_(store, accepted):
        store, lease, _ = reference_store.reserve(store, jnp.ones((2, 2), bool))
        (store, lease), (out, stale) = lax.scan(one_loop, (store, lease), jnp.arange(4, dtype=jnp.int32))
        store, late = reference_store.accept(store, lease, accepted)
        return *reference_store.release(store, lease), late, out, stale

    store, accepted = make(), jnp.array([1, 0], jnp.int32)
    compiled = jax.jit(round_, donate_argnums=0).lower(store, accepted).compile()
    expected = jax.tree.map(jax.typeof, store)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            store, left, late, out, stale = compiled(store, accepted)
    assert jax.tree.map(jax.typeof, store) == expected
    assert (int(left), int(late), int(jnp.sum(stale))) == (0, 0, 0)
    assert int(store.pool.free_count) == store.slots
    for u in (CONSUME, 3):  # the same queries and keys: the correction is nothing (identity 1)
        assert_close(out[u], out[DENSE])


def test_requirement_13_8_a_million_cycles_leave_a_counter_and_nothing_else():
    store = make(slots=4, layers=1, heads=1, value_width=1, max_length=1)
    rows = jnp.array([True, True, False, True])

    def cycle(_, carry):
        store, wrong = carry
        store, lease, shortfall = reference_store.reserve(store, rows)
        store, stale = reference_store.release(store, lease)
        return store, wrong + stale + shortfall

    run = jax.jit(lambda store, n: lax.fori_loop(jnp.int32(0), n, cycle, (store, jnp.int32(0))))
    for cycles in (1_000, 1_000_000):
        after, wrong = run(store, jnp.int32(cycles))
        assert (int(wrong), sorted(after.pool.incarnation.tolist())) == (0, [0, cycles, cycles, cycles])
        same(after.references, store.references)
        assert sorted(after.pool.free.tolist()) == list(range(4))
        chex.assert_trees_all_equal_shapes_and_dtypes(after, store)


def test_requirement_8_host_memory_stays_bounded_over_many_requests():
    """Cycles dispatched from the host: arrays and Python objects are as many after them as before."""

    def cycle(store):
        store, lease, _ = reference_store.reserve(store, jnp.ones(3, bool))
        store, _ = reference_store.accept(store, Lease(lease.slots[None], lease.incarnations[None]), jnp.zeros(1, int))
        return reference_store.release(store, lease)

    step = jax.jit(cycle, donate_argnums=0)
    store, _ = step(make())

    def used():
        gc.collect()
        return tracemalloc.get_traced_memory()[0], len(jax.live_arrays())

    tracemalloc.start()
    try:
        for cycles in (50, 2_000):
            memory, arrays = used()
            for _ in range(cycles):
                store, stale = step(store)
            grown, more = np.subtract(used(), (memory, arrays))
        assert (int(stale), int(more)) == (0, 0)
        assert grown < 20_000, "bytes after 2,000 cycles, warmed up with 50"
    finally:
        tracemalloc.stop()
    assert int(jnp.max(store.pool.incarnation)) == 2_051
    assert sum(x.size for x in jax.tree.leaves(store.pool)) == 3 * store.slots + 1


def test_the_documented_example_runs():
    """The section of docs/operations.md."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text[text.index("## Reference slots") :], re.DOTALL)
    names: dict = {}
    exec(compile(block, "operations.md", "exec"), names)
    assert_close(names["corrected"], names["dense"].out)
    assert [int(names[name]) for name in ("shortfall", "stale", "uncaptured")] == [0, 0, 0]
    assert int(names["store"].pool.free_count) == names["store"].slots
