"""Reference correction: the worked example, the k rule, small cases by hand, batches, gradients, what is refused."""

import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from pallas_kernels import lowering
from sparse_jax import Config, Reference
from tests import numpy_reference
from tests.attention_cases import AttentionCase
from tests.compare import assert_same_bits
from tests.reference_cases import (
    ARRAYS,
    CASE,
    FIELDS,
    LOOP,
    as_dict,
    as_reference,
    capture,
    consume,
    dense,
    loops,
    seen_of,
    unselected_poisoned,
)

BOTH = ["xla", "interpret"]
both = pytest.mark.parametrize("implementation", BOTH)
PAGES = jnp.array([[2, 0, 3, 1]], jnp.int32)  # of two tokens each


def scalar_loop(scores, values):
    """One head of width 1 whose keys are their own scores; NaN where no token is."""
    pools = [np.full((4, 1, 2, 1), np.nan, np.float32) for _ in range(2)]
    for pool, numbers in zip(pools, (scores, values)):
        for token, number in enumerate(numbers):
            pool[PAGES[0, token // 2], 0, token % 2] = number
    arrays = jnp.ones((1, 1, 1)), *map(jnp.asarray, pools), PAGES, jnp.array([len(scores)], jnp.int32)
    return dict(zip(ARRAYS, arrays))


def captured(scores, values, count, implementation):
    return capture(scalar_loop(scores, values), np.array([count], np.int32), 4, implementation=implementation)


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual).ravel(), np.ravel(expected), rtol=1e-6, atol=1e-6)


@both
def test_worked_example_gives_23_5(implementation):
    """p = 1/2, 1/4, 1/8, 1/8: m = 3/4, O = 20, C = 16; later a = 26 over the two chosen keys, nothing else is read."""
    assert sparse_jax.retained_count(4, 0.5) == 2
    output, reference = captured(np.log([4, 2, 1, 1]), [16, 32, 8, 24], 2, implementation)
    close(output.out, 20)
    close(output.lse, np.log(8))
    assert reference.indices.ravel().tolist() == [0, 1, -1, -1]
    assert reference.count.tolist() == [2]
    close(reference.mass, 0.75)
    close(reference.output, 20)
    close(reference.contribution, 16)
    later = scalar_loop([0.5, 0.5, np.nan, np.nan], [20, 32, np.nan, np.nan])
    close(consume(later, reference, implementation=implementation), 20 - 16 + 0.75 * 26)


