"""The fetched SmolLM2-135M, where it is in the cache: that its weights, rotary order and tokenizer belong together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import chat, checkpoints, tokenizers
from models.llama import LlamaConfig

NAME = "smollm2-135m"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (checkpoints.cache_folder() / NAME).is_dir(), reason=f"needs the model: sparse-jax fetch {NAME}"
    ),
]
TEXT = """\
The sun is a star at the centre of our solar system. It is made mostly of hydrogen and helium, and its energy comes from
nuclear fusion in its core. Light from the sun takes about eight minutes to reach the earth. Without it there would be
no life on our planet, because plants need light to grow and animals need plants to eat."""
WIDTH = 128


@pytest.fixture(scope="module")
def model():
    config, model = checkpoints.load(NAME, dtype=jnp.float32)
    assert config == LlamaConfig.smollm2_135m()
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.for_folder(checkpoints.resolve(NAME))


@pytest.fixture(scope="module")
def logits(model):
    forward = nnx.jit(lambda model, tokens: model.logits(model.forward(tokens).hidden[0])[0])
    return lambda ids: np.asarray(forward(model, jnp.asarray([*ids, *[0] * (WIDTH - len(ids))])[None]))[: len(ids)]


def test_it_knows_the_capital_of_france(tokenizer, logits):
    ids = tokenizer.encode("The capital of France is")
    assert tokenizer.decode([int(logits(ids)[-1].argmax())]) == " Paris"
    ids = tokenizer.encode(chat.chat_prompt(checkpoints.resolve(NAME), "What is the capital of France?"))
    for _ in range(7):
        ids.append(int(logits(ids)[-1].argmax()))
    assert tokenizer.decode(ids[-7:]) == "The capital of France is Paris."


def test_it_expects_plain_english(tokenizer, logits):
    """Perplexity is about 9; with rotary rows left in pairs it is 45."""
    ids = tokenizer.encode(TEXT)[:WIDTH]
    scores = jax.nn.log_softmax(logits(ids)[:-1])
    assert np.exp(-np.mean(scores[np.arange(len(ids) - 1), ids[1:]])) < 15
