"""The models that most tests use."""

from models.llama import LlamaConfig
from models.ouro import InitConfig, OuroConfig


def small_ouro(**changes) -> OuroConfig:
    """2 layers, 4 loops, grouped heads, some 30,000 parameters."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_positions": 128}
    init = InitConfig(embedding_std=1.0, matrix_std=1.0, head_std=1.0, scale_by_fan_in=True, branch_norm=0.5)
    return OuroConfig(**(sizes | heads | {"bos_id": None, "stop_ids": (), "init": init} | changes))


def small_llama(**changes) -> LlamaConfig:
    """3 layers, groups of 3 query heads as in SmolLM2, some 30,000 parameters."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 3}
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "max_positions": 128}
    return LlamaConfig(**(sizes | heads | {"rope_theta": 1e4} | changes))
