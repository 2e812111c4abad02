"""Random steps of allocate, append, share, release, reuse and stale use, compared with a plain Python model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sparse_jax import paging, slot_pool
from tests.sparse_jax.paging_model import UNKNOWN, Model

PLANES, PAGES, PAGE_SIZE, REQUESTS, TABLE_WIDTH, TOKENS = 2, 7, 4, 4, 3, 5
steps = {"total": 0}


def jit(operation, **options):
    # A function of its own has a cache of its own, which the last test counts in.
    return jax.jit(lambda *args: operation(*args), donate_argnums=0, **options)


reserve, write, append = jit(paging.reserve, static_argnums=2), jit(paging.write), jit(paging.append)
share, release = jit(paging.share), jit(paging.release)
release_pairs, hold_pairs = jax.jit(slot_pool.release), jax.jit(slot_pool.hold)


@jax.jit
def read(state):
    """All that a user could see: values of all planes and requests, and the views."""
    planes, requests = jnp.arange(PLANES, dtype=jnp.int32), jnp.arange(REQUESTS, dtype=jnp.int32)
    k, v = jax.vmap(lambda p: jax.vmap(lambda r: paging.gather(state, p, r))(requests))(planes)
    return k[..., 0, 0], v[..., 0, 0], jax.vmap(lambda p: paging.view(state, p))(planes)


@jax.jit
def live(state, table):
    return slot_pool.live(state.pool, table.pages, table.incarnations)


counts = st.lists(st.integers(0, TOKENS), min_size=REQUESTS, max_size=REQUESTS)
requests = st.integers(0, REQUESTS - 1)


class Paging(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.model = Model(PAGES, PAGE_SIZE, REQUESTS, TABLE_WIDTH)
        self.state = paging.create(
            planes=PLANES, pages=PAGES, page_size=PAGE_SIZE, kv_heads=1, key_width=1,
            requests=REQUESTS, pages_per_request=TABLE_WIDTH,
        )  # fmt: skip
        self.value, self.incarnations = 0.0, np.zeros(PAGES, np.int32)
        self.reservations, self.tables = [], []  # kept for ever, and used again when they are stale

    def new_values(self):
        self.value += 1
        values = self.value + np.arange(REQUESTS * TOKENS).reshape(REQUESTS, TOKENS) / 64
        planes = jnp.asarray(values + 1000 * np.arange(PLANES)[:, None, None], jnp.float32)[..., None, None]
        return values, planes

    def write_model(self, places, values):
        return sum(self.model.write(row, row_values) for row, row_values in zip(places, values))

    @rule(counts=counts)
    def append(self, counts):
        values, planes = self.new_values()
        self.state, reservation = append(self.state, planes, -planes, np.array(counts, np.int32))
        places = self.model.reserve(counts)
        assert self.write_model(places, values) == 0
        self.compare(reservation, places)

    @rule(counts=counts)
    def allocate(self, counts):
        self.state, reservation = reserve(self.state, np.array(counts, np.int32), TOKENS)
        places = self.model.reserve(counts)
        self.compare(reservation, places)

    def compare(self, reservation, places):
        assert [int((row >= 0).sum()) for row in np.asarray(reservation.slots)] == [len(row) for row in places]
        self.reservations.append((jax.tree.map(np.asarray, reservation), places))

    @rule(which=st.integers(0, 2) | st.integers(0, 30))
    def write_through_an_old_reservation(self, which):
        if not self.reservations:
            return
        reservation, places = self.reservations[-1 - which % len(self.reservations)]
        values, planes = self.new_values()
        stale = self.write_model(places, values)
        for plane in range(PLANES):
            k = planes[plane]
            self.state, seen = write(self.state, plane, reservation, k, -k)
            assert int(seen) == stale

    @rule(source=requests, into=requests, tokens=st.integers(1, 12), sensible=st.integers(0, 3))
    def share(self, source, into, tokens, sensible):
        used = [request for request in range(REQUESTS) if self.model.lengths[request]]
        if sensible and 0 < len(used) < REQUESTS:  # otherwise most shares would be ignored
            source, into = used[source % len(used)], min(set(range(REQUESTS)) - set(used))
        shared = self.model.share(source, into, tokens)
        self.state, stale = share(self.state, source, into, tokens)
        assert int(stale) == (0 if shared else 1)

    @rule(which=st.lists(requests, max_size=3))
    def release(self, which):
        for request in set(which):
            self.model.release(request)
        self.state, stale = release(self.state, np.isin(np.arange(REQUESTS), which))
        assert int(stale) == 0

    @rule()
    def keep_the_table(self):
        self.tables.append((jax.tree.map(np.asarray, self.state.table), [list(t) for t in self.model.tables]))

    @rule(which=st.integers(0, 10))
    def use_an_old_table(self, which):
        if not self.tables:
            return
        table, leases = self.tables[-1 - which % len(self.tables)]
        still = [[page.holders > 0 for page in row] + [False] * (TABLE_WIDTH - len(row)) for row in leases]
        alive = np.asarray(live(self.state, table))
        np.testing.assert_array_equal(alive, still)
        present = table.pages != -1
        shown = read(dataclasses.replace(self.state, table=jax.tree.map(jnp.asarray, table)))[2]
        np.testing.assert_array_equal(shown.page_table[0] >= 0, alive)
        np.testing.assert_array_equal(shown.stale, [(present & ~alive).sum()] * PLANES)
        # What is stale can be let go or held again as often as one likes: nothing happens.
        pages = np.where(alive, -1, table.pages)
        for change in (release_pairs, hold_pairs):
            pool, stale = change(self.state.pool, pages, table.incarnations)
            assert int(stale) == (pages != -1).sum()
            jax.tree.map(np.testing.assert_array_equal, pool, self.state.pool)

    @invariant()
    def everything_agrees(self):
        steps["total"] += 1
        model, pool, table = self.model, jax.tree.map(np.asarray, self.state.pool), self.state.table
        np.testing.assert_array_equal(table.lengths, model.lengths)
        np.testing.assert_array_equal(np.asarray(table.status) != paging.OK, model.failed)

        owner = {}  # one lease, one page id, and the other way round
        for row, leases in zip(np.asarray(table.pages), model.tables):
            assert (row[len(leases) :] == -1).all()
            for page_id, lease in zip(row.tolist(), leases):
                assert owner.setdefault(page_id, lease) is lease
        assert len({id(lease) for lease in owner.values()}) == len(owner)
        np.testing.assert_array_equal(pool.holders, [owner[i].holders if i in owner else 0 for i in range(PAGES)])
        free = pool.free[: pool.free_count].tolist()
        assert len(free) == model.free == PAGES - len(owner), "no page is lost"
        assert sorted(free + list(owner)) == list(range(PAGES))
        assert (pool.incarnation >= self.incarnations).all(), "incarnations only grow"
        self.incarnations = pool.incarnation

        k, v, view = jax.tree.map(np.asarray, read(self.state))
        for request in range(REQUESTS):
            for i, token in enumerate(model.read(request)):
                if token is not UNKNOWN:
                    expected = [token + 1000 * plane if token else 0 for plane in range(PLANES)]
                    np.testing.assert_array_equal(k[:, request, i], expected)
                    np.testing.assert_array_equal(v[:, request, i], -np.array(expected))
        assert (view.stale == 0).all()
        first = np.arange(PLANES)[:, None, None] * PAGES
        np.testing.assert_array_equal(view.page_table, np.where(table.pages >= 0, first + table.pages, -1))


TestPaging = Paging.TestCase
TestPaging.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,  # the same steps on every run: a failure must be reproducible
    suppress_health_check=list(HealthCheck),
)


def test_contract_10_two_thousand_steps_and_each_operation_compiled_once():
    if not steps["total"]:  # run alone
        TestPaging("runTest").runTest()
    assert steps["total"] >= 2000, steps
    for operation in (reserve, write, append, share, release, read):
        assert operation._cache_size() == 1, operation
