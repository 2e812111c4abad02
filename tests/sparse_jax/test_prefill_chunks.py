"""Plans for prompts: the values of vLLM's tests, properties, and errors that name the argument."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_jax import prefill_chunks as plans

LENGTHS = st.lists(st.integers(0, 12), max_size=7)


@pytest.mark.parametrize(
    ("lengths", "buffer", "chunks"),
    [
        ([2, 3, 4, 2], 5, [(0, 2), (2, 3), (3, 4)]),
        ([5, 5, 5], 5, [(0, 1), (1, 2), (2, 3)]),
        ([1, 1, 1], 10, [(0, 3)]),
        ([4, 4, 4], 100, [(0, 3)]),
        ([], 5, []),
    ],
)
def test_split_prefill_chunks(lengths, buffer, chunks):
    assert plans.split_prefill_chunks(lengths, buffer) == chunks
    assert plans.split_prefill_chunks(np.array(lengths, np.int32), buffer) == chunks


def test_workspace_starts():
    starts = plans.workspace_starts([10, 15, 20, 5], [(0, 2), (2, 4)])
    assert starts.dtype == np.int32
    assert starts.tolist() == [0, 10, 0, 20]


@settings(deadline=None)
@given(lengths=LENGTHS, buffer=st.integers(12, 30))
def test_every_request_has_room_of_its_own(lengths, buffer):
    chunks = plans.split_prefill_chunks(lengths, buffer)
    starts = plans.workspace_starts(lengths, chunks)
    for (start, end), after in zip(chunks, [*chunks[1:], None]):
        places = [p for i in range(start, end) for p in range(starts[i], starts[i] + lengths[i])]
        assert places == list(range(len(places)))
        assert len(places) <= buffer
        assert after is None or len(places) + lengths[after[0]] > buffer  # closed only when the next did not fit


INDEXER = [
    # seq, q, workspace, bytes -> (first and last request, first and last query) of each piece
    ([0], [0], 100, 1000, []),
    ([100] * 3, [10] * 3, 1000, 5000, [(0, 1, 0, 10), (1, 2, 0, 10), (2, 3, 0, 10)]),
    ([10] * 3, [5] * 3, 100, 10000, [(0, 3, 0, 15)]),
    ([50] * 3, [1] * 3, 50, 1000000, [(0, 1, 0, 1), (1, 2, 0, 1), (2, 3, 0, 1)]),
    ([10] * 3, [5] * 3, 100, 1000, [(0, 2, 0, 10), (2, 3, 0, 5)]),
    ([1000, 50], [100, 5], 2000, 1000, [*((0, 1, i, i + 1) for i in range(100)), (1, 2, 0, 5)]),
    ([0, 10, 0], [0, 5, 0], 100, 1000, [(0, 3, 0, 5)]),
    ([200, 10], [3, 3], 100, 10000, [(0, 1, 0, 3), (1, 2, 0, 3)]),  # longer than the workspace: by itself
]


@pytest.mark.parametrize(("seq", "q", "workspace", "max_bytes", "expected"), INDEXER)
def test_split_indexer_prefill_chunks(seq, q, workspace, max_bytes, expected):
    got = plans.split_indexer_prefill_chunks(seq, q, workspace, max_bytes)
    assert got == [(slice(a, b), slice(c, d)) for a, b, c, d in expected]


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=6), max_bytes=st.integers(0, 600))
def test_indexer_pieces_cover_every_query_once_within_the_limits(pairs, max_bytes):
    q, seq = [min(pair) for pair in pairs], [max(pair) for pair in pairs]
    seen, requests_seen = [], []
    for requests, queries in plans.split_indexer_prefill_chunks(seq, q, 20, max_bytes):
        rows = [(i, t) for i in range(requests.start, requests.stop) for t in range(q[i])]
        assert len(rows[queries]) == queries.stop - queries.start >= 1
        seen += rows[queries]
        requests_seen += [requests] if requests not in requests_seen else []
        assert sum(seq[requests]) <= 20
        assert len(rows[queries]) == 1 or 4 * len(rows[queries]) * sum(seq[requests]) <= max_bytes
    assert seen == [(i, t) for i in range(len(q)) for t in range(q[i])]


@pytest.mark.parametrize(
    ("lengths", "threshold", "flags", "expected"),
    [
        ([1, 2, 3], 1, None, (1, 2, 1, 5)),
        ([1, 2, 3], 3, None, (1, 2, 1, 5)),  # decodes are uniform
        ([110] * 6 + [0], 128, None, (6, 0, 660, 0)),
        ([4, 4, 64], 4, None, (2, 1, 8, 64)),  # a token and three drafts
        ([4, 4, 64], 1, None, (0, 3, 0, 72)),
        ([1, 1], 1, [False, True], (1, 1, 1, 1)),  # a prompt of one token
        ([64, 1], 1, None, (0, 2, 0, 65)),
        ([0, 0], 1, None, (0, 0, 0, 0)),
        ([], 1, None, (0, 0, 0, 0)),
    ],
)
def test_split_decodes_and_prefills(lengths, threshold, flags, expected):
    got = plans.split_decodes_and_prefills(lengths, threshold, prefilling=flags)
    assert got == expected
    assert got.decode_tokens == sum(lengths[: got.decodes])


@pytest.mark.parametrize(
    ("lengths", "force_sparse", "expected"),
    [([512, 2048], False, True), ([512, 2049], False, False), ([512], True, False), ([], False, True)],
)
def test_dense_prefill(lengths, force_sparse, expected):
    assert plans.dense_prefill(lengths, 2048, force_sparse=force_sparse) is expected


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        ((128, 512, 128, 64, 128), True),
        ((64, 512, 192, 64, 256), True),
        ((64, 512, 256, 0, 256), True),
        ((64, 512, 128, 64, 128), False),
        ((128, 512, 192, 64, 256), False),
        ((64, 512, 256, 64, 256), False),  # a head of 320
    ],
)
def test_masked_mha_available(geometry, expected):
    assert plans.masked_mha_available(*geometry) is expected
    assert not plans.masked_mha_available(*geometry, quantized=True)


def test_masked_mha_workspace():
    assert plans.masked_mha_entries(1, 32_768) == 33_554_432 == plans.MASK_ENTRIES
    assert plans.masked_mha_entries(1, 33_024) == 34_080_768
    assert plans.masked_mha_entries(1, 100, 33) == 128 * 4
    assert plans.masked_mha_workspace_fits(1, 32_768)
    assert not plans.masked_mha_workspace_fits(1, 33_024)
    for query in (36, 48, 64, 112):
        assert not plans.masked_mha_workspace_fits(1, query * 1024)
    exact = plans.masked_mha_entries(2, 2048, 2048)
    assert exact == 262_144
    assert plans.masked_mha_entries(3, 2048, 2048) == 393_216
    assert plans.masked_mha_entries(2, 2048, 4096) == 524_288
    assert plans.masked_mha_workspace_fits(2, 2048, 2048, entries=exact)
    assert not plans.masked_mha_workspace_fits(3, 2048, 2048, entries=exact)
    assert not plans.masked_mha_workspace_fits(2, 2048, 4096, entries=exact)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plans.split_prefill_chunks([2, 6], 5), "lengths must fit in the buffer of 5, got 6 at 1"),
        (lambda: plans.split_prefill_chunks([2, -1], 5), r"lengths must be at least 0, got \[2, -1\]"),
        (lambda: plans.split_prefill_chunks([2.0], 5), "lengths must hold integers, got float64"),
        (lambda: plans.split_prefill_chunks([[2]], 5), r"lengths must be \[B\], got the shape \[1, 1\]"),
        (lambda: plans.split_prefill_chunks([2], 5.5), "buffer must be an integer .*got 5.5"),
        (lambda: plans.workspace_starts([1, 2, 3], [(0, 1), (2, 3)]), r"from 0 to 3, got \[\(0, 1\), \(2, 3\)\]"),
        (lambda: plans.workspace_starts([1, 2, 3], [(0, 2)]), r"from 0 to 3, got \[\(0, 2\)\]"),
        (lambda: plans.workspace_starts([2**30] * 4, [(0, 4)]), "sum up within 32 bits, got 3221225472"),
        (lambda: plans.split_indexer_prefill_chunks([1, 2], [1], 9, 9), "must have one size, got 2 and 1"),
        (lambda: plans.split_indexer_prefill_chunks([1], [-1], 9, 9), r"query_lengths must be at least 0, got \[-1\]"),
        (lambda: plans.split_decodes_and_prefills([1, 0, 1], 1), r"padding \(0\) at the end only, got \[1, 0, 1\]"),
        (lambda: plans.split_decodes_and_prefills([1], 0), "threshold must be at least 1, got 0"),
        (lambda: plans.split_decodes_and_prefills([1], 1, prefilling=[]), "prefilling must cover 1 requests, got 0"),
        (lambda: plans.dense_prefill([1], 0), "k must be at least 1, got 0"),
        (lambda: plans.masked_mha_entries(1, -5), "query must be at least 0, got -5"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
