"""Random prompts, appends, compactions, shares and releases, compared with lists in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import compaction, paging

PLANES, PAGES, PAGE_SIZE, REQUESTS, TABLE_WIDTH, HEADS, WIDTH = 2, 9, 2, 4, 5, 2, 6


@jax.jit
def append(state, k, v, counts):
    state, reservation = compaction.reserve(state, counts, WIDTH)
    for plane in range(PLANES):
        state, _ = compaction.write(state, plane, reservation, k[plane], v[plane])
    return state


@jax.jit
def prefill(state, k, v, lengths, kept, ids):
    state, room = compaction.reserve_prompt(state, lengths, kept, WIDTH)
    for plane in range(PLANES):
        state, _ = compaction.write_prompt(state, plane, room, ids[plane], k[plane], v[plane])
    return state


compact, share, release = map(jax.jit, (compaction.compact, compaction.share, compaction.release))


@jax.jit
def read(state):
    """Positions, keys and values of all planes and requests, [planes, B, W * P, Hkv]."""

    def one(plane, request):
        k, v = paging.gather(state.paged, plane, request)
        pages = paging.view(state.paged, plane).page_table[request]
        positions = jnp.moveaxis(state.key_positions[jnp.maximum(pages, 0)], 2, 1).reshape(-1, HEADS)
        return positions, k[..., 0], v[..., 0]

    planes, requests = jnp.arange(PLANES, dtype=jnp.int32), jnp.arange(REQUESTS, dtype=jnp.int32)
    return jax.vmap(lambda p: jax.vmap(lambda r: one(p, r))(requests))(planes)


class Walk:
    """places[b][j] is {(plane, head): (position, value)}; a head without a key there has no entry."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.places, self.full, self.value = [[] for _ in range(REQUESTS)], [0] * REQUESTS, 0
        paged = paging.create(
            planes=PLANES, pages=PAGES, page_size=PAGE_SIZE, kv_heads=HEADS, key_width=1,
            requests=REQUESTS, pages_per_request=TABLE_WIDTH,
        )  # fmt: skip
        self.state = compaction.track(paged)
        self.succeeded, self.failed = 0, 0

    def new_values(self):
        self.value += 1
        shape = (PLANES, REQUESTS, WIDTH, HEADS)
        return self.value + np.arange(np.prod(shape)).reshape(shape) / 256

    def some(self, high):
        return self.rng.integers(0, high + 1, REQUESTS) * (self.rng.random(REQUESTS) < 0.5)

    def granted(self, asked):
        """The requests that asked and got; the others must be as they were, which `check` sees."""
        ok = np.asarray(self.state.paged.table.status) == paging.OK
        self.succeeded += int((asked & ok).sum())
        self.failed += int((asked & ~ok).sum())
        return np.flatnonzero(asked & ok)

    def append(self):
        values, counts = self.new_values(), self.some(WIDTH)
        as_tokens = jnp.asarray(values, jnp.float32)[..., None]
        self.state = append(self.state, as_tokens, -as_tokens, jnp.asarray(counts))
        for b in self.granted(counts > 0):
            for i in range(counts[b]):
                self.places[b].append({(p, h): (self.full[b] + i, values[p, b, i, h]) for p, h in PAIRS})
            self.full[b] += counts[b]

    def prefill(self):
        values, kept = self.new_values(), self.some(3)
        lengths = np.maximum(kept, self.rng.integers(1, WIDTH + 1, REQUESTS))
        ids = np.sort(self.rng.integers(-2, WIDTH + 2, (PLANES, REQUESTS, HEADS, WIDTH)), axis=-1)
        as_tokens = jnp.asarray(values, jnp.float32)[..., None]
        arguments = (jnp.asarray(x, jnp.int32) for x in (lengths, kept, ids))
        self.state = prefill(self.state, as_tokens, -as_tokens, *arguments)
        for b in self.granted(kept > 0):
            new = [{} for _ in range(kept[b])]
            for p, h in PAIRS:
                present = [i for i in ids[p, b, h] if 0 <= i < lengths[b]]
                for place, i in zip(new, present):
                    place[p, h] = (self.full[b] + i, values[p, b, i, h])
            self.places[b] += new
            self.full[b] += lengths[b]

    def compact(self):
        ids = np.sort(self.rng.integers(0, 9, (PLANES, REQUESTS, HEADS, WIDTH)), axis=-1)
        ids = np.where(self.rng.random(ids.shape) < 0.5, -1, ids)
        ids[:, self.rng.random(REQUESTS) < 0.5] = -1
        packed = {}
        for b in range(REQUESTS):
            for p, h in PAIRS:
                present = [i for i in ids[p, b, h] if 0 <= i < len(self.places[b]) and (p, h) in self.places[b][i]]
                packed[b, p, h] = [self.places[b][i][p, h] for i in present]
        counts = [max(len(packed[b, p, h]) for p, h in PAIRS) for b in range(REQUESTS)]
        self.state, stale = compact(self.state, jnp.asarray(ids, jnp.int32))
        assert int(stale) == 0
        for b in self.granted(np.array(counts) > 0):
            self.places[b] = [
                {(p, h): packed[b, p, h][j] for p, h in PAIRS if j < len(packed[b, p, h])} for j in range(counts[b])
            ]

    def share(self):
        source, target = self.rng.permutation(REQUESTS)[:2]
        self.state, stale = share(self.state, jnp.int32(source), jnp.int32(target), 2**30)
        assert int(stale) == (len(self.places[target]) > 0)
        if not self.places[target] and self.places[source]:
            self.places[target], self.full[target] = list(self.places[source]), self.full[source]

    def release(self):
        gone = self.rng.random(REQUESTS) < 0.3
        self.state, stale = release(self.state, jnp.asarray(gone))
        assert int(stale) == 0
        for b in np.flatnonzero(gone):
            self.places[b], self.full[b] = [], 0

    def check(self):
        positions, k, v = map(np.asarray, read(self.state))
        assert np.asarray(self.state.paged.table.lengths).tolist() == [len(places) for places in self.places]
        assert np.asarray(self.state.full_lengths).tolist() == [f if p else 0 for f, p in zip(self.full, self.places)]
        for b, places in enumerate(self.places):
            for j, place in enumerate(places):
                for p, h in PAIRS:
                    position, value = place.get((p, h), (-1, None))
                    assert positions[p, b, j, h] == position
                    if value is not None:
                        assert (k[p, b, j, h], v[p, b, j, h]) == (np.float32(value), -np.float32(value))
        pool, table = self.state.paged.pool, np.asarray(self.state.paged.table.pages)
        used = np.bincount(table[table >= 0], minlength=PAGES)
        np.testing.assert_array_equal(pool.holders, used)
        assert int(pool.free_count) == (used == 0).sum()


PAIRS = [(p, h) for p in range(PLANES) for h in range(HEADS)]


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_equal_lists_in_python(seed):
    walk = Walk(seed)
    for _ in range(80):
        step = walk.rng.choice(["append", "append", "prefill", "compact", "compact", "share", "release"])
        getattr(walk, step)()
        walk.check()
    assert walk.succeeded > 20
    assert walk.failed > 0, "this test should also run out of pages"
