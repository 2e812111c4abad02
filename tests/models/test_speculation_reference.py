"""Rounds of speculation with reference correction: each row has a reference of its own, captured by draft or verify."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import speculation
from models.decode import decode_chunk
from models.ouro import Ouro
from models.reference import ReferenceCorrection
from models.speculation import Speculation, speculative_round
from tests.models.speculation_setting import (
    CONFIG,
    DENSE,
    PAGE_SIZE,
    assert_same_text,
    one_round,
    plain,
    prompts,
    speculate,
    start,
)

REQUESTS, TOKENS = 32, 14


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(2))


def corrected(retention: float):
    return dataclasses.replace(DENSE, reference=ReferenceCorrection(retention=retention))


@pytest.mark.slow
@pytest.mark.parametrize("d", [1, 2])
def test_full_retention_gives_the_tokens_of_plain_dense_decoding(model, d):
    texts = prompts(0, REQUESTS)
    state = start(model, texts, TOKENS)
    expected, _ = plain(model, state, TOKENS)
    found, _, outs = speculate(model, state, Speculation(drafts=3, draft_loops=d), corrected(1.0))
    assert assert_same_text(model, texts, expected, found, 1e-4) <= 1
    for out in outs:
        np.testing.assert_allclose(out.retained, 1.0, atol=1e-5)
    assert max(int(out.accepted.max()) for out in outs) == 3


@pytest.mark.slow
@pytest.mark.parametrize("d", [1, 2])
def test_partial_retention_gives_the_tokens_of_corrected_decoding_without_drafts(model, d):
    """Token for token those of the same rows without an accepted draft, and of plain steps but for close logits."""
    speculation, options = Speculation(drafts=3, draft_loops=d), corrected(0.3)
    state = start(model, prompts(1, REQUESTS), TOKENS)
    found, after, outs = speculate(model, state, speculation, options)
    unspeculated, same, singles = speculate(model, state, speculation, options, most=0)
    assert found == unspeculated
    assert len(singles) == TOKENS - 1
    assert sum(int((out.accepted > 0).sum()) for out in outs) > 8
    np.testing.assert_array_equal(after.paged.table.lengths, same.paged.table.lengths)
    dense, _ = plain(model, state, TOKENS)
    assert sum(a != b for a, b in zip(found, dense)) > 0  # the correction is there
    steps, _ = plain(model, state, TOKENS, options)
    assert sum(a != b for a, b in zip(found, steps)) <= 1
    # Each row keeps what a plain step of the same token keeps.
    _, out = _decode(model, state, options)
    np.testing.assert_allclose(singles[0].retained, out.retained[0], atol=1e-6)
    assert float(out.retained[0].max()) < 0.99


_decode = jax.jit(
    lambda model, state, options: decode_chunk(*nnx.split(model), state, options, 1), static_argnames="options"
)


def of_the_first_row(real):
    """A mutation: all rows of a request have one place."""
    first = jnp.arange(real.shape[0], dtype=jnp.int32)[:, None] * real.shape[1]
    return jnp.where(real, first, -1)


@pytest.mark.slow
def test_mutation_rows_that_share_a_reference_change_the_committed_row(model):
    state, two = start(model, prompts(1, REQUESTS), TOKENS), Speculation(drafts=3, draft_loops=2)
    right, _ = one_round(model, state, two, corrected(0.3))
    with mock.patch.object(speculation, "_places", of_the_first_row):
        wrong, _ = jax.jit(lambda model, state: speculative_round(model, state, corrected(0.3), two))(model, state)
    plain_state, _ = _decode(model, state, corrected(0.3))
    expected, found, mutated = (
        keys_of_the_last_plane(s, state.paged.table.lengths) for s in (plain_state, right, wrong)
    )
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert np.abs(mutated - expected).max() > 1e-3


def keys_of_the_last_plane(state, positions):
    """Of the token at each request's position."""
    positions = np.asarray(positions)
    pages = np.asarray(state.paged.table.pages)[np.arange(len(positions)), positions // PAGE_SIZE]
    return np.asarray(state.paged.kv.k)[-1, pages, :, positions % PAGE_SIZE]
