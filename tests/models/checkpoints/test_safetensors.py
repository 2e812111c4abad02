"""Safetensors files and their headers, with Ouro as the model."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from models import checkpoints
from models.checkpoints import CheckpointError
from models.ouro import Ouro, OuroConfig
from tests.models import numpy_ouro
from tests.models.configs import small_ouro

forward = nnx.jit(lambda model, tokens: model.forward(tokens))
CONFIG = small_ouro(rope_theta=1e4, exit_threshold=0.9, bos_id=0, stop_ids=(0, 2))


def random_tensors(config: OuroConfig, dtype=np.float32) -> dict[str, np.ndarray]:
    """A checkpoint by the tensor list of the format, written out by hand."""
    rng = np.random.default_rng(0)
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    h, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    shapes = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,), "lm_head.weight": (v, h)}
    shapes |= {"model.early_exit_gate.weight": (1, h), "model.early_exit_gate.bias": (1,)}
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.{p}_proj.weight": s for p, s in zip("qkvo", [(heads, h), (kv, h), (kv, h), (h, heads)])
        }
        shapes |= {f"{name}.mlp.{p}_proj.weight": s for p, s in zip(("gate", "up", "down"), [(f, h), (f, h), (h, f)])}
        shapes |= {
            f"{name}.{norm}_layernorm{n}.weight": (h,) for norm in ("input", "post_attention") for n in ("", "_2")
        }
    return {
        name: np.asarray(
            rng.normal(size=shape) * shape[-1] ** -0.5 if len(shape) == 2 else 1 + 0.3 * rng.normal(size=shape), dtype
        )
        for name, shape in shapes.items()
    }


def write(folder, tensors, config=CONFIG, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(checkpoints.config_to_json(config) | fields))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder, shards, weight_map=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(checkpoints.config_to_json(CONFIG)))
    names = [f"model-{n}.safetensors" for n in range(len(shards))]
    for name, shard in zip(names, shards):
        safetensors.numpy.save_file(shard, folder / name)
    weight_map = weight_map or {tensor: name for name, shard in zip(names, shards) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(CONFIG)


def test_names_and_shapes_are_those_of_the_format(tensors):
    assert checkpoints.expected_shapes(CONFIG) == {name: tensor.shape for name, tensor in tensors.items()}


@pytest.mark.parametrize("sharded", [False, True])
def test_parity_with_numpy_in_every_loop(tmp_path, tensors, sharded):
    """House tolerance 1e-4 against an independent float64 transcription, every loop and position."""
    if sharded:
        items = list(tensors.items())
        folder = write_shards(tmp_path / "c", [dict(items[0::3]), dict(items[1::3]), dict(items[2::3])])
    else:
        folder = write(tmp_path / "c", tensors)
    config, model = checkpoints.load(folder, dtype=jnp.float32)
    assert config == CONFIG
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 17)
    output = forward(model, jnp.asarray(tokens)[None])
    hidden, gates, logits = numpy_ouro.forward(tensors, config, tokens)
    assert hidden.shape == (4, 17, 32)
    np.testing.assert_allclose(output.hidden[:, 0], hidden, atol=1e-4, rtol=0)
    np.testing.assert_allclose(output.gate_logits[:, 0], gates, atol=1e-4, rtol=0)
    np.testing.assert_allclose(model.logits(output.hidden)[:, 0], logits, atol=1e-4, rtol=0)


def test_mutation_parity_sees_a_change_of_any_tensor(tmp_path, tensors):
    config, model = checkpoints.load(write(tmp_path / "c", tensors), dtype=jnp.float32)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 5)
    output = forward(model, jnp.asarray(tokens)[None])
    logits = np.asarray(model.logits(output.hidden)[:, 0])
    for name in tensors:
        changed = tensors | {name: np.flip(tensors[name], 0) * 1.05}
        _, gates, expected = numpy_ouro.forward(changed, config, tokens)
        difference = (
            np.abs(output.gate_logits[:, 0] - gates).max() if "gate." in name else np.abs(logits - expected).max()
        )
        assert name.endswith("early_exit_gate.bias") or float(difference) > 1e-2, name


@pytest.mark.parametrize(
    ("stored", "dtype"), [(jnp.bfloat16, "bfloat16"), (np.float16, "float16"), (np.float32, "float32")]
)
def test_every_float_dtype_loads(tmp_path, stored, dtype):
    tensors = random_tensors(CONFIG, jnp.dtype(stored))
    _, model = checkpoints.load(write(tmp_path / "c", tensors), dtype=stored)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))} == {dtype}
    np.testing.assert_array_equal(model.layers[1].mlp.up_proj[...], tensors["model.layers.1.mlp.up_proj.weight"])


def test_bf16_activations_over_float32_parameters(tmp_path, tensors):
    _, model = checkpoints.load(write(tmp_path / "c", tensors), dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert model.lm_head[...].dtype == jnp.float32
    assert forward(model, jnp.zeros((1, 2), jnp.int32)).hidden.dtype == jnp.bfloat16


def test_rotary_inverse_frequencies_are_skipped(tmp_path, tensors):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "model.rotary_emb.inv_freq": np.ones(4),
    }
    checkpoints.locate(write(tmp_path / "c", tensors | extra), CONFIG)


def broken(tensors):
    up = "model.layers.1.mlp.up_proj.weight"
    without = {name: tensor for name, tensor in tensors.items() if name != up}
    return {
        "unknown: model.layers.2.mlp.up_proj.weight": tensors | {"model.layers.2.mlp.up_proj.weight": tensors[up]},
        f"missing: {up}": without,
        f"shape: {up} \\(is \\[32, 64\\], should be \\[64, 32\\]\\)": tensors | {up: tensors[up].T.copy()},
        f"dtype: {up} \\(is I32, should be one of F32, BF16, F16\\)": tensors | {up: tensors[up].astype(np.int32)},
        f"dtype: {up} \\(is F64": tensors | {up: tensors[up].astype(np.float64)},
    }


@pytest.mark.parametrize("case", range(5))
def test_wrong_tensors_are_named_before_anything_is_allocated(tmp_path, tensors, case, monkeypatch):
    message, wrong = list(broken(tensors).items())[case]
    folder = write(tmp_path / "c", wrong)
    monkeypatch.setattr(jnp, "asarray", lambda *a, **k: pytest.fail("allocated"))
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(folder)


def test_all_problems_come_in_one_message(tmp_path, tensors):
    wrong = {name: tensor for name, tensor in tensors.items() if "q_proj" not in name} | {
        "other": np.zeros(1, np.float32)
    }
    with pytest.raises(CheckpointError) as error:
        checkpoints.load(write(tmp_path / "c", wrong))
    for part in ("unknown: other", "missing: ", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"):
        assert part in str(error.value)


def test_long_lists_are_cut(tmp_path, tensors):
    with pytest.raises(CheckpointError, match="and 15 more"):
        checkpoints.load(write(tmp_path / "c", {}))


def test_tensor_in_two_shards_is_a_duplicate(tmp_path, tensors):
    twice = {"lm_head.weight": tensors["lm_head.weight"]}
    with pytest.raises(
        CheckpointError, match=r"duplicate: lm_head.weight \(in model-0.safetensors and model-1.safetensors\)"
    ):
        checkpoints.load(write_shards(tmp_path / "c", [tensors, twice]))


def test_tensor_twice_in_one_header_is_a_duplicate(tmp_path, tensors):
    folder = write(tmp_path / "c", tensors)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].rstrip()
    entry = json.dumps({"model.norm.weight": json.loads(header)["model.norm.weight"]}).encode()[1:-1]
    header = header[:-1] + b"," + entry + b"}"
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    with pytest.raises(CheckpointError, match=r"duplicate: model\.norm\.weight"):
        checkpoints.load(folder)


def test_tensor_in_another_shard_than_the_index_says(tmp_path, tensors):
    items = list(tensors.items())
    names = ["model-0.safetensors", "model-1.safetensors"]
    weight_map = {name: names[n % 2] for n, (name, _) in enumerate(items)}
    weight_map[items[0][0]] = names[1]
    folder = write_shards(tmp_path / "c", [dict(items[0::2]), dict(items[1::2])], weight_map)
    with pytest.raises(CheckpointError, match=f"misplaced: {items[0][0]}"):
        checkpoints.load(folder)


def test_index_is_checked(tmp_path, tensors):
    folder = write_shards(tmp_path / "c", [tensors])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model-0.safetensors"}}))
    with pytest.raises(CheckpointError, match="points outside its folder"):
        checkpoints.load(folder)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-7.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"model-7\.safetensors, which is not there"):
        checkpoints.load(folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="is no index of safetensors"):
        checkpoints.load(folder)


def test_cut_file_is_named(tmp_path, tensors):
    folder = write(tmp_path / "c", tensors)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a sound safetensors file"):
        checkpoints.load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mistral"}, "model_type = 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = 'yarn'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .'sliding_attention'."),
    ],
)
def test_configurations_of_other_models_are_refused(tmp_path, tensors, fields, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(write(tmp_path / "c", tensors, **fields))


def test_config_fields_of_the_released_models():
    data = {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": 49152,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 65536,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "total_ut_steps": 4,
        "early_exit_threshold": 1.0,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 24,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    assert checkpoints.config_from_json(data) == OuroConfig.ouro_1_4b()
    assert checkpoints.config_from_json(data | {"eos_token_id": 2}).stop_ids == (0, 2)
    newer = {key: value for key, value in data.items() if key not in ("rope_theta", "rope_scaling", "total_ut_steps")}
    newer |= {
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "num_hidden_layers": 48,
        "layer_types": None,
    }
    assert checkpoints.config_from_json(newer) == OuroConfig.ouro_2_6b()
    del data["hidden_size"]
    with pytest.raises(CheckpointError, match=r"config\.json lacks hidden_size"):
        checkpoints.config_from_json(data)


@pytest.mark.parametrize("max_shard_bytes", [None, 20_000])
def test_save_and_load_round_trip(tmp_path, max_shard_bytes):
    model = Ouro(CONFIG, rngs=nnx.Rngs(3))
    checkpoints.save(tmp_path / "c", model, max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert ("model.safetensors" in files) == (max_shard_bytes is None)
    assert not [name for name in files if name.endswith(".partial")]
    config, again = checkpoints.load(tmp_path / "c", dtype=jnp.float32)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_save_over_the_other_layout_leaves_no_stale_weights(tmp_path):
    old, new = Ouro(CONFIG, rngs=nnx.Rngs(1)), Ouro(CONFIG, rngs=nnx.Rngs(2))
    for first, second in [(None, 20_000), (20_000, None)]:
        checkpoints.save(tmp_path / "c", old, max_shard_bytes=first)
        checkpoints.save(tmp_path / "c", new, max_shard_bytes=second)
        _, loaded = checkpoints.load(tmp_path / "c", dtype=jnp.float32)
        np.testing.assert_array_equal(loaded.lm_head[...], new.lm_head[...])


def test_save_in_bf16(tmp_path):
    model = Ouro(CONFIG, rngs=nnx.Rngs(3))
    checkpoints.save(tmp_path / "c", model, dtype=jnp.bfloat16)
    stored = safetensors.numpy.load_file(tmp_path / "c" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in stored.values()} == {"bfloat16"}
    _, loaded = checkpoints.load(tmp_path / "c", dtype=jnp.float32)
    np.testing.assert_array_equal(loaded.lm_head[...], model.lm_head[...].astype(jnp.bfloat16).astype(jnp.float32))


def test_loaded_model_keeps_its_options(tmp_path):
    checkpoints.save(tmp_path / "c", Ouro(CONFIG, rngs=nnx.Rngs(3)))
    _, model = checkpoints.load(tmp_path / "c", attention="xla", embedding="one_hot")
    assert (model.attention, model.embedding) == ("xla", "one_hot")


def test_shipped_model_is_found_by_name_and_small():
    folder = checkpoints.resolve("ouro-tiny")
    config, model = checkpoints.load("ouro-tiny", dtype=jnp.float32)
    assert (config.vocab_size, config.loops, config.max_positions, config.stop_ids) == (264, 4, 4096, (257,))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 64)
    assert (folder / "model.safetensors").stat().st_size <= 12 * 2**20
    assert np.isfinite(forward(model, jnp.arange(256, 264)[None]).hidden).all()


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="no configuration at"):
        checkpoints.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.config_to_json(CONFIG)))
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        checkpoints.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        checkpoints.load(tmp_path)
