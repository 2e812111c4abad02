"""Prompts and decode steps through an evicting selector, and its rule in plain NumPy (float64)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_jax import paging


class Sizes(NamedTuple):
    """What a test is about. Requests have prompts of `counts` tokens and grow to at most `total`."""

    counts: tuple[int, ...] = (11, 3, 7, 0)
    prompt: int = 12  # padded
    total: int = 24
    group: int = 3
    kv_heads: int = 2
    width: int = 4
    planes: int = 2
    page_size: int = 4
    pages: int = 12
    table_width: int = 4
    dtype: Any = jnp.float32

    @property
    def steps(self):
        return self.total - self.prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """All tokens that requests will have, by position."""

    q: jax.Array  # [planes, B, total, Hq, D]
    k: jax.Array  # [planes, B, total, Hkv, D]
    v: jax.Array


def draw(sizes, seed=0, trend=0.15):
    """Random tokens, of which some are heavy hitters, later ones rather: else the first ones would always win."""
    rng, batch = np.random.default_rng(seed), len(sizes.counts)
    heads = (sizes.kv_heads * sizes.group, sizes.kv_heads, sizes.kv_heads)
    shapes = [(sizes.planes, batch, sizes.total, n, sizes.width) for n in heads]
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    affinity = 1.5 * rng.standard_normal(shapes[1][:-1]) + trend * np.arange(sizes.total)[:, None]
    q[..., 0] = 0.5 * q[..., 0] + 2
    k[..., 0] = affinity
    return Tokens(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))


def empty(sizes):
    return paging.create(
        planes=sizes.planes,
        pages=sizes.pages,
        page_size=sizes.page_size,
        kv_heads=sizes.kv_heads,
        key_width=sizes.width,
        requests=len(sizes.counts),
        pages_per_request=sizes.table_width,
        dtype=sizes.dtype,
    )


class Steps(NamedTuple):
    """What decode steps gave, with a leading axis of steps; `at` is the position of the token, -1 for no part."""

    at: Any  # i32[steps, B]
    out: Any  # [steps, planes, B, Hq, D]
    positions: Any  # i32[steps, planes, B, Hkv, C]
    read: Any  # i32[steps, planes, B, Hkv]
    lengths: Any  # i32[steps, B]
    pages: Any  # i32[steps] pages in use
    stale: Any  # i32[steps]

    def held(self, step, plane, request, head):
        row = np.asarray(self.positions[step, plane, request, head])
        return sorted(row[row >= 0].tolist())


def prefill(selector, paged, state, counts, tokens, width):
    """Prompts of counts i32[B] tokens through every plane."""
    paged, state, room = selector.reserve_prompt(paged, state, counts, width)
    past = (jnp.arange(width) >= counts[:, None])[..., None, None]

    def store(plane, carry):
        # Nothing that lies behind a prompt may matter.
        q, k, v = (jnp.where(past, jnp.nan, x[plane, :, :width]) for x in (tokens.q, tokens.k, tokens.v))
        return selector.store_prompt(*carry, plane, room, q, k, v)[:2]

    return jax.lax.fori_loop(0, paged.kv.planes, store, (paged, state))


def step(selector, paged, state, takes_part, tokens):
    """One token of each request that takes part: (paged, state, one row of `Steps`)."""
    at = jnp.where(takes_part, selector.next_positions(paged, state), -1)
    paged, state, room = selector.reserve(paged, state, takes_part.astype(jnp.int32), 1)
    index = jnp.maximum(at, 0)[:, None, None, None]

    def plane_step(carry, inputs):
        paged, state = carry
        plane, q, k, v = inputs
        q, k, v = (jnp.take_along_axis(x, index, axis=1) for x in (q, k, v))
        paged, state, stale = selector.store(paged, state, plane, room, k, v)
        view = paging.view(paged, plane)
        view = dataclasses.replace(view, lengths=jnp.where(takes_part, view.lengths, 0))
        attended = selector.attend(state, q, *paging.flat(paged.kv), view, plane=plane)
        out = attended.output.out[:, 0]
        return (paged, attended.state), (out, attended.positions, attended.tokens_read, stale + view.stale)

    planes = jnp.arange(paged.kv.planes, dtype=jnp.int32)
    (paged, state), outs = jax.lax.scan(plane_step, (paged, state), (planes, tokens.q, tokens.k, tokens.v))
    out, positions, read, stale = outs
    used = paged.kv.pages - paged.pool.free_count
    return paged, state, Steps(at, out, positions, read, paged.table.lengths, used, stale.sum())


def decode(selector, paged, state, takes_part, tokens):
    """A scan of steps, takes_part bool[steps, B]."""

    def one(carry, takes_part):
        paged, state, row = step(selector, *carry, takes_part, tokens)
        return (paged, state), row

    (paged, state), rows = jax.lax.scan(one, (paged, state), takes_part)
    return paged, state, rows


# Compiling is what takes time here, a third of it in LLVM's optimisations.
QUICK = {"xla_backend_optimization_level": 0}
jit_prefill = jax.jit(prefill, static_argnums=(0, 5), donate_argnums=(1, 2), compiler_options=QUICK)
jit_decode = jax.jit(decode, static_argnums=0, donate_argnums=(1, 2), compiler_options=QUICK)


def begin(selector, sizes, tokens, paged=None, state=None):
    """The caches after the prompts."""
    paged = empty(sizes) if paged is None else paged
    state = selector.init(paged.kv, len(sizes.counts)) if state is None else state
    return jit_prefill(selector, paged, state, jnp.asarray(sizes.counts, jnp.int32), tokens, sizes.prompt)


def parts(sizes):
    """Who takes part in which step, bool[steps, B]: all that have a prompt, but request 1 pauses now and then."""
    part = np.tile(np.asarray(sizes.counts) > 0, (sizes.steps, 1))
    part[2::5, 1] = False
    return jnp.asarray(part)


def go_on(selector, sizes, tokens, paged, state, part=None):
    """(tokens, paged, state, rows as NumPy) after steps."""
    paged, state, rows = jit_decode(selector, paged, state, parts(sizes) if part is None else part, tokens)
    return tokens, paged, state, jax.tree.map(np.asarray, rows)


def whole_run(selector, sizes, seed=0):
    """Prompts, then steps."""
    tokens = draw(sizes, seed)
    return go_on(selector, sizes, tokens, *begin(selector, sizes, tokens))


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class Plain:
    """One plane of one request under the rule of a paper: which positions each KV head holds, as plain sets.

    limit, sinks, recent: tokens. prompt(p) gives the scores [Hkv, count] of prompt tokens for probabilities
    p [Hkv, G, count, count]; update(scores, p) those after a step, in place, for p [Hkv, G, n] of the tokens held.
    """

    def __init__(self, tokens, plane, request, count, *, limit, sinks, recent, prompt, update=None):
        self.q, self.k, self.v = (np.asarray(x[plane, request], np.float64) for x in (tokens.q, tokens.k, tokens.v))
        self.limit, self.recent, self.update = limit, min(recent, limit), update
        self.sinks = min(sinks, limit - self.recent)
        total, self.kv_heads, width = self.k.shape
        self.q = self.q.reshape(total, self.kv_heads, -1, width) * width**-0.5
        self.scores = np.zeros((self.kv_heads, total))
        self.held = [list(range(count)) for _ in range(self.kv_heads)]
        s = np.einsum("thgd,shd->hgts", self.q[:count], self.k[:count])
        p = softmax(np.where(np.tri(count, dtype=bool), s, -np.inf)) if count else s
        self.scores[:, :count] = prompt(p)
        self.at = count
        for head in range(self.kv_heads):
            while len(self.held[head]) > limit:
                self.drop(head, count - self.recent)

    def drop(self, head, end):
        """The lowest score below position `end` goes; of equal ones the lowest position."""
        candidates = [p for p in self.held[head] if self.sinks <= p < end]
        self.held[head].remove(min(candidates, key=lambda p: (self.scores[head, p], p)))

    def step(self):
        """The next token: its output [Hq, D]."""
        out, p = [], []
        for head in range(self.kv_heads):
            if self.update and len(self.held[head]) >= self.limit:
                self.drop(head, self.at + 1 - self.recent)
            self.held[head].append(self.at)
            p.append(softmax(self.q[self.at, head] @ self.k[self.held[head], head].T))
            out.append(p[-1] @ self.v[self.held[head], head])
        if self.update:
            self.update(self, p)
        self.at += 1
        return np.concatenate(out)


def sum_up(plain, p):
    """H2O: mean over the group, added up."""
    for head, weights in enumerate(p):
        plain.scores[head, plain.held[head]] += weights.mean(axis=0)


def assert_follows(run, sizes, plain, atol=2e-5):
    """Every step of every request and plane holds what the plain rule holds and gives its output."""
    tokens, paged, _, rows = run
    for plane, request in np.ndindex(sizes.planes, len(sizes.counts)):
        reference = plain(tokens, plane, request, sizes.counts[request])
        for i, at in enumerate(rows.at[:, request]):
            if at < 0:
                assert not rows.read[i, plane, request].any()
                continue
            assert at == reference.at
            out = reference.step()
            for head, held in enumerate(reference.held):
                assert rows.held(i, plane, request, head) == sorted(held), (plane, request, head, at)
                assert rows.read[i, plane, request, head] == len(held)
            np.testing.assert_allclose(rows.out[i, plane, request], out, atol=atol, rtol=0)
    assert not rows.stale.any()
    paging.check(paged)
