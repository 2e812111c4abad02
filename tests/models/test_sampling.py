import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import GREEDY, Sampling, filtered, request_keys, sample

LOGITS = jnp.log(jnp.array([[0.05, 0.5, 0.15, 0.3]]))


jit_sample = jax.jit(sample, static_argnames="sampling")


def draws(logits, sampling, count=2000):
    keys = request_keys(0, 1)
    step = jax.jit(jax.vmap(lambda n: sample(logits, keys, n[None], sampling)[0]))
    return np.bincount(step(jnp.arange(count)), minlength=logits.shape[-1]) / count


def test_greedy_takes_the_largest_and_the_lower_id_of_a_tie():
    logits = jnp.array([[0.0, 3.0, 3.0], [1.0, 0.0, 0.5]])
    np.testing.assert_array_equal(sample(logits, request_keys(0, 2), jnp.zeros(2, jnp.int32), GREEDY), [1, 0])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), [0.05, 0.5, 0.15, 0.3]),
        (Sampling(temperature=0.5), [0.0068, 0.6849, 0.0616, 0.2466]),
        (Sampling(temperature=1.0, top_k=2), [0, 0.625, 0, 0.375]),
        (Sampling(temperature=1.0, top_p=0.9), [0, 0.5263, 0.1579, 0.3158]),
        (Sampling(temperature=1.0, top_p=0.7), [0, 0.625, 0, 0.375]),
        (Sampling(temperature=1.0, top_p=1e-9), [0, 1, 0, 0]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.6), [0, 0.625, 0, 0.375]),
        (Sampling(temperature=1e-30), [0, 1, 0, 0]),
        (Sampling(temperature=1.0, top_k=99), [0.05, 0.5, 0.15, 0.3]),
    ],
)
def test_frequencies_follow_the_filters_by_hand(sampling, expected):
    np.testing.assert_allclose(draws(LOGITS, sampling), expected, atol=0.04)


def test_top_p_is_measured_after_top_k():
    values, ids = filtered(LOGITS, Sampling(temperature=1.0, top_k=2, top_p=0.62))
    np.testing.assert_array_equal(ids, [[1, 3]])
    np.testing.assert_array_equal(jnp.isfinite(values), [[True, False]])


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=0.8, top_k=20, top_p=0.9)])
def test_a_draw_does_not_depend_on_its_neighbours(sampling):
    logits = jax.random.normal(jax.random.key(5), (6, 50))
    generated = jnp.arange(6, dtype=jnp.int32)
    together = jit_sample(logits, request_keys([7, 8, 9, 7, 8, 9], 6), generated, sampling)
    for b, seed in enumerate([7, 8, 9, 7, 8, 9]):
        alone = jit_sample(logits[b : b + 1], request_keys(seed, 1), generated[b : b + 1], sampling)
        assert int(alone[0]) == int(together[b])


def test_streams_differ_between_requests_and_steps():
    logits = jnp.zeros((8, 1000))
    sampling = Sampling(temperature=1.0)
    keys = request_keys(0, 8)
    first, second = (sample(logits, keys, jnp.full(8, n, jnp.int32), sampling) for n in (0, 1))
    assert len(set(np.asarray(first).tolist())) > 6
    assert (np.asarray(first) != np.asarray(second)).sum() > 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be finite and 0 or more, got -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0"),
    ],
)
def test_refuses_impossible_sampling(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_one_seed_or_one_each():
    with pytest.raises(ValueError, match="one seed or one for each of 3 requests, got 2"):
        request_keys([1, 2], 3)
