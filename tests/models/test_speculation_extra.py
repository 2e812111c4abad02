"""Drafts by a model's extra layer: the text is that of plain decoding, the layer's plane that of the whole text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.deepseek import Deepseek
from models.generate import generate
from models.ouro import Ouro
from models.reference import ReferenceCorrection
from models.sampling import Sampling
from models.speculation import Speculation
from models.speculation_overlapped import Overlapped
from sparse_jax import paging, selectors
from tests.models.configs import small_ouro
from tests.models.deepseek_setting import small_deepseek

CONFIG = small_deepseek(mtp_layers=1, num_layers=2)
PROMPTS = [[5, 9, 2, 60, 33, 7, 8], [1, 2, 3], [40, 41, 42, 43, 44]]
LIMITS = [14, 9, 12]


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Deepseek:
    return Deepseek(CONFIG, rngs=nnx.Rngs(3))


def continued(model, selector="dsa", by="extra", drafts=3, **options):
    speculation = None if by is None else Speculation(drafts=drafts, by=by)
    made = generate(
        model, PROMPTS, selector=selectors.get(selector), max_tokens=LIMITS, page_size=4, chunk=8,
        speculation=speculation, **options,
    )  # fmt: skip
    for _ in made:
        pass
    return made


@pytest.mark.parametrize(("selector", "drafts"), [("dense", 1), ("dsa", 3)])
def test_greedy_text_is_that_of_plain_decoding(model, selector, drafts):
    plain, drafted = continued(model, selector, by=None), continued(model, selector, drafts=drafts)
    assert drafted.tokens == plain.tokens
    assert drafted.finished == plain.finished
    assert drafted.stats().stale == 0
    assert drafted.stats().acceptance is not None


def test_a_stop_token_ends_a_request_inside_a_round(model):
    whole = continued(model)
    stopped = continued(model, stop_ids=(whole.tokens[0][3],))
    assert stopped.tokens[0] == whole.tokens[0][: whole.tokens[0].index(whole.tokens[0][3])]
    assert stopped.finished[0] == "stop"


def test_a_layer_that_is_always_right_accepts_everything():
    """All weights that could change the text are zero: every token is the same, and the layer knows it."""
    model = Deepseek(CONFIG, rngs=nnx.Rngs(3))
    model.embed_tokens[...] = jnp.ones_like(model.embed_tokens[...])
    for layer in [*model.layers, model.extra[0].layer]:
        layer.self_attn.o_proj[...] *= 0
        for part in (layer.mlp.experts, layer.mlp.shared_experts) if hasattr(layer.mlp, "experts") else (layer.mlp,):
            part.down_proj[...] *= 0
    model.extra[0].eh_proj[...] = jnp.tile(jnp.eye(CONFIG.hidden_size), (1, 2))
    made = continued(model)
    assert made.tokens == continued(model, by=None).tokens
    stats = made.stats()
    assert stats.acceptance == 1.0
    assert stats.tokens_per_round > 2.5


@jax.jit
def of_the_whole_text(model, text):
    """Of text i32[1, T]: the layer's output [T - 1, hidden] and what it keeps of each token, without a cache."""
    positions, kept = jnp.arange(text.shape[1] - 1, dtype=jnp.int32)[None], {}

    def attend(plane, q, k, v, cache):
        kept["rows"] = k[0, :, 0]
        return model.causal(plane, q, k, v, cache)

    further, _ = model.predict(model.forward(text[:, :-1]).hidden[0], text[:, 1:], positions, attend, ())
    return further[0], kept["rows"]


@pytest.mark.slow
def test_the_layers_plane_and_output_are_those_of_the_whole_text(model):
    made = continued(model)
    state = made.state
    for request, (prompt, tokens) in enumerate(zip(PROMPTS, made.tokens)):
        cached = int(state.paged.table.lengths[request])
        text = prompt + tokens
        assert len(text) == cached + 1
        padded = text + [0] * (24 - len(text))  # which no token of the text sees
        further, kept = of_the_whole_text(model, jnp.array(padded)[None])
        np.testing.assert_allclose(state.further[request], further[cached - 1], atol=2e-5)
        pages = np.asarray(paging.view(state.paged, jnp.int32(CONFIG.num_layers)).page_table[request])
        rows = np.asarray(state.paged.kv.k).reshape(-1, *state.paged.kv.k.shape[2:])[pages[: -(-cached // 4)], 0]
        np.testing.assert_allclose(rows.reshape(-1, rows.shape[-1])[:cached], kept[:cached], atol=2e-5)


def test_drawn_text_comes_to_an_end_and_repeats_with_its_seed(model):
    sampling = Sampling(temperature=1.0)
    made = continued(model, sampling=sampling, seed=4)
    assert [len(tokens) for tokens in made.tokens] == LIMITS
    assert continued(model, sampling=sampling, seed=4).tokens == made.tokens


def test_what_cannot_be_combined_is_refused_by_name(model):
    with pytest.raises(ValueError, match=r"draft by its extra layer, Speculation\(by='extra'\)"):
        continued(model, by="loops")
    none = Deepseek(dataclasses.replace(CONFIG, mtp_layers=0), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="mtp_layers 0"):
        continued(none)
    with pytest.raises(ValueError, match="an extra layer, and this one has none"):
        continued(Ouro(small_ouro(), rngs=nnx.Rngs(0)), "dense")
    with pytest.raises(ValueError, match="reference correction, which is between loops"):
        Speculation(by="extra").check(CONFIG, selectors.get("dsa"), ReferenceCorrection(retention=0.5))
    with pytest.raises(ValueError, match="by must be 'loops' or 'extra'"):
        Speculation(by="model")
    state = continued(model).state
    options = continued(model).options
    with pytest.raises(ValueError, match="drafts by 'extra' do not run ahead of the host"):
        Overlapped(model, state, options, Speculation(by="extra"))
