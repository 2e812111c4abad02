"""Rotary positions: two layouts of the rotated pairs, and YaRN for contexts beyond the first one.

    half-split      the pairs are (x_i, x_{i + D/2})
    interleaved     the pairs are (x_{2i}, x_{2i + 1})

Source: YaRN, arXiv 2309.00071, and DeepSeek-V3's published inference code (facts only).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """How positions are stretched from `original_positions` by `factor`.

    Pairs that turn more often than `beta_fast` times over the original positions keep their frequency, those that turn
    less often than `beta_slow` times are slowed by the factor, the others lie between. mscale, mscale_all_dim: how much
    sharper attention gets, see `amplitude` and `sharpening`.
    """

    factor: float
    original_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self):
        if self.factor < 1 or self.original_positions < 1:
            raise ValueError(
                f"factor and original_positions are at least 1, got {self.factor} and {self.original_positions}"
            )
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(f"beta_fast must be above beta_slow, got {self.beta_fast} and {self.beta_slow}")

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by: 1 where mscale and mscale_all_dim are equal."""
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def sharpening(self) -> float:
        """What the scale of attention is multiplied by: m^2 with m = 0.1 * mscale_all_dim * ln(factor) + 1."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def frequencies(self, plain: jax.Array, theta: float) -> jax.Array:
        """The frequencies f32[D / 2] between `plain` ones and those slowed by the factor."""

        def pair_of(turns: float) -> float:  # the pair that turns so often over the original positions
            return plain.size * math.log(self.original_positions / (turns * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(pair_of(self.beta_fast)), 0)
        high = min(math.ceil(pair_of(self.beta_slow)), 2 * plain.size - 1)
        pair = jnp.arange(plain.size, dtype=jnp.float32)
        slowed = jnp.clip((pair - low) / max(high - low, 1e-3), 0.0, 1.0)
        return plain / self.factor * slowed + plain * (1.0 - slowed)


def rotate(
    x: jax.Array, positions: jax.Array, theta: float, *, interleaved: bool, yarn: Yarn | None = None
) -> jax.Array:
    """Rotate the pairs of the last axis by the angles of each position; every pair stays where it is.

    x [B, S, heads, D], D even or 0; positions i32[B, S]. Angles are float32; cos and sin are rounded to the dtype of x.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    amplitude = 1.0
    if yarn is not None:
        frequencies, amplitude = yarn.frequencies(frequencies, theta), yarn.amplitude
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequencies  # [B, S, 1, D / 2]
    cos, sin = (amplitude * jnp.cos(angle)).astype(x.dtype), (amplitude * jnp.sin(angle)).astype(x.dtype)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.stack(turned, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(turned, axis=-1)
