"""Ids of sparse MLA to slots, at the sizes of vLLM's tests, against a transcription in NumPy; parts with empty rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import merge_attention, to_slots
from tests.compare import assert_same_bits

REQUESTS, WIDTH, ROWS = 4, 10, 8


def numpy_slots(token_ids, table, request_ids, page_size, *, stride=None, workspaces=None, starts=None):
    """One id after the other; no shared code, no vectors."""
    slots = np.full(token_ids.shape, -1, np.int64)
    for row, column in np.ndindex(token_ids.shape):
        token, request = int(token_ids[row, column]), int(request_ids[row])
        if token < 0 or token // page_size >= table.shape[1] or not 0 <= request < len(table):
            continue
        page = int(table[request, token // page_size])
        if workspaces is not None and workspaces[row] >= 0:
            slots[row, column] = int(starts[workspaces[row]]) + token
        elif page >= 0:
            slots[row, column] = page * (stride or page_size) + token % page_size
    return slots.astype(np.int32)


def make_batch(chosen, page_size, rows=ROWS, seed=0):
    """Ids with holes of every kind, a table with an absent page, and requests in any order."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(64)[: REQUESTS * WIDTH].reshape(REQUESTS, WIDTH).astype(np.int32)
    table[2, 3] = -1
    token_ids = rng.integers(0, WIDTH * page_size, (rows, chosen)).astype(np.int32)
    hole = rng.random(token_ids.shape)
    far = np.array([WIDTH * page_size, 2**31 - 1, -(2**31)], np.int32)
    token_ids = np.where(hole < 0.3, -1, np.where(hole < 0.4, rng.choice(far, token_ids.shape), token_ids))
    return token_ids, table, rng.integers(0, REQUESTS, rows).astype(np.int32)


@pytest.mark.parametrize("chosen", [128, 256, 512])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_decode_rows(chosen, page_size):
    batch = make_batch(chosen, page_size)
    got = to_slots(*batch, page_size=page_size)
    assert got.dtype == jnp.int32
    assert (got == numpy_slots(*batch, page_size)).all()
    assert (jax.jit(functools.partial(to_slots, page_size=page_size))(*batch) == got).all()


