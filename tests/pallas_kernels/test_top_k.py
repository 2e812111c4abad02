"""The top-k kernel against a sort in NumPy: interpreter, lowering for CUDA, GPU; and mutations that must fail."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_jax
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.top_k import LARGEST_K, rounds, top_k
from tests.top_k_cases import KINDS, assert_right, make_lengths, make_rows

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@functools.partial(jax.jit, static_argnames=("k", "order", "options"))
def interpreted(scores, lengths, *, k, order, options=()):
    return top_k(scores, k, lengths, order=order, interpret=True, **dict(options))


SMALL = (("chunk", 32),)


@pytest.mark.parametrize(
    ("size", "k", "order", "chunk", "count"),
    [
        (1, 1, "score", None, 1),
        (7, 9, "id", None, 1),
        (33, 33, "score", None, 1),
        (1000, 64, "id", None, 1),
        (1000, 1, "score", 32, 3),
        (9295, 300, "score", 4096, 2),
        (1500, 100, "id", 512, 3),
    ],
)
def test_interpret(size, k, order, chunk, count):
    """From rows of one score to three rounds; k of 1, of the whole row and above it."""
    options = () if chunk is None else (("chunk", chunk),)
    assert len(rounds(size, min(k, size), rows=len(KINDS), **dict(options))) == count
    for seed in (0, 1):
        scores, lengths = make_rows(seed, size), make_lengths(seed, len(KINDS), size, k)
        assert_right(interpreted(scores, lengths, k=k, order=order, options=options), scores, k, lengths, order)


def small_case():
    """Rows of 100 scores in four chunks: each kind with its whole row, then with odd lengths."""
    scores = make_rows(3, 100)
    odd = make_lengths(3, len(KINDS), 100, 12)
    return np.concatenate([scores, scores]), np.concatenate([np.full_like(odd, 100), odd])


def run_small(scores, lengths):
    return interpreted(scores, lengths, k=12, order="score", options=SMALL)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_interpret_16_bit_scores(dtype):
    scores, lengths = small_case()
    scores = jnp.asarray(scores).astype(dtype)
    assert_right(run_small(scores, lengths), scores, 12, lengths)


def test_interpret_without_lengths():
    scores, _ = small_case()
    assert_right(run_small(scores, None), scores, 12)


ANY_SCORE = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45]) | st.floats(width=32)


@settings(max_examples=60, deadline=None)
@given(scores=st.lists(ANY_SCORE, min_size=70, max_size=70), length=st.integers(-2, 75))
def test_interpret_any_scores(scores, length):
    """One compilation for all of them."""
    scores, lengths = np.array([scores], np.float32), np.array([length], np.int32)
    assert_right(interpreted(scores, lengths, k=7, order="score", options=SMALL), scores, 7, lengths)


def test_contract_12_same_bits_whatever_stands_in_other_rows():
    scores, lengths = small_case()
    first = run_small(scores, lengths)
    assert (run_small(scores, lengths) == first).all()
    for row in range(len(scores)):
        others, lengths_of_others = np.roll(scores, 3, axis=0), np.roll(lengths, 7)
        others[row], lengths_of_others[row] = scores[row], lengths[row]
        assert (run_small(others, lengths_of_others)[row] == first[row]).all()


def reversed_rows(scores, lengths):
    """Of equal scores the highest ids."""
    masked = np.where(np.arange(100) < lengths[:, None], scores, np.nan)[:, ::-1]
    ids = run_small(masked, np.full_like(lengths, 100))
    return jnp.where(ids < 0, -1, 99 - ids)


MUTATIONS = {
    "nothing": run_small,
    "ids_shifted": lambda s, n: jnp.where(run_small(s, n) < 0, -1, run_small(s, n) + 1),
    "ties_to_the_highest_id": reversed_rows,
    "length_dropped": lambda s, n: run_small(s, np.full_like(n, 100)),
    "length_one_short": lambda s, n: run_small(s, np.clip(n, 1, 100) - 1),
    "one_too_few": lambda s, n: run_small(s, n).at[:, -1].set(-1),
    "absent_is_0": lambda s, n: jnp.maximum(run_small(s, n), 0),
    "in_the_order_of_ids": lambda s, n: jnp.sort(run_small(s, n), axis=-1),
    "nan_is_chosen": lambda s, n: run_small(np.where(np.isnan(s), 1e38, s), n),
    "minus_infinity_is_chosen": lambda s, n: run_small(np.where(np.isneginf(s), -3.4e38, s), n),
    "zeros_differ": lambda s, n: run_small(np.where((s == 0) & np.signbit(s), -1e-45, s).astype(np.float32), n),
    "denormals_are_zero": lambda s, n: run_small(np.where(np.abs(s) < 1.17e-38, 0, s).astype(np.float32), n),
    "compared_in_bfloat16": lambda s, n: run_small(jnp.asarray(s).astype(jnp.bfloat16), n),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_fails(mutation):
    """A comparison that forgives a wrong result is no test."""
    scores, lengths = small_case()
    ids = MUTATIONS[mutation](scores, lengths)
    if mutation == "nothing":
        assert_right(ids, scores, 12, lengths)
        return
    with pytest.raises(AssertionError, match="ids differ"):
        assert_right(ids, scores, 12, lengths)


@settings(max_examples=500, deadline=None)
@given(
    size=st.integers(1, 2**20) | st.integers(1, 5000),
    k=st.integers(1, LARGEST_K) | st.integers(1, 70),
    rows=st.sampled_from([1, 2, 64, 65537]),
    chunk=st.sampled_from([None, 32, 256, 4096, 32768]),
)
def test_rounds_keep_enough_and_end(size, k, rows, chunk):
    k = min(k, size)
    plan = rounds(size, k, rows=rows, chunk=chunk)
    assert plan[0].size == size
    assert (plan[-1].chunks, plan[-1].kept) == (1, k)
    for this in plan:
        assert this.chunk in [2**i for i in range(5, 16)]  # larger chunks do not fit in registers
        assert this.kept >= min(k, this.chunk)
        assert this.warps in (1, 2, 4, 8, 16, 32)
        assert 32 * this.warps <= this.chunk
        assert this.chunks * this.chunk >= this.size
    for this, following in itertools.pairwise(plan):
        assert following.size == this.chunks * this.kept < this.size


SIZES, WIDTHS, ROWS = (1, 32, 1000, 2048, 9295, 32768, 131072, 1048576), (1, 64, 2048, LARGEST_K), (1, 64, 4096)
SHAPES = list(itertools.product(ROWS, SIZES, WIDTHS))
PLANS = {tuple(rounds(size, min(k, size), rows=rows)): (rows, size, k) for rows, size, k in SHAPES}
# The dtype of the scores matters to the loads of the first round alone.
FIRST_ROUNDS = {(plan[0].chunk, plan[0].warps): plan for plan in sorted(PLANS, key=len, reverse=True)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_lowers_for_cuda_in_every_plan(dtype):
    for index, plan in enumerate(PLANS if dtype == jnp.float32 else FIRST_ROUNDS.values()):
        rows, size, k = PLANS[plan]
        run = functools.partial(top_k, k=k, order=("id", "score")[index % 2], interpret=False)
        scores = jax.ShapeDtypeStruct((rows, size), dtype)
        lengths = jax.ShapeDtypeStruct((rows,), jnp.int32) if index % 3 else None
        lowered = lower_for_cuda(lambda s, n, run=run: run(s, lengths=n), scores, lengths).as_text()
        assert lowered.count("custom_call @") == len(plan), "one kernel for each round"


def repeated(rows, size):
    """f32[rows, size] of all kinds in turn."""
    made = make_rows(0, size)
    return made[np.arange(rows) % len(made)]


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["score", "id"])
@pytest.mark.parametrize(
    ("rows", "size", "k"),
    [
        (20, 1, 1),
        (20, 33, 40),
        (65537, 16, 4),
        (512, 2048, 64),
        (40, 1000, 1000),
        (20, 9295, LARGEST_K),
        (64, 32768, 2048),
        (64, 131072, 2048),
        (1, 131072, 2048),
        (20, 131072, 1),
        (20, 1048576, LARGEST_K),
        (20, 1048575, 64),
    ],
)
def test_gpu(rows, size, k, order):
    scores, lengths = repeated(rows, size), make_lengths(0, rows, size, k)
    for given_lengths in (lengths, None):
        ids = sparse_jax.top_k(scores, k, given_lengths, order=order, implementation="triton")
        assert_right(ids, scores, k, given_lengths, order)
    again = sparse_jax.top_k(scores, k, order=order, implementation="triton")
    assert (again == ids).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize(("size", "k"), [(1000, 64), (40000, 2048)])
def test_gpu_dtypes_and_the_meaning(size, k, implementation, dtype):
    """Denormal numbers, too, are compared exactly by both."""
    scores, lengths = jnp.asarray(make_rows(1, size)).astype(dtype), make_lengths(1, len(KINDS), size, k)
    assert_right(sparse_jax.top_k(scores, k, lengths, implementation=implementation), scores, k, lengths)
