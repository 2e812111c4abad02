"""Reference correction of the public operations: the equations, the k rule, and what must change no bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import sparse_jax
from sparse_jax import Reference
from sparse_jax import reference as operations
from tests import numpy_reference
from tests.attention_cases import INT32_MIN
from tests.compare import assert_same_bits
from tests.reference_cases import (
    CASE,
    DRAFT,
    FIELDS,
    LOOP,
    as_dict,
    as_reference,
    capture,
    consume,
    counts_of,
    dense,
    loops,
    seen_of,
    unselected_poisoned,
)

BOTH = ["xla", "interpret"]
CAPACITY = 12  # of CASE; 0.3 of 40 keys
LARGEST = 2**31 - 1
both = pytest.mark.parametrize("implementation", BOTH)


def same_bits(actual, expected):
    """Of whole trees: outputs, references."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(a, e)


def near(actual, expected, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance)


@both
@pytest.mark.parametrize(("case", "capacity"), [(CASE, CAPACITY), (DRAFT, 50)], ids=["single", "draft"])
def test_requirement_31_gold_comparison_with_numpy(case, capacity, implementation):
    """Hq = 4, Hkv = 2, float32; absent pages, and a capacity above the table; both precisions of NumPy."""
    first, later, counts = loops(case)
    output, reference = capture(first, counts, capacity, implementation=implementation)
    corrected = consume(later, reference, implementation=implementation)
    for dtype in (np.float64, np.float32):
        gold = numpy_reference.capture(first, counts, capacity, dtype)
        assert (np.asarray(reference.indices) == gold["indices"]).all()
        assert (np.asarray(reference.count) == gold["count"]).all()
        near(output.out, gold["out"])
        near(output.lse, gold["lse"])
        for name in ("mass", "output", "contribution"):
            near(getattr(reference, name), gold[name])
        near(corrected, numpy_reference.consume(later, gold, dtype))
    assert (reference.count > 0).any()
    assert (reference.mass[reference.count < seen_of(first)] < 0.99).all()
    uncorrected = np.abs(np.asarray(corrected) - np.asarray(dense(later, implementation=implementation).out))
    assert uncorrected.max() > 0.1, "the later loop must differ from dense attention, or this shows nothing"


@both
def test_identity_same_loop_gives_the_reference_output(implementation):
    first, _, counts = loops(CASE)
    output, reference = capture(first, counts, CAPACITY, implementation=implementation)
    near(consume(first, reference, implementation=implementation), np.asarray(output.out))


@both
def test_identity_full_retention_is_dense(implementation):
    """k = n: mass 1, the contribution is the output, and the later loop is dense attention, bit for bit."""
    first, later, counts = loops(DRAFT, 1.0)
    output, reference = capture(first, counts, 50, implementation=implementation)
    there = np.asarray(seen_of(first) > 0)
    near(reference.mass[there], 1.0)
    near(reference.contribution[there], np.asarray(reference.output)[there])
    same_bits(output, dense(first, implementation=implementation))
    assert_same_bits(
        consume(later, reference, implementation=implementation), dense(later, implementation=implementation).out
    )


@both
def test_identity_one_key_gives_its_own_value(implementation):
    """n = 1: the result is the token's value at the later loop."""
    first, later, _ = loops(dataclasses.replace(CASE, lengths=(1, 1, 1)))
    _, reference = capture(first, np.ones((3, 1), np.int32), CAPACITY, implementation=implementation)
    assert (reference.mass == 1).all()
    assert (reference.indices[..., 0] == 0).all()
    own = later["v_pages"][later["page_table"][:, 0], :, 0]  # [B, Hkv, Dv]
    assert_same_bits(consume(later, reference, implementation=implementation)[:, 0], jnp.repeat(own, 2, axis=1))


