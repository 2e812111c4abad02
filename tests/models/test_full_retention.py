"""Reference correction that keeps every key, of many requests with long contexts: the tokens of dense decoding."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from models.generate import generate
from models.ouro import Ouro
from models.reference import ReferenceCorrection
from tests.models.configs import small_ouro


@pytest.mark.slow
def test_requirement_19_64_requests_with_long_contexts():
    """Of three or four pages each, all but the last one full; the same call shapes on both sides."""
    config = dataclasses.replace(small_ouro(num_layers=1, loops=4), max_positions=256)
    model = Ouro(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(64)
    prompts = [rng.integers(0, 64, length).tolist() for length in rng.integers(150, 241, 64)]
    texts = []
    with jax.default_matmul_precision("highest"):
        for reference in (None, ReferenceCorrection(retention=1.0)):
            result = generate(model, prompts, max_tokens=8, page_size=64, chunk=8, reference=reference)
            for _ in result:
                pass
            texts.append(result.tokens)
    assert texts[0] == texts[1]
    assert {len(text) for text in texts[0]} == {8}
    assert len({tuple(text) for text in texts[0]}) > 32
    assert result.stats().retained_mass_least > 1 - 1e-5
