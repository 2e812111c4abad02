"""Reference slots among those of others: fragments, all or nothing, rows without a slot, what outlives what."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import Config, paged_attention, reference_store, slot_pool
from sparse_jax.reference_store import ABSENT, CAPTURE, CONSUME, DENSE
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax.test_reference_store import (
    SLOTS,
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

pytestmark = pytest.mark.optimised  # two compilations must round alike


@pytest.mark.parametrize("options", [{}, {"implementation": "interpret", "config": Config(exact=True)}])
def test_requirement_15_18_fragmented_slots(options):
    """Slots [5, 3, 7] between those of others: each row reads and writes its own, in exact mode with the same bits."""
    compare = assert_same_bits if options else assert_close
    store, all_slots = reserve(make(), SLOTS)
    others = rows_of(all_slots, np.array([0, 1, 2, 4, 6]))
    for three in (slice(0, 3), slice(2, 5)):
        store = captured(store, rows_of(others, three), attention(4, 3))
    before = store.references
    for slot in (7, 3, 5):
        store, stale = reference_store.release(store, rows_of(all_slots, slice(slot, slot + 1)))
        assert int(stale) == 0
    store, lease = reserve(store, 3)
    assert lease.slots.tolist() == [5, 3, 7]

    loop = attention(5, 3)
    after = later(loop)
    plan = planned(store, lease, CAPTURE)
    _, store, _ = reference_store.capture(store, plan, 0, *loop, counts_of(loop), **options)
    same(rows_of(store.references, others.slots), rows_of(before, others.slots))
    same(rows_of(store.references, slice(None), 1), rows_of(before, slice(None), 1))
    out, _, _ = consumed(store, lease, 0, after, **options)
    for row in range(3):
        compare(out[row], single_row(only(loop, row), only(after, row), **options)[0])
    wrong, _, _ = reference_store.consume(
        store, dataclasses.replace(plan, modes=plan.modes * 2, slots=plan.slots[::-1]), 0, *after, **options
    )
    assert np.abs(wrong - out)[0].max() > 1e-3, "a row that reads the slot of another one is noticed"


def test_requirement_14_reserve_takes_all_or_nothing():
    store, _ = reserve(make(), 6)
    rows = np.array([[True, False, True], [False, True, False]])
    after, lease, shortfall = reference_store.reserve(store, rows)
    assert int(shortfall) == 1
    same(after, store)
    assert (np.asarray(lease.slots) == -1).all()
    assert (np.asarray(lease.incarnations) == -1).all()
    plan = planned(after, lease, CAPTURE)
    assert (np.asarray(plan.modes) == ABSENT).all(), "and an empty lease plans nothing"
    after, lease, shortfall = reference_store.reserve(store, rows & (np.arange(3) != 1))
    assert int(shortfall) == 0
    assert (np.asarray(lease.slots) >= 0).tolist() == [[True, False, True], [False, False, False]]


@pytest.mark.parametrize("place", ["take", "after"])
def test_requirement_14_a_failure_inside_reserve_leaves_the_store_usable(monkeypatch, place):
    """Also in a compiled, donating call: what fails while it is traced has consumed nothing."""
    take = slot_pool.take

    def fail(*args):
        take(*args)
        raise RuntimeError("injected")

    store, first = reserve(make(), 2)
    expected = jax.tree.map(np.asarray, store)
    with monkeypatch.context() as patched:
        patched.setattr(*((slot_pool, "take") if place == "take" else (reference_store, "_or_dropped")), fail)
        for reserve_ in (reference_store.reserve, jax.jit(lambda *x: reference_store.reserve(*x), donate_argnums=0)):
            with pytest.raises((RuntimeError, TypeError, AttributeError)):
                reserve_(store, jnp.ones(3, bool))
    same(store, expected)
    store, second = reserve(store, SLOTS - 2)
    assert sorted((*first.slots.tolist(), *second.slots.tolist())) == list(range(SLOTS))


def test_a_new_lease_reads_nothing_of_its_predecessor():
    store, lease = reserve(make(slots=3), 3)
    store = captured(store, lease, attention(1, 3))
    assert (np.asarray(store.references.count) > 0).all()
    store, lease = reserve(reference_store.release(store, lease)[0], 3)
    assert (np.asarray(store.references.count) == 0).all()


def test_requirement_24_rows_of_a_prompt_get_no_slot():
    store, lease = reserve(make(), 3)
    loop = attention(6, 3)
    store = captured(store, lease, loop)
    plan, stale = reference_store.plan(store, lease, jnp.array([DENSE, CONSUME, CAPTURE]))
    assert (plan.modes.tolist(), int(stale)) == ([DENSE, CONSUME, CAPTURE], 0)
    assert plan.slots.tolist() == [-1, 1, 2]
    assert plan.incarnations.tolist() == [-1, 1, 1]
    out, stale, uncaptured = reference_store.consume(store, plan, 0, *later(loop))
    assert (int(stale), int(uncaptured)) == (0, 0)
    assert (np.abs(out).max(axis=(1, 2)) > 0).tolist() == [False, True, False]
    other = attention(16, 3)
    output, after, _ = reference_store.capture(store, plan, 0, *other, counts_of(other))
    assert_same_bits(output.out, paged_attention(*other).out)
    same(rows_of(after.references, slice(0, 2)), rows_of(store.references, slice(0, 2)))
    assert (np.asarray(after.references.mass[2, 0]) != np.asarray(store.references.mass[2, 0])).all()


def test_requirement_21_every_field_has_a_reader():
    """Another value in any buffer changes what some operation returns."""
    store, lease = reserve(make(), 3)
    loop = attention(3, 3)
    store = captured(store, lease, loop)

    def readings(store):
        plan, stale = reference_store.plan(store, lease, CONSUME)
        consumed = reference_store.consume(store, plan, 0, *later(loop))
        return jax.tree.map(np.asarray, (stale, consumed, reference_store.reserve(store, np.ones(3, bool))[1:]))

    usual, (leaves, tree) = readings(store), jax.tree.flatten(store)
    for at, leaf in enumerate(leaves):
        if leaf.dtype == jnp.int32 and leaf.ndim == 4:  # ids that the rows see as well as those chosen
            changed = jnp.where(leaf >= 0, (leaf + 1) % 7, leaf)
        else:
            changed = jnp.zeros_like(leaf)
        other = readings(jax.tree.unflatten(tree, [*leaves[:at], changed, *leaves[at + 1 :]]))
        different = [(a != b).any() for a, b in zip(*map(jax.tree.leaves, (usual, other)))]
        assert any(different), jax.tree_util.tree_flatten_with_path(store)[0][at][0]


def test_requirement_16_nothing_outlives_the_store():
    def use():
        store, lease = reserve(make(), 3)
        store = captured(store, lease, attention(1, 3))
        return reference_store.release(store, lease)[0]

    use()  # compiles
    gc.collect()
    before = len(jax.live_arrays())
    store = use()
    assert len(jax.live_arrays()) > before
    del store
    gc.collect()
    assert len(jax.live_arrays()) == before
    containers = {name: x for name, x in vars(reference_store).items() if isinstance(x, list | dict | set | jax.Array)}
    assert set(containers) <= {"__builtins__", "__annotations__"}, "no caches of the module"
