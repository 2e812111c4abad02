"""The router of DeepSeek-V3 against NumPy, and experts against one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.experts import Balance, ExpertsConfig, MixtureOfExperts, route

CONFIG = ExpertsConfig(count=12, per_token=3, width=5, groups=4, groups_chosen=2, scale=2.5)


def numpy_route(scores, bias, config):
    """One token in float64: ids by falling s + b, and their weights."""
    by = np.float64(scores) + bias
    size = config.count // config.groups
    best = [np.sort(by[g * size : (g + 1) * size])[-2:].sum() for g in range(config.groups)]
    allowed = sorted(range(config.groups), key=lambda g: (-best[g], g))[: config.groups_chosen]
    ids = [e for e in range(config.count) if e // size in allowed]
    ids = sorted(ids, key=lambda e: (-by[e], e))[: config.per_token]
    weights = np.float64(scores)[ids]
    if config.normalised:
        weights = weights / weights.sum()
    return ids, weights * config.scale


@pytest.mark.parametrize("changes", [{}, {"groups": 1, "groups_chosen": 1, "normalised": False}])
def test_route_is_that_of_numpy(changes):
    config = ExpertsConfig(**(vars(CONFIG) | changes))
    rng = np.random.default_rng(0)
    scores, bias = rng.random((50, 12), np.float32), rng.standard_normal(12).astype(np.float32)
    ids, weights = jax.jit(route, static_argnums=2)(scores, bias, config)
    unbiased = np.asarray(route(scores, np.zeros(12, np.float32), config)[0])
    assert (np.sort(unbiased, axis=1) != np.sort(ids, axis=1)).any()
    for token in range(50):
        expected_ids, expected = numpy_route(scores[token], bias, config)
        assert ids[token].tolist() == expected_ids
        np.testing.assert_allclose(weights[token], expected, rtol=1e-5)


def test_ties_go_to_the_lower_id_and_a_strong_expert_in_a_weak_group_is_not_chosen():
    config = ExpertsConfig(count=4, per_token=2, width=1, groups=2, groups_chosen=1)
    scores = np.array([[0.9, 0.0, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]], np.float32)
    ids, weights = route(scores, np.zeros(4, np.float32), config)
    assert ids.tolist() == [[2, 3], [0, 1]]
    np.testing.assert_allclose(weights, 0.5)


@pytest.fixture(scope="module")
def mixture():
    model = MixtureOfExperts(6, CONFIG, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    bias = np.random.default_rng(1).standard_normal(12).astype(np.float32) * 0.1
    model.gate.e_score_correction_bias[...] = jnp.asarray(bias)
    return model


def test_each_token_goes_through_its_own_experts_whatever_the_others_do(mixture):
    x = np.random.default_rng(2).standard_normal((2, 7, 6)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        out = np.asarray(nnx.jit(lambda m, x: m(x))(mixture, x))
    get = lambda module, name: np.float64(getattr(module, name)[...])  # noqa: E731

    def mlp(x, gate, up, down):
        g = gate @ x
        return down @ (g / (1 + np.exp(-g)) * (up @ x))

    names = ("gate_proj", "up_proj", "down_proj")
    for at in np.ndindex(2, 7):
        token = np.float64(x[at])
        scores = 1 / (1 + np.exp(-(get(mixture.gate, "weight") @ token)))
        ids, weights = numpy_route(scores, get(mixture.gate, "e_score_correction_bias"), CONFIG)
        expected = mlp(token, *(get(mixture.shared_experts, name) for name in names))
        for expert, weight in zip(ids, weights):
            expected = expected + weight * mlp(token, *(get(mixture.experts, name)[expert] for name in names))
        np.testing.assert_allclose(out[at], expected, atol=1e-5)
    with jax.default_matmul_precision("highest"):  # few tokens take another way
        np.testing.assert_allclose(mixture(x[:1, :1]), out[:1, :1], atol=1e-5)


def test_an_expert_that_overflows_is_seen_only_by_who_chose_it(mixture):
    experts = nnx.merge(*nnx.split(mixture.experts))
    experts.up_proj[...] = experts.up_proj[...].at[5].set(jnp.inf)
    ids = jnp.tile(jnp.array([[0, 1, 2]]), (8, 1)).at[3].set(jnp.array([4, 5, 6]))
    out = np.asarray(experts(jnp.ones((8, 6)), ids, jnp.ones((8, 3))))
    assert np.isfinite(out[[0, 1, 2, 4, 5, 6, 7]]).all()
    assert not np.isfinite(out[3]).any()


def test_the_bias_has_no_gradient_and_a_type_of_its_own(mixture):
    x = jnp.ones((1, 2, 6))
    gradients = nnx.grad(lambda m: (m(x) ** 2).sum())(mixture)
    assert not np.asarray(gradients.gate.e_score_correction_bias[...]).any()
    assert np.asarray(gradients.gate.weight[...]).any()
    assert len(jax.tree.leaves(nnx.state(mixture, Balance))) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"shared": -1}, "shared must be at least 0"),
        ({"groups": 5}, "12 experts do not fall into 5 groups"),
        ({"groups_chosen": 5}, "4 groups of which 5 are chosen"),
        ({"per_token": 7}, "per_token is 7, but 2 of 4 groups hold 6"),
    ],
)
def test_configuration_refuses_what_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**(vars(CONFIG) | changes))
