"""top_k under JAX's transformations, and which implementation runs; tests/pallas_kernels has what it selects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lowering
from sparse_jax import to_slots, token_sparse_attention, top_k
from tests.compare import assert_close, assert_same_bits
from tests.top_k_cases import assert_right, make_lengths, make_rows

IMPLEMENTATIONS = ["xla", None, "interpret", pytest.param("triton", marks=pytest.mark.gpu)]
EACH = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

SCORES = jnp.asarray(make_rows(5, 40))[:12]
LENGTHS = jnp.asarray(make_lengths(5, 12, 40, 6))


def right(order="score"):
    return top_k(SCORES, 6, LENGTHS, order=order, implementation="xla")


@EACH
def test_vmap_of_top_k(implementation):
    run = functools.partial(top_k, k=6, implementation=implementation)
    got = jax.vmap(lambda s, n: run(s, lengths=n))(SCORES.reshape(3, 4, 40), LENGTHS.reshape(3, 4))
    assert_same_bits(got.reshape(12, 6), right())


@EACH
def test_top_k_in_a_scan_over_lengths_is_traced_once(implementation):
    traces = []

    def step(_, lengths):
        traces.append(lengths)
        return None, top_k(SCORES, 6, lengths, order="id", implementation=implementation)

    run = jax.jit(lambda lengths: jax.lax.scan(step, None, lengths)[1])
    lengths = jnp.stack([LENGTHS, LENGTHS - 3, LENGTHS[::-1]])
    for got, n in zip(run(lengths), lengths, strict=True):
        assert_right(got, SCORES, 6, n, "id")
    run(lengths + 1)
    assert len(traces) == 1


@EACH
def test_64_bit_mode_compares_float32(implementation):
    with jax.enable_x64(True):
        wide = SCORES.astype(jnp.float64)
        ids = top_k(wide, 6, LENGTHS.astype(jnp.int64), implementation=implementation)
        assert ids.dtype == jnp.int32
        near = jnp.array([1.0, 1.0 + 1e-12, 0.5], jnp.float64)  # one value in float32
        assert top_k(near, 2, implementation=implementation).tolist() == [0, 1]
    assert_same_bits(ids, right())


@pytest.mark.parametrize("implementation", ["xla", None, pytest.param("triton", marks=pytest.mark.gpu)])
def test_top_k_inside_shard_map_with_checking_on(implementation):
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((len(devices),), ("rows",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")
    run = jax.shard_map(
        lambda s, n: top_k(s, 6, n, implementation=implementation), mesh=mesh, in_specs=(spec, spec), out_specs=spec
    )
    assert_same_bits(jax.jit(run)(SCORES, LENGTHS), right())


@functools.partial(jax.jit, static_argnames="implementation")
def select_and_attend(q, keys, values, implementation):
    """q [B, Hkv, D], keys and values [B * W, Hkv, P, D]: the 5 best keys of each (request, head), attended to."""
    batch, heads, width = q.shape
    scores = jnp.einsum("bhd,bwhpd->bhwp", q, keys.reshape(batch, -1, *keys.shape[1:])).reshape(batch, heads, -1)
    chosen = top_k(scores, 5, implementation=implementation, order="id")
    table = jnp.arange(keys.shape[0], dtype=jnp.int32).reshape(batch, -1)
    slots = to_slots(chosen, table, jnp.arange(batch, dtype=jnp.int32), page_size=keys.shape[2])
    picked = jnp.take_along_axis(scores, chosen, axis=-1)  # the scores themselves have a gradient
    return jnp.sum(token_sparse_attention(q, keys, values, slots).out * width) + jnp.sum(picked**2)


gradients = jax.jit(jax.grad(select_and_attend, argnums=(0, 1, 2)), static_argnames="implementation")


def attention_arguments():
    rng = np.random.default_rng(0)
    shapes = ((2, 2, 8), (6, 2, 4, 8), (6, 2, 4, 8))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@EACH
def test_gradient_of_selecting_and_attending(implementation):
    """The choice is a constant of the derivative, whichever implementation makes it."""
    arguments = attention_arguments()
    grads = gradients(*arguments, implementation=implementation)
    for grad, other in zip(grads, gradients(*arguments, implementation="xla"), strict=True):
        assert_close(grad, other, name="gradient")
    way, step = [jnp.cos(7.0 * x) for x in arguments], 1e-3
    ahead, behind = (
        select_and_attend(*(x + sign * step * d for x, d in zip(arguments, way, strict=True)), implementation)
        for sign in (1, -1)
    )
    slope = sum(float(jnp.vdot(grad, d)) for grad, d in zip(grads, way, strict=True))
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=5e-3)


@EACH
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_ids_have_no_tangent(implementation, wrap):
    run = wrap(lambda s: top_k(s, 6, LENGTHS, implementation=implementation))
    ids, tangents = jax.jvp(run, (SCORES,), (jnp.ones_like(SCORES),))
    assert_same_bits(ids, right())
    assert tangents.dtype == jax.dtypes.float0
    loss = lambda s: jnp.sum(run(s).astype(jnp.float32))  # noqa: E731
    assert (jax.grad(loss)(SCORES) == 0).all()


def test_gradient_lowers_for_cuda_with_the_kernel():
    for implementation in ("triton", None):
        gradient = jax.grad(functools.partial(select_and_attend, implementation=implementation))
        assert 'name = "top_k"' in lowering.lower_for_cuda(gradient, *attention_arguments()).as_text()


@pytest.mark.parametrize("wide", [False, True])
def test_lowers_for_cuda_under_vmap_and_in_64_bit_mode(wide):
    run = jax.vmap(functools.partial(top_k, k=6, implementation="triton"))
    with jax.enable_x64(wide):
        scores = SCORES.reshape(3, 4, 40).astype(jnp.float64 if wide else jnp.float32)
        assert lowering.names_kernel(lowering.lower_for_cuda(run, scores).as_text())


def test_contract_11_none_takes_the_kernel_on_a_gpu_and_plain_jnp_on_a_cpu():
    run = functools.partial(top_k, k=6)
    assert lowering.names_kernel(lowering.lower_for_cuda(run, SCORES).as_text())
    assert not lowering.names_kernel(jax.jit(run).lower(SCORES).as_text())
    with pytest.raises(ValueError, match=r'implementation="xla".*implementation="interpret"'):
        jax.jit(functools.partial(run, implementation="triton")).lower(SCORES)
