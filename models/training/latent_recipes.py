"""Presets of DeepSeek-style models: `deepseek_tiny`, which is shipped, and `deepseek_smoke` for tests.

Three stages, see `models.training.latent_attends`: the language model with dense attention, its indexer alone, then
both with sparse attention. The rate comes down over the last two, so that the model settles with what it will read.
"""

import dataclasses
from typing import Any

from models.deepseek_config import DeepseekConfig, IndexerConfig
from models.experts import ExpertsConfig
from models.tasks import Mixture
from models.training.latent_objective import LatentObjective
from models.training.recipes import Phase, TrainConfig

TINY = DeepseekConfig(
    vocab_size=264,
    hidden_size=256,
    intermediate_size=640,
    num_layers=4,
    num_heads=4,
    nope_dim=64,
    rope_dim=32,
    v_dim=64,
    latent_dim=96,
    q_rank=96,
    max_positions=4096,
    experts=ExpertsConfig(count=8, per_token=2, width=128, shared=1),
    first_dense=1,
    indexer=IndexerConfig(heads=4, head_dim=64, topk=128),
    mtp_layers=1,
    bos_id=256,
    stop_ids=(257,),
)
"""The shipped model: 4 layers and one that drafts, 5,563,848 parameters."""


def curriculum() -> tuple[Phase, ...]:
    """Short sequences first, then every length up to 4,096; retrieval above all, few and short chains."""
    kinds = (0.2, 0.6, 0.2)
    begin = Mixture(text=0.3, chains=0.1, dense=1.0, guided=1.0, max_hops=1, max_keys=4, kinds=kinds)
    more = Mixture(text=0.35, chains=0.1, guided=1.0, max_hops=2, kinds=kinds)
    late = Mixture(text=0.45, chains=0.05, guided=1.0, max_hops=2, kinds=kinds)
    less = 16_384  # scores of every pair of tokens are kept for the gradients
    return (
        Phase(0.10, ((256, 1.0),), begin),
        Phase(0.30, ((256, 0.5), (512, 0.3), (2048, 0.2)), more),
        Phase(0.60, ((512, 0.3), (2048, 0.55), (4096, 0.15)), late),
        Phase(0.72, ((2048, 0.8), (4096, 0.2)), late, "indexer", less),
        Phase(1.00, ((2048, 0.8), (4096, 0.2)), late, "sparse", less),
    )


def deepseek_tiny(**changes) -> TrainConfig:
    """The run that makes deepseek-tiny on one H200."""
    settings: dict[str, Any] = {
        "model": TINY,
        "phases": curriculum(),
        "objective": LatentObjective(),
        "decay_from": 0.5,
        "checkpoint_every": 1_000,
        "evaluation_tasks": ("passkey", "keys4", "keys8", "copy16"),
        "name": "deepseek-tiny",
    } | changes
    if settings.get("steps") is None:
        settings.setdefault("minutes", 4.0)
    return TrainConfig(**settings)


def deepseek_smoke(**changes) -> TrainConfig:
    """Thirty steps of a very small model on short sequences, for a CPU."""
    model = dataclasses.replace(
        TINY,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        nope_dim=16,
        rope_dim=8,
        v_dim=16,
        latent_dim=24,
        q_rank=24,
        max_positions=128,
        experts=ExpertsConfig(count=4, per_token=2, width=16, shared=1),
        indexer=IndexerConfig(heads=2, head_dim=16, topk=16),
    )
    mixture = Mixture(text=0.5, chains=0.1, max_hops=1, max_keys=1)
    settings: dict[str, Any] = {
        "model": model,
        "phases": (
            Phase(0.4, ((64, 1.0),), mixture),
            Phase(0.7, ((64, 1.0),), mixture, "indexer", 256),
            Phase(1.0, ((64, 1.0),), mixture, "sparse", 256),
        ),
        "objective": LatentObjective(),
        "tokens_per_step": 512,
        "warmup": 5,
        "dtype": "float32",
        "workers": 0,
        "quick_evaluations": 0,
        "evaluation_tasks": (),
        "evaluation_lengths": (64,),
        "evaluation_count": 4,
        "evaluation_tokens": 1024,
        "name": "deepseek-smoke",
    } | changes
    if settings.get("minutes") is None:
        settings.setdefault("steps", 30)
    return TrainConfig(**settings)
