"""Reported cases of other systems on reference correction that its own tests do not have under other names."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import Config, reference_capture, reference_consume
from tests import numpy_reference
from tests.compare import assert_close, assert_same_bits
from tests.reference_cases import ARRAYS, CASE, capture, consume, loops
from tests.sparse_jax.scalar_attention import IMPLEMENTATIONS, KERNELS, every_implementation, ids
from tests.sparse_jax.test_cases_mla import draw

HEADS = [
    *[{"Hq": hq, "Hkv": hkv} for hq, hkv in ((28, 4), (24, 4), (40, 8), (64, 4))],
    *[{"Hq": 2, "Hkv": 1, "D": width, "Dv": 80} for width in (80, 192)],
]


@every_implementation
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_case_HEADS_1_and_2(shape, implementation):
    """Groups and widths that are no powers of two, at the default scale, which is that of the true width."""
    case = dataclasses.replace(CASE, name="heads", B=1, W=3, D=16, Dv=16, lengths=(11,))
    first, later, counts = loops(dataclasses.replace(case, **shape))
    output, reference = capture(first, counts, 4, implementation=implementation)
    gold = numpy_reference.capture(first, counts, 4)
    assert_close(output.out, gold["out"])
    assert (np.asarray(reference.indices) == gold["indices"]).all()
    assert_close(reference.mass, gold["mass"], name="mass")
    assert_close(consume(later, reference, implementation=implementation), numpy_reference.consume(later, gold))


@pytest.mark.parametrize("implementation", KERNELS)
def test_case_COMPILE_3_split_counts_in_one_process(implementation):
    """Grids 2, 5, 3, 4, in mixed order: jax#40847 gave an earlier one's size."""
    first, later, counts = loops(CASE)
    output, reference = capture(first, counts, 12, implementation="xla")
    expected = consume(later, reference, implementation="xla")
    for splits in (2, 5, 3, 4, 5, 2):
        options = {"implementation": implementation, "config": Config(splits=splits, block_tokens=16)}
        got, kept = capture(first, counts, 12, **options)
        assert_close(got.out, output.out)
        assert (kept.indices == reference.indices).all()
        assert_close(kept.mass, reference.mass, name="mass")
        assert_close(consume(later, kept, **options), expected)


@pytest.mark.parametrize("implementation", ["xla", None, IMPLEMENTATIONS[2]])  # JAX's interpreter refuses it
def test_case_TRANSFORM_2_heads_split_over_devices_with_checking_on(implementation):
    """Over two devices where there are two; with one the same checks run."""
    first, later, counts = loops(CASE)
    devices, spec = jax.devices()[:2], jax.sharding.PartitionSpec
    mesh = jax.make_mesh((len(devices),), ("heads",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    of_loop = (spec(None, None, "heads"), spec(None, "heads"), spec(None, "heads"), spec(), spec())

    def both(first, later, counts):
        _, reference = reference_capture(*first, counts, capacity=12, implementation=implementation)
        return reference_consume(*later, reference, implementation=implementation)

    run = jax.shard_map(both, mesh=mesh, in_specs=(of_loop, of_loop, spec()), out_specs=of_loop[0])
    got = jax.jit(run)(*(tuple(x[name] for name in ARRAYS) for x in (first, later)), counts)
    _, reference = capture(first, counts, 12, implementation="xla")
    assert_close(got, consume(later, reference, implementation="xla"))


@every_implementation
def test_case_PAGE_1_page_sizes_agree(implementation):
    q, k, v = draw(2, 4, 16), draw(128, 2, 16, seed=1), draw(128, 2, 16, seed=2)
    results = []
    for page_size in (1, 16, 64):
        pools = [jnp.swapaxes(x.reshape(-1, page_size, 2, 16), 1, 2) for x in (k, v)]
        arrays = q, *pools, ids(range(128 // page_size), range(128 // page_size)), ids(100, 61)
        _, reference = reference_capture(*arrays, ids(10, 7), capacity=10, implementation=implementation)
        out = reference_consume(-q, *arrays[1:], reference, implementation=implementation)
        results.append((reference.indices, out))
    for indices, out in results[1:]:
        assert (indices == results[0][0]).all()
        assert_close(out, results[0][1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_case_INT32_1_pages_past_2_to_the_31(dtype):
    """The same keys in page 1 and in pages around 2^31 elements."""
    page, places = draw(1, 64, 128).astype(dtype), (1, 262143, 262144, 262145)
    pool = jnp.zeros((262146, 1, 64, 128), dtype)
    pool = jax.jit(lambda pool: pool.at[jnp.array(places)].set(page), donate_argnums=0)(pool)
    q, results = draw(1, 4, 128, seed=1, dtype="bfloat16"), []
    for place in places:
        arrays = q, pool, pool, ids([place]), ids(64)
        output, reference = reference_capture(*arrays, ids(7), capacity=8, implementation="triton")
        results.append((output, reference, reference_consume(-q, *arrays[1:], reference, implementation="triton")))
    assert float(jnp.abs(results[0][2]).max()) > 0
    for other in results[1:]:
        for a, e in zip(jax.tree.leaves(other), jax.tree.leaves(results[0]), strict=True):
            assert_same_bits(a, e)


@pytest.mark.gpu
def test_case_GRID_1_more_than_65535_rows():
    """Each row has a page of its own: the value of its one token comes back."""
    for rows in (65536, 65537):
        pool = jnp.arange(64.0).reshape(64, 1, 1, 1)
        arrays = jnp.ones((rows, 1, 1)), pool, pool, (np.arange(rows) % 64)[:, None], np.ones(rows, np.int32)
        counts = np.ones(rows, np.int32)
        output, reference = reference_capture(*arrays, counts, capacity=1, implementation="triton")
        corrected = reference_consume(*arrays, reference, implementation="triton")
        for out in (output.out, corrected):
            np.testing.assert_array_equal(out.ravel(), np.arange(rows) % 64)
