"""jit, vmap, scan, donation, differentiation, 64-bit mode and sharding of the attention operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from sparse_jax import paged_attention, token_sparse_attention
from tests.attention_cases import CASES, OPS, call, make_inputs, poisoned
from tests.compare import assert_close, assert_same_bits

PLAIN_AND_KERNEL = ["xla", "interpret", None]


@pytest.mark.parametrize("implementation", PLAIN_AND_KERNEL)
@pytest.mark.parametrize("op", OPS)
def test_jit_equals_eager(op, implementation):
    case = CASES["gqa4"]
    x = make_inputs(case)
    run = functools.partial(call, op, case, implementation=implementation)
    assert_close(jax.jit(run)(x).out, run(x).out)


@pytest.mark.parametrize("implementation", PLAIN_AND_KERNEL)
@pytest.mark.parametrize("op", OPS)
def test_vmap_equals_a_loop(op, implementation):
    """Over queries, tables and lists, with one shared pool."""
    case = CASES["gqa4"]
    x = make_inputs(case)
    batched = {"q", "lengths", "page_indices", "slots"}
    stacked = {n: jnp.stack([a, a[::-1], a]) if n in batched else a for n, a in x.items()}
    axes = {n: 0 if n in batched else None for n in x}
    run = functools.partial(call, op, case, implementation=implementation)
    together = jax.vmap(run, in_axes=(axes,))(stacked)
    for i in range(3):
        alone = run({n: a[i] if n in batched else a for n, a in stacked.items()})
        assert_close(together.out[i], alone.out)
        assert_close(together.lse[i], alone.lse, name="lse")


@pytest.mark.parametrize("implementation", PLAIN_AND_KERNEL)
def test_scan_over_growing_lengths_compiles_once(implementation):
    case = CASES["gqa4"]
    x = make_inputs(case)
    pool, table = x["k_pages"], jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    attend = functools.partial(paged_attention, implementation=implementation)

    def step(carry, _):
        q, lengths = carry
        out = attend(q, pool, x["v_pages"], table, lengths).out
        return (out, lengths + 1), out

    start = (x["q"][:, 0], jnp.array([1, 60], jnp.int32))
    _, outs = jax.jit(lambda c: jax.lax.scan(step, c, None, length=4))(start)
    carry = start
    for i in range(4):
        carry, out = step(carry, None)
        assert_close(outs[i], out)


def test_pool_can_be_donated():
    """A step that writes a token and attends to it changes the pool in place."""
    case = CASES["gqa4"]
    x = make_inputs(case)
    pool = jnp.zeros((1024, *x["k_pages"].shape[1:]), jnp.float32)

    def step(k, v, q, table, lengths):
        k = k.at[3, :, 5].set(1.0)
        return k, v, paged_attention(q, k, v, table, lengths).out

    args = (x["q"], jnp.zeros((2, 5), jnp.int32), jnp.array([3, 4], jnp.int32))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(pool, pool, *args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes / 4


def grad_inputs(case, op):
    x = make_inputs(case)
    x["page_table"] = x["page_table"].at[1].set(-1)  # an empty row
    x["slots"] = x["slots"].at[1].set(-1)
    return poisoned(op, case, x)


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("op", OPS)
def test_case_TRANSFORM_1_gradient(op, implementation):
    """Right against finite differences, zero for empty rows and for keys that nobody sees, never NaN (contract 11)."""
    case = CASES["window_softcap_sinks"]
    x = grad_inputs(case, op)
    floats = ("q", "k_pages", "v_pages", "sinks")

    def loss(values):
        got = call(op, case, {**x, **values}, implementation=implementation)
        return jnp.sum(jnp.sin(got.out)) + jnp.sum(jnp.where(jnp.isneginf(got.lse), 0.0, got.lse))

    values = {name: x[name] for name in floats}
    grads = jax.grad(loss)(values)
    seen = jnp.isfinite(x["k_pages"])
    for name, grad in grads.items():
        assert jnp.isfinite(grad).all(), name
    assert (grads["q"][1] == 0).all()
    assert (jnp.where(seen, 0.0, grads["k_pages"]) == 0).all()
    assert (jnp.where(seen, 0.0, grads["v_pages"]) == 0).all()
    rng, eps = np.random.default_rng(0), 1e-2
    for name in floats:
        way = jnp.where(
            jnp.isfinite(values[name]), jnp.asarray(rng.standard_normal(values[name].shape), jnp.float32), 0
        )
        way = way / jnp.linalg.norm(way)
        ahead, behind = (loss({**values, name: values[name] + sign * eps * way}) for sign in (1, -1))
        slope = float(jnp.vdot(jnp.where(way == 0, 0, grads[name]), way))
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * eps), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_gradient_next_to_a_padding_row_that_holds_nan(implementation):
    case = CASES["padding_rows"]
    x = make_inputs(case)
    padding = x["q_positions"] < 0
    assert padding.any()
    x["q"] = jnp.where(padding[..., None, None], jnp.nan, x["q"])
    loss = lambda k: call("paged", case, {**x, "k_pages": k}, implementation=implementation).out.sum()  # noqa: E731
    assert jnp.isfinite(jax.grad(loss)(x["k_pages"])).all()


@pytest.mark.parametrize("implementation", ["interpret", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_case_TRANSFORM_1_kernels_say_that_they_are_not_differentiable(op, implementation):
    case = CASES["gqa4"]
    x = make_inputs(case)
    with pytest.raises(TypeError, match=r'not differentiable. Use implementation="xla"'):
        jax.grad(lambda q: call(op, case, {**x, "q": q}, implementation=implementation).out.sum())(x["q"])


def test_forward_mode():
    case = CASES["gqa4"]
    x = make_inputs(case)

    def run(q, implementation):
        return call("paged", case, {**x, "q": q}, implementation=implementation).out

    results = [jax.jvp(lambda q, i=i: run(q, i), (x["q"],), (jnp.ones_like(x["q"]),)) for i in ("xla", None)]
    assert_close(results[0][1], results[1][1])


@pytest.mark.parametrize("op", OPS)
def test_64_bit_mode_changes_nothing(op):
    case = CASES["draft3_row_lists_window"]
    x = make_inputs(case)
    for implementation in ("xla", "interpret"):
        narrow = call(op, case, x, implementation=implementation)
        with jax.enable_x64(True):
            wide = call(op, case, x, implementation=implementation)
            assert wide.out.dtype == jnp.float32
            assert wide.lse.dtype == jnp.float32
            assert_close(wide.out, narrow.out)
            if op == "token_sparse":
                # Wider ids: out of 32 bits stays out of range, it does not wrap to a real slot.
                ids = x["slots"].astype(jnp.int64) + jnp.where(x["slots"] % 3 == 0, 2**32, 0)
                absent = jnp.where(x["slots"] % 3 == 0, -1, x["slots"])
                a, b = (call(op, case, {**x, "slots": s}, implementation=implementation) for s in (ids, absent))
                assert_same_bits(a.out, b.out)
            with pytest.raises(ValueError, match=r"q must have one of the dtypes .*got float64"):
                call(op, case, {**x, "q": x["q"].astype(jnp.float64)}, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", None, pytest.param("triton", marks=pytest.mark.gpu)])
def test_case_TRANSFORM_2_heads_split_over_devices_with_checking_on(implementation):
    """Inside shard_map, over two devices where there are two; with one the same checks run."""
    case = CASES["gqa4"]
    x = make_inputs(case)
    devices = jax.devices()[:2]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("heads",), devices=devices, axis_types=auto)
    spec = jax.sharding.PartitionSpec
    names = ("q", "k_pages", "v_pages", "page_table", "lengths")
    in_specs = (spec(None, None, "heads"), spec(None, "heads"), spec(None, "heads"), spec(), spec())
    run = jax.shard_map(
        lambda *args: paged_attention(*args, implementation=implementation).out,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=spec(None, None, "heads"),
    )
    out = jax.jit(run)(*(x[n] for n in names))
    assert len(out.sharding.device_set) == len(devices)
    assert_close(out, call("paged", case, x, implementation="xla").out)


def test_checked_composes_with_scan_and_vmap():
    pool, slots = jnp.ones((2, 1, 2, 4)), jnp.array([[[0, 1]]], jnp.int32)

    def loop(slots):
        def step(q, _):
            return token_sparse_attention(q, pool, pool, slots).out, None

        return jax.lax.scan(step, jnp.ones((1, 1, 4)), None, length=2)[0]

    run = sparse_jax.checked(jax.jit(loop))
    assert_same_bits(run(slots), loop(slots))
    with pytest.raises(Exception, match=r"slots.*77"):
        run(slots.at[0, 0, 0].set(77))
    many = sparse_jax.checked(jax.vmap(loop))
    assert many(jnp.stack([slots, slots])).shape == (2, 1, 1, 4)
    with pytest.raises(Exception, match=r"slots"):
        many(jnp.stack([slots, slots + 50]))