@both
def test_identity_no_error_where_neither_mass_nor_the_other_values_drift(implementation):
    """New values where both heads of a group have chosen a key: then the correction is all there is."""
    first, _, counts = loops(CASE, poison=False)
    _, reference = capture(first, counts, CAPACITY, implementation=implementation)
    values, table = np.array(first["v_pages"]), np.asarray(first["page_table"])
    changed = 0
    for b, h in np.ndindex(3, 2):
        chosen = [set(np.asarray(reference.indices)[b, 0, 2 * h + i].tolist()) - {-1} for i in (0, 1)]
        for j in chosen[0] & chosen[1]:
            values[table[b, j // 4], h, j % 4] += 1 + j
            changed += 1
    assert changed > 3
    later = {**first, "v_pages": jnp.asarray(values)}
    exact = np.asarray(dense(later, implementation=implementation).out)
    assert np.abs(exact - np.asarray(dense(first, implementation=implementation).out)).max() > 1
    near(consume(later, reference, implementation=implementation), exact, 5e-6)


@both
def test_requirement_26_only_chosen_keys_are_read(implementation):
    first, later, counts = loops(CASE, poison=False)
    clean, dirty = (
        capture(x, counts, CAPACITY, implementation=implementation) for x in (first, loops(CASE, poison=True)[0])
    )
    same_bits(dirty, clean)
    reference = clean[1]
    assert (reference.count < seen_of(first)).all()
    for fill in (np.nan, np.inf):
        poisoned = unselected_poisoned(later, reference, fill)
        assert not jnp.isfinite(poisoned["v_pages"]).all(axis=-1).all()
        got = consume(poisoned, reference, implementation=implementation)
        assert_same_bits(got, consume(later, reference, implementation=implementation))


@both
def test_requirement_27_each_query_head_chooses_for_itself(implementation):
    first, _, counts = loops(CASE)
    _, reference = capture(first, counts, CAPACITY, implementation=implementation)
    for h in (0, 2):
        assert (reference.indices[:2, :, h] != reference.indices[:2, :, h + 1]).any(), "two heads of one group"
    # The other head of the group as it was, this one with another query: only this one's reference moves.
    moved = {**first, "q": first["q"].at[:, :, 1].multiply(-1.0)}
    _, other = capture(moved, counts, CAPACITY, implementation=implementation)
    for name in ("indices", "mass", "output", "contribution"):
        before, after = getattr(reference, name), getattr(other, name)
        assert_same_bits(after[:, :, [0, 2, 3]], before[:, :, [0, 2, 3]], name=name)
        assert (after[:, :, 1] != before[:, :, 1]).any()


@both
def test_requirement_27_placement_of_pages_changes_no_bit(implementation):
    first, later, counts = loops(CASE)
    pages = first["k_pages"].shape[0]
    order = jnp.asarray(np.random.default_rng(0).permutation(pages), jnp.int32)

    def placed(x):
        ok = (x["page_table"] >= 0) & (x["page_table"] < pages)
        moved = {n: jnp.zeros_like(x[n]).at[order].set(x[n]) for n in ("k_pages", "v_pages")}
        return {**x, **moved, "page_table": jnp.where(ok, order[jnp.where(ok, x["page_table"], 0)], -1)}

    here, there = (capture(x, counts, CAPACITY, implementation=implementation) for x in (first, placed(first)))
    same_bits(there, here)
    assert_same_bits(
        consume(placed(later), there[1], implementation=implementation),
        consume(later, here[1], implementation=implementation),
    )


@both
def test_a_count_of_0_publishes_nothing_and_gives_0(implementation):
    """Whatever the other fields hold then."""
    first, later, counts = loops(CASE)
    full = capture(first, counts, CAPACITY, implementation=implementation)
    for none in (0, -3):
        wanted = np.array([[none], [counts[1, 0]], [none]], np.int32)
        output, reference = capture(first, wanted, CAPACITY, implementation=implementation)
        same_bits(output, full[0])
        assert reference.count.tolist() == [[0], [counts[1, 0]], [0]]
        for row in (0, 2):
            assert (reference.indices[row] == -1).all()
            assert all((getattr(reference, name)[row] == 0).all() for name in ("mass", "output", "contribution"))
        same_bits(jax.tree.map(lambda x: x[1], reference), jax.tree.map(lambda x: x[1], full[1]))
    garbage = {name: getattr(reference, name).at[::2].set(jnp.nan) for name in ("mass", "output", "contribution")}
    garbage["indices"] = reference.indices.at[::2].set(3)
    for count in (0, -2):
        empty = dataclasses.replace(reference, **garbage, count=reference.count.at[::2].set(count))
        got = consume(later, empty, implementation=implementation)
        assert (got[::2] == 0).all()
        assert_same_bits(got[1], consume(later, full[1], implementation=implementation)[1])


@both
def test_requirement_2_a_count_above_the_capacity_publishes_nothing(implementation):
    first, _, counts = loops(CASE)
    full = capture(first, counts, CAPACITY, implementation=implementation)
    for count in (CAPACITY + 1, LARGEST):
        above = counts.copy()
        above[0] = count
        output, reference = capture(first, above, CAPACITY, implementation=implementation)
        same_bits(output, full[0])
        assert reference.count.tolist() == [[0], *counts[1:].tolist()]
        assert (reference.indices[0] == -1).all()
        assert (reference.mass[0] == 0).all()
        same_bits(jax.tree.map(lambda x: x[1:], reference), jax.tree.map(lambda x: x[1:], full[1]))
    # What a row sees bounds its count, as long as the reference has room for the count.
    more = counts.copy()
    more[2] = CAPACITY
    _, reference = capture(first, more, CAPACITY, implementation=implementation)
    assert reference.count[2].item() == 7
    near(reference.mass[2], 1.0)


def test_requirement_2_checked_raises():
    first, later, counts = loops(CASE)
    pages = first["k_pages"].shape[0]
    first["page_table"] = jnp.where((first["page_table"] < 0) | (first["page_table"] >= pages), -1, first["page_table"])
    run = sparse_jax.checked(lambda x, counts: capture(x, counts, CAPACITY, implementation="xla"))
    same_bits(run(first, counts), capture(first, counts, CAPACITY, implementation="xla"))
    with pytest.raises(checkify.JaxRuntimeError, match=r"counts: must be at most the capacity of 12, got 13"):
        run(first, np.full_like(counts, 13))
    with pytest.raises(checkify.JaxRuntimeError, match=r"page_table.*99"):
        run({**first, "page_table": first["page_table"].at[0, 0].set(99)}, counts)
    with pytest.raises(checkify.JaxRuntimeError, match=r"lengths.*41"):
        run({**first, "lengths": first["lengths"].at[0].set(41)}, counts)
    reference = run(first, counts)[1]
    later = {**later, "page_table": first["page_table"].at[1, 3].set(77)}
    with pytest.raises(checkify.JaxRuntimeError, match=r"page_table.*77"):
        sparse_jax.checked(lambda x, r: consume(x, r, implementation="xla"))(later, reference)


def test_requirement_2_capacity_changes_no_result():
    first, later, counts = loops(CASE)
    small, large = (capture(first, counts, capacity, implementation="xla") for capacity in (CAPACITY, 60))
    same_bits(large[0], small[0])
    assert_same_bits(large[1].indices[..., :CAPACITY], small[1].indices)
    assert (large[1].indices[..., CAPACITY:] == -1).all()
    for name in FIELDS[1:]:
        near(getattr(large[1], name), np.asarray(getattr(small[1], name)))
    near(consume(later, large[1], implementation="xla"), consume(later, small[1], implementation="xla"))


@both
def test_pages_that_went_away_and_rows_without_any(implementation):
    """A stale entry of the table reads as absent, in both loops."""
    first, later, counts = loops(CASE)
    gone = {"page_table": later["page_table"].at[0, 2].set(-1).at[1].set(-1).at[2, 0].set(first["k_pages"].shape[0])}
    clean = loops(CASE, poison=False)[0]
    output, reference = capture({**clean, **gone}, counts, CAPACITY, implementation=implementation)
    gold = numpy_reference.capture({**clean, **gone}, counts, CAPACITY)
    assert (np.asarray(reference.indices) == gold["indices"]).all()
    near(reference.mass, gold["mass"])
    near(reference.contribution, gold["contribution"])
    assert (reference.indices[1] == -1).all()
    assert jnp.isneginf(output.lse[1]).all()
    assert (output.out[1] == 0).all()
    _, whole = capture(first, counts, CAPACITY, implementation=implementation)
    got = consume({**later, **gone}, whole, implementation=implementation)
    near(got, numpy_reference.consume({**later, **gone}, as_dict(whole)))
    near(got[1], np.asarray(whole.output - whole.contribution)[1])


@both
def test_lengths_of_any_size(implementation):
    """Rows before the first token see nothing; lengths beyond the table are cut to it; nothing wraps."""
    first, later, _ = loops(DRAFT, poison=False)
    odd = [(0, -7), (1, 2), (INT32_MIN, 40), (LARGEST, 43), (41, INT32_MIN + 1)]
    for lengths in odd:
        x, y = ({**z, "lengths": np.array(lengths, np.int32)} for z in (first, later))
        counts = np.full((2, 3), 50, np.int32)
        output, reference = capture(x, counts, 50, implementation=implementation)
        assert (np.asarray(reference.count) == seen_of(x)).all(), lengths
        same_bits(output, dense(x, implementation=implementation))
        got = consume(y, reference, implementation=implementation)
        assert_same_bits(got, dense(y, implementation=implementation).out)
        near(got, numpy_reference.consume(y, as_dict(reference)))
        few = capture(x, counts_of(x, 0.3), 50, implementation=implementation)[1]
        near(consume(y, few, implementation=implementation), numpy_reference.consume(y, as_dict(few)))


@both
def test_ids_out_of_range_in_a_reference_are_absent(implementation):
    """Out of range for the row, too: a key that it does not see."""
    first, later, counts = loops(CASE)
    reference = as_reference(numpy_reference.capture(first, counts, CAPACITY))
    rng, shape = np.random.default_rng(2), reference.indices.shape
    limit = np.asarray(later["lengths"])[:, None, None, None]
    wild = np.where(rng.random(shape) < 0.5, rng.choice([-1, -2, INT32_MIN, LARGEST, 40, 41], shape), limit)
    hit = rng.random(shape) < 0.4
    outside = dataclasses.replace(reference, indices=jnp.where(hit, jnp.asarray(wild, jnp.int32), reference.indices))
    absent = dataclasses.replace(reference, indices=jnp.where(hit, -1, reference.indices))
    got = consume(unselected_poisoned(later, absent), outside, implementation=implementation)
    assert_same_bits(got, consume(later, absent, implementation=implementation))
    near(got, numpy_reference.consume(later, as_dict(absent)))
    # In any order, and a count beyond the columns counts as the columns.
    backwards = dataclasses.replace(
        absent, indices=absent.indices[..., ::-1], count=jnp.full_like(absent.count, CAPACITY + 9)
    )
    kept = dataclasses.replace(absent, count=jnp.full_like(absent.count, CAPACITY))
    near(consume(later, backwards, implementation=implementation), numpy_reference.consume(later, as_dict(kept)), 2e-6)


@both
def test_rows_pick_their_references(implementation):
    """consume_rows: any reference, the same one twice, none (-1), and one out of range."""
    first, later, counts = loops(CASE)
    _, reference = capture(first, counts, CAPACITY, implementation=implementation)
    call = operations.Call.of(*(later[n] for n in LOOP), None, None, None, None)
    flat = reference.flat(2)

    def picked(rows):
        rows = jnp.array(rows, jnp.int32)[:, None]
        return operations.consume_rows(
            call, later["page_table"], later["lengths"], flat, rows, None, implementation=implementation, config=None
        )

    same = picked([0, 1, 2])
    assert_same_bits(same, consume(later, reference, implementation=implementation))
    assert_same_bits(picked([1, 1, 2])[1:], same[1:])
    swapped = as_dict(jax.tree.map(lambda x: x[jnp.array([1, 0, 2])], reference))
    near(picked([1, 0, 2]), numpy_reference.consume(later, swapped))
    for nothing in (-1, 3, INT32_MIN, LARGEST):
        got = picked([0, nothing, 2])
        assert (got[1] == 0).all()
        assert_same_bits(got[::2], same[::2])


@both
def test_contract_12_other_rows_change_no_bit_and_nothing_retraces(implementation):
    first, later, counts = loops(CASE)
    before = capture(first, counts, CAPACITY, implementation=implementation)
    corrected = consume(later, before[1], implementation=implementation)
    sizes = [f._cache_size() for f in (operations._capture, operations._consume)]
    for length, count in ((33, 5), (1, 1), (0, 0), (40, 12)):
        x, y = ({**z, "lengths": z["lengths"].at[0].set(length), "q": z["q"].at[0].add(1.0)} for z in (first, later))
        wanted = counts.copy()
        wanted[0] = count
        after = capture(x, wanted, CAPACITY, implementation=implementation)
        same_bits(jax.tree.map(lambda a: a[1:], after), jax.tree.map(lambda a: a[1:], before))
        got = consume(y, after[1], implementation=implementation)
        assert_same_bits(got[1:], corrected[1:])
    same_bits(capture(first, counts, CAPACITY, implementation=implementation), before)
    assert_same_bits(consume(later, before[1], implementation=implementation), corrected)
    assert sizes == [f._cache_size() for f in (operations._capture, operations._consume)]


@both
def test_q_without_the_axis_of_tokens(implementation):
    first, later, counts = loops(CASE)
    with_axis = capture(first, counts, CAPACITY, implementation=implementation)
    flat, flat_later = ({**x, "q": x["q"][:, 0]} for x in (first, later))
    output, reference = capture(flat, counts[:, 0], CAPACITY, implementation=implementation)
    same_bits((output, reference), jax.tree.map(lambda x: x[:, 0], with_axis))
    assert (reference.count.shape, reference.indices.shape) == ((3,), (3, 4, CAPACITY))
    assert_same_bits(
        consume(flat_later, reference, implementation=implementation),
        consume(later, with_axis[1], implementation=implementation)[:, 0],
    )


def test_vmap_under_jit_equals_a_loop():
    first, later, _ = loops(CASE, poison=False)
    queries = {"q": jnp.stack([first["q"], -first["q"]]), "lengths": jnp.array([[33, 40, 7], [21, 9, 40]], jnp.int32)}
    wanted = jnp.stack([counts_of({**first, "lengths": lengths}, 0.3) for lengths in queries["lengths"]])

    def both_loops(changed, counts):
        output, reference = capture({**first, **changed}, counts, CAPACITY, implementation="interpret")
        return output, reference, consume(later, reference, implementation="interpret")

    together = jax.jit(jax.vmap(both_loops))(queries, wanted)
    for i in range(2):
        alone = both_loops({name: array[i] for name, array in queries.items()}, wanted[i])
        for a, e in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            near(a[i], np.asarray(e))


def test_host_arrays_are_copied():
    """Changing a NumPy argument after the call changes nothing."""
    first, later, counts = loops(CASE)
    reference = capture(first, counts, CAPACITY, implementation="xla")[1]
    host = Reference(**{name: np.array(array) for name, array in as_dict(reference).items()})
    got = consume(later, host, implementation="xla")
    for name in FIELDS:
        getattr(host, name)[...] = 0
    assert_same_bits(got, consume(later, reference, implementation="xla"))
