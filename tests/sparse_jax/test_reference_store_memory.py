"""What a step allocates beside the store, seen in its compiled form: nothing that grows with the capacity."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from sparse_jax import Reference, reference_store
from sparse_jax.reference_store import Lease, Plan

SLOTS, LAYERS, HEADS, CAPACITY, VALUE_WIDTH, PAGE_SIZE = 64, 2, 16, 65_536, 8, 64
INDEX_BYTES = 4 * SLOTS * LAYERS * HEADS * CAPACITY
PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


STORE = jax.eval_shape(
    lambda: reference_store.create(
        slots=SLOTS, layers=LAYERS, heads=HEADS, value_width=VALUE_WIDTH, max_length=CAPACITY, retention=1
    )
)
LEASE, ROW = Lease(i32(8, 4), i32(8, 4)), Plan(i32(1), i32(1), i32(1))
PAGES = CAPACITY // PAGE_SIZE
LOOP = f32(1, HEADS, 1), f32(PAGES, 1, PAGE_SIZE, 1), f32(PAGES, 1, PAGE_SIZE, VALUE_WIDTH), i32(1, PAGES), i32(1)
REFERENCE = Reference(
    i32(1, HEADS, CAPACITY), i32(1), f32(1, HEADS), f32(1, HEADS, VALUE_WIDTH), f32(1, HEADS, VALUE_WIDTH)
)


def memory(step, *args, platform="cpu", donated=True):
    with jax.default_device(jax.devices(platform)[0]):
        return jax.jit(step, donate_argnums=0 if donated else ()).lower(STORE, *args).compile().memory_analysis()


def write_all_layers(store, plan, reference):
    def write(store, layer):
        return reference_store.write(store, plan, layer, reference)

    return lax.scan(write, store, jnp.arange(LAYERS, dtype=jnp.int32))


def one_step(store, plans, counts, q, *loop):
    """Rows at different loops: those that capture first, then those that consume, from what that returned."""

    def layer(carry, layer):
        store, q = carry
        output, store, _ = reference_store.capture(store, plans[0], layer, q, *loop, counts)
        out, _, _ = reference_store.consume(store, plans[1], layer, q, *loop)
        return (store, (output.out + out)[..., :1]), None

    return lax.scan(layer, (store, q), jnp.arange(LAYERS, dtype=jnp.int32))[0]


STEPS = {
    "accept": (reference_store.accept, LEASE, i32(8)),
    "release": (reference_store.release, LEASE),
    "reserve": (reference_store.reserve, jax.ShapeDtypeStruct((8, 4), jnp.bool_)),
    "write": (reference_store.write, ROW, i32(), REFERENCE),
    "write_all_layers": (write_all_layers, ROW, REFERENCE),
    "capture_and_consume": (one_step, (ROW, ROW), i32(1), *LOOP),
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", STEPS)
def test_requirement_3_4_a_step_neither_copies_nor_gathers_the_indices(name, platform):
    """Of a buffer of 512 MiB; none of it is allocated for this test."""
    assert INDEX_BYTES == 512 * 2**20
    found = memory(*STEPS[name], platform=platform)
    assert found.alias_size_in_bytes >= INDEX_BYTES, "updated in its own memory"
    limit = 2**20 if name in ("accept", "release", "reserve") else INDEX_BYTES // 8
    scores = 4 * 4 * HEADS * CAPACITY if name == "capture_and_consume" else 0  # of this row, and their order
    assert found.temp_size_in_bytes < limit + scores, (found.temp_size_in_bytes, limit, scores)


@pytest.mark.parametrize("name", ["accept", "release"])
def test_requirement_3_4_hold_without_donation(name):
    assert memory(*STEPS[name], donated=False).temp_size_in_bytes < 2**20


def test_the_bound_notices_a_copy():
    """Consuming from the old store beside a write into it must keep both: what `one_step` avoids."""

    def both(store, plan, reference, *loop):
        old, _, _ = reference_store.consume(store, plan, 0, *loop)
        return old, reference_store.write(store, plan, 1, reference)[0]

    assert memory(both, ROW, REFERENCE, *LOOP).temp_size_in_bytes > INDEX_BYTES // 8


def test_growth_needs_the_old_and_the_new_indices_and_nothing_else():
    with pytest.warns(UserWarning, match="donated buffers were not usable"):  # the indices: their size changes
        found = memory(lambda store: reference_store.grow(store, 2 * CAPACITY))
    assert found.temp_size_in_bytes < 2**20
    shape = {"slots": SLOTS, "layers": LAYERS, "heads": HEADS, "value_width": VALUE_WIDTH}
    peak = reference_store.peak_bytes(**shape, capacities=(CAPACITY, 2 * CAPACITY))
    at_once = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    assert 0 <= at_once - peak < 2**10, "the count of free slots, tuples"
