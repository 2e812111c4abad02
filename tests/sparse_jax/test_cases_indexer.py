"""Reported cases of other systems on the indexer of sparse MLA: scores, what is chosen, and what is then read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from sparse_jax import indexer_scores, mla_sparse_attention, paged_attention, to_slots, top_k
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax.scalar_attention import KERNELS, every_implementation, expect, ids
from tests.sparse_jax.test_cases_mla import attend, draw, latents

NAN, INF = np.nan, np.inf


def score(keys, table, lengths, *, rows=1, **options):
    """Scores f32[B, rows, W * P] of keys f[N, P] that are their own scores."""
    q, weights = jnp.ones((len(lengths), rows, 1, 1)), jnp.ones((len(lengths), rows, 1))
    return indexer_scores(q, weights, keys[..., None], table, lengths, **options)


def choose(keys, table, lengths, kept, *, rows=1, **options):
    """Slots i32[B, rows, kept] of the best tokens."""
    chosen = top_k(score(keys, table, lengths, rows=rows, **options), kept).reshape(-1, kept)
    requests = jnp.repeat(jnp.arange(len(lengths), dtype=jnp.int32), rows)
    slots = to_slots(chosen, table, requests, page_size=keys.shape[1], lengths=lengths)
    return slots.reshape(len(lengths), rows, kept)


@every_implementation
@pytest.mark.parametrize("heads", [1, 5, 32, 64])
def test_case_HEADS_3_and_PREC_1_any_number_of_heads_in_full_precision(heads, implementation):
    """And drafts that see different lengths, against float64."""
    q, w, keys, table = draw(2, 3, heads, 40), draw(2, 3, heads, seed=1), draw(6, 16, 40, seed=2), ids([4, 0], [1, 5])
    got = indexer_scores(q, w, keys, table, ids(25, 32), implementation=implementation)
    q, w, keys = (np.asarray(x, np.float64) for x in (q, w, keys))
    for b, length in enumerate((25, 32)):
        for t in range(3):
            seen = length - 2 + t
            rows = keys[np.asarray(table[b])].reshape(32, 40)[:seen]
            expected = w[b, t] @ np.maximum(q[b, t] @ rows.T, 0)
            assert np.abs(np.asarray(got[b, t, :seen]) - expected).max() < 1e-5 * np.abs(expected).max()
            assert jnp.isneginf(got[b, t, seen:]).all()


@every_implementation
@pytest.mark.parametrize("length", [50, 64, 2])
def test_case_TOPK_1_and_2_everything_is_read_when_it_fits(length, implementation):
    """Budget 64, 4 pages of 16: equal to dense attention, and the list stays 64 wide."""
    pool, q, table, lengths = draw(4, 16, 24), draw(1, 2, 24, seed=1), ids([2, 0, 3, 1]), ids(length)
    dense = paged_attention(q, pool[:, None], pool[:, None, :, :16], table, lengths, scale=0.25)
    for options in ({}, {"k": 64}):
        slots = choose(draw(4, 16, seed=2), table, lengths, 64, implementation=implementation, **options)[:, 0]
        assert slots.shape == (1, 64)
        assert jnp.sum(slots >= 0) == length
        got = mla_sparse_attention(q, pool, slots, scale=0.25, value_dim=16, implementation=implementation)
        assert_close(got.out, dense.out)
        assert_close(got.lse, dense.lse, name="lse")


@every_implementation
def test_case_TOPK_3_ties(implementation):
    """ReLU makes zeros of all that is negative: the lowest positions win, every time."""
    negative = jnp.array([[-1.0, -2.0, -0.5, -3.0, -1.0, 0.0, -0.0, -7.0]])
    for keys in [negative] * 20 + [jnp.ones((1, 8))]:
        assert choose(keys, ids([0]), ids(5), 2, implementation=implementation).ravel().tolist() == [0, 1]


@every_implementation
def test_case_TOPK_4_float32_scores_of_bf16_keys(implementation):
    q, keys = jnp.array([[[1.0, 0.001]]], jnp.bfloat16), jnp.array([[[1.0, 0], [1, 1]]], jnp.bfloat16)
    scores = indexer_scores(q, jnp.ones((1, 1)), keys, ids([0]), ids(2), implementation=implementation)
    assert scores.dtype == jnp.float32
    assert scores[0, 0] < scores[0, 1] < 1.002
    assert top_k(scores, 1).tolist() == [[1]]


@every_implementation
def test_case_TOPK_of_negative_weights(implementation):
    """Scores may be negative: a token that no head likes, at 0, is better, and all are before those not seen."""
    keys, w = jnp.array([[3.0, -1.0, 2.0, 9.0]])[..., None], -jnp.ones((1, 1))
    scores = indexer_scores(jnp.ones((1, 1, 1)), w, keys, ids([0]), ids(3), implementation=implementation)
    assert scores.tolist() == [[-3, 0, -2, -INF]]
    assert top_k(scores, 4).tolist() == [[1, 2, 0, -1]]


@every_implementation
def test_case_SPEC_2_and_3_and_PAD_3_rows_use_their_requests_tables(implementation):
    """With equal keys lse is the logarithm of what a row sees. More rows than tokens: the first see nothing."""
    keys, table = jnp.zeros((4, 4)), ids([3, 1], [0, 2])
    for lengths, rows, seen in (
        ((7, 4), 3, [5, 6, 7, 2, 3, 4]),
        ((4, 3), 2, [3, 4, 2, 3]),
        ((0, 0), 2, [0, 0, 0, 0]),
        ((2, 8), 4, [0, 0, 1, 2, 5, 6, 7, 8]),
        ((-(2**31), 2**31 - 1), 2, [0, 0, 8, 8]),
    ):
        slots = choose(keys, table, ids(*lengths), 8, rows=rows, implementation=implementation)
        got = attend(latents(np.zeros(16), np.arange(16.0), 4), slots, rows=rows)
        np.testing.assert_allclose(np.exp(got.lse.ravel()), seen, rtol=1e-5)
        assert ((slots[0] < 0) | (slots[0] // 4 == 3) | (slots[0] // 4 == 1)).all()
        assert ((slots[1] < 0) | (slots[1] // 4 == 0) | (slots[1] // 4 == 2)).all()


@pytest.mark.parametrize("implementation", KERNELS)
def test_case_PAD_1_and_SPLIT_1_and_2_a_row_among_others(implementation):
    """Alone, after an empty row, with 7 others, and with its keys on other pages: the same bits."""
    q, w, keys = draw(8, 4, 24), draw(8, 4, seed=1), draw(12, 4, 24, seed=2)
    table, lengths = np.random.default_rng(3).integers(0, 12, (8, 5)), np.array([18, 0, 20, 1, 5, 7, 16, 3])

    def run(rows, keys=keys, table=table):
        return indexer_scores(q[rows], w[rows], keys, table[rows], lengths[rows], implementation=implementation)

    alone = run(slice(0, 1))[0]
    assert_same_bits(run(slice(0, 8))[0], alone)
    assert_same_bits(run(np.array([1, 0]))[1], alone)
    assert jnp.isneginf(run(slice(1, 2))).all()
    place = np.random.default_rng(4).permutation(12)
    assert_same_bits(run(slice(0, 1), keys[np.argsort(place)], place[table])[0], alone)


def test_case_COMPILE_1_and_2_lengths_and_ids_do_not_retrace():
    for implementation in ("xla", "interpret"):
        traces = []

        @jax.jit
        def step(lengths, implementation=implementation, traces=traces):
            traces.append(lengths)
            slots = choose(jnp.zeros((8, 4)), ids(range(8)), lengths, 32, implementation=implementation)[:, 0]
            return attend(latents(np.zeros(32), np.arange(32.0), 4), slots, implementation=implementation)

        for length in range(1, 33):
            expect(step(ids(length)), (length - 1) / 2, np.log(length))
        assert len(traces) == 1


@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_case_POISON_keys_that_nobody_may_see(dtype, implementation):
    """Past the length, of absent pages, of other requests: the scores keep their bits, and are -inf there."""

    def run(bad):
        keys = jnp.array([[bad] * 4, [1, 3, 2, bad], [bad] * 4], dtype)[..., None]
        q, w = jnp.ones((2, 1, 1), dtype), jnp.array([[1.0], [0.0]])
        return indexer_scores(q, w, keys, ids([1, -1], [2, -1]), ids(3, 0), implementation=implementation)

    assert_same_bits(run(NAN), run(0.0))
    assert run(NAN).tolist() == [[1, 3, 2] + [-INF] * 5, [-INF] * 8]


@every_implementation
def test_case_POISON_and_QUANT_7_a_key_that_is_not_a_number(implementation):
    """It is never chosen, by the rows that see it; rows before it and other keys keep their scores."""
    keys = jnp.array([[1.0, NAN, 2.0, 3.0]])
    scores = score(keys, ids([0]), ids(4), rows=4, implementation=implementation)[0]
    clean = score(keys.at[0, 1].set(0.0), ids([0]), ids(4), rows=4, implementation=implementation)[0]
    others = np.arange(4) != 1
    assert_same_bits(scores[:, others], clean[:, others])
    assert jnp.isneginf(scores[0, 1])
    assert jnp.isnan(scores[1:, 1]).all()
    assert choose(keys, ids([0]), ids(4), 4, implementation=implementation).ravel().tolist() == [3, 2, 0, -1]


def test_case_HOST_1_numpy_arguments_may_be_reused_at_once():
    table, lengths, keys = np.array([[1, 0]], np.int32), np.array([4], np.int32), np.array([[1.0, 2], [3, 4]])
    scores = score(keys.astype(np.float32), table, lengths)
    table[:], lengths[:] = -1, 0
    assert scores.tolist() == [[[3, 4, 1, 2]]]


@every_implementation
def test_case_BOUNDS_1_and_3_wild_pages_and_page_0(implementation):
    """A page past the pool is absent, not clamped; page 0 is ordinary."""
    keys, table = jnp.array([[1.0, 2], [3, 4], [5, 6]]), ids([0, 99, 2])
    options = {"implementation": implementation}
    assert score(keys, table, ids(6), **options).ravel().tolist() == [1, 2, -INF, -INF, 5, 6]
    assert choose(keys, table, ids(6), 6, **options).ravel().tolist() == [5, 4, 1, 0, -1, -1]
    with pytest.raises(Exception, match=r"page_table.*99"):
        sparse_jax.checked(lambda t: score(keys, t, ids(6), **options))(table)


@every_implementation
def test_case_BOUNDS_2_and_4_rows_and_requests(implementation):
    """Two requests with pages of their own; the row of a request that does not exist reads nothing."""
    keys, table, options = jnp.arange(12.0).reshape(3, 4), ids([0, 1], [2, -1]), {"implementation": implementation}
    both = choose(keys, table, ids(5, 3), 4, **options)
    assert both[:, 0].tolist() == [[4, 3, 2, 1], [10, 9, 8, -1]]
    for b in range(2):
        alone = choose(keys, table[b : b + 1], ids((5, 3)[b]), 4, **options)
        assert alone[0].tolist() == both[b].tolist()
    assert to_slots(ids([0], [0], [0]), table, ids(0, 1, 2), page_size=4).ravel().tolist() == [0, 8, -1]


@pytest.mark.gpu
def test_case_GRID_1_more_than_65535_rows():
    keys = jnp.arange(64.0).reshape(64, 1)
    for rows in (65536, 65537):
        table = (np.arange(rows, dtype=np.int32) % 64)[:, None]
        got = score(keys, table, np.ones(rows, np.int32), implementation="triton")
        np.testing.assert_array_equal(got.ravel(), np.arange(rows) % 64)


@every_implementation
def test_case_PAGE_1_page_sizes_agree(implementation):
    rows, q, w = draw(512, 24), draw(1, 4, 24, seed=1), draw(1, 4, seed=2)
    scores = [
        indexer_scores(q, w, rows.reshape(-1, p, 24), ids(range(512 // p)), ids(500), implementation=implementation)
        for p in (16, 64, 256)
    ]
    for other in scores[1:]:
        assert_close(other, scores[0])


def test_case_MASK_1_a_mask_is_no_table():
    with pytest.raises(ValueError, match="page_table must hold integers, got bool"):
        score(jnp.ones((1, 2)), np.array([[True]]), ids(1))
