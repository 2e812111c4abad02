"""Who gets pages: a step serves its requests as if they came one after the other, with or without a loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lowering import lower_for_cuda
from sparse_jax import page_allocation, paging, selectors
from tests.sparse_jax.test_paging import counts_of, extend, make, release, reserve, same, share, statuses

grant = jax.jit(page_allocation.grant)
REQUESTS = 4


def one_by_one(state, counts, width):
    for request, count in enumerate(counts):
        alone = [count if request == other else 0 for other in range(len(counts))]
        state, _ = reserve(state, counts_of(*alone), width)
    return state


def with_lengths(state, *lengths):
    return dataclasses.replace(state, table=dataclasses.replace(state.table, lengths=counts_of(*lengths)))


def test_all_who_share_a_page_let_go_of_it_after_lengths_were_set_back():
    """Both go on at the start of a shared page: the first gets another one, the second is the only holder then."""
    state, _, _ = extend(make(pages=4, requests=2), 8, 0)
    state, _ = share(state, 0, 1, 8)
    back = with_lengths(state, 4, 4)
    together, _ = reserve(back, counts_of(4, 2), 4)
    assert statuses(together) == [paging.OK, paging.OK]
    same(together, one_by_one(back, (4, 2), 4))
    np.testing.assert_array_equal(together.table.pages[:, :2], [[0, 2], [0, 1]])
    np.testing.assert_array_equal(together.pool.holders, [2, 1, 1, 0])


def random_state(rng):
    """A few requests with shared pages, some ended, lengths set back, and few pages left."""
    state = make(pages=12, page_size=2, requests=REQUESTS, pages_per_request=5, planes=1)
    state, _ = reserve(state, jnp.array(rng.integers(0, 9, REQUESTS), jnp.int32), 9)
    for _ in range(3):
        state, _ = release(state, jnp.array(rng.random(REQUESTS) < 0.3))
        for source, target in rng.integers(0, REQUESTS, (4, 2)):
            state, _ = share(state, int(source), int(target), int(rng.integers(1, 9)))
    lengths = np.asarray(state.table.lengths)
    back = np.where(rng.random(REQUESTS) < 0.6, rng.integers(0, lengths + 1), lengths)
    return with_lengths(state, *back.tolist())


@pytest.mark.parametrize("width", [1, 5, 9])  # in a closed form, in a few turns, in a loop
def test_random_steps_equal_one_request_after_the_other(width):
    """Every array of the state, the ids of the pages included."""
    rng, seen = np.random.default_rng(width), set()
    for _ in range(100):
        state = random_state(rng)
        counts = rng.integers(0, width + 1, REQUESTS).tolist()
        together, reservation = reserve(state, counts_of(*counts), width)
        same(together, one_by_one(state, counts, width))
        seen |= set(statuses(together)) | ({"copied"} if (np.asarray(reservation.copied_to) >= 0).any() else set())
    assert {paging.OK, paging.OUT_OF_PAGES, "copied"} <= seen


def test_one_page_for_each_request_is_granted_as_the_loop_grants_it():
    """A column that nobody touches makes the general case of it. Pages and holders are anything, outdated ones too."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        eligible = rng.random(7) < 0.9
        pages = rng.integers(0, 4, 7)
        holders = np.where(rng.random(7) < 0.8, rng.integers(0, 4, 4)[pages], 0)
        touched = eligible[:, None]
        one = [jnp.array(x, jnp.int32)[:, None] for x in (pages, holders)]
        more = page_allocation.MOST_COLUMNS
        two = [jnp.concatenate([x, jnp.full((7, more), fill, jnp.int32)], axis=1) for x, fill in zip(one, (-1, 0))]
        free = jnp.int32(rng.integers(0, 6))
        granted, fresh = grant(jnp.array(eligible), jnp.array(touched), *one, free)
        expected, expected_fresh = grant(
            jnp.array(eligible), jnp.array(np.pad(touched, ((0, 0), (0, more)))), *two, free
        )
        np.testing.assert_array_equal(granted, expected)
        np.testing.assert_array_equal(fresh, expected_fresh[:, :1])
        assert int(fresh.sum()) <= int(free)


@pytest.mark.parametrize("width", [1, 9])
def test_a_step_has_no_loop_on_a_gpu(width):
    """Of a loop whose turns are not known, a GPU asks the host after each; that also ends the CUDA graph around it."""
    state, quest = make(page_size=16), selectors.get("quest")

    def step(state, side, counts):
        state, reservation = paging.reserve(state, counts, width)
        return state, quest.copy(side, *paging.flat_copies(state, reservation))

    text = lower_for_cuda(step, state, quest.init(state.kv), counts_of(1, 1, 1)).as_text()
    assert "copy_pages" in text
    assert "stablehlo.while" not in text
