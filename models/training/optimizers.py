"""Muon for the matrices of the layers, AdamW for everything else, as one optax transformation without a learning rate.

    m     = momentum * m + g,      n = momentum * m + g                     (Nesterov)
    dW    = 0.2 * sqrt(max(in, out)) * orthogonal(n) + decay * W    as large as an AdamW update: one rate for both
    W     = W - rate * dW

orthogonal() is five Newton-Schulz steps X <- a X + (b A + c A A) X with A = X X', in bfloat16. Matrices of one shape go
through them as one batch: twenty-eight small matrices one by one would be four hundred launches a step.

Source: Muon, Jordan et al. 2024 (coefficients 3.4445, -4.7750, 2.0315); scaling by 0.2 sqrt(max), arXiv 2502.16982.
"""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """Momentum of each matrix, float32."""

    momentum: optax.Updates


def orthogonalize(matrices: jax.Array, steps: int = 5) -> jax.Array:
    """Move the singular values of f32[M, rows, columns], rows <= columns, close to 1. The result is bfloat16."""
    a, b, c = COEFFICIENTS
    norm = jnp.sqrt(jnp.sum(matrices * matrices, axis=(1, 2), keepdims=True))
    x = (matrices / (norm + 1e-7)).astype(jnp.bfloat16)
    for _ in range(steps):
        gram = jnp.einsum("mrc,msc->mrs", x, x)
        x = a * x + jnp.einsum("mrs,msc->mrc", b * gram + c * (gram @ gram), x)
    return x


def scale_by_muon(momentum: float = 0.95, steps: int = 5) -> optax.GradientTransformation:
    """Orthogonalised Nesterov momentum for a tree of matrices, scaled to the size of an AdamW update.

    A leaf may be a stack of matrices, [..., rows, columns].
    """

    def init(params):
        return MuonState(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))

    def update(updates, state, params=None):
        del params
        mass = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + g, mass, updates)
        leaves, tree = jax.tree.flatten(ahead)
        groups = collections.defaultdict(list)  # (rows, columns) with rows <= columns -> places in leaves
        for place, leaf in enumerate(leaves):
            groups[tuple(sorted(leaf.shape[-2:]))].append(place)
        for (rows, columns), places in groups.items():
            upright = {i: leaves[i].shape[-2] > leaves[i].shape[-1] for i in places}
            flat = [(leaves[i].mT if upright[i] else leaves[i]).reshape(-1, rows, columns) for i in places]
            moved = orthogonalize(jnp.concatenate(flat), steps).astype(jnp.float32) * (0.2 * columns**0.5)
            start = 0
            for i, part in zip(places, flat):
                each = moved[start : start + len(part)]
                leaves[i] = (each.mT if upright[i] else each).reshape(leaves[i].shape)
                start += len(part)
        return jax.tree.unflatten(tree, leaves), MuonState(mass)

    return optax.GradientTransformation(init, update)


def is_layer_matrix(path: tuple, leaf: jax.Array) -> bool:
    """Whether a parameter belongs to Muon: the matrices inside the layers, neither embedding nor head nor gate."""
    name = jax.tree_util.keystr(path)
    return leaf.ndim >= 2 and ("layers" in name or "extra" in name)


def muon_adamw(*, momentum: float = 0.95, decay: float = 0.1, clip: float = 1.0) -> optax.GradientTransformation:
    """The optimiser of ouro-tiny, for updates that the caller multiplies with -rate.

    Gradients are clipped to global norm `clip` first. `decay` applies to the layers' matrices alone.
    """

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: "muon" if is_layer_matrix(path, leaf) else "adam", params
        )

    muon = optax.chain(scale_by_muon(momentum), optax.add_decayed_weights(decay))
    parts = {"muon": muon, "adam": optax.scale_by_adam(b1=0.9, b2=0.98)}
    return optax.chain(optax.clip_by_global_norm(clip), optax.partition(parts, labels))


def rate_at(fraction: float, step: int, *, peak: float, warmup: int, decay_from: float, last: float) -> float:
    """Learning rate: linear warm-up over steps, constant, from the share `decay_from` on linear to `last` * peak."""
    down = max(0.0, min(1.0, (fraction - decay_from) / max(1.0 - decay_from, 1e-9)))
    return peak * min(1.0, (step + 1) / max(warmup, 1)) * (1.0 - (1.0 - last) * down)
