"""The exit gate of Ouro: from one number per token and loop to the loop whose hidden state gives the logits.

    lambda_u = sigmoid(g_u)
    p_u      = lambda_u * prod_{i < u} (1 - lambda_i)          the last loop takes the rest
    CDF_u    = 1 - prod_{i <= u} (1 - lambda_i)
    exit     = first u with CDF_u >= threshold, else the last loop

All loops are always computed: the gate only selects a hidden state, so it saves no time.
"""

from typing import Any

import jax
import jax.numpy as jnp

from models.interface import ModelConfig


def log_stay(gate_logits: jax.Array) -> jax.Array:
    """Log of prod_{i <= u} (1 - lambda_i) for gate_logits [U, ...] -> f32[U, ...]; exact where lambda rounds to 1."""
    return jnp.cumsum(jax.nn.log_sigmoid(-gate_logits.astype(jnp.float32)), axis=0)


def exit_log_probabilities(gate_logits: jax.Array) -> jax.Array:
    """Log of p_u for gate_logits [U, ...] -> f32[U, ...]; finite for finite gates, with a finite gradient.

    The p_u of a token sum to 1.
    """
    stay = log_stay(gate_logits)
    before = jnp.concatenate([jnp.zeros_like(stay[:1]), stay[:-1]])  # log prod_{i < u} (1 - lambda_i)
    leave = jax.nn.log_sigmoid(gate_logits.astype(jnp.float32))
    return before + leave.at[-1].set(0.0)


def exit_loop(gate_logits: jax.Array, *, threshold: float = 1.0, step: int | None = None) -> jax.Array:
    """The loop at which each token leaves: gate_logits [U, ...] -> i32[...] in 0 .. U-1.

    An explicit `step` goes before the threshold. A threshold of 1 or more means fixed depth, also where the CDF
    rounds to 1 before the last loop.
    Raises ValueError for a step that is no loop and for a threshold below 0 or NaN.
    """
    last = gate_logits.shape[0] - 1
    if step is not None and not 0 <= step <= last:
        raise ValueError(f"exit step must be a loop from 0 to {last}, got {step}")
    if not threshold >= 0:
        raise ValueError(f"exit threshold must be 0 or more (1 and above: fixed depth), got {threshold}")
    if step is not None or threshold >= 1.0:
        return jnp.full(gate_logits.shape[1:], last if step is None else step, jnp.int32)
    cdf = -jnp.expm1(log_stay(gate_logits))
    return jnp.argmax((cdf >= threshold).at[-1].set(True), axis=0).astype(jnp.int32)


def chosen_exit(config: ModelConfig, threshold: float | None, step: int | None) -> dict[str, Any]:
    """The options of `select_exit`: the caller's, or the model's for those that are None; a threshold goes alone.

    Raises ValueError for an exit that the caller wants from a model of one loop.
    """
    if config.loops == 1 and not (threshold is None and step is None):
        given = {"exit_threshold": threshold, "exit_step": step}
        told = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise ValueError(f"{told}: an exit is among the loops of a looped model, and this model has one")
    if threshold is None and step is None:
        step = config.exit_step
    return {"threshold": config.exit_threshold if threshold is None else threshold, "step": step}


def select_exit(
    hidden: jax.Array, gate_logits: jax.Array, *, threshold: float = 1.0, step: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The hidden state of each token's exit loop: hidden [U, ..., H], gate_logits [U, ...] -> ([..., H], i32[...]).

    Raises ValueError for shapes that do not agree, and where `exit_loop` does.
    """
    if hidden.shape[:-1] != gate_logits.shape:
        raise ValueError(f"hidden {hidden.shape} and gate_logits {gate_logits.shape} must agree up to the last axis")
    loop = exit_loop(gate_logits, threshold=threshold, step=step)
    return jnp.take_along_axis(hidden, loop[None, ..., None], axis=0)[0], loop
