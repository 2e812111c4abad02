"""The accumulator's kernels: interpreter and GPU against float64 NumPy, lowering for CUDA, mutations that must fail."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from pallas_kernels import Config, lowering
from tests.compare import assert_close, assert_same_bits
from tests.h2o_setting import DECAY, probabilities

KERNELS = ["interpret", pytest.param("triton", marks=pytest.mark.gpu)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call."""

    name: str
    group_size: int = 4
    page_size: int = 16
    table_width: int = 5
    width: int = 64
    kv_heads: int = 2
    dtype: str = "bfloat16"  # of the pool
    q_dtype: str = "bfloat16"
    state: str = "float32"
    group: str = "mean"
    splits: int | None = None
    lengths: tuple[int, ...] = (77, 500, 9, 0)
    per_head_table: bool = False
    pages: int | None = None


CASES = [
    Case(name="mean"),
    Case(name="max of 3, pages of one token", group_size=3, page_size=1, table_width=90, group="max", splits=3),
    Case(
        name="max of 7, float32",
        group_size=7,
        page_size=64,
        table_width=2,
        width=128,
        dtype="float32",
        q_dtype="float32",
        group="max",
    ),
    Case(name="mean of 5, fp8", group_size=5, dtype="float8_e4m3fn", splits=2, per_head_table=True),
    Case(
        name="max of 17, narrow, bf16 state",
        group_size=17,
        page_size=4,
        table_width=21,
        width=7,
        group="max",
        state="bfloat16",
    ),
]
GPU_CASES = [
    dataclasses.replace(
        CASES[2], name="long", dtype="bfloat16", table_width=600, kv_heads=8, lengths=(38_399, 12, 38_400)
    ),
    Case(name="float16", dtype="float16", q_dtype="float16", width=96, group="max", group_size=6),
    Case(name="one request", kv_heads=1, lengths=(4096,), table_width=256, splits=16),
]
LARGE = Case(name="large pool", page_size=64, width=128, kv_heads=8, pages=40_000, lengths=(1,))
OPTIONS: dict[str, Any] = dict(k=3, reserved=(2, 4))


@functools.cache
def make(case, seed=0):
    rng = np.random.default_rng(seed)
    batch, pages = len(case.lengths), case.pages or len(case.lengths) * case.table_width + 3
    heads = case.kv_heads if case.per_head_table else 1
    order = rng.permutation(pages)[: batch * case.table_width].reshape(batch, 1, case.table_width)
    table = np.repeat(order, heads, axis=1).astype(np.int32)
    table[0, :, 1], table[-1, :, 0] = -1, pages + 5
    shape = (pages, case.kv_heads, case.page_size)
    k = jnp.asarray(rng.standard_normal((*shape, case.width)), jnp.float32).astype(case.dtype)
    q = jnp.asarray(2 * rng.standard_normal((batch, case.kv_heads * case.group_size, case.width)), case.q_dtype)
    scores = jnp.asarray(rng.random(shape), case.state)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    return scores, q, k, jnp.asarray(table if case.per_head_table else table[:, 0]), lengths


