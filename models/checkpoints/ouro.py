"""Ouro in Hugging Face names: `config.json` and tensors."""

from typing import Any

from models.checkpoints import fields
from models.ouro import InitConfig, OuroConfig

ALLOWED: dict[str, tuple[Any, ...]] = {
    "model_type": ("ouro",),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "tie_word_embeddings": (False,),
    "use_sliding_window": (False,),
    "attention_bias": (False,),
}


def config_from_json(data: dict[str, Any]) -> OuroConfig:
    """The configuration of `config.json`. Raises CheckpointError for what this model does not compute."""
    fields.require_fields(data)
    fields.refuse_other_computations("Ouro", data, ALLOWED)
    stops = fields.stop_ids(data)
    if stops & {0, 2}:  # the released files say 0, chat ends with 2, one converted copy says 2
        stops |= {0, 2}
    std = data.get("initializer_range", 0.02)
    return OuroConfig(
        **fields.common_sizes(data, theta=1e6, eps=1e-6, positions=65_536),
        loops=data.get("total_ut_steps", 4),
        exit_threshold=float(data.get("early_exit_threshold", 1.0)),
        exit_step=data.get("early_exit_step"),
        stop_ids=tuple(sorted(stops)),
        init=InitConfig(embedding_std=std, matrix_std=std, head_std=std, gate_std=std),
    )


def config_to_json(config: OuroConfig) -> dict[str, Any]:
    """The fields of `config.json`."""
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        **fields.common_json(config),
        "total_ut_steps": config.loops,
        "early_exit_threshold": config.exit_threshold,
        "early_exit_step": config.exit_step,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.num_layers,
    }


def tensor_names(path: tuple[Any, ...], config: OuroConfig) -> str:
    """The checkpoint's name of a parameter: ('layers', 0, 'mlp', 'up_proj') -> model.layers.0.mlp.up_proj.weight."""
    del config
    parts = [str(part) for part in path]
    if parts[-1] not in ("weight", "bias"):
        parts.append("weight")
    return ".".join(parts if parts[0] == "lm_head" else ["model", *parts])
