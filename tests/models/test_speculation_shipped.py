"""The shipped model drafts and corrects at once, and stop tokens end texts inside a round: as in plain decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import checkpoints
from models.generate import generate
from models.reference import ReferenceCorrection
from models.speculation import Speculation
from models.training import corpora

pytestmark = pytest.mark.optimised
BOUND = 1e-3  # two logits as close as this may change places where rows are batched differently
STOPS = (ord(","), ord("\n"))


@pytest.mark.slow
def test_full_retention_with_drafts_gives_the_text_of_plain_dense_decoding():
    """100 prompts of 4 to 40 bytes."""
    _, model = checkpoints.load("ouro-tiny", dtype=jnp.float32)
    margins = jax.jit(lambda tokens: jax.lax.top_k(model.logits(model.forward(tokens).hidden[-1]), 2)[0])
    text, rng = corpora.excerpt(), np.random.default_rng(1)
    options = {"max_tokens": 12, "chunk": 12, "page_size": 16, "stop_ids": STOPS}
    drafting = {"speculation": Speculation(drafts=3, draft_loops=1), "reference": ReferenceCorrection(retention=1.0)}
    different, lengths = 0, []
    places, sizes = rng.integers(0, len(text) - 64, 100), rng.integers(4, 41, 100)
    prompts = [[256, *text[at : at + n].tolist()] for at, n in zip(places, sizes)]
    with jax.default_matmul_precision("highest"):
        plain, drafted = (generate(model, prompts, **options, **more) for more in ({}, drafting))
        for _ in (*plain, *drafted):
            pass
        for prompt, a, b, *ends in zip(prompts, plain.tokens, drafted.tokens, plain.finished, drafted.finished):
            lengths.append(len(b))
            if (a, ends[0]) != (b, ends[1]):
                at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
                whole = prompt + a[:at]
                best = margins(jnp.array(whole + [0] * (64 - len(whole)))[None])[0, len(whole) - 1]
                assert float(best[0] - best[1]) < BOUND
                different += 1
    assert different <= 2
    assert len(set(lengths)) > 8, "texts stop anywhere in a round"
    assert drafted.stats().acceptance > 0.3
