"""DeepSeek-V3, DeepSeek-V3.2 and GLM-5 in Hugging Face names: `config.json` and tensors."""

import re
from typing import Any

from models.checkpoints import fields, fp8_blocks
from models.checkpoints.errors import CheckpointError
from models.deepseek_config import DeepseekConfig, IndexerConfig
from models.experts import ExpertsConfig
from models.rotary import Yarn

ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}
"""By `model_type`: without indexer, with one whose rotary pairs are halves apart, with one whose pairs are adjacent."""

ALLOWED: dict[str, tuple[Any, ...]] = {
    "model_type": tuple(ARCHITECTURES),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}

NEEDED = (
    *fields.NEEDED,
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)

YARN = {"factor": "factor", "original_max_position_embeddings": "original_positions"} | {
    name: name for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
}
"""Field of `config.json` -> field of `Yarn`."""


def config_from_json(data: dict[str, Any]) -> DeepseekConfig:
    """The configuration of `config.json`. Raises CheckpointError for what this model does not compute."""
    fields.require_fields(data, NEEDED)
    special = ("rope_parameters", "rope_scaling", "layer_types")
    fields.refuse_other_computations("DeepSeek", {k: v for k, v in data.items() if k not in special}, ALLOWED)
    stored = data.get("quantization_config") or {}
    if stored and (stored.get("quant_method"), stored.get("weight_block_size")) != ("fp8", [fp8_blocks.BLOCK] * 2):
        raise CheckpointError(f"config.json says quantization_config = {stored} (supported: fp8, blocks of 128 x 128)")
    rope = fields.rope_fields(data) or data.get("rope_scaling") or {}
    try:
        return DeepseekConfig(
            vocab_size=data["vocab_size"],
            hidden_size=data["hidden_size"],
            intermediate_size=data["intermediate_size"],
            num_layers=data["num_hidden_layers"],
            num_heads=data["num_attention_heads"],
            nope_dim=data["qk_nope_head_dim"],
            rope_dim=data["qk_rope_head_dim"],
            v_dim=data["v_head_dim"],
            latent_dim=data["kv_lora_rank"],
            q_rank=data.get("q_lora_rank"),
            rope_theta=float(rope.get("rope_theta", data.get("rope_theta", 1e4))),
            rope_interleaved=data.get("rope_interleave", True),
            yarn=_yarn(rope),
            norm_eps=data.get("rms_norm_eps", 1e-6),
            max_positions=data.get("max_position_embeddings", 4096),
            experts=_experts(data),
            first_dense=_first_dense(data),
            indexer=_indexer(data),
            mtp_layers=data.get("num_nextn_predict_layers", data.get("num_mtp_layers")) or 0,
            bos_id=data.get("bos_token_id"),
            stop_ids=tuple(sorted(fields.stop_ids(data))),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"config.json does not fit together: {error}") from error


def _yarn(rope: dict[str, Any]) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    other = {name: rope[name] for name in ("attention_factor", "truncate") if rope.get(name) not in (None, True)}
    if kind != "yarn" or rope.get("factor") is None or other:
        raise CheckpointError(
            f"config.json asks for rotary positions of the kind {kind!r} with {other or rope}; supported: 'default', "
            "and 'yarn' with a factor and the usual ramp"
        )
    # mscale that is not there means another amplitude than 1, see `Yarn.amplitude`.
    absent = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 0}
    values: dict[str, Any] = {name: rope.get(name) or absent.get(name, 0) for name in YARN}
    values |= {name: float(value) for name, value in values.items() if name != "original_max_position_embeddings"}
    return Yarn(**{YARN[name]: value for name, value in values.items()})


def _experts(data: dict[str, Any]) -> ExpertsConfig | None:
    if not data.get("n_routed_experts"):
        return None
    fields.require_fields(data, ("num_experts_per_tok", "moe_intermediate_size"))
    return ExpertsConfig(
        count=data["n_routed_experts"],
        per_token=data["num_experts_per_tok"],
        width=data["moe_intermediate_size"],
        shared=data.get("n_shared_experts") or 0,
        groups=data.get("n_group") or 1,
        groups_chosen=data.get("topk_group") or 1,
        scale=float(data.get("routed_scaling_factor", 1.0)),
        normalised=data.get("norm_topk_prob", True),
    )


