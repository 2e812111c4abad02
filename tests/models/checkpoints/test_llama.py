"""Llama-style checkpoints in Hugging Face names: shapes, round trips, tied heads, fields of config.json, chat."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from models import checkpoints
from models.chat import chat_prompt
from models.checkpoints import CheckpointError
from models.llama import LlamaConfig
from tests.models import numpy_llama
from tests.models.configs import small_llama

CONFIG = small_llama(bos_id=1, stop_ids=(2,))
TENSORS = numpy_llama.random_tensors(CONFIG)
RELEASED = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49152,
}
"""The fields of SmolLM2-135M-Instruct on its hub."""


def write(folder, tensors=TENSORS, config=CONFIG, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(checkpoints.config_to_json(config) | fields))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_the_format(tied):
    config = small_llama(tied_embeddings=tied)
    tensors = numpy_llama.random_tensors(config)
    assert checkpoints.expected_shapes(config) == {name: tensor.shape for name, tensor in tensors.items()}


def test_each_layer_gets_its_own_tensors(tmp_path):
    config, model = checkpoints.load(write(tmp_path / "c"), dtype=jnp.float32)
    assert config == CONFIG
    for layer in range(CONFIG.num_layers):
        for parameter, name in {"o_proj": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm"}.items():
            stored = TENSORS[f"model.layers.{layer}.{name}.weight"]
            np.testing.assert_array_equal(getattr(model.layers, parameter)[layer], stored)


@pytest.mark.parametrize(("tied", "max_shard_bytes", "dtype"), [(True, None, None), (False, 9_000, jnp.bfloat16)])
def test_save_and_load_round_trip(tmp_path, tied, max_shard_bytes, dtype):
    config = small_llama(tied_embeddings=tied, bos_id=1, stop_ids=(0, 2))
    rounded = {
        name: tensor if dtype is None else tensor.astype(dtype)
        for name, tensor in numpy_llama.random_tensors(config).items()
    }
    _, model = checkpoints.load(write(tmp_path / "c", rounded, config), dtype=jnp.float32)
    checkpoints.save(tmp_path / "again", model, dtype=dtype, max_shard_bytes=max_shard_bytes)
    stored = {}
    for file in (tmp_path / "again").glob("*.safetensors"):
        stored |= safetensors.numpy.load_file(file)
    assert stored.keys() == rounded.keys()
    found, again = checkpoints.load(tmp_path / "again", dtype=jnp.float32)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_parameters_take_the_dtype_that_is_asked_for(tmp_path):
    _, model = checkpoints.load(write(tmp_path / "c"), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    assert model.dtype == jnp.bfloat16


def test_wrong_tensors_are_named(tmp_path):
    up = "model.layers.1.mlp.up_proj.weight"
    wrong = {name: tensor for name, tensor in TENSORS.items() if "k_proj" not in name}
    wrong |= {up: TENSORS[up].T.copy(), "lm_head.weight": TENSORS["model.embed_tokens.weight"]}
    with pytest.raises(CheckpointError) as error:
        checkpoints.load(write(tmp_path / "c", wrong))
    for part in ("missing: model.layers.0.self_attn.k_proj.weight", f"shape: {up}", "unknown: lm_head.weight"):
        assert part in str(error.value)


def test_fields_of_the_released_model():
    assert checkpoints.config_from_json(RELEASED) == LlamaConfig.smollm2_135m(stop_ids=(2,))
    older = {name: value for name, value in RELEASED.items() if name not in ("tie_word_embeddings", "rope_theta")}
    newer = older | {"rope_parameters": {"rope_theta": 500_000.0}}
    expected = LlamaConfig.smollm2_135m(stop_ids=(2,), tied_embeddings=False, rope_theta=5e5)
    assert checkpoints.config_from_json(newer) == expected


def test_the_second_end_of_a_text_is_in_the_generation_settings(tmp_path):
    folder = write(tmp_path / "c")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert checkpoints.read_config(folder).stop_ids == (0, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type = 'llama3'"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"model_type": "mamba"}, "model_type = 'mamba' .supported: 'ouro', 'llama'."),
    ],
)
def test_configurations_of_other_models_are_refused(tmp_path, fields, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(write(tmp_path / "c", **fields))


@pytest.mark.parametrize("place", ["file", "settings", "list"])
def test_chat_template_of_a_folder(tmp_path, place):
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<ai>{% endif %}"
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        listed = [{"name": "tool", "template": "no"}, {"name": "default", "template": template}]
        settings["chat_template"] = template if place == "settings" else listed
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat_prompt(tmp_path, "Hi") == "<s><user>Hi<ai>"


def test_a_model_without_a_chat_template_says_so():
    with pytest.raises(ValueError, match=r"has no chat template; leave out --chat"):
        chat_prompt(checkpoints.resolve("ouro-tiny"), "Hi")
