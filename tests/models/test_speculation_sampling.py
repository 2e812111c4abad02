"""Rejection sampling: what is emitted is distributed as plain sampling, whatever the draft thinks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import speculation_accept
from models.ouro import Ouro
from models.sampling import Sampling, request_keys
from models.speculation import Speculation
from tests.models.speculation_setting import CONFIG, DENSE, one_round, plain, prompts, speculate, start

ROWS, VOCABULARY, DRAFTS = 20_000, 6, 2
P = jnp.array([[2.0, 1.0, 0.0, 0.0, -1.0, -8.0], [0.0, 0.0, 2.0, 1.0, 0.0, 1.0], [1.0, 0.5, 0.0, 0.0, 0.0, 2.0]])
Q = jnp.array([[0.0, 2.0, 1.0, 0.0, -1.0, 1.0], [2.0, 0.0, 2.0, 0.0, 0.0, 0.0]])


@functools.partial(jax.jit, static_argnames="sampling")
def emitted(drafts, sampling):
    """Tokens i32[ROWS, DRAFTS + 1] and accepted of a round whose logits depend on the place alone."""
    keys, none = request_keys(0, ROWS), jnp.zeros(ROWS, jnp.int32)
    drawn = [
        speculation_accept.propose(jnp.broadcast_to(q, (ROWS, VOCABULARY)), keys, none + i, sampling)
        for i, q in enumerate(Q)
    ]
    candidates, q = jnp.stack([x for x, _ in drawn], axis=1), jnp.stack([x for _, x in drawn], axis=1)
    logits = jnp.broadcast_to(P, (ROWS, *P.shape))
    return speculation_accept.accept(logits, candidates, q, none + drafts, keys, none, sampling)


def chi_square(tokens, expected):
    """(statistic less degrees of freedom) / its standard deviation; ids of probability 0 must not appear."""
    counts, expected = np.bincount(tokens, minlength=VOCABULARY), np.asarray(expected) * len(tokens)
    assert counts[expected == 0].sum() == 0
    freedom = (expected > 0).sum() - 1
    statistic = ((counts - expected) ** 2 / np.where(expected > 0, expected, 1)).sum()
    return (statistic - freedom) / np.sqrt(2 * freedom)


SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_k=4),
    Sampling(temperature=1.3, top_p=0.8),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_emitted_tokens_are_distributed_as_the_target(sampling):
    """In every place that is reached, and for a request without drafts."""
    tokens, accepted = jax.device_get(emitted(DRAFTS, sampling))
    p = speculation_accept.probabilities(P, sampling)
    for place in range(DRAFTS + 1):
        assert chi_square(tokens[accepted >= place, place], p[place]) < 4
    q = speculation_accept.probabilities(Q, sampling)
    overlap = np.minimum(p[:2], q).sum(axis=1)
    assert (accepted >= 1).mean() == pytest.approx(overlap[0], abs=0.02)
    assert (accepted[accepted >= 1] >= 2).mean() == pytest.approx(overlap[1], abs=0.02)
    tokens, accepted = jax.device_get(emitted(0, sampling))
    assert (accepted == 0).all()
    assert chi_square(tokens[:, 0], p[0]) < 4


def test_mutation_drawing_the_rest_from_the_target_is_noticed(monkeypatch):
    plain_draw = speculation_accept._draw

    def from_the_target(weights, keys):
        if weights.shape == (ROWS, VOCABULARY):
            weights = jnp.broadcast_to(speculation_accept.probabilities(P, SAMPLINGS[0])[0], weights.shape)
        return plain_draw(weights, keys)

    drawn = emitted.__wrapped__(DRAFTS, SAMPLINGS[0])  # not the compiled one
    monkeypatch.setattr(speculation_accept, "accept", _with(from_the_target, monkeypatch))
    wrong = emitted.__wrapped__(DRAFTS, SAMPLINGS[0])
    p = speculation_accept.probabilities(P, SAMPLINGS[0])
    assert chi_square(np.asarray(drawn[0][:, 0]), p[0]) < 4
    assert chi_square(np.asarray(wrong[0][:, 0]), p[0]) > 20


def _with(draw, monkeypatch):
    accept = speculation_accept.accept

    def mutated(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(speculation_accept, "_draw", draw)
            return accept(*arguments)

    return mutated


def test_equal_models_accept_everything():
    keys, none = request_keys(1, 64), jnp.zeros(64, jnp.int32)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, 3, 50)) * 3, jnp.float32)
    sampling = Sampling(temperature=0.8, top_p=0.9)
    drawn = [speculation_accept.propose(logits[:, i], keys, none + i, sampling) for i in range(2)]
    candidates, q = (jnp.stack(x, axis=1) for x in zip(*drawn))
    tokens, accepted = speculation_accept.accept(logits, candidates, q, none + 2, keys, none, sampling)
    np.testing.assert_array_equal(accepted, 2)
    np.testing.assert_array_equal(tokens[:, :2], candidates)


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(0))


SAMPLED = dataclasses.replace(DENSE, sampling=Sampling(temperature=1.0, top_k=3))
ONE = Speculation(drafts=1, draft_loops=1)


@pytest.mark.slow
def test_a_round_of_the_model_is_distributed_as_two_plain_steps(model):
    """The same prompt 1,536 times with different seeds: pairs of tokens, against as many plain draws."""
    texts = [[5, 9, 1, 40]] * 1536
    states = [start(model, texts, 3, SAMPLED, pages=1536 * 3, seed=seed) for seed in (0, 1)]
    # The first token is the same for all, so that all share a distribution.
    states = [dataclasses.replace(state, tokens=jnp.full(1536, 17, jnp.int32)) for state in states]
    found, _, outs = speculate(model, states[0], ONE, SAMPLED)
    expected, _ = plain(model, states[1], 2, SAMPLED)
    pairs = [np.array([64 * a + b for a, b in texts]) for texts in (found, expected)]
    assert 0.05 < np.mean(outs[0].accepted) < 0.95
    cells = np.unique(np.concatenate(pairs))
    counts = np.array([[(x == cell).sum() for cell in cells] for x in pairs])
    counts = counts[:, counts.sum(axis=0) >= 10]
    assert 4 <= counts.shape[1] <= 9
    statistic = ((counts[0] - counts[1]) ** 2 / counts.sum(axis=0)).sum()
    freedom = counts.shape[1]
    assert (statistic - freedom) / np.sqrt(2 * freedom) < 4


def test_a_request_draws_the_same_whatever_its_neighbours(model):
    texts, seeds = prompts(0, 6), [11, 12, 13, 14, 15, 16]
    order = [3, 0, 5, 1, 4, 2]
    state = start(model, texts, 8, SAMPLED, seed=seeds)
    found, _, _ = speculate(model, state, ONE, SAMPLED)
    moved = start(model, [texts[b] for b in order], 8, SAMPLED, seed=[seeds[b] for b in order])
    shuffled, _, _ = speculate(model, moved, ONE, SAMPLED)
    assert shuffled == [found[b] for b in order]
    other = start(model, texts, 8, SAMPLED, seed=[seed + 100 for seed in seeds])
    assert speculate(model, other, ONE, SAMPLED)[0] != found
    _, out = one_round(model, state, ONE, SAMPLED)
    assert out.tokens.dtype == jnp.int32