# The table of the k rule: n, r, the count, and what float32 on the device would have given.
K_RULE = [(13, 0.1, 2, 2), (100, 0.07, 8, 7), (50, 0.3, 15, 16), (90, 0.3, 27, 28), (1, 0.02, 1, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize(("n", "retention", "count", "of_float32"), K_RULE)
def test_requirement_1_table_of_the_k_rule(n, retention, count, of_float32):
    assert sparse_jax.retained_count(n, retention) == count
    table = sparse_jax.retained_counts(100, retention)
    assert (table.dtype, table.shape, table[n]) == (np.int32, (101,), count)
    assert math.ceil(np.float32(n) * np.float32(retention)) == of_float32


@pytest.mark.parametrize("retention", [0.02, 0.07, 0.1, 0.3, 1])
def test_requirement_1_every_length_on_the_host_and_in_the_table(retention):
    most = 65536
    expected = np.array([0] + [min(n, max(1, math.ceil(n * retention))) for n in range(1, most + 1)])
    lengths = np.arange(most + 1)
    table = sparse_jax.retained_counts(most, retention)
    assert (sparse_jax.retained_count(lengths, retention) == expected).all()
    on_the_device = jnp.asarray(table)[jnp.asarray(lengths)]
    assert on_the_device.dtype == jnp.int32
    assert (np.asarray(on_the_device) == expected).all()
    in_float32 = np.ceil(lengths.astype(np.float32) * np.float32(retention))
    wrong = int((in_float32[1:] != np.ceil(lengths[1:] * float(retention))).sum())
    assert wrong == {0.3: 2724, 0.07: 489}.get(retention, 0), "why a table"


@both
def test_ties_go_to_the_lowest_id(implementation):
    _, reference = captured([1.0, 2.0, 1.0, 1.0, 2.0, 1.0, -1.0], range(7), 4, implementation)
    assert reference.indices.ravel().tolist() == [0, 1, 2, 4]
    _, reference = captured([0.0, -0.0, 0.0, -0.0], range(4), 3, implementation)
    assert reference.indices.ravel().tolist() == [0, 1, 2, -1]
    close(reference.mass, 0.75)


@both
def test_no_key_is_forced_in_and_the_own_key_competes(implementation):
    """The row's own key is the last; if it is chosen, its key and value of the later loop count."""
    _, reference = captured([3.0, 0.0, 2.0, 0.0, 0.0], range(5), 2, implementation)
    assert reference.indices.ravel().tolist() == [0, 2, -1, -1], "neither sink nor recent"
    _, reference = captured([0.0, 1.0, 0.0, 9.0], [1.0, 2.0, 3.0, 4.0], 1, implementation)
    assert reference.indices.ravel().tolist() == [3, -1, -1, -1]
    later = scalar_loop([np.nan, np.nan, np.nan, 5.0], [np.nan, np.nan, np.nan, 40.0])
    expected = reference.output - reference.contribution + 40 * reference.mass
    close(consume(later, reference, implementation=implementation), expected)


@both
def test_keys_whose_probability_is_0_are_ranked_by_score(implementation):
    _, reference = captured([-900.0, 0.0, -700.0, -800.0], [1.0, 2.0, 3.0, 4.0], 3, implementation)
    assert reference.indices.ravel().tolist() == [1, 2, 3, -1]
    close(reference.mass, 1.0)
    later = scalar_loop([np.nan, 0.0, 0.0, 0.0], [np.nan, 3.0, 6.0, 9.0])
    close(consume(later, reference, implementation=implementation), 2 - 2 + 6.0)


@both
def test_a_key_that_is_not_a_number_shows_in_its_own_row_only(implementation):
    output, reference = captured([1.0, np.nan, 2.0], [1.0, 2.0, 3.0], 2, implementation)
    assert jnp.isnan(output.out).all()
    assert jnp.isnan(reference.output).all()
    assert 1 not in reference.indices.ravel(), "NaN is never chosen"


def full_reference(case, x, capacity):
    """A reference whose count is all that a row sees; a capture would fill the rest."""
    leading, seen = (case.B, case.T), jnp.asarray(seen_of(x), jnp.int32)
    ids = jnp.arange(capacity, dtype=jnp.int32)
    indices = jnp.where(ids < seen[..., None], ids, -1)[:, :, None]
    zeros = jnp.zeros((*leading, case.Hq, case.Dv), jnp.float32)
    return Reference(jnp.repeat(indices, case.Hq, axis=2), seen, zeros[..., 0] + 1, zeros, zeros)


BATCH = AttentionCase(name="batch", B=32, Hq=2, Hkv=1, D=16, Dv=16, P=4, W=10)
EXACT = Config(exact=True, block_tokens=16)  # three splits


def batch_of(batch, **changes):
    rng = np.random.default_rng(7)
    lengths = tuple(int(n) for n in rng.integers(0, 41, 32))[:batch]
    return dataclasses.replace(BATCH, B=batch, lengths=lengths, **changes)


@pytest.mark.parametrize(("batch", "dtype"), [(1, "float32"), (8, "bfloat16"), (32, "float32")])
def test_requirement_19_full_retention_has_the_bits_of_dense_attention(batch, dtype):
    """In plain jnp; the kernel follows, and runs at these batches on a GPU."""
    case = batch_of(batch, dtype=dtype)
    _, later, _ = loops(case)
    got = consume(later, full_reference(case, later, 40), implementation="xla")
    assert_same_bits(got, dense(later, implementation="xla").out)


def test_requirements_18_and_19_batched_rows_have_the_bits_of_single_rows():
    """With the exact configuration, at batch 1 and 32; every third row keeps all its keys."""
    case, options = batch_of(32), {"implementation": "interpret", "config": EXACT}
    first, later, counts = loops(case)
    full = np.arange(32) % 3 == 0
    counts[full] = seen_of(first)[full]
    output, reference = capture(first, counts, 40, **options)
    corrected = consume(later, reference, **options)
    assert_same_bits(output.out, dense(first, **options).out)
    assert_same_bits(corrected[full], dense(later, **options).out[full])
    for row in (0, 4, 13, 30):
        x, y = (
            {n: a[row : row + 1] if n in ("q", "page_table", "lengths") else a for n, a in z.items()}
            for z in (first, later)
        )
        alone = capture(x, counts[row : row + 1], 40, **options)
        for a, e in zip(jax.tree.leaves(alone), jax.tree.leaves((output, reference)), strict=True):
            assert_same_bits(a[0], e[row])
        assert_same_bits(consume(y, alone[1], **options)[0], corrected[row])


def test_requirement_20_the_output_kept_is_the_rounded_one():
    """In bfloat16: what dense attention returned, widened; the correction adds up in float32 and is rounded once.

    The tests of the kernels compare the same bits.
    """
    case = batch_of(8, dtype="bfloat16")
    first, later, counts = loops(case)
    output, reference = capture(first, counts, 40, implementation="xla")
    assert_same_bits(output.out, dense(first, implementation="xla").out)
    assert (output.out.dtype, reference.output.dtype) == (jnp.bfloat16, jnp.float32)
    assert_same_bits(reference.output, output.out.astype(jnp.float32) * (reference.count > 0)[..., None, None])
    # What bfloat16 cannot hold beside the output, so that the order of rounding shows.
    small = jnp.full_like(reference.contribution, 2.0**-9)
    fixed = dataclasses.replace(reference, mass=jnp.zeros_like(reference.mass), contribution=small)
    partial = np.asarray((reference.count > 0) & (reference.count < seen_of(first)))
    assert partial.sum() > 3
    got = consume(later, fixed, implementation="xla")
    assert_same_bits(got[partial], (reference.output - small).astype(jnp.bfloat16)[partial])


def test_gradient():
    """Right against finite differences, zero for keys that no row looks at, never NaN; empty rows included."""
    first, later, _ = loops(dataclasses.replace(CASE, lengths=(33, 40, 0)))
    counts = np.array([[9], [13], [0]], np.int32)  # the second publishes nothing
    gold = numpy_reference.capture(first, counts, 12)
    later = unselected_poisoned(later, as_reference(gold))
    values = [{n: x[n] for n in LOOP} for x in (first, later)]

    def loss(values, implementation=None):
        x, y = ({**first, **loop} for loop in values)
        output, reference = capture(x, counts, 12, implementation=implementation)
        there = (reference.count > 0)[..., None]
        # What an empty row holds is nobody's.
        hidden = {name: jnp.where(there[..., None], getattr(reference, name), jnp.nan) for name in FIELDS[3:]}
        hidden["mass"] = jnp.where(there, reference.mass, jnp.nan)
        corrected = consume(y, dataclasses.replace(reference, **hidden), implementation=implementation)
        return sum(jnp.sum(jnp.sin(a)) for a in (output.out, reference.mass, reference.contribution, corrected))

    # None differentiates the plain-jnp meaning; "xla" is that, and differentiates too.
    assert jax.eval_shape(jax.grad(functools.partial(loss, implementation="xla")), values)
    run = jax.jit(jax.value_and_grad(loss))
    value, grads = run(values)
    expected = [gold[name] for name in ("out", "mass", "contribution")] + [numpy_reference.consume(later, gold)]
    np.testing.assert_allclose(value, sum(np.sin(a).sum() for a in expected), rtol=1e-5)
    for grad, array in zip(jax.tree.leaves(grads), jax.tree.leaves(values), strict=True):
        assert jnp.isfinite(grad).all()
        assert (jnp.where(jnp.isfinite(array), 0.0, grad) == 0).all()
        assert jnp.abs(grad).max() > 1e-3
    assert (grads[0]["q"][2] == 0).all()
    assert (grads[1]["q"][1:] == 0).all(), "rows without a reference"
    rng, eps = np.random.default_rng(0), 3e-3
    way = jax.tree.map(lambda x: np.where(np.isfinite(x), rng.standard_normal(x.shape), 0).astype(np.float32), values)
    way = jax.tree.map(lambda w: w / np.linalg.norm(w), way)
    ahead, behind = (run(jax.tree.map(lambda x, w, s=s: x + s * eps * w, values, way))[0] for s in (1, -1))
    slope = sum(jnp.vdot(g, w) for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(way), strict=True))
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * eps), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("implementation", ["interpret", "triton"])
def test_kernels_say_that_they_are_not_differentiable(implementation):
    first, _, counts = loops(CASE, poison=False)
    reference = full_reference(CASE, first, 12)
    with pytest.raises(TypeError, match=r'not differentiable. Use implementation="xla"'):
        jax.grad(lambda q: capture({**first, "q": q}, counts, 12, implementation=implementation)[0].out.sum())(
            first["q"]
        )
    with pytest.raises(TypeError, match=r'not differentiable. Use implementation="xla"'):
        jax.grad(lambda q: consume({**first, "q": q}, reference, implementation=implementation).sum())(first["q"])