@pytest.mark.parametrize(("chosen", "page_size"), [(128, 16), (2176, 64), (4224, 128)])
def test_counts_of_what_is_left_after_all_checks(chosen, page_size):
    token_ids, table, request_ids = make_batch(chosen, page_size, seed=1)
    token_ids[0], token_ids[1] = np.arange(chosen) % (WIDTH * page_size), -1  # a full row, an empty one
    token_ids[2, chosen // 2 :] = token_ids[3, chosen // 4 :] = -1
    request_ids[:4] = [0, 1, 2, 3]
    expected = numpy_slots(token_ids, table, request_ids, page_size)
    packed, counts = to_slots(token_ids, table, request_ids, page_size=page_size, compact=True)
    assert counts.dtype == jnp.int32
    assert counts.tolist() == (expected >= 0).sum(axis=1).tolist()
    assert counts[:2].tolist() == [chosen, 0]
    for row, slots in enumerate(expected):
        valid = slots[slots >= 0].tolist()
        assert packed[row].tolist() == valid + [-1] * (chosen - len(valid))


def test_workspace_rows():
    token_ids, table, request_ids = make_batch(256, 64, rows=12)
    request_ids[11] = REQUESTS  # a padding row, whatever workspace it names
    workspaces, starts = np.array([-1] * 6 + [0, 0, 0, 1, 1, 1], np.int32), np.array([0, 100], np.int32)
    expected = numpy_slots(token_ids, table, request_ids, 64, workspaces=workspaces, starts=starts)
    options = {"page_size": 64, "workspace_request_ids": workspaces, "workspace_starts": starts}
    got = to_slots(token_ids, table, request_ids, **options)
    assert (got == expected).all()
    assert (got[:6] == numpy_slots(token_ids[:6], table, request_ids[:6], 64)).all()
    assert (got[11] == -1).all()
    packed, counts = to_slots(token_ids, table, request_ids, **options, compact=True)
    assert counts.tolist() == (expected >= 0).sum(axis=1).tolist()
    assert packed[7, : counts[7]].tolist() == expected[7][expected[7] >= 0].tolist()


def test_rows_of_a_larger_batch():
    """Two query rows of a batch of 12: the caller passes their request ids, and all 12 are refused."""
    token_ids, table, request_ids = make_batch(128, 16, rows=12)
    with pytest.raises(ValueError, match=r"request_ids must cover the rows of token_ids, \[2\], got \[12\]"):
        to_slots(token_ids[:2], table, request_ids, page_size=16)
    got = to_slots(token_ids[:2], table, request_ids[:2], page_size=16)
    assert (got == numpy_slots(token_ids, table, request_ids, 16)[:2]).all()


@pytest.mark.parametrize("stride", [192, 832])
def test_pages_of_other_layers_between(stride):
    """Three pages from one page of this layer to the next, and thirteen."""
    batch = make_batch(256, 64, seed=2)
    got = to_slots(*batch, page_size=64, page_stride=stride)
    assert (got == numpy_slots(*batch, 64, stride=stride)).all()
    assert got.max() > 64 * 64


@pytest.mark.parametrize(("stride", "message"), [(63, "at least page_size, got 63 and 64"), (832.5, "integer.*832.5")])
def test_strides_that_are_refused(stride, message):
    with pytest.raises(ValueError, match=f"page_stride must be .*{message}"):
        to_slots(*make_batch(256, 64), page_size=64, page_stride=stride)


def test_padding_rows_request_ids_out_of_range_and_no_ids():
    token_ids, table, _ = make_batch(128, 16)
    token_ids[:5] = np.arange(128)
    token_ids[4] = -1
    request_ids = np.array([REQUESTS, -1, 2**31 - 1, -(2**31), 0, 0, 1, 2], np.int32)
    packed, counts = to_slots(token_ids, table, request_ids, page_size=16, compact=True)
    assert (packed[:5] == -1).all()
    assert counts[:5].tolist() == [0] * 5
    packed, counts = to_slots(token_ids[:, :0], table, request_ids, page_size=16, compact=True)
    assert (packed.shape, counts.tolist()) == ((ROWS, 0), [0] * ROWS)


def test_empty_rows_of_a_part_are_neutral():
    """Rows that hold [0, 1, -1, -1], nothing and [2, -1, 3, -1]: a kernel left NaN in the second, or said +inf."""
    outs = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
    lses = jax.random.normal(jax.random.key(1), (1, 3, 2))
    for value in (jnp.nan, jnp.inf):
        got = merge_attention(outs.at[:, 1].set(jnp.nan), lses.at[:, 1].set(value))
        assert_same_bits(got.out[jnp.array([0, 2])], outs[0, jnp.array([0, 2])])
        assert_same_bits(got.lse[jnp.array([0, 2])], lses[0, jnp.array([0, 2])], name="lse")
        assert (got.out[1] == 0).all()
        assert jnp.isneginf(got.lse[1]).all()


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_an_empty_part_takes_no_share(value):
    """Whatever stands in it, wherever it stands, the parts that hold keys keep their bits; so do the gradients."""
    outs = jax.random.normal(jax.random.key(0), (2, 3, 2, 4))
    lses = jax.random.normal(jax.random.key(1), (2, 3, 2))
    sick, said = jnp.full((1, 3, 2, 4), jnp.nan), jnp.full((1, 3, 2), value)
    expected = merge_attention(outs, lses)
    for where in (0, 1, 2):
        parts = [jnp.concatenate([a[:where], b, a[where:]]) for a, b in ((outs, sick), (lses, said))]
        got = merge_attention(*parts)
        np.testing.assert_allclose(got.out, expected.out, rtol=1e-6)
        np.testing.assert_allclose(got.lse, expected.lse, rtol=1e-6)
    gradient = jax.grad(lambda lses: merge_attention(parts[0], lses).out.sum())(parts[1])
    assert jnp.isfinite(gradient).all()
