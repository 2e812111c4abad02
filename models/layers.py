"""Pieces that the models share: the root-mean-square norm, matrices, the gated feed-forward part."""

import jax
import jax.numpy as jnp
from flax import nnx


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The norm x / rms(x) * weight over the last axis: x [..., H], weight [H].

    The statistics are float32, the product is taken in the dtype of x.
    """
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normal.astype(x.dtype) * weight.astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with its weight."""

    def __init__(self, width: int, *, value: float, eps: float, param_dtype):
        self.weight = nnx.Param(jnp.full((width,), value, param_dtype))  # [H]
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [..., H] over its last axis."""
        return rms_norm(x, self.weight[...], self.eps)


def matrix(rngs: nnx.Rngs, *shape: int, param_dtype) -> nnx.Param:
    """A normal matrix [..., out, in], as checkpoints store it, with a standard deviation of fan_in ** -0.5."""
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-1] ** -0.5
    return nnx.Param(values.astype(param_dtype))


class MLP(nnx.Module):
    """The gated feed-forward down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, width: int, *, rngs: nnx.Rngs, param_dtype):
        self.gate_proj = matrix(rngs, width, hidden, param_dtype=param_dtype)
        self.up_proj = matrix(rngs, width, hidden, param_dtype=param_dtype)
        self.down_proj = matrix(rngs, hidden, width, param_dtype=param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [..., H] to [..., H]."""
        gate = jnp.einsum("...h,ih->...i", x, self.gate_proj[...].astype(x.dtype))
        up = jnp.einsum("...h,ih->...i", x, self.up_proj[...].astype(x.dtype))
        return jnp.einsum("...i,hi->...h", jax.nn.silu(gate) * up, self.down_proj[...].astype(x.dtype))


def check_sizes(config, *names: str) -> None:
    """Raise ValueError unless the named sizes are at least 1, query heads divide into groups and D is even."""
    check_at_least_one(config, *names)
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"num_heads {config.num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}")
    if config.head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {config.head_dim}")


def check_at_least_one(config, *names: str) -> None:
    """Raise ValueError unless the named sizes are at least 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


def check_loops(first: int, last: int, loops: int) -> None:
    """Raise ValueError unless first .. last - 1 are loops of a model that has `loops` of them, one at least."""
    if not 0 <= first < last <= loops:
        raise ValueError(f"the model has the loops 0 .. {loops - 1}; got first {first} and last {last}")
