"""What differs between the families of models that are trained here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.deepseek import Deepseek, DeepseekConfig
from models.ouro import Ouro, OuroConfig
from models.training import latent_objective, objective, promises

Config = OuroConfig | DeepseekConfig
Model = Ouro | Deepseek


class Family(NamedTuple):
    """How one kind of model is made, what it minimises, how it is judged."""

    fresh: Callable[..., Any]
    """(config, seed, options of the model) -> model, with weights to begin with"""
    loss: Callable[..., Any]
    """(model, tokens i[B, S], labels u8[B, S], key, objective, stage) -> (f32[], LossParts)"""
    judged: Callable[..., Any]
    """(model, tokens i32[B, S]) -> ce f32[U, B, S], correct bool[U, B, S], exit probabilities f32[U, B, S]"""
    learns: Callable[[tuple[Any, ...], Any], bool]
    """(path of a parameter, stage): whether it changes in that stage"""
    gates: Callable[[dict[str, Any]], dict[str, bool]]
    """(report of `quality.report`): the promises of the shipped model, and whether they are kept"""


def _fresh_ouro(config: OuroConfig, seed: int, **options: Any) -> Ouro:
    return Ouro(config, rngs=nnx.Rngs(seed), **options)


def _ouro_loss(model, tokens, labels, key, settings, stage):
    del stage  # there is one
    return objective.loss(model, tokens, labels, key, settings)


def _ouro_judged(model: Ouro, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    ce, correct, log_exits = objective.cross_entropy(model, tokens)
    return ce, correct, jnp.exp(log_exits)


OURO = Family(_fresh_ouro, _ouro_loss, _ouro_judged, lambda path, stage: True, promises.ouro)
LATENT = Family(
    latent_objective.fresh, latent_objective.loss, latent_objective.judged, latent_objective.learns, promises.latent
)


def of(config: Config) -> Family:
    """The family of a configuration."""
    return LATENT if isinstance(config, DeepseekConfig) else OURO
