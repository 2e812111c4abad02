"""Mixture of experts of DeepSeek-V3: a router that picks k of E experts for each token, and experts that all share.

    s = sigmoid(router x)                                one score for each expert, float32
    the groups whose two best s + b sum highest stay; of their experts, the k best by s + b are chosen
    g = s of the chosen, divided by their sum, times `scale`
    y = sum_e g_e expert_e(x) + shared(x)

The bias b balances the load: it changes who is chosen, never with which weight, and no gradient reaches it.
Legend: M tokens, H hidden width, I width of an expert, E experts, k experts of a token.

Source: DeepSeek-V3, arXiv 2412.19437.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers import MLP, check_at_least_one, matrix

HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Sizes of the experts. `groups` of the same size, of which `groups_chosen` may give experts to a token."""

    count: int  # E
    per_token: int  # k
    width: int  # I
    shared: int = 1  # experts that every token takes, stored as one of `shared * width`
    groups: int = 1
    groups_chosen: int = 1
    scale: float = 1.0
    normalised: bool = True

    def __post_init__(self):
        check_at_least_one(self, "count", "per_token", "width", "groups", "groups_chosen")
        if self.shared < 0:
            raise ValueError(f"shared must be at least 0, got {self.shared}")
        if self.count % self.groups or self.groups_chosen > self.groups:
            raise ValueError(
                f"{self.count} experts do not fall into {self.groups} groups of which {self.groups_chosen} are chosen"
            )
        if self.per_token > self.groups_chosen * (self.count // self.groups):
            raise ValueError(
                f"per_token is {self.per_token}, but {self.groups_chosen} of {self.groups} groups hold "
                f"{self.groups_chosen * (self.count // self.groups)} of the {self.count} experts"
            )


class Balance(nnx.Param):
    """A parameter that a rule of its own moves, not a gradient: the router's bias."""


def route(scores: jax.Array, bias: jax.Array, config: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """The experts of each token: scores f32[M, E] in 0 .. 1 -> (ids i32[M, k], weights f32[M, k]).

    bias f32[E]. Ties go to the lower id, of groups and of experts.
    """
    tokens, chosen_by = scores.shape[0], scores + bias
    if config.groups > 1:
        by_group = chosen_by.reshape(tokens, config.groups, -1)
        best = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(axis=-1)
        _, groups = jax.lax.top_k(best, config.groups_chosen)
        stays = (groups[:, :, None] == jnp.arange(config.groups)).any(axis=1)  # [M, groups]
        chosen_by = jnp.where(stays[:, :, None], by_group, -jnp.inf).reshape(tokens, -1)
    _, ids = jax.lax.top_k(chosen_by, config.per_token)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.normalised:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * config.scale


class Router(nnx.Module):
    """Who gets a token; float32 whatever the dtype of the model, because it decides."""

    def __init__(self, hidden: int, config: ExpertsConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.weight = matrix(rngs, config.count, hidden, param_dtype=jnp.float32)  # [E, H]
        self.e_score_correction_bias = Balance(jnp.zeros(config.count, jnp.float32))  # [E]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts of x [M, H]: (ids i32[M, k], weights f32[M, k])."""
        logits = jnp.einsum("mh,eh->me", x.astype(jnp.float32), self.weight[...], precision=HIGHEST)
        return route(jax.nn.sigmoid(logits), self.e_score_correction_bias[...], self.config)


class Experts(nnx.Module):
    """The experts' matrices, stacked, and what tokens get from those that they chose."""

    def __init__(self, hidden: int, config: ExpertsConfig, *, rngs: nnx.Rngs, param_dtype):
        self.gate_proj = matrix(rngs, config.count, config.width, hidden, param_dtype=param_dtype)
        self.up_proj = matrix(rngs, config.count, config.width, hidden, param_dtype=param_dtype)
        self.down_proj = matrix(rngs, config.count, hidden, config.width, param_dtype=param_dtype)

    def __call__(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """The weighted sum of the chosen experts: x [M, H], ids i32[M, k], weights f32[M, k] -> [M, H]."""
        experts, tokens = self.gate_proj.shape[0], jnp.arange(x.shape[0])[:, None]
        gate, up, down = (p[...].astype(x.dtype) for p in (self.gate_proj, self.up_proj, self.down_proj))
        # Few tokens copy the matrices of their experts, which reads or writes each of them three times; many go through
        # all experts and drop what they did not choose.
        if 3 * ids.size < experts:
            inner = jax.nn.silu(jnp.einsum("mh,mkih->mki", x, gate[ids])) * jnp.einsum("mh,mkih->mki", x, up[ids])
            return jnp.einsum("mki,mkhi->mh", (inner * weights[..., None]).astype(x.dtype), down[ids])
        inner = jax.nn.silu(jnp.einsum("mh,eih->mei", x, gate)) * jnp.einsum("mh,eih->mei", x, up)
        chosen = jnp.zeros((x.shape[0], experts), bool).at[tokens, ids].set(True)
        weights = jnp.zeros(chosen.shape, jnp.float32).at[tokens, ids].set(weights)
        inner = jnp.where(chosen[..., None], inner * weights[..., None], 0).astype(x.dtype)
        return jnp.einsum("mei,ehi->mh", inner, down)


class MixtureOfExperts(nnx.Module):
    """The feed-forward part of a layer: the chosen experts and the shared one."""

    def __init__(self, hidden: int, config: ExpertsConfig, *, rngs: nnx.Rngs, param_dtype):
        self.gate = Router(hidden, config, rngs=rngs)
        self.experts = Experts(hidden, config, rngs=rngs, param_dtype=param_dtype)
        if config.shared:
            self.shared_experts = MLP(hidden, config.shared * config.width, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [B, S, H] to [B, S, H]."""
        flat = x.reshape(-1, x.shape[-1])
        out = self.experts(flat, *self.gate(flat)).reshape(x.shape)
        return out + self.shared_experts(x) if self.gate.config.shared else out