def _first_dense(data: dict[str, Any]) -> int:
    kinds = data.get("mlp_layer_types")
    if kinds is None:
        return data.get("first_k_dense_replace", 0)
    first = (kinds + ["sparse"]).index("sparse")
    if kinds[first:] != ["sparse"] * (len(kinds) - first) or set(kinds[:first]) - {"dense"}:
        raise CheckpointError(f"config.json says mlp_layer_types = {kinds} (supported: dense ones, then sparse ones)")
    return first


def _indexer(data: dict[str, Any]) -> IndexerConfig | None:
    kind = data.get("model_type")
    if kind == "deepseek_v3":
        return None
    fields.require_fields(data, ("index_n_heads", "index_head_dim", "index_topk"))
    pattern = data.get("indexer_types") or data.get("index_topk_pattern")
    return IndexerConfig(
        heads=data["index_n_heads"],
        head_dim=data["index_head_dim"],
        topk=data["index_topk"],
        interleaved=data.get("indexer_rope_interleave", kind == "glm_moe_dsa"),
        hadamard=data.get("index_hadamard", False),
        freq=data.get("index_topk_freq") or 1,
        offset=data.get("index_skip_topk_offset", 2),
        pattern=pattern if isinstance(pattern, str | None) else tuple(pattern),
    )


def config_to_json(config: DeepseekConfig) -> dict[str, Any]:
    """The fields of `config.json`."""
    indexer, experts = config.indexer, config.experts
    kind = "deepseek_v3" if indexer is None else "glm_moe_dsa" if indexer.interleaved else "deepseek_v32"
    rope: dict[str, Any] | None = None
    if config.yarn is not None:
        rope = {"type": "yarn", **{name: getattr(config.yarn, field) for name, field in YARN.items()}}
    data: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **fields.common_json(config),
        "num_key_value_heads": config.num_heads,
        "head_dim": config.rope_dim,
        "rope_scaling": rope,
        "rope_interleave": config.rope_interleaved,
        "q_lora_rank": config.q_rank,
        "kv_lora_rank": config.latent_dim,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.v_dim,
        "first_k_dense_replace": config.first_dense,
        "num_nextn_predict_layers": config.mtp_layers,
        "n_routed_experts": None if experts is None else experts.count,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    if experts is not None:
        data |= {
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.width,
            "n_shared_experts": experts.shared,
            "n_group": experts.groups,
            "topk_group": experts.groups_chosen,
            "routed_scaling_factor": experts.scale,
            "norm_topk_prob": experts.normalised,
        }
    if indexer is not None:
        data |= {
            "index_n_heads": indexer.heads,
            "index_head_dim": indexer.head_dim,
            "index_topk": indexer.topk,
            "index_hadamard": indexer.hadamard,
            "index_topk_freq": indexer.freq,
            "index_skip_topk_offset": indexer.offset,
            "index_topk_pattern": indexer.pattern,
        }
    return data


def tensor_names(path: tuple[Any, ...], config: DeepseekConfig) -> str | list[str]:
    """The checkpoint's name of a parameter; of the stacked experts, the name for each of them.

    ('layers', 3, 'mlp', 'experts', 'up_proj') -> [model.layers.3.mlp.experts.0.up_proj.weight, ...]. The extra layers
    follow the others; embedding and head are not theirs.
    """
    parts = [str(part) for part in path]
    if parts[0] == "extra":
        parts[:2] = ["layers", str(config.num_layers + int(parts[1]))]
        if parts[2] == "layer":
            del parts[2]
        elif parts[2] == "norm":
            parts.insert(2, "shared_head")
    if parts[-1] not in ("weight", "bias", "e_score_correction_bias"):
        parts.append("weight")
    name = ".".join(parts if parts[0] == "lm_head" else ["model", *parts])
    if ".experts." in name:
        assert config.experts is not None
        return [name.replace(".experts.", f".experts.{n}.") for n in range(config.experts.count)]
    return name


def ignored(name: str, config: DeepseekConfig) -> bool:
    """Whether a tensor of an extra layer is not needed: the layer is not asked for, or it repeats embedding or head."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    if found is None or int(found[1]) < config.num_layers:
        return False
    repeated = name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
    return repeated or int(found[1]) >= config.num_layers + config.mtp_layers