REFUSED_BY_CAPTURE = [
    ({"counts": None}, "counts is required"),
    ({"counts": jnp.ones((3, 1))}, "counts must hold integers, got float32"),
    ({"counts": jnp.ones(3, jnp.int32)}, r"counts must have the shape \[3, 1\], got \[3\]"),
    ({"counts": jnp.ones((3, 2), jnp.int32)}, r"counts must have the shape \[3, 1\], got \[3, 2\]"),
    ({"q": jnp.zeros((3, 4, 16))}, r"counts must have the shape \[3\], got \[3, 1\]"),
    ({"capacity": 0}, "capacity must be at least 1, got 0"),
    ({"capacity": 2**31}, "capacity must be at least 1"),
    ({"capacity": 2.5}, "capacity must be an integer known on the host, got 2.5"),
    ({"q": jnp.zeros((3, 1, 5, 16))}, "Hq must be a multiple of Hkv, got Hq = 5"),
    ({"q": jnp.zeros((3, 1, 4, 16), jnp.int32)}, "q must have one of the dtypes .*got int32"),
    ({"k_pages": jnp.zeros((9, 2, 4, 8))}, r"k_pages must have the shape .*got \[9, 2, 4, 8\]"),
    ({"v_pages": jnp.zeros((9, 2, 4, 8))}, r"v_pages must have the shape .*got \[9, 2, 4, 8\]"),
    ({"page_table": jnp.zeros((2, 10), jnp.int32)}, r"page_table must have the shape .*got \[2, 10\]"),
    ({"lengths": jnp.zeros(2, jnp.int32)}, r"lengths must have the shape .*got \[2\]"),
    ({"scale": float("nan")}, "scale must be a finite Python number, got nan"),
    ({"implementation": "cuda"}, "implementation must be one of .*got 'cuda'"),
    ({"config": {"splits": 2}}, "config must be a Config"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED_BY_CAPTURE)
def test_capture_refuses_what_does_not_fit(change, message):
    first, _, counts = loops(CASE, poison=False)
    given = {**{n: first[n] for n in ARRAYS}, "counts": counts, "capacity": 12, **change}
    with pytest.raises(ValueError, match=message):
        sparse_jax.reference_capture(**given)


REFUSED_BY_CONSUME = [
    ({"indices": jnp.zeros((3, 1, 2, 12), jnp.int32)}, r"reference.indices must have the shape \[3, 1, 4, \*\], got"),
    ({"indices": jnp.zeros((3, 1, 4, 12))}, "reference.indices must be int32, got float32"),
    ({"indices": jnp.zeros((3, 1, 4, 0), jnp.int32)}, "reference.indices must have at least one column"),
    ({"count": jnp.zeros(3, jnp.int32)}, r"reference.count must have the shape \[3, 1\], got \[3\]"),
    ({"count": jnp.zeros((3, 1), jnp.int16)}, "reference.count must be int32, got int16"),
    ({"count": None}, "reference.count is required"),
    ({"mass": jnp.zeros((3, 1, 4), jnp.bfloat16)}, "reference.mass must be float32, got bfloat16"),
    ({"mass": jnp.zeros((3, 1, 2))}, r"reference.mass must have the shape \[3, 1, 4\], got \[3, 1, 2\]"),
    ({"output": jnp.zeros((3, 1, 4, 16))}, r"reference.output must have the shape \[3, 1, 4, 24\], got"),
    ({"contribution": jnp.zeros((3, 4, 24))}, r"reference.contribution must have the shape .*got \[3, 4, 24\]"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED_BY_CONSUME)
def test_consume_refuses_what_does_not_fit(change, message):
    first, _, _ = loops(CASE, poison=False)
    reference = full_reference(CASE, first, 12)
    with pytest.raises(ValueError, match=message):
        consume(first, dataclasses.replace(reference, **change))


def test_consume_refuses_other_rows_and_other_types():
    first, _, _ = loops(CASE, poison=False)
    reference = full_reference(CASE, first, 12)
    with pytest.raises(ValueError, match=r"reference.indices must have the shape \[3, 4, \*\], got \[3, 1, 4, 12\]"):
        consume({**first, "q": first["q"][:, 0]}, reference)
    with pytest.raises(ValueError, match="reference must be a Reference, got dict"):
        consume(first, as_dict(reference))
    with pytest.raises(ValueError, match=r"lengths must have the shape .*got \[2\]"):
        consume({**first, "lengths": jnp.zeros(2, jnp.int32)}, reference)


@pytest.mark.parametrize("implementation", [None, "xla", "interpret"])
def test_lengths_for_each_head_are_not_supported(implementation):
    first, _, counts = loops(CASE, poison=False)
    x = {**first, "lengths": jnp.ones((3, 2), jnp.int32)}
    with pytest.raises(NotImplementedError, match=r"lengths must be one a request, \[3\], got \[3, 2\]"):
        capture(x, counts, 12, implementation=implementation)
    with pytest.raises(NotImplementedError, match=r"lengths must be one a request, \[3\], got \[3, 2\]"):
        consume(x, full_reference(CASE, first, 12), implementation=implementation)


def test_pools_that_the_kernels_cannot_address():
    """Contract 8: of odd width, between 2^31 and 2^32 one-byte elements; None takes plain jnp instead."""
    pages = 2**31 // (2 * 64 * 15) + 9
    pool = jax.ShapeDtypeStruct((pages, 2, 64, 15), jnp.float8_e4m3fn)
    q, count = jax.ShapeDtypeStruct((1, 4, 15), jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int32)
    args = q, pool, pool, jax.ShapeDtypeStruct((1, 2), jnp.int32), count

    def run(*args, implementation=None):
        _, reference = sparse_jax.reference_capture(*args, args[-1], capacity=8, implementation="xla")
        return (
            sparse_jax.reference_capture(*args, args[-1], capacity=8, implementation=implementation),
            sparse_jax.reference_consume(*args, reference, implementation=implementation),
        )

    with pytest.raises(NotImplementedError, match=r"k_pages has \d+ one-byte elements in rows of 15"):
        lowering.lower_for_cuda(lambda *args: run(*args, implementation="triton"), *args)
    assert not lowering.names_kernel(lowering.lower_for_cuda(run, *args).as_text())


def test_triton_on_a_cpu_names_the_other_implementations():
    first, _, counts = loops(CASE, poison=False)
    with pytest.raises(ValueError, match=r'implementation="xla".*implementation="interpret"'):
        jax.jit(lambda: capture(first, counts, 12, implementation="triton")).trace().lower(lowering_platforms=("cpu",))


@pytest.mark.parametrize("implementation", [None, "xla", "interpret"])
def test_contract_9_a_reference_is_state(implementation):
    """int32 and float32, no weak types, whatever the queries and the mode; frozen; of NumPy arrays, too."""
    case = dataclasses.replace(CASE, dtype="bfloat16")
    first, _, counts = loops(case, poison=False)
    for wide in (False, True):
        with jax.enable_x64(wide):
            output, reference = jax.eval_shape(lambda: capture(first, counts, 12, implementation=implementation))
            corrected = jax.eval_shape(
                lambda r: consume(first, r, implementation=implementation), full_reference(case, first, 12)
            )
        assert (output.out.dtype, output.lse.dtype, corrected.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
        for name in FIELDS:
            leaf = getattr(reference, name)
            assert leaf.dtype == (jnp.int32 if name in ("indices", "count") else jnp.float32), name
            assert not leaf.weak_type, name
        assert (reference.indices.shape, reference.contribution.shape) == ((3, 1, 4, 12), (3, 1, 4, 24))
    with pytest.raises(dataclasses.FrozenInstanceError):
        reference.count = counts


def test_the_documented_example_runs():
    """The section of docs/operations.md."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    section = text[text.index("## Reference correction") : text.index("## Reference slots")]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict = {}
    exec(compile(block, "operations.md", "exec"), names)
    assert names["counts"].tolist() == [5, 4]
    x = dict(zip(ARRAYS, (names["queries"][1][:, None], names["keys"][1], names["values"][1], names["table"])))
    kept = {name: array[:, None] for name, array in as_dict(names["reference"]).items()}
    expected = numpy_reference.consume({**x, "lengths": names["lengths"]}, kept)
    np.testing.assert_allclose(names["corrected"], expected[:, 0], rtol=1e-5, atol=1e-5)
