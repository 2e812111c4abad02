"""SPEC-1: drafts are written, some rejected by setting lengths back, and decoding goes on as if they had never been."""

import dataclasses

import jax.numpy as jnp
import numpy as np

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
