"""The kernel that merges splits equals the plain-jnp merge: interpreter, lowering for CUDA, GPU; and mutations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.merge_splits import merge_splits
from sparse_jax.xla import merge_attention
from tests.compare import assert_close

SHAPES = [(1, 128), (2, 3), (3, 512), (33, 128)]  # splits, Dv
ROWS = (2, 3)  # requests, heads


def make_parts(splits, width):
    """outs f32[splits, 2, 3, Dv], lses f32[splits, 2, 3]; parts without keys hold NaN, and one row has no other."""
    rng = np.random.default_rng(splits)
    outs = rng.standard_normal((splits, *ROWS, width)).astype(np.float32)
    lses = (rng.standard_normal((splits, *ROWS)) * 4).astype(np.float32)
    empty = rng.random(lses.shape) < (0.3 if splits > 1 else 0)
    empty[:, 1, 2] = True  # a row without any key
    lses[:, 0, 1] += 500  # exp would overflow
    lses[:, 1, 0] -= 500
    empty[0, 0, 1] = False
    lses[empty], outs[empty] = -np.inf, np.nan
    return jnp.asarray(outs), jnp.asarray(lses)


def check(splits, width, dtype, *, interpret=True, change=lambda outs, lses: (outs, lses)):
    outs, lses = make_parts(splits, width)
    merge = jax.jit(functools.partial(merge_splits, out_dtype=dtype, interpret=interpret))
    out, lse = merge(*change(outs, lses))
    expected, expected_lse = merge_attention(outs, lses, None)
    assert out.dtype == dtype
    assert_close(out, expected, dtype)
    assert_close(lse, expected_lse, name="lse")
    assert (out[1, 2] == 0).all()
    assert lse[1, 2] == -jnp.inf


@pytest.mark.parametrize(("splits", "width"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interpret(splits, width, dtype):
    check(splits, width, dtype)


MUTATIONS = {
    "part_dropped": lambda outs, lses: (outs, lses.at[0].set(-jnp.inf)),
    "weights_of_another_part": lambda outs, lses: (outs, jnp.roll(lses, 1, axis=0)),
    "empty_part_counts": lambda outs, lses: (outs, jnp.maximum(lses, -30.0)),
    "columns_shifted": lambda outs, lses: (jnp.roll(outs, 1, axis=-1), lses),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_fails(mutation):
    with pytest.raises(AssertionError):
        check(3, 512, "bfloat16", change=MUTATIONS[mutation])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lowers_for_cuda(dtype):
    for splits, width in SHAPES:
        merge = functools.partial(merge_splits, out_dtype=dtype, interpret=False)
        assert 'name = "merge_splits"' in lower_for_cuda(merge, *make_parts(splits, width)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize(("splits", "width"), [*SHAPES, (64, 256), (132, 64), (264, 128), (528, 512)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gpu(splits, width, dtype):
    check(splits, width, dtype, interpret=False)
