"""What reference correction costs in quality: the device's side, where every later loop is also held against dense.

    held = begin(...)                              which method: what later loops do, captures, how many keys are kept
    paged, held, steps = advance(...)              tokens of a text or an answer, each a decode step

The methods replace the attention of the loops after a capture, which chose keys by its probabilities p:

    correction   output + mass * a - contribution   a: attention of this loop over the chosen keys
    plain        a                                  the same keys, without the correction
    frozen       output                             what the capture gave, whatever this loop asks

Every method is an array of the same compiled step, which computes dense attention in each plane, to compare. The
arithmetic is that of the equations, not of the operations of `sparse_jax`; tests hold the two against each other.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import decode
from models.evaluation.run import judge
from models.interface import ModelConfig
from sparse_jax.attention_call import AttentionOutput
from sparse_jax.paging import PagedState, PageView
from sparse_jax.reference import retained_counts
from sparse_jax.selectors import Attended, Selector

FORMS = ("correction", "plain", "frozen")


@dataclasses.dataclass(frozen=True)
class Method:
    """A form of `FORMS` and the loops that capture; no captures: dense attention throughout."""

    name: str
    form: str = "correction"
    captures: tuple[int, ...] = (1,)

    @property
    def takes_retention(self) -> bool:
        """Whether it chooses keys."""
        return bool(self.captures) and self.form != "frozen"


METHODS = (
    Method("dense", captures=()),
    Method("correction"),
    Method("plain sparse", "plain"),
    Method("frozen", "frozen"),
    Method("late correction", captures=(2,)),
    Method("late plain", "plain", captures=(2,)),
)
"""Captures in loops 1 and 2 are the late correction: with nothing between them the first serves nobody."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """The method as arrays, the references of the running step, and what was measured in it."""

    form: jax.Array  # i32[] index in FORMS
    captures: jax.Array  # bool[U]
    counts: jax.Array  # i32[S + 1] keys that are kept of 0 .. S keys
    chosen: jax.Array  # bool[L, B, Hq, S]
    mass: jax.Array  # f32[L, B, Hq]
    output: jax.Array  # f32[L, B, Hq, D]
    contribution: jax.Array  # f32[L, B, Hq, D]
    masses: jax.Array  # f32[planes, B, Hq] dense probability, in each plane, of the keys its reference has chosen
    errors: jax.Array  # f32[planes, B] distance of the output from the dense one of the same queries, relative


class Steps(NamedTuple):
    """What the host learns of some steps; the first axis is the step."""

    logits: jax.Array  # f32[steps, B, V]
    right: jax.Array  # bool[steps, B] the judged token is the arg max
    margin: jax.Array  # f32[steps, B] its logit minus the best other one
    nll: jax.Array  # f32[steps, B] minus its log probability
    masses: jax.Array  # f32[steps, planes, B, Hq]
    errors: jax.Array  # f32[steps, planes, B]


def begin(config: ModelConfig, requests: int, tokens: int, method: Method, retention: float) -> Held:
    """Before the first step of B requests that see up to S = `tokens` tokens."""
    layers, heads, width = config.num_layers, config.num_heads, config.head_dim
    captures = np.isin(np.arange(config.loops), method.captures)
    return Held(
        form=jnp.int32(FORMS.index(method.form)),
        captures=jnp.asarray(captures),
        counts=jnp.asarray(retained_counts(tokens, retention)),
        chosen=jnp.zeros((layers, requests, heads, tokens), bool),
        mass=jnp.zeros((layers, requests, heads), jnp.float32),
        output=jnp.zeros((layers, requests, heads, width), jnp.float32),
        contribution=jnp.zeros((layers, requests, heads, width), jnp.float32),
        masses=jnp.zeros((config.planes, requests, heads), jnp.float32),
        errors=jnp.zeros((config.planes, requests), jnp.float32),
    )


@functools.partial(jax.jit, static_argnames=("graph",), donate_argnames=("paged", "held"))
def advance(
    params: nnx.State, paged: PagedState, held: Held, tokens: jax.Array, targets: jax.Array, *, graph: nnx.GraphDef
) -> tuple[PagedState, Held, Steps]:
    """Decode steps with tokens i32[steps, B] (-1: takes no part), judged by targets i32[steps, B] (-1: not)."""
    model = nnx.merge(graph, params)

    def step(carry: tuple[PagedState, Held], now: tuple[jax.Array, jax.Array]):
        (paged, held), (token, target) = carry, now
        positions = jnp.where(token >= 0, paged.table.lengths, -1)
        out = decode.decode_step(model, jnp.maximum(token, 0), positions, paged, Compared(), held)
        held = out.selector_state
        return (out.paged, held), Steps(out.logits, *judge(out.logits, target), held.masses, held.errors)

    (paged, held), steps = jax.lax.scan(step, (paged, held), (tokens, targets))
    return paged, held, steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared(Selector):
    """Attention by the method in its state, a `Held`, of one token of each request; everything is also measured."""

    def attend(self, state: Held, q, k_pages, v_pages, view: PageView, *, plane: Any = 0, **options) -> Attended:
        """See `Selector.attend`; nothing counts as read."""
        del options
        layers = state.mass.shape[0]
        loop, layer = plane // layers, plane % layers
        z, v = _scores(q[:, 0], k_pages, v_pages, view)
        p = _softmax(z)
        dense = jnp.einsum("bhs,bhsd->bhd", p, v, precision="highest")
        capture = state.captures[loop]
        counts = state.counts[jnp.clip(view.lengths, 0, z.shape[-1])]
        chosen = jax.lax.cond(capture, lambda: largest(z, counts), lambda: state.chosen[layer])
        held = jnp.where(chosen, p, 0.0)
        mass, contribution = held.sum(axis=-1), jnp.einsum("bhs,bhsd->bhd", held, v, precision="highest")
        # Apart from p, which may underflow for all keys that an earlier loop has chosen.
        a = jnp.einsum("bhs,bhsd->bhd", _softmax(jnp.where(chosen, z, -jnp.inf)), v, precision="highest")
        output = state.output[layer]
        forms = (output + state.mass[layer][..., None] * a - state.contribution[layer], a, output)
        after = jnp.any(state.captures & (jnp.arange(state.captures.size) < loop)) & ~capture
        out = jnp.where(after, jnp.stack(forms)[state.form], dense).astype(q.dtype)
        new = chosen, mass, dense.astype(q.dtype).astype(jnp.float32), contribution
        names = ("chosen", "mass", "output", "contribution")
        changed = {
            name: getattr(state, name).at[layer].set(jnp.where(capture, value, getattr(state, name)[layer]))
            for name, value in zip(names, new, strict=True)
        }
        errors = state.errors.at[plane].set(_distance(out, dense))
        state = dataclasses.replace(state, **changed, masses=state.masses.at[plane].set(mass), errors=errors)
        lse = jax.nn.logsumexp(z, axis=-1)
        nothing = jnp.zeros((q.shape[0], k_pages.shape[1]), jnp.int32)
        return Attended(AttentionOutput(out[:, None], lse[:, None]), state, nothing, nothing[..., None] - 1)


def largest(z: jax.Array, counts: jax.Array) -> jax.Array:
    """The counts[b] largest scores of z f32[B, Hq, S], ties to the lowest id: bool[B, Hq, S]."""
    order = jnp.argsort(-z, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1, stable=True)
    return (rank < counts[:, None, None]) & (z > -jnp.inf)


def _scores(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, view: PageView) -> tuple[jax.Array, jax.Array]:
    """Scores f32[B, Hq, S] of q [B, Hq, D], -inf where there is no token, and the values f32[B, Hq, S, D]."""
    batch, heads, width = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    page = jnp.maximum(view.page_table, 0)  # [B, W]
    place = jnp.arange(page.shape[1] * page_size, dtype=jnp.int32)
    holds = jnp.repeat(view.page_table >= 0, page_size, axis=1) & (place < view.lengths[:, None])  # [B, S]

    def tokens(pool: jax.Array) -> jax.Array:  # f32[B, Hq, S, D], zeros where there is no token
        x = pool[page].swapaxes(1, 2).reshape(batch, kv_heads, -1, width).astype(jnp.float32)
        return jnp.repeat(jnp.where(holds[:, None, :, None], x, 0.0), heads // kv_heads, axis=1)

    z = jnp.einsum("bhd,bhsd->bhs", q.astype(jnp.float32), tokens(k_pages), precision="highest") * width**-0.5
    return jnp.where(holds[:, None], z, -jnp.inf), tokens(v_pages)


def _softmax(z: jax.Array) -> jax.Array:
    """Over the last axis; zeros for a row that is -inf throughout."""
    weight = jnp.exp(z - jnp.maximum(z.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min))
    return weight / jnp.maximum(weight.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def _distance(out: jax.Array, dense: jax.Array) -> jax.Array:
    """|out - dense| / |dense| over all heads, f32[B] of [B, Hq, D]; 0 where dense is."""
    size = jnp.sqrt((dense * dense).sum(axis=(1, 2)))
    difference = out.astype(jnp.float32) - dense
    return jnp.sqrt((difference * difference).sum(axis=(1, 2))) / jnp.where(size == 0, 1.0, size)
