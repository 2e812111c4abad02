"""Random steps of reserve, plan, capture, consume, accept, release, growth and stale use, against plain Python."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparse_jax import Reference, reference_store
from tests.sparse_jax.reference_store_model import Model

SLOTS, LAYERS, HEADS, REQUESTS, ROWS, LENGTH = 9, 2, 2, 2, 2, 8
SHAPE, SEEN = (REQUESTS, ROWS), np.array([LENGTH - 1, LENGTH] * REQUESTS)  # keys that each row sees
CAPACITIES = (4, LENGTH - 1)
steps = collections.Counter()


def jit(operation, **options):
    # A function of its own has a cache of its own, which the last test counts in.
    return jax.jit(lambda *args: operation(*args), **options)


reserve, write, accept, release = (
    jit(f, donate_argnums=0)
    for f in (reference_store.reserve, reference_store.write, reference_store.accept, reference_store.release)
)
plan, grow = jit(reference_store.plan), jit(reference_store.grow, static_argnums=1)

# One page for each request; all queries are 0, so that attention is the mean of the values it reads.
VALUES = np.random.default_rng(0).standard_normal((REQUESTS, LENGTH)).astype(np.float32)
PAGES = jnp.asarray(VALUES)[:, None, :, None]
TABLE, LENGTHS = jnp.arange(REQUESTS, dtype=jnp.int32)[:, None], jnp.full(REQUESTS, LENGTH, jnp.int32)


@jit
def consume(store, planned, layer):
    q = jnp.zeros((*SHAPE, HEADS, 1), jnp.float32)
    return reference_store.consume(store, planned, layer, q, PAGES, PAGES, TABLE, LENGTHS)


def expected_of(row, found):
    """Attention of one row, f32[HEADS], from the reference that the model says it reads."""
    values = VALUES[row // ROWS]
    if found is None:
        return np.zeros(HEADS)
    count, indices, mass, output, contribution = found
    if count == SEEN[row]:
        return np.full(HEADS, values[:count].mean())
    mean = np.array([values[[j for j in ids[:count] if j < SEEN[row]]].mean() for ids in indices])
    return output + mass * mean - contribution


modes = st.lists(st.integers(-1, 2), min_size=4, max_size=4) | st.sampled_from([[1] * 4, [2] * 4])
masks = st.lists(st.booleans(), min_size=4, max_size=4) | st.just([True] * 4)
layers = st.integers(0, LAYERS - 1)
choices = st.tuples(st.sampled_from([True, True, False, None]), st.integers(0, 20))


class Store(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 9))
    def start(self, seed):
        self.model, self.rng = Model(SLOTS), np.random.default_rng(seed)
        self.store = reference_store.create(
            slots=SLOTS, layers=LAYERS, heads=HEADS, value_width=1, max_length=LENGTH - 1, retention=1,
            initial_capacity=CAPACITIES[0],
        )  # fmt: skip
        self.incarnations = np.zeros(SLOTS, np.int32)
        self.leases, self.plans = [], []  # kept for ever, and used again when they are stale

    def pick(self, kept, which):
        """An old lease or plan: with a live slot, with one that was given back, or any."""
        held, which = which
        fitting = [(x, rows) for x, rows in kept if any(slot is not None and slot.held == held for slot in rows)]
        kept = fitting if fitting and held is not None else kept
        return kept[-1 - which % len(kept)]

    @rule(wanted=masks)
    def reserve(self, wanted):
        self.store, lease, shortfall = reserve(self.store, np.array(wanted).reshape(SHAPE))
        rows, missing = self.model.reserve(wanted)
        assert int(shortfall) == missing
        assert (np.asarray(lease.slots).reshape(-1) >= 0).tolist() == [slot is not None for slot in rows]
        self.leases.append((jax.tree.map(np.asarray, lease), rows))

    @precondition(lambda self: self.leases)
    @rule(which=choices, modes=modes)
    def plan(self, which, modes):
        self.planned(which, modes)

    def planned(self, which, modes):
        lease, rows = self.pick(self.leases, which)
        made, stale = plan(self.store, lease, np.array(modes, np.int32).reshape(SHAPE))
        made, (expected, ignored) = jax.tree.map(np.asarray, made), self.model.plan(rows, modes)
        assert int(stale) == ignored
        assert made.modes.reshape(-1).tolist() == [mode for mode, _ in expected]
        slots = [slot for _, slot in expected]
        assert (made.slots.reshape(-1) >= 0).tolist() == [slot is not None for slot in slots]
        self.plans.append(((made, expected), slots))
        return made, expected

    def references(self):
        """A random reference for each row: what the model keeps of it, and the arrays."""
        room = self.store.capacity
        kept = []
        for count in self.rng.integers(0, room + 1, 4).tolist():
            ids = [sorted(self.rng.permutation(LENGTH - 1)[:count].tolist()) for _ in range(HEADS)]
            indices = [row + [-1] * (room - count) for row in ids]
            kept.append((count, indices, *self.rng.standard_normal((3, HEADS)).astype(np.float32)))
        count, indices, mass, output, contribution = (np.array(x).reshape(*SHAPE, *np.shape(x)[1:]) for x in zip(*kept))
        arrays = Reference(
            indices.astype(np.int32), count.astype(np.int32), mass, output[..., None], contribution[..., None]
        )
        return [x if x[0] else None for x in kept], arrays

    @precondition(lambda self: self.leases)
    @rule(which=choices)
    def capture_a_lease_and_read_it(self, which):
        planned = self.planned(which, [reference_store.CAPTURE] * 4)
        for layer in range(LAYERS):
            self.write(*planned, layer)
        self.compare(*self.planned(which, [reference_store.CONSUME] * 4), layer)

    @precondition(lambda self: self.plans)
    @rule(which=choices, layer=layers)
    def capture_through_any_plan(self, which, layer):
        self.write(*self.pick(self.plans, which)[0], layer)

    def write(self, planned, rows, layer):
        kept, arrays = self.references()
        self.store, stale = write(self.store, planned, np.int32(layer), arrays)
        ignored = self.model.write(rows, layer, kept)
        assert int(stale) == ignored
        steps["stale rows"] += ignored

    @precondition(lambda self: self.leases)
    @rule(which=choices, layer=layers)
    def read_a_lease(self, which, layer):
        self.compare(*self.planned(which, [reference_store.CONSUME] * 4), layer)

    @precondition(lambda self: self.plans)
    @rule(which=choices, layer=layers)
    def consume_through_any_plan(self, which, layer):
        self.compare(*self.pick(self.plans, which)[0], layer)

    def compare(self, planned, rows, layer):
        out, stale, uncaptured = consume(self.store, planned, np.int32(layer))
        found, ignored, empty = self.model.consume(rows, layer)
        assert (int(stale), int(uncaptured)) == (ignored, empty)
        expected = np.array([expected_of(row, x) for row, x in enumerate(found)])
        np.testing.assert_allclose(out.reshape(4, HEADS), expected, atol=1e-5)
        steps["rows read"] += sum(x is not None for x in found)
        steps["stale rows"] += ignored

    @precondition(lambda self: self.leases)
    @rule(which=choices, accepted=st.lists(st.integers(-1, ROWS), min_size=REQUESTS, max_size=REQUESTS))
    def accept(self, which, accepted):
        lease, rows = self.pick(self.leases, which)
        self.store, stale = accept(self.store, lease, np.array(accepted, np.int32))
        ignored = self.model.accept(rows, ROWS, accepted)
        assert int(stale) == ignored
        steps["stale rows"] += ignored

    @precondition(lambda self: self.leases)
    @rule(which=choices, part=masks)
    def release(self, which, part):
        lease, rows = self.pick(self.leases, which)
        mask = np.array(part).reshape(SHAPE)
        lease = reference_store.Lease(np.where(mask, lease.slots, -1), lease.incarnations)
        self.store, stale = release(self.store, lease)
        ignored = self.model.release([slot if kept else None for slot, kept in zip(rows, part)])
        assert int(stale) == ignored
        steps["stale rows"] += ignored

    @rule(rarely=st.integers(0, 9))
    def grow(self, rarely):
        if rarely == 0:
            self.store = grow(self.store, CAPACITIES[-1])

    @invariant()
    def everything_agrees(self):
        steps["total"] += 1
        pool, kept = jax.tree.map(np.asarray, (self.store.pool, self.store.references))
        owner = {}
        for lease, rows in self.leases:
            for slot_id, slot in zip(lease.slots.reshape(-1).tolist(), rows):
                if slot is not None and slot.held:
                    assert owner.setdefault(slot_id, slot) is slot, "one lease, one slot"
        free = pool.free[: pool.free_count].tolist()
        assert len(free) == self.model.free == SLOTS - len(owner), "no slot is lost"
        assert sorted(free + list(owner)) == list(range(SLOTS))
        np.testing.assert_array_equal(pool.holders, [int(i in owner) for i in range(SLOTS)])
        assert (pool.incarnation >= self.incarnations).all(), "incarnations only grow"
        self.incarnations = pool.incarnation
        for slot_id, slot in owner.items():
            for layer in range(LAYERS):
                found = slot.kept.get(layer)
                count = int(kept.count[slot_id, layer])
                assert count == (found[0] if found else 0)
                if found:
                    at = (slot_id, layer)
                    np.testing.assert_array_equal(kept.indices[at][:, :count], [ids[:count] for ids in found[1]])
                    np.testing.assert_array_equal(kept.mass[at], found[2])
                    np.testing.assert_array_equal(kept.output[at][:, 0], found[3])
                    np.testing.assert_array_equal(kept.contribution[at][:, 0], found[4])


TestStore = Store.TestCase
TestStore.settings = settings(
    max_examples=160,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,  # the same steps on every run: a failure must be reproducible
    suppress_health_check=list(HealthCheck),
)


def test_contract_10_five_thousand_steps_and_each_operation_compiled_once_for_each_capacity():
    if not steps["total"]:  # run alone
        TestStore("runTest").runTest()
    assert steps["total"] >= 5000, steps
    assert min(steps["rows read"], steps["stale rows"]) >= 300, steps
    for operation in (reserve, plan, write, consume, accept, release, grow):
        assert operation._cache_size() == len(CAPACITIES), operation
