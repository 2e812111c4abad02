"""The training objective of a DeepSeek-style model: next tokens, the tokens after them, and its indexer.

    loss = mean of w * CE  +  f * mean of w * CE of the extra layer, one token further  +  sum of divergences

w is the weight of the label of the byte to predict, see `models.tasks`. The divergence of each layer's indexer, and
what is seen in which stage: `models.training.latent_attends`. In the stage "indexer" the divergences are all the loss.
The router's bias goes down by a fixed amount for experts that get more than their share, and up for the others: that
amount stands where its gradient would, so the optimiser moves it like everything else.

Source: DeepSeek-V3, arXiv 2412.19437 (extra layer, balancing without a loss), DeepSeek-V3.2 (indexer).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models import tasks
from models.deepseek import Deepseek, DeepseekConfig
from models.experts import MixtureOfExperts
from models.training import objective
from models.training.latent_attends import Stage, attend_in
from models.training.objective import LABEL_WEIGHTS, LossParts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentObjective:
    """Weights of the loss. `label_weights` go by label: see `models.tasks`."""

    extra: float = 0.2  # f
    label_weights: tuple[float, ...] = LABEL_WEIGHTS
    dropout: float = 0.1  # of both branches of every layer, in plain text alone

    def __post_init__(self) -> None:
        objective.check_dropout(self.dropout)


def fresh(config: DeepseekConfig, seed: int, **options: Any) -> Deepseek:
    """A model to train: embeddings of size 1, branches that add little at first, a quiet head."""
    model = Deepseek(config, rngs=nnx.Rngs(seed), **options)
    sizes = {"embed_tokens": config.hidden_size**0.5, "lm_head": 0.5, "o_proj": 0.3, "down_proj": 0.3}

    def scaled(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return leaf * next((size for part, size in sizes.items() if part in name), 1.0)

    graph, params = nnx.split(model)
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(scaled, params))


class BalancedExperts:
    """The experts of a layer, which note who gets the tokens. It lives in one trace."""

    def __init__(self, experts: MixtureOfExperts):
        self.experts = experts
        self.busiest = self.pull = jnp.zeros((), jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [B, S, H] to [B, S, H], as the experts do."""
        gate, flat = self.experts.gate, x.reshape(-1, x.shape[-1])
        ids, weights = gate(flat)
        experts = jnp.arange(gate.config.count)
        share = jnp.mean(ids[..., None] == experts, axis=(0, 1), dtype=jnp.float32) * gate.config.count
        self.busiest = share.max()  # 1: all get the same
        bias = gate.e_score_correction_bias[...]
        # Small, so that the norm of all gradients does not see it; the optimiser takes its sign and no more.
        pull = 1e-5 * jnp.sum(jnp.sign(share - 1.0) * bias)
        self.pull = pull - jax.lax.stop_gradient(pull)
        out = self.experts.experts(flat, ids, weights).reshape(x.shape)
        return out + self.experts.shared_experts(x) if gate.config.shared else out


class Forward(NamedTuple):
    """What a forward pass of all layers gives."""

    hidden: jax.Array  # [B, S, H]
    further: jax.Array | None  # [B, S, H] of the extra layer; None without one
    divergences: tuple[jax.Array, ...]  # f32[] of each layer whose indexer learns


def forward(model: Deepseek, tokens: jax.Array, stage: Stage, *, further: bool = True) -> Forward:
    """All layers, and with `further` the first extra one, over tokens i32[B, S]."""
    config = model.config
    if config.indexer is None:
        raise ValueError("training needs a model with an indexer")
    attend = attend_in(stage, config.indexer.topk, model.attention)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    # The gradient of a gather is a scatter-add, which is slow on a GPU.
    table = model.embed_tokens[...].astype(model.dtype)
    embedded = jax.nn.one_hot(tokens, config.vocab_size, dtype=model.dtype) @ table
    out, divergences = model.loops(embedded, positions, attend, ())
    if not (further and len(model.extra)):
        return Forward(out.hidden[0], None, divergences)
    following, plane = jnp.roll(embedded, -1, axis=1), jnp.int32(config.num_layers)
    drafted, divergences = model.extra[0](out.hidden[0], following, positions, plane, attend, divergences)
    return Forward(out.hidden[0], drafted, divergences)


def prepare(model: Deepseek, key: jax.Array, rows: jax.Array, length: int, rate: float) -> list[BalancedExperts]:
    """Give a model (one that lives in this trace only) dropout in the rows of bool[B] and experts that take notes."""
    noting, layers = [], [*model.layers, *(extra.layer for extra in model.extra)]
    for layer in layers:
        if isinstance(layer.mlp, MixtureOfExperts):
            noting.append(BalancedExperts(layer.mlp))
            layer.mlp = noting[-1]  # type: ignore[assignment]
    if rate > 0:
        like = jax.ShapeDtypeStruct((*rows.shape, length, model.config.hidden_size), model.dtype)
        objective.drop_branches(layers, ("self_attn", "mlp"), key, rows, like, rate)
    return noting


def loss(
    model: Deepseek, tokens: jax.Array, labels: jax.Array, key: jax.Array, settings: LatentObjective, stage: Stage
) -> tuple[jax.Array, LossParts]:
    """The objective for tokens i[B, S] and their labels u8[B, S] -> (f32[], LossParts).

    `ce` has a column for the next token and one for the token after it. Changes `model`, which must be one of this
    trace alone, fresh from `nnx.merge`.
    """
    tokens, labels = tokens.astype(jnp.int32), labels.astype(jnp.int32)
    rate = 0.0 if stage == "indexer" else settings.dropout
    noting = prepare(model, key, labels[:, 1] == tasks.TEXT, tokens.shape[1], rate)
    targets, label = objective.goals(tokens, labels)
    weight = objective.weights(label, settings.label_weights)
    out = forward(model, tokens, stage)
    ce, _ = objective.token_losses(model.logits(out.hidden), targets)
    total = objective.weighted(ce, weight)
    further = ce
    if out.further is not None:
        further, _ = objective.token_losses(model.logits(out.further), jnp.roll(targets, -1, axis=1))
        total = total + settings.extra * objective.weighted(further, jnp.roll(weight, -1, axis=1).at[:, -1].set(0.0))
        further = jnp.roll(further, 1, axis=1)  # back to the label that it is about; the first one means nothing
    divergence = sum(out.divergences, start=jnp.zeros((), jnp.float32))
    total = divergence if stage == "indexer" else total + divergence + sum(each.pull for each in noting)
    others = {"divergence": divergence / max(len(out.divergences), 1)}
    if noting:
        others["busiest expert"] = jnp.stack([each.busiest for each in noting]).max()
    reported = objective.by_kind(jnp.stack([ce, further]), label)
    return total, LossParts(*jax.lax.stop_gradient((total, reported, None, others)))


def learns(path: tuple[Any, ...], stage: Stage) -> bool:
    """Whether a parameter changes in a stage."""
    of_indexer = "indexer" in jax.tree_util.keystr(path)
    return stage == "sparse" or of_indexer == (stage == "indexer")


def judged(model: Deepseek, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores of tokens i32[B, S] read densely and through the indexer's choice: the two rows of each result.

    Returns ce f32[2, B, S], correct bool[2, B, S], and zeros, as there are no loops to leave. Entry s is about token
    s + 1.
    """
    stages: tuple[Stage, ...] = ("dense", "sparse")
    hidden = jnp.stack([forward(model, tokens, stage, further=False).hidden for stage in stages])
    ce, correct = objective.token_losses(model.logits(hidden), jnp.roll(tokens, -1, axis=1))
    return ce, correct, jnp.zeros_like(ce)
