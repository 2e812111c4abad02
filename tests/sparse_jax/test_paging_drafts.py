"""SPEC-1: drafts are written, some rejected by setting lengths back, and decoding goes on as if they had never been."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paging

PROMPT, DRAFTS, ACCEPTED = 10, 3, (3, 0, 1)


def tokens_at(positions):
    """[planes, B, width, Hkv, D] that depend on request and position alone, [B, width] positions."""
    request = np.arange(positions.shape[0])[:, None]
    value = (100 * request + positions).astype(np.float32)
    return jnp.asarray(np.broadcast_to(value[None, :, :, None, None], (2, *positions.shape, 1, 4)))


def extend(state, start, counts, *, wrong=0.0):
    """Appends counts[b] tokens after position start[b]; `wrong` is added to all but the first of each request."""
    positions = np.asarray(start)[:, None] + np.arange(max(counts))
    new = tokens_at(positions).at[:, :, 1:].add(wrong)
    state, _ = paging.append(state, new, new, jnp.asarray(counts, jnp.int32))
    paging.check(state)
    return state


def test_case_SPEC_1_lengths_after_rejection():
    def prompted():
        pages = {"pages": 24, "page_size": 4, "requests": 3, "pages_per_request": 6}
        state = paging.create(planes=2, kv_heads=1, key_width=4, dtype=jnp.float32, **pages)
        return extend(state, [0] * 3, [PROMPT] * 3)

    drafted = extend(prompted(), [PROMPT] * 3, [DRAFTS + 1] * 3, wrong=0.5)  # the real token, then three drafts
    lengths = [PROMPT + 1 + accepted for accepted in ACCEPTED]
    assert lengths == [14, 11, 12]
    kept = dataclasses.replace(drafted.table, lengths=jnp.asarray(lengths, jnp.int32))
    drafted = extend(dataclasses.replace(drafted, table=kept), lengths, [1] * 3)
    plain = prompted()
    for b, accepted in enumerate(ACCEPTED):
        for i in range(accepted + 1):
            counts = [int(b == other) for other in range(3)]
            plain = extend_one(plain, [PROMPT + i] * 3, counts, wrong=0.5 if i else 0.0)
    plain = extend(plain, lengths, [1] * 3)
    assert drafted.table.lengths.tolist() == plain.table.lengths.tolist() == [15, 12, 13]
    for plane in range(2):
        for b, length in enumerate(plain.table.lengths.tolist()):
            a, e = (paging.gather(state, plane, b)[0][:length] for state in (drafted, plain))
            np.testing.assert_array_equal(a, e)
    assert int(drafted.pool.free_count) <= int(plain.pool.free_count)  # pages of drafts stay, and are used again


def extend_one(state, start, counts, *, wrong):
    """One token for the requests with a count of 1, at their position."""
    new = tokens_at(np.asarray(start)[:, None]) + wrong
    state, _ = paging.append(state, new, new, jnp.asarray(counts, jnp.int32))
    return state


@pytest.mark.parametrize("page_size", [1, 4])
def test_taking_drafts_back_leaves_tables_holders_and_free_pages_as_if_they_had_never_been(page_size):
    shape = {"pages": 40, "page_size": page_size, "requests": 3, "pages_per_request": 20}

    def prompted():
        state = paging.create(planes=2, kv_heads=1, key_width=4, dtype=jnp.float32, **shape)
        state = extend(state, [0] * 3, [PROMPT, 8, 0])
        return paging.share(state, 0, 2, 7)[0]  # the page of token 6 is shared: who writes into it gets a copy

    start = [PROMPT, 8, 7]
    drafted = extend(prompted(), start, [DRAFTS + 1] * 3)
    drafted, stale = jax.jit(paging.truncate)(drafted, jnp.array([11, 9, 8], jnp.int32))
    plain = extend(prompted(), start, [1] * 3)
    assert int(stale) == 0
    assert int(drafted.pool.free_count) == int(plain.pool.free_count)
    assert sorted(drafted.pool.holders.tolist()) == sorted(plain.pool.holders.tolist())
    np.testing.assert_array_equal(drafted.table.lengths, plain.table.lengths)
    np.testing.assert_array_equal(drafted.table.pages >= 0, plain.table.pages >= 0)
    for b, length in enumerate(plain.table.lengths.tolist()):
        a, e = (paging.gather(state, 1, b)[0][:length] for state in (drafted, plain))
        np.testing.assert_array_equal(a, e)


def test_truncate_ignores_longer_lengths_and_takes_everything_at_or_below_zero():
    state = paging.create(planes=1, pages=9, page_size=4, kv_heads=1, key_width=4, requests=3, pages_per_request=3)
    state, _ = paging.reserve(state, jnp.array([5, 6, 9], jnp.int32), 9)
    cut, stale = paging.truncate(state, jnp.array([6, -3, 8], jnp.int32))
    assert cut.table.lengths.tolist() == [5, 0, 8]
    assert (cut.table.pages >= 0).sum(axis=1).tolist() == [2, 0, 2]
    assert (int(cut.pool.free_count), int(stale)) == (5, 0)
    again, stale = paging.truncate(cut, jnp.array([6, -3, 8], jnp.int32))
    assert (again.table.pages == cut.table.pages).all()
    assert int(again.pool.free_count) == 5
    with pytest.raises(ValueError, match=r"lengths is i32\[3\], got \[2\]"):
        paging.truncate(state, jnp.array([1, 2], jnp.int32))
