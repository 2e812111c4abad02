"""What the card of a DeepSeek-style model says in other words than that of a looped one."""

from typing import Any

KIND = "DeepSeek-style model"
LOSSES = ((0, "-", "next byte"), (1, ":", "the one after"))
LOOKS = ((0, ":", "dense"), (1, "-", "indexer"))
"""Columns of the curves: place in a result, line style, words."""


def sizes(model: dict[str, Any]) -> str:
    """A paragraph about the sizes of a configuration."""
    experts, indexer = model["experts"], model["indexer"]
    rows = model["latent_dim"] + model["rope_dim"]
    return (
        f"{model['num_layers']} layers of width {model['hidden_size']}, the first with an MLP of "
        f"{model['intermediate_size']}, the others with {experts['count']} experts of {experts['width']}, of which a "
        f"token takes {experts['per_token']} and one that all share; and {model['mtp_layers']} layer that predicts the "
        f"byte after the next.\nLatent attention: {model['num_heads']} heads read cached rows of {rows} numbers "
        f"({model['rope_dim']} of them the rotary key). Indexer: {indexer['heads']} heads of {indexer['head_dim']}, "
        f"which choose {indexer['topk']} tokens."
    )


def ways(config: dict[str, Any]) -> str:
    """What the columns of a result are."""
    return f"read densely / read by the indexer's choice of {config['model']['indexer']['topk']} tokens"


def loss(goal: dict[str, Any]) -> str:
    """A line about the objective."""
    return (
        f"- Loss: cross entropy, plus {goal['extra']:g} times that of the extra layer, plus in each layer the "
        "divergence of the indexer from the heads' mean attention; experts are balanced by the router's bias"
    )


def stage(phase: dict[str, Any]) -> str:
    """The end of the line about a phase."""
    words = {"indexer": "; only the indexer learns", "sparse": "; attention to the indexer's choice"}
    size = f", {phase['tokens']:,} bytes a step" if phase.get("tokens") else ""
    return words.get(phase.get("stage", "dense"), "") + size
