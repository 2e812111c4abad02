"""to_slots, merge_attention, top_k and retained_count."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_jax import merge_attention, retained_count, to_slots, top_k
from tests.compare import assert_close
from tests.top_k_cases import assert_right, make_lengths, make_rows

INF, NAN = np.inf, np.nan
BOTH = pytest.mark.parametrize("implementation", ["xla", "interpret"])


def brute_top_k(row, k, length=None):
    """By falling score, ties by rising id; NaN and -inf never."""
    length = len(row) if length is None else min(max(length, 0), len(row))
    ids = [i for i in range(length) if not math.isnan(row[i]) and row[i] > -INF]
    ids = sorted(ids, key=lambda i: (-row[i], i))[:k]
    return ids + [-1] * (k - len(ids))


SCORES = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.001, INF, -INF, NAN, 1e-40, 2e-40, -1e-40, -3e38, 3e38]),
    min_size=7,
    max_size=7,
)


@BOTH
@settings(max_examples=60, deadline=None)
@given(row=SCORES, length=st.integers(-3, 12), k=st.sampled_from([3, 9]))
def test_contract_6_top_k(implementation, row, length, k):
    scores, lengths = jnp.array([row], jnp.float32), jnp.array([length], jnp.int32)
    got = top_k(scores, k, lengths, implementation=implementation)
    assert got.dtype == jnp.int32
    assert got[0].tolist() == brute_top_k(row, k, length)
    by_id = top_k(scores, k, lengths, order="id", implementation=implementation)[0].tolist()
    valid = [i for i in got[0].tolist() if i >= 0]
    assert by_id == sorted(valid) + [-1] * (k - len(valid))


@pytest.mark.parametrize("order", ["score", "id"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_contract_6_the_meaning_of_hard_rows(dtype, order):
    """Two axes of rows: XLA sorts them, where it has a faster way for one axis."""
    scores = jnp.asarray(make_rows(0, 100)).astype(dtype)
    lengths = make_lengths(0, len(scores), 100, 12)
    for rows in (scores.shape[:1], (5, -1)):
        ids = top_k(scores.reshape(*rows, 100), 12, lengths.reshape(rows), order=order, implementation="xla")
        assert_right(ids.reshape(-1, 12), scores, 12, lengths, order)


@BOTH
def test_contract_6_zeros_are_equal_and_bf16_is_compared_in_float32(implementation):
    assert top_k(jnp.array([-0.0, 0.0, -0.0]), 3, implementation=implementation).tolist() == [0, 1, 2]
    assert top_k(jnp.array([1.0, 2.0, 2.0], jnp.bfloat16), 2, implementation=implementation).tolist() == [1, 2]


@BOTH
def test_case_TOPK_2_fewer_than_asked_for(implementation):
    assert top_k(jnp.array([5.0, 6.0]), 4, implementation=implementation).tolist() == [1, 0, -1, -1]


@BOTH
def test_case_TOPK_3_ties(implementation):
    for _ in range(20):
        assert top_k(jnp.ones(5), 2, implementation=implementation).tolist() == [0, 1]


@BOTH
def test_case_TOPK_4_float32_scores(implementation):
    assert top_k(jnp.array([1.0, 1.001], jnp.float32), 1, implementation=implementation).tolist() == [1]


@pytest.mark.parametrize("k", [1, 64, 512, 1000, 1024, 2048, 4096, 6000])
def test_case_TOPK_5_any_k(k):
    scores = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    assert top_k(jnp.asarray(scores), k).tolist() == brute_top_k(scores.tolist(), k)


@BOTH
def test_top_k_batches_and_errors(implementation):
    scores = jnp.arange(24.0).reshape(2, 3, 4)
    lengths = jnp.array([[0, 1, 2], [3, 4, 5]], jnp.int32)
    got = jax.jit(lambda s, n: top_k(s, 2, n, implementation=implementation))(scores, lengths)
    assert got.tolist() == [[[-1, -1], [0, -1], [1, 0]], [[2, 1], [3, 2], [3, 2]]]
    for options, message in (
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"k": 2.5}, "k must be an integer .*got 2.5"),
        ({"k": 1, "order": "size"}, "order must be .*got 'size'"),
        ({"k": 1, "lengths": lengths[0]}, "lengths must have the shape"),
        ({"k": 1, "implementation": "gpu"}, "implementation must be one of .*got 'gpu'"),
    ):
        with pytest.raises(ValueError, match=message):
            top_k(scores, **{"implementation": implementation, **options})
    with pytest.raises(ValueError, match=r"scores must be floating \[\.\.\., S\], got int32 \[3\]"):
        top_k(jnp.zeros(3, jnp.int32), 1, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", "interpret", "triton", None])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 5)])
def test_top_k_of_nothing(shape, implementation):
    got = top_k(jnp.zeros(shape), 4, jnp.zeros(shape[:-1], jnp.int32), implementation=implementation)
    assert (got.shape, got.dtype) == ((*shape[:-1], 4), jnp.int32)
    assert (got == -1).all()


@given(length=st.integers(0, 10**9), retention=st.floats(0, 2))
def test_retained_count(length, retention):
    expected = min(length, max(1, math.ceil(length * retention)))
    assert retained_count(length, retention) == expected
    assert retained_count(np.array([length]), retention).tolist() == [expected]


def test_case_EVICT_3_at_least_one_is_kept():
    assert [retained_count(n, 0.4) for n in (0, 1, 2, 5)] == [0, 1, 1, 2]
    assert retained_count(10, 0.1) == 1  # the product is 1.0 in double precision
    assert retained_count(30, 0.1) == math.ceil(30 * 0.1)
    assert retained_count(3_000_000_000, 1.0) == 3_000_000_000
    with pytest.raises(ValueError, match="must fit in 32 bits"):
        retained_count(np.array([3_000_000_000]), 1.0)
    with pytest.raises(ValueError, match="length must be known on the host"):
        jax.jit(lambda n: retained_count(n, 0.5))(3)


TABLE = jnp.array([[4, 2, -1], [1, 9, 3]], jnp.int32)


def test_to_slots():
    ids = jnp.array([[0, 5, 9, -1, 12], [3, 4, 11, 2**31 - 1, -(2**31)], [0, 1, 2, 3, 4]], jnp.int32)
    got = to_slots(ids, TABLE, jnp.array([0, 1, 7], jnp.int32), page_size=4)
    assert got.tolist() == [[16, 9, -1, -1, -1], [7, 36, 15, -1, -1], [-1] * 5]
    packed, counts = to_slots(ids, TABLE, jnp.array([0, 1, 7], jnp.int32), page_size=4, compact=True)
    assert packed.tolist() == [[16, 9, -1, -1, -1], [7, 36, 15, -1, -1], [-1] * 5]
    assert counts.tolist() == [2, 3, 0]
    packed, _ = to_slots(jnp.array([[-1, 3, -1, 0]]), TABLE, jnp.array([1]), page_size=4, compact=True)
    assert packed.tolist() == [[7, 4, -1, -1]]


def test_to_slots_lengths_stride_heads_and_workspace():
    ids = jnp.array([[0, 5, 6]], jnp.int32)
    one = jnp.array([0], jnp.int32)
    assert to_slots(ids, TABLE, one, page_size=4, lengths=jnp.array([6, 0])).tolist() == [[16, 9, -1]]
    assert to_slots(ids, TABLE, one, page_size=4, page_stride=10).tolist() == [[40, 21, 22]]
    per_head = jnp.stack([TABLE, TABLE + 10], axis=1)
    assert to_slots(ids, per_head, one, page_size=4).tolist() == [[[16, 9, 10], [56, 49, 50]]]
    both = to_slots(jnp.stack([ids, ids + 1], axis=1), per_head, one, page_size=4)
    assert both.tolist() == [[[16, 9, 10], [57, 50, 51]]]
    rows = jnp.array([[0, 5, -1, 12], [0, 5, -1, 12], [0, 5, -1, 12]], jnp.int32)
    got = to_slots(
        rows, TABLE, jnp.array([1, 1, 1]), page_size=4, workspace_request_ids=jnp.array([-1, 1, 5]),
        workspace_starts=jnp.array([100, 200]),
    )  # fmt: skip
    assert got.tolist() == [[4, 37, -1, -1], [200, 205, -1, -1], [-1] * 4]


def test_to_slots_workspace_rows_do_not_wrap():
    workspaces = {"workspace_request_ids": jnp.array([0, 1, 2]), "workspace_starts": jnp.array([-1, 2**31 - 3, 7])}
    got = to_slots(jnp.array([[0, 5]] * 3), TABLE, jnp.array([0, 0, 0]), page_size=4, **workspaces)
    assert got.tolist() == [[-1, -1], [2**31 - 3, -1], [7, 12]]


def test_to_slots_wide_numpy_ids_do_not_wrap():
    got = to_slots(np.array([[2**32 + 1, 1]]), np.array([[3, 2**32 + 1]]), np.array([0]), page_size=4)
    assert got.tolist() == [[-1, 13]]


def test_to_slots_wild_pages_do_not_wrap():
    table = jnp.array([[2**30, 2**31 - 1, 5]], jnp.int32)
    got = to_slots(jnp.array([[0, 4, 8]], jnp.int32), table, jnp.array([0]), page_size=4)
    assert got.tolist() == [[-1, -1, 20]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_ids": jnp.array([0, 1])}, r"request_ids must cover the rows of token_ids, \[1\], got \[2\]"),
        ({"page_stride": 2}, "page_stride must be at least page_size, got 2 and 4"),
        ({"page_size": 3}, "page_size must be a power of two, got 3"),
        ({"workspace_starts": jnp.array([0])}, "go together"),
        ({"lengths": jnp.array([1, 2, 3])}, r"lengths must have the shape \[2\], got \[3\]"),
        ({"token_ids": jnp.zeros(3, jnp.int32)}, "token_ids must have the shape"),
    ],
)
def test_to_slots_errors(change, message):
    arguments = {
        "token_ids": jnp.zeros((1, 3), jnp.int32),
        "page_table": TABLE,
        "request_ids": jnp.array([0]),
        "page_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        to_slots(**{**arguments, **change})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merge_attention_equals_one_softmax(dtype):
    rng = np.random.default_rng(0)
    s, v = rng.standard_normal((3, 5, 2, 7)) * 4, rng.standard_normal((3, 5, 2, 7, 6))
    p = np.exp(s)
    outs = (p[..., None] * v).sum(-2) / p.sum(-1)[..., None]
    lses, sinks = np.log(p.sum(-1)), rng.standard_normal(2)
    got = merge_attention(
        jnp.asarray(outs, dtype), jnp.asarray(lses, jnp.float32), sinks=jnp.asarray(sinks, jnp.float32)
    )
    total = p.sum((0, -1))
    expected = (p[..., None] * v).sum((0, -2)) / (total + np.exp(sinks))[..., None]
    assert got.out.dtype == jnp.dtype(dtype)
    assert_close(got.out, expected, dtype)
    assert_close(got.lse, np.log(total), name="lse")
    with pytest.raises(ValueError, match="lses must have the shape"):
        merge_attention(jnp.zeros((2, 3, 4)), jnp.zeros((2, 4)))
