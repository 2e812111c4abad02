"""Checkpoints of DeepSeek-style models: names, FP8 blocks, the extra layer, shards, fields of config.json."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from models import checkpoints
from models.checkpoints import CheckpointError, fp8_blocks
from models.checkpoints.families import tensors_of
from models.deepseek import Deepseek, DeepseekConfig, ExpertsConfig, IndexerConfig, Yarn
from tests.models.deepseek_setting import small_deepseek

EXPERTS = ExpertsConfig(count=3, per_token=2, width=6)
INDEXER = IndexerConfig(heads=2, head_dim=8, topk=4, pattern=("full", "shared"))
CONFIG = small_deepseek(
    num_layers=2, experts=EXPERTS, indexer=INDEXER, mtp_layers=1, bos_id=0, stop_ids=(1,), max_positions=64
)
RELEASED = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v32",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""The fields of DeepSeek-V3.2-Exp on its hub."""


def random_tensors(config=CONFIG):
    """A checkpoint by the tensor list of the format, written out by hand."""
    rng, h, heads = np.random.default_rng(0), config.hidden_size, config.num_heads
    shapes = {"model.embed_tokens.weight": (64, h), "model.norm.weight": (h,), "lm_head.weight": (64, h)}
    for n in range(3):
        layer = f"model.layers.{n}."
        shapes |= {f"{layer}{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
        attention = {"q_a_proj": (12, h), "q_a_layernorm": (12,), "q_b_proj": (heads * 12, 12)}
        attention |= {"kv_a_proj_with_mqa": (20, h), "kv_a_layernorm": (16,), "kv_b_proj": (heads * 14, 16)}
        attention |= {"o_proj": (h, heads * 6)}
        if n != 1:
            attention |= {"indexer.wq_b": (16, 12), "indexer.wk": (8, h), "indexer.k_norm": (8,)}
            attention |= {"indexer.weights_proj": (2, h)}
            shapes[f"{layer}self_attn.indexer.k_norm.bias"] = (8,)
        shapes |= {f"{layer}self_attn.{name}.weight": shape for name, shape in attention.items()}
        parts = {"mlp": 48} if n == 0 else {"mlp.shared_experts": 6} | {f"mlp.experts.{e}": 6 for e in range(3)}
        for part, width in parts.items():
            shapes |= {f"{layer}{part}.{name}_proj.weight": (width, h) for name in ("gate", "up")}
            shapes[f"{layer}{part}.down_proj.weight"] = (h, width)
        if n > 0:
            shapes |= {f"{layer}mlp.gate.weight": (3, h), f"{layer}mlp.gate.e_score_correction_bias": (3,)}
    shapes |= {f"model.layers.2.{name}.weight": (h,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes["model.layers.2.eh_proj.weight"] = (h, 2 * h)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


TENSORS = random_tensors()
REPEATED = {
    "model.layers.2.embed_tokens.weight": TENSORS["model.embed_tokens.weight"],
    "model.layers.2.shared_head.head.weight": TENSORS["lm_head.weight"],
}


def write(folder, tensors, config=CONFIG, **fields):
    """In two shards, the way released files come."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(checkpoints.config_to_json(config) | fields))
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_names_and_shapes_are_those_of_the_format():
    assert checkpoints.expected_shapes(CONFIG) == {name: tensor.shape for name, tensor in TENSORS.items()}


def test_every_tensor_arrives_and_repeated_ones_are_left(tmp_path):
    config, model = checkpoints.load(write(tmp_path, TENSORS | REPEATED), dtype=jnp.float32)
    assert config == CONFIG
    loaded = tensors_of(model)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(loaded[name], tensor, err_msg=name)
    expert = TENSORS["model.layers.1.mlp.experts.2.up_proj.weight"]
    np.testing.assert_array_equal(model.layers[1].mlp.experts.up_proj[...][2], expert)


def test_save_and_load_round_trip(tmp_path):
    model = Deepseek(CONFIG, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    checkpoints.save(tmp_path, model, max_shard_bytes=20_000)
    config, loaded = checkpoints.load(tmp_path, dtype=jnp.bfloat16)
    assert config == CONFIG
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for expected, found in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(loaded)), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_the_extra_layer_is_left_where_it_is_not_asked_for(tmp_path):
    config = dataclasses.replace(CONFIG, mtp_layers=0)
    _, model = checkpoints.load(write(tmp_path, TENSORS | REPEATED, config), dtype=jnp.float32)
    assert len(model.extra) == 0
    with pytest.raises(CheckpointError, match=r"unknown: model\.layers\.1\.stray"):
        checkpoints.locate(write(tmp_path, TENSORS | {"model.layers.1.stray": np.zeros(1, np.float32)}), config)


def test_fp8_weights_are_multiplied_by_the_scale_of_their_block(tmp_path):
    """A matrix of 130 x 260 has 2 x 3 blocks, the last ones cut."""
    config = dataclasses.replace(CONFIG, intermediate_size=130, hidden_size=260, mtp_layers=0)
    model = Deepseek(config, rngs=nnx.Rngs(0))
    name = "model.layers.0.mlp.gate_proj.weight"
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((130, 260)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random((2, 3)).astype(np.float32)
    tensors = tensors_of(model) | {name: weight, f"{name}_scale_inv": scale}
    _, loaded = checkpoints.load(write(tmp_path, tensors, config), dtype=jnp.float32)
    found = loaded.layers[0].mlp.gate_proj[...]
    blocks = np.kron(scale, np.ones((128, 128), np.float32))[:130, :260]
    np.testing.assert_array_equal(found, np.float32(weight) * blocks)
    np.testing.assert_array_equal(loaded.norm.weight[...], model.norm.weight[...])

    del tensors[f"{name}_scale_inv"]
    with pytest.raises(CheckpointError, match=rf"missing: {name}_scale_inv"):
        checkpoints.locate(write(tmp_path, tensors, config), config)
    with pytest.raises(CheckpointError, match=r"unknown: lm_head\.weight_scale_inv"):
        checkpoints.locate(write(tmp_path, tensors | {"lm_head.weight_scale_inv": scale}, config), config)
    with pytest.raises(CheckpointError, match=rf"shape: {name}_scale_inv \(is \[1, 3\], should be \[2, 3\]\)"):
        checkpoints.locate(write(tmp_path, tensors | {f"{name}_scale_inv": scale[:1]}, config), config)
    assert fp8_blocks.scale_shape((128, 129)) == (1, 2)


def test_a_file_written_anew_is_read_anew(tmp_path):
    """Headers are remembered, and that of an older file in the same place is not its own."""
    for columns in (2, 3):
        file = tmp_path / "model.safetensors"
        weight = np.full((2, columns), columns, ml_dtypes.float8_e4m3fn)
        safetensors.numpy.save_file({"a": np.zeros(columns, np.float32), "b": weight}, file)
        np.testing.assert_array_equal(fp8_blocks.read(file, "b"), weight)


def test_released_fields_are_understood():
    config = checkpoints.config_from_json(RELEASED)
    assert config == DeepseekConfig.v3_2(mtp_layers=1)
    assert config.scale == pytest.approx(0.135234, abs=5e-7)
    v3 = {name: value for name, value in RELEASED.items() if not name.startswith("index_")}
    assert checkpoints.config_from_json(v3 | {"model_type": "deepseek_v3"}).indexer is None
    glm = {"model_type": "glm_moe_dsa", "rope_scaling": None, "rope_parameters": {"rope_theta": 1e6}}
    glm |= {"index_topk_freq": 4, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58, "indexer_types": None}
    config = checkpoints.config_from_json(RELEASED | glm)
    assert (config.indexer.interleaved, config.yarn, config.rope_theta, config.first_dense) == (True, None, 1e6, 3)
    assert "".join("SF"[layer.full] for layer in config.index_layers[:10]) == "FFSSSFSSSF"


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        small_deepseek(indexer=None, q_rank=None, experts=None, rope_interleaved=False),
        small_deepseek(
            yarn=Yarn(factor=2.0, original_positions=64, mscale=0.5),
            indexer=IndexerConfig(heads=2, head_dim=8, interleaved=True, hadamard=True, freq=2, offset=1),
        ),
    ],
)
def test_configurations_come_back_from_json(config):
    assert checkpoints.config_from_json(json.loads(json.dumps(checkpoints.config_to_json(config)))) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ({"kv_lora_rank": None}, "config.json lacks kv_lora_rank"),
        ({"index_topk": None}, "config.json lacks index_topk"),
        ({"moe_intermediate_size": None}, "config.json lacks moe_intermediate_size"),
        ({"q_lora_rank": None}, "does not fit together: the indexer takes the squeezed query"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "the kind 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": False}}, "'truncate': False"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "supported: dense ones, then sparse ones"),
        ({"quantization_config": {"quant_method": "awq"}}, "supported: fp8, blocks of 128 x 128"),
        ({"n_group": 7}, "256 experts do not fall into 7 groups"),
    ],
)
def test_fields_of_another_computation_are_refused(fields, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.config_from_json(RELEASED | fields)
