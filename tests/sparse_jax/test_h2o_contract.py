"""The contract of the accumulator: neighbours, placement, sick numbers, numbers out of range, transforms, arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax


def pooled(seed=0, *, page_size=4, lengths=(37, 20, 0), heads=2, group=3, width=8, pages=40, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    table_width = 10
    table = rng.permutation(pages)[: len(lengths) * table_width].reshape(len(lengths), table_width).astype(np.int32)
    shape = (pages, heads, page_size)
    return [
        jnp.asarray(rng.random(shape), jnp.float32),
        jnp.asarray(rng.standard_normal((len(lengths), heads * group, width)), dtype),
        jnp.asarray(rng.standard_normal((*shape, width)), dtype),
        jnp.asarray(table),
        jnp.asarray(lengths, jnp.int32),
    ]


ACCUMULATE = functools.partial(sparse_jax.h2o_accumulate, k=3, reserved=(2, 4))


@pytest.mark.parametrize("group", ["mean", "max"])
def test_T25_neighbours_and_placement_change_no_bit(group):
    scores, q, keys, table, lengths = pooled()
    together = np.asarray(ACCUMULATE(scores, q, keys, table, lengths, group=group))
    order = np.random.default_rng(1).permutation(40)
    moved = ACCUMULATE(
        jnp.zeros_like(scores).at[order].set(scores),
        q,
        jnp.zeros_like(keys).at[order].set(keys),
        jnp.asarray(order, jnp.int32)[table],
        lengths,
        group=group,
    )
    np.testing.assert_array_equal(np.asarray(moved)[order], together)
    for b in range(3):
        alone = ACCUMULATE(scores, q[b : b + 1], keys, table[b : b + 1], lengths[b : b + 1], group=group)
        np.testing.assert_array_equal(np.asarray(alone)[table[b]], together[table[b]])


def test_T26_nan_outside_the_window_reaches_nothing():
    scores, q, keys, table, lengths = pooled()
    clean = np.asarray(ACCUMULATE(scores, q, keys, table, lengths))
    used = np.zeros((40, 4), bool)
    for b, length in enumerate((37, 20, 0)):
        for t in range(2, length - 4):
            used[table[b, t // 4], t % 4] = True
    poisoned = jnp.where(used[:, None, :, None], keys, jnp.nan)
    np.testing.assert_array_equal(np.asarray(ACCUMULATE(scores, q, poisoned, table, lengths)), clean)
    absent = np.asarray(ACCUMULATE(scores, q, poisoned, table.at[0, 3].set(-1).at[1, 2].set(40), lengths))
    assert np.isfinite(absent).all()


@pytest.mark.parametrize(("name", "value"), [("q", np.nan), ("q", np.inf), ("key", np.nan), ("key", np.inf)])
def test_a_sick_query_or_key_says_nothing(name, value):
    """QUANT-7: what is not finite counts as 0, so that one sick step does not ruin the sums for good."""
    scores, q, keys, table, lengths = pooled()
    if name == "q":
        q = q.at[0].set(value)
    else:
        keys = keys.at[table[0, 1], :, 2].set(value)
    sick = np.asarray(ACCUMULATE(scores, q, keys, table, lengths))
    assert np.isfinite(sick).all()
    well = np.asarray(ACCUMULATE(*pooled()))
    np.testing.assert_array_equal(sick[np.asarray(table[1])], well[np.asarray(table[1])])


@pytest.mark.parametrize("wild", [-3, -50, -(2**31), 2**31 - 1])
def test_traced_numbers_out_of_range_stay_inside_the_request(wild):
    args = pooled()
    run = jax.jit(lambda k, first, last: sparse_jax.h2o_accumulate(*args, k=k, reserved=(first, last)))
    near = int(np.clip(wild, 0, 40))
    for k, first, last in ((3, 2, wild), (3, wild, 4), (wild, 2, 4)):
        known = [max(1, near)] if k == wild else [k]
        known += [near if x == wild else x for x in (first, last)]
        expected = sparse_jax.h2o_accumulate(*args, k=known[0], reserved=(known[1], known[2]))
        np.testing.assert_allclose(run(k, first, last), expected, rtol=1e-6)


@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 9, 10, 40, 400, -3])
def test_T28_short_rows_and_lengths_beyond_the_table(length):
    scores, q, keys, table, _ = pooled(lengths=(37,))
    new = np.asarray(ACCUMULATE(scores, q, keys, table, jnp.array([length], jnp.int32)))
    changed = (new != np.asarray(scores))[np.asarray(table[0])]  # [W, Hkv, P]
    end = min(length, 40) - 4
    want = list(range(2, end)) if end - 2 > 3 else []
    for head in (0, 1):
        assert np.flatnonzero(changed[:, head].reshape(-1)).tolist() == want
    np.testing.assert_array_equal(np.delete(new, np.asarray(table[0]), axis=0), np.delete(scores, table[0], axis=0))


def test_T30_jit_vmap_and_donation_and_one_compilation():
    scores, q, keys, table, lengths = pooled()
    count = 0

    def step(scores, decay, scale, k):
        nonlocal count
        count += 1
        return ACCUMULATE(scores, q, keys, table, lengths, decay=decay, scale=scale, k=k)

    jitted = jax.jit(step, donate_argnums=0)
    for decay, scale, k in ((0.9, 0.3, 3), (0.5, 0.2, 3), (1.0, 0.3, 20)):
        expected = ACCUMULATE(scores, q, keys, table, lengths, decay=decay, scale=scale, k=k)
        np.testing.assert_allclose(jitted(jnp.copy(scores), decay, scale, k), expected, rtol=1e-6)
    assert count == 1
    many = jax.vmap(lambda q, scores: ACCUMULATE(scores, q, keys, table, lengths))(
        jnp.stack([q, -q]), jnp.stack([scores, scores])
    )
    np.testing.assert_allclose(many[1], ACCUMULATE(scores, -q, keys, table, lengths), rtol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", None, pytest.param("triton", marks=pytest.mark.gpu)])
def test_T30_shard_map_over_kv_heads_with_checking_on(implementation):
    scores, q, keys, table, lengths = pooled()
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((len(devices),), ("heads",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    run = jax.shard_map(
        lambda *args: ACCUMULATE(*args, implementation=implementation),
        mesh=mesh,
        in_specs=(spec(None, "heads"), spec(None, "heads"), spec(None, "heads"), spec(), spec()),
        out_specs=spec(None, "heads"),
    )
    new = jax.jit(run)(scores, q, keys, table, lengths)
    np.testing.assert_allclose(new, ACCUMULATE(scores, q, keys, table, lengths, implementation="xla"), rtol=1e-5)


BAD = {
    "scores": (
        lambda a: a.__setitem__(0, a[0][:, :, :2]),
        r"scores must have the shape \[40, 2, 4\], got \[40, 2, 2\]",
    ),
    "scores dtype": (lambda a: a.__setitem__(0, a[0].astype(jnp.float16)), "scores must have one of the dtypes"),
    "q": (lambda a: a.__setitem__(1, a[1][:, :5]), "multiple of 2 KV heads, got 5"),
    "lengths": (lambda a: a.__setitem__(4, a[4][:2]), r"lengths must have the shape \[3\] or \[3, 2\], got \[2\]"),
    "page_table": (lambda a: a.__setitem__(3, a[3][:2]), r"page_table must have the shape .*got \[2, 10\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_named(name):
    args = pooled()
    BAD[name][0](args)
    with pytest.raises(ValueError, match=BAD[name][1]):
        ACCUMULATE(*args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be at least 1, got"),
        ({"reserved": (-1, 2)}, "reserved must be at least 0"),
        ({"reserved": (1, 2, 3)}, "reserved must be two numbers"),
        ({"group": "sum"}, "group must be one of"),
        ({"scale": float("inf")}, "scale must be finite"),
        ({"scale": 1e300}, "scale must be finite"),
        ({"scale": np.ones(1)}, "scale and decay must be numbers"),
        ({"implementation": "cuda"}, "implementation must be one of"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ACCUMULATE(*pooled(), **options)
