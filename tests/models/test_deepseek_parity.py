"""The same numbers as transformers: DeepSeek-V3, DeepSeek-V3.2 and GLM-5 with shared choices, over pages, too.

Weights go through `save_pretrained` and our loader. 32 index heads and index weights times 20, so that scores do not
tie: how torch breaks ties depends on the length of a row.
"""

import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from models import checkpoints
from tests.models.deepseek_setting import decoded, random_tokens

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", minversion="5.20")
    from transformers.modeling_layers import MtpLayer
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.deepseek_v32 import modeling_deepseek_v32
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "rope_parameters": YARN | {"mscale_all_dim": 1.0, "rope_theta": 1e4, "beta_fast": 32, "beta_slow": 1},
}
INDEXER = {"index_topk": 5, "index_head_dim": 8, "index_n_heads": 32}
SHARED = {"indexer_types": ["full", "shared", "full", "shared"], "rope_parameters": {"rope_theta": 1e4}}
PEERS = {
    "deepseek_v3": (modeling_deepseek_v3.DeepseekV3ForCausalLM, {"num_mtp_layers": 0}),
    "deepseek_v32": (modeling_deepseek_v32.DeepseekV32ForCausalLM, INDEXER),
    "glm_moe_dsa": (modeling_glm_moe_dsa.GlmMoeDsaForCausalLM, INDEXER | SHARED | {"rms_norm_eps": 1e-5}),
}


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def randomised(module):
    """With weights that depend on their names alone."""
    with torch.no_grad():
        for name, weight in [*module.named_parameters(), *module.named_buffers()]:
            if "inv_freq" in name:
                continue
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            values = torch.tensor(rng.standard_normal(weight.shape), dtype=torch.float32)
            factor = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1 if "bias" in name else 0.3
            values = values * factor + (weight.ndim == 1 and "bias" not in name)
            weight.copy_(values * (20 if "weights_proj" in name else 1))
    return module.eval()


def peer(kind):
    model, changes = PEERS[kind]
    config = model.config_class(**(SIZES | changes))
    config._attn_implementation = "eager"
    return randomised(model(config))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", PEERS)
def test_prefill_and_paged_decode_have_the_numbers_of_transformers(kind, tmp_path):
    theirs = peer(kind)
    theirs.save_pretrained(tmp_path)
    config, model = checkpoints.load(tmp_path, dtype=jnp.float32)
    assert checkpoints.config_to_json(config)["model_type"] == kind
    tokens, prompts, lengths = random_tokens(2, 21), (11, 7), (21, 10)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    found = nnx.jit(lambda model, tokens: model.logits(model.forward(tokens).hidden[0]))(model, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    logits, _ = decoded(model, tokens, prompts, lengths, config.selector_for(None))
    for request, (prompt, length) in enumerate(zip(prompts, lengths)):
        np.testing.assert_allclose(logits[request], expected[request, prompt - 1 : length], atol=1e-4, rtol=0)


def extra_tensors(layer, number):
    """Of a layer of transformers, under the names of released files."""
    tensors, prefix = {}, f"model.layers.{number}."
    for name, weight in layer.state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        values = weight.numpy()
        if "experts.gate_up_proj" in name:
            for expert, (gate, up) in enumerate(zip(*np.split(values, 2, axis=1))):
                tensors[f"{prefix}mlp.experts.{expert}.gate_proj.weight"] = np.ascontiguousarray(gate)
                tensors[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = np.ascontiguousarray(up)
        elif name == "mlp.experts.down_proj":
            tensors |= {f"{prefix}mlp.experts.{expert}.down_proj.weight": down for expert, down in enumerate(values)}
        else:
            tensors[prefix + name] = values
    return tensors


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_extra_layer_has_the_numbers_of_transformers(tmp_path):
    theirs = peer("deepseek_v3")
    norm, block = modeling_deepseek_v3.DeepseekV3RMSNorm, modeling_deepseek_v3.DeepseekV3DecoderLayer
    extra = randomised(MtpLayer(theirs.config, block, norm, 4))
    theirs.config.num_mtp_layers = 1
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    repeated = {"model.layers.4.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    safetensors.numpy.save_file(tensors | extra_tensors(extra, 4) | repeated, file)
    _, model = checkpoints.load(tmp_path, dtype=jnp.float32)

    tokens = random_tokens(2, 9)
    hidden = np.random.default_rng(1).standard_normal((2, 8, 32)).astype(np.float32)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8))
    found, _ = nnx.jit(lambda m, h, t, p: m.predict(h, t, p, m.causal, ()))(model, hidden, tokens[:, 1:], positions)
    at = torch.tensor(positions, dtype=torch.long)
    with torch.no_grad():
        embedded = theirs.model.embed_tokens(torch.tensor(tokens[:, 1:], dtype=torch.long))
        mask = torch.triu(torch.full((8, 8), -torch.inf), diagonal=1)[None, None]
        rotary = theirs.model.rotary_emb(embedded, position_ids=at)
        expected = extra(embedded, torch.tensor(hidden), rotary, mask, at, None)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4, rtol=0)
