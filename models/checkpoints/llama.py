"""Llama-style models in Hugging Face names: `config.json` and tensors."""

from typing import Any

from models.checkpoints import fields
from models.llama import LlamaConfig

ALLOWED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
}

LAYER_TENSORS = {
    "input_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
"""Stacked parameter -> name inside a layer."""

OTHER_TENSORS = {"embed_tokens": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}


def config_from_json(data: dict[str, Any]) -> LlamaConfig:
    """The configuration of `config.json`. Raises CheckpointError for what this model does not compute."""
    fields.require_fields(data)
    fields.refuse_other_computations("Llama", data, ALLOWED)
    return LlamaConfig(
        **fields.common_sizes(data, theta=1e4, eps=1e-6, positions=2048),
        tied_embeddings=data.get("tie_word_embeddings", False),
        stop_ids=tuple(sorted(fields.stop_ids(data))),
    )


def config_to_json(config: LlamaConfig) -> dict[str, Any]:
    """The fields of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **fields.common_json(config),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied_embeddings,
    }


def tensor_names(path: tuple[Any, ...], config: LlamaConfig) -> str | list[str]:
    """The checkpoint's name of a parameter; of a stacked one, the name for each layer.

    ('layers', 'up_proj') -> [model.layers.0.mlp.up_proj.weight, ...]. A tied head is the embedding and has no tensor.
    """
    if path[0] == "layers":
        return [f"model.layers.{n}.{LAYER_TENSORS[path[1]]}.weight" for n in range(config.num_layers)]
    return f"{OTHER_TENSORS[path[0]]}.weight"
