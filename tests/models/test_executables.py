"""Programs that are compiled ahead of their calls: once for what they are made of, and anew for anything else."""

import functools

import jax
import jax.numpy as jnp
import pytest

from models.executables import compilations, executable


@functools.partial(jax.jit, static_argnames="power")
def product(x: jax.Array, power: int) -> jax.Array:
    return (x @ x) ** power


def test_the_same_arguments_find_the_same_program():
    x = jnp.full((2, 2), 3.0)
    first = executable(product, (x,), power=2)
    before = compilations()
    assert executable(product, (x + 1.0,), power=2) is first
    assert compilations() == before
    assert first(x).tolist() == product(x, power=2).tolist()
    assert executable(product, (x,), power=3) is not first
    assert executable(product, (x.astype(jnp.bfloat16),), power=2) is not first


@pytest.mark.parametrize("precision", ["highest", "tensorfloat32"])
def test_the_precision_around_a_call_is_part_of_its_program(precision):
    x = jnp.full((2, 2), 3.0)
    plain = executable(product, (x,), power=1)
    with jax.default_matmul_precision(precision):
        assert executable(product, (x,), power=1) is not plain
    assert executable(product, (x,), power=1) is plain
