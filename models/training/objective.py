"""The training objective of Ouro: expected loss over the exit distribution, with a floor and an entropy reward.

    loss = sum over tokens w * [ (1 - f) * sum_u p_u CE_u  +  f * sum_u s_u CE_u  -  beta * H(p) ]  /  sum over tokens w

p is the exit distribution of the token, s fixed shares of the loops (every loop must give usable logits), w the weight
of the label of the byte to predict. A byte of a label `tasks.BEHIND` + d has the digit d as its target, not itself: see
`models.tasks`. The formulation without the floor: Ouro, arXiv 2510.25741.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import tasks
from models.exit_gate import exit_log_probabilities
from models.ouro import Ouro

LABEL_WEIGHTS = (0.0, 1.0, 0.5, 0.25, 4.0, 12.0, 6.0)
"""Weights by label of `models.tasks`; the last one for all from BEHIND on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Weights of the loss. `label_weights` go by label: see `models.tasks`."""

    floor: float = 0.2  # f
    shares: tuple[float, ...] = (0.1, 0.15, 0.25, 0.5)  # s_u, normalised; late loops more, to be worth their time
    entropy: float = 0.1  # beta
    label_weights: tuple[float, ...] = LABEL_WEIGHTS
    dropout: float = 0.1  # of both branches of every layer, in plain text alone

    def __post_init__(self) -> None:
        check_dropout(self.dropout)


class LossParts(NamedTuple):
    """What a step reports: means over its tokens."""

    loss: jax.Array  # f32[]
    ce: jax.Array  # f32[4, U] nats a byte; rows as in REPORTED, NaN where there is no such byte
    exits: jax.Array | None  # f32[4, U] mean exit probabilities at the same bytes; None where there are no exits
    others: dict[str, jax.Array] | None = None  # f32[] each, by the name that the log gives them


REPORTED = (tasks.TEXT, tasks.ANSWER, tasks.CHAIN, tasks.BEHIND)
"""Rows of `LossParts`: text, answers, chain answers, digits behind links."""


def check_dropout(rate: float) -> None:
    """Raises ValueError unless 0 <= rate < 1."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {rate}")


class DroppedBranch:
    """A branch of a layer, or its closing norm, followed by dropout."""

    def __init__(self, branch: Any, mask: jax.Array):
        self.branch, self.mask = branch, mask

    def __call__(self, *arguments: Any) -> Any:
        """What the branch gives, its first result dropped."""
        result = self.branch(*arguments)
        return (result[0] * self.mask, *result[1:]) if isinstance(result, tuple) else result * self.mask


def drop_branches(
    layers: Iterable[Any],
    names: tuple[str, ...],
    key: jax.Array,
    rows: jax.Array,
    like: jax.ShapeDtypeStruct,
    rate: float,
) -> None:
    """Let dropout follow the named branches of layers, of a model of this trace alone, in the rows of bool[B].

    like: what a branch gives, [B, S, H]. rate: from 0 up and below 1, rounded to 256ths, at most 255 of them. One mask
    serves all loops, as over the steps of a recurrent net.
    """
    dropped = min(round(256 * rate), 255)
    for layer in layers:
        for name in names:
            key, draw = jax.random.split(key)
            kept = jax.random.bits(draw, like.shape, jnp.uint8) >= dropped  # a byte is enough and costs a quarter
            mask = jnp.where(rows[:, None, None], kept * (256 / (256 - dropped)), 1.0).astype(like.dtype)
            setattr(layer, name, DroppedBranch(getattr(layer, name), mask))


def goals(tokens: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of tokens and labels i32[B, S]: what each position is to predict, and the label of that, up to BEHIND."""
    label = jnp.roll(labels, -1, axis=1).at[:, -1].set(tasks.UNKNOWN)
    digit = ord("0") + label - tasks.BEHIND
    targets = jnp.where(label >= tasks.BEHIND, digit, jnp.roll(tokens, -1, axis=1))
    return targets, jnp.minimum(label, tasks.BEHIND)


def token_losses(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross entropy f32[..., B, S], and whether the target i32[B, S] is the arg max of logits f32[..., B, S, V]."""
    # A masked sum: the gradient of a gather is a scatter-add, which is slow on a GPU.
    hit = jax.lax.broadcasted_iota(jnp.int32, (*targets.shape, logits.shape[-1]), 2) == targets[..., None]
    target_logit = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - target_logit, target_logit >= jnp.max(logits, axis=-1)


def weights(label: jax.Array, by_label: tuple[float, ...]) -> jax.Array:
    """The weight f32[B, S] of labels i32[B, S] up to BEHIND."""
    return sum((value * (label == index) for index, value in enumerate(by_label)), start=jnp.zeros((), jnp.float32))


def weighted(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Weighted mean of f32[B, S]."""
    return jnp.sum(weight * values) / jnp.maximum(jnp.sum(weight), 1.0)


def by_kind(values: jax.Array, label: jax.Array) -> jax.Array:
    """Means of f32[U, B, S] over the bytes of each kind -> f32[4, U], rows as in REPORTED."""
    kind = jnp.stack([label == reported for reported in REPORTED]).astype(jnp.float32)  # [4, B, S]
    return jnp.einsum("ubs,kbs->ku", values, kind, precision="highest") / kind.sum(axis=(1, 2))[:, None]


def cross_entropy(
    model: Ouro, tokens: jax.Array, targets: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss of every loop for tokens i32[B, S] and targets i32[B, S], by default the next tokens.

    Returns ce f32[U, B, S], correct bool[U, B, S] (the target is the arg max) and log exit probabilities f32[U, B, S].
    Entry s is about token s + 1; the last one means nothing.
    """
    if targets is None:
        targets = jnp.roll(tokens, -1, axis=1)
    out = model.forward(tokens)
    ce, correct = token_losses(model.logits(out.hidden), targets)
    return ce, correct, exit_log_probabilities(out.gate_logits)


def loss(model: Ouro, tokens: jax.Array, labels: jax.Array, key: jax.Array, objective: Objective):
    """The objective for tokens i[B, S] and their labels u8[B, S] -> (f32[], LossParts).

    Dropout changes `model`, which must be one of this trace alone, fresh from `nnx.merge`.
    """
    tokens, labels = tokens.astype(jnp.int32), labels.astype(jnp.int32)
    if objective.dropout > 0:
        like = jax.ShapeDtypeStruct((*tokens.shape, model.config.hidden_size), model.dtype)
        names = "input_layernorm_2", "post_attention_layernorm_2"  # the closing norms
        drop_branches(model.layers, names, key, labels[:, 1] == tasks.TEXT, like, objective.dropout)
    targets, label = goals(tokens, labels)
    ce, _, log_exits = cross_entropy(model, tokens, targets)
    exits = jnp.exp(log_exits)
    weight = weights(label, objective.label_weights)
    shares = jnp.asarray(objective.shares, jnp.float32)[:, None, None] / sum(objective.shares)
    token_loss = jnp.sum(
        ((1 - objective.floor) * exits + objective.floor * shares) * ce + objective.entropy * exits * log_exits, axis=0
    )
    total = weighted(token_loss, weight)
    means, exit_means = (jax.lax.stop_gradient(by_kind(values, label)) for values in (ce, exits))
    return total, LossParts(total, means, exit_means)