@functools.cache
def oracle(case):
    scores, q, k, table, lengths = make(case)
    h, keys = np.asarray(scores.astype(jnp.float32), np.float64), np.asarray(k.astype(jnp.float32), np.float64)
    table = np.broadcast_to(
        np.asarray(table).reshape(table.shape[0], -1, table.shape[-1]), (len(lengths), case.kv_heads, table.shape[-1])
    )
    first, last = OPTIONS["reserved"]
    q = np.asarray(q.astype(jnp.float32)).reshape(len(lengths), case.kv_heads, case.group_size, -1)
    for b, head in np.ndindex(*table.shape[:2]):
        end = min(int(lengths[b]), table.shape[-1] * case.page_size) - last
        if end - first <= OPTIONS["k"]:
            continue
        token = np.arange(first, end)
        page, offset = table[b, head, token // case.page_size], token % case.page_size
        exists = (page >= 0) & (page < h.shape[0])
        page, offset = page[exists], offset[exists]
        p = probabilities(q[b, head], keys[page, head, offset], case.width**-0.5, case.group)
        h[page, head, offset] = p + DECAY * h[page, head, offset]
    return h


def run(case, implementation, args=None, **changes):
    options = OPTIONS | {"group": case.group, "implementation": implementation} | changes
    options["config"] = Config(splits=case.splits)
    return sparse_jax.h2o_accumulate(*(args or make(case)), **options)


RUNS = [pytest.param(case, "interpret", id=f"{case.name}-interpret") for case in CASES]
RUNS += [pytest.param(case, "triton", marks=pytest.mark.gpu, id=f"{case.name}-gpu") for case in [*CASES, *GPU_CASES]]


@pytest.mark.parametrize(("case", "implementation"), RUNS)
def test_equals_float64(case, implementation):
    new = run(case, implementation)
    assert new.dtype == case.state
    assert_close(new, oracle(case), case.state)
    if case.state == "float32":  # what a step adds is far below the sums: compare it alone, too
        start = DECAY * np.asarray(make(case)[0], np.float64)
        changed = oracle(case) != np.asarray(make(case)[0], np.float64)
        np.testing.assert_allclose(
            (np.asarray(new) - start)[changed], (oracle(case) - start)[changed], rtol=2e-3, atol=3e-7
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_meaning_equals_float64(case):
    assert_close(run(case, "xla"), oracle(case), case.state)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    "mutation", ["shifted pages", "another head's query", "no decay", "another window", "stale key"]
)
def test_mutations_fail(mutation, implementation):
    case = CASES[0]
    scores, q, k, table, lengths = make(case)
    args, changes = [scores, q, k, table, lengths], {}
    if mutation == "shifted pages":
        args[3] = jnp.where(table >= 0, (table + 1) % k.shape[0], table)
    elif mutation == "another head's query":
        args[1] = jnp.roll(q, case.group_size, axis=1)
    elif mutation == "no decay":
        changes["decay"] = 1.0
    elif mutation == "another window":
        changes["reserved"] = (3, 4)
    else:
        args[2] = k.at[int(table[0, 2]), 1, 3].multiply(3)
    new = run(case, implementation, tuple(args), **changes)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(new - scores, oracle(case) - np.asarray(scores), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("implementation", KERNELS)
def test_contract_4_and_12_poison_and_neighbours_change_no_bit(implementation):
    case = CASES[0]
    scores, q, k, table, lengths = make(case)
    clean = run(case, implementation)
    used = oracle(case) != np.asarray(scores, np.float64)
    poisoned = jnp.where(used[..., None], k.astype(jnp.float32), jnp.nan).astype(k.dtype)
    assert_same_bits(run(case, implementation, (scores, q, poisoned, table, lengths)), clean)
    assert_same_bits(run(case, implementation), clean)
    alone = run(case, implementation, (scores, q, k, table.at[0].set(-1).at[2:].set(-1), lengths))
    own = np.asarray(table[1])
    assert_same_bits(np.asarray(alone)[own], np.asarray(clean)[own])


@pytest.mark.parametrize("implementation", KERNELS)
def test_a_sick_query_says_nothing(implementation):
    case = CASES[0]
    scores, q, k, table, lengths = make(case)
    new = np.asarray(run(case, implementation, (scores, q.at[0].set(jnp.nan), k, table, lengths)))
    assert np.isfinite(new).all()
    well = np.asarray(run(case, implementation))
    np.testing.assert_array_equal(new[np.asarray(table[1])], well[np.asarray(table[1])])


@pytest.mark.gpu
def test_in_place_over_steps():
    """In a scan whose carry is donated, the sums are updated where they lie."""
    case = GPU_CASES[0]
    scores, q, k, table, lengths = make(case)

    def steps(scores):
        step = functools.partial(sparse_jax.h2o_accumulate, **OPTIONS, group=case.group)
        return jax.lax.scan(lambda s, _: (step(s, q, k, table, lengths), None), scores, None, length=3)[0]

    lowered = jax.jit(steps, donate_argnums=0).lower(scores)
    raw = 4 * case.group_size * len(case.lengths) * case.kv_heads * case.table_width * case.page_size
    assert lowered.compile().memory_analysis().temp_size_in_bytes < raw + scores.nbytes
    expected = scores
    for _ in range(3):
        expected = run(case, "triton", (expected, q, k, table, lengths))
    assert_same_bits(jax.jit(steps)(scores), expected)


@pytest.mark.parametrize("case", [*CASES, *GPU_CASES, LARGE], ids=lambda case: case.name)
def test_lowers_for_cuda(case):
    batch, pages = len(case.lengths), case.pages or 99
    pool = (pages, case.kv_heads, case.page_size)
    table = (batch, case.kv_heads, case.table_width) if case.per_head_table else (batch, case.table_width)
    shapes = [
        jax.ShapeDtypeStruct(pool, case.state),
        jax.ShapeDtypeStruct((batch, case.kv_heads * case.group_size, case.width), case.q_dtype),
        jax.ShapeDtypeStruct((*pool, case.width), case.dtype),
        jax.ShapeDtypeStruct(table, jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    ]
    step = functools.partial(
        sparse_jax.h2o_accumulate,
        **OPTIONS,
        group=case.group,
        implementation="triton",
        config=Config(splits=case.splits),
    )
    text = lowering.lower_for_cuda(step, *shapes).as_text()
    assert "h2o_scores" in text
    assert "h2o_update" in text
