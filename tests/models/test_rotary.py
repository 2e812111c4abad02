"""Rotary positions: the two layouts, and YaRN's numbers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.deepseek import DeepseekConfig, Yarn
from models.rotary import rotate

POSITIONS = np.array([[0, 3, 100]], np.int32)


def random_heads():
    return jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 2, 8)), jnp.float32)


def turned(first, second):
    """Pairs as complex numbers, turned in float64."""
    angle = POSITIONS[0][:, None] * 1e4 ** (-np.arange(4) / 4)
    result = (np.float64(first) + 1j * np.float64(second)) * np.exp(1j * angle)[None, :, None]
    return result.real, result.imag


def test_half_split_turns_the_halves_which_is_the_layout_of_the_other_models():
    x = random_heads()
    expected = np.concatenate(turned(x[..., :4], x[..., 4:]), axis=-1)
    np.testing.assert_allclose(rotate(x, POSITIONS, 1e4, interleaved=False), expected, atol=1e-4)


def test_interleaved_turns_neighbours():
    x = random_heads()
    expected = np.stack(turned(x[..., 0::2], x[..., 1::2]), axis=-1).reshape(x.shape)
    np.testing.assert_allclose(rotate(random_heads(), POSITIONS, 1e4, interleaved=True), expected, atol=1e-4)


def test_the_layouts_differ_and_both_keep_what_only_distance_decides():
    q, k = random_heads(), random_heads()[:, ::-1]
    scores = []
    for interleaved in (False, True):
        near, far = (
            jnp.einsum(
                "bshd,bthd->bhst",
                rotate(q, POSITIONS + shift, 1e4, interleaved=interleaved),
                rotate(k, POSITIONS + shift, 1e4, interleaved=interleaved),
            )
            for shift in (0, 57)
        )
        np.testing.assert_allclose(near, far, atol=1e-4)
        scores.append(near)
    assert np.abs(scores[0] - scores[1]).max() > 0.1


def test_yarn_has_the_numbers_of_v3_2():
    """Factor 40, mscale 1: m = 1.368888, m^2 = 1.873854, scale 0.135234; without YaRN 192 ** -0.5 = 0.072169."""
    yarn = Yarn(factor=40.0)
    assert yarn.sharpening == pytest.approx(1.873854, abs=5e-7)
    assert math.sqrt(yarn.sharpening) == pytest.approx(1.368888, abs=5e-7)
    assert yarn.amplitude == 1.0
    assert DeepseekConfig.v3_2().scale == pytest.approx(0.135234, abs=5e-7)
    assert DeepseekConfig.v3_2(max_positions=4096).scale == pytest.approx(0.072169, abs=5e-7)
    assert DeepseekConfig.v3_2(max_positions=4096).stretched is None


def test_yarn_slows_only_the_slow_pairs():
    plain = 1e4 ** (-np.arange(32, dtype=np.float32) / 32)
    found = np.asarray(Yarn(factor=40.0).frequencies(jnp.asarray(plain), 1e4))
    # Turns over 4096 positions: pair 10 turns 36.7 times, pair 11 27.5 times, pair 23 0.87 times.
    np.testing.assert_allclose(found[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(found[23:], plain[23:] / 40, rtol=1e-6)
    between = found[11:23] / plain[11:23]
    assert (np.diff(between) < 0).all()
    assert 1 / 40 < between.min() < between.max() < 1


@pytest.mark.parametrize("options", [{"factor": 0.5}, {"factor": 4.0, "beta_fast": 1.0}])
def test_yarn_refuses_what_cannot_be(options):
    with pytest.raises(ValueError, match=r"factor and original_positions are at least 1|beta_fast must be above"):
        Yarn(**options)
