"""What the tests of speculation share: a small Ouro, batches of prompts, rounds with candidates of one's own choice."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import speculation_accept
from models.decode import DecodeOptions, DecodeState, decode_chunk, prefill_batch
from models.ouro import Ouro
from models.sampling import request_keys
from models.speculation import RoundOutput, Speculation, speculative_round
from sparse_jax import paging, selectors
from tests.models.configs import small_ouro

CONFIG = small_ouro()  # 2 layers, 4 loops, 4 query and 2 key/value heads, a vocabulary of 64
PAGE_SIZE, WIDTH, LONGEST = 4, 16, 14  # tokens of a page, pages of a table, tokens of a prompt
DENSE = DecodeOptions(selector=selectors.get("dense"))


def prompts(seed: int, requests: int, longest: int = LONGEST) -> list[list[int]]:
    """Of 1 to `longest` random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, rng.integers(1, longest + 1)).tolist() for _ in range(requests)]


@functools.partial(jax.jit, static_argnames="options")
def _prefill(model: Ouro, tokens, counts, state: DecodeState, options: DecodeOptions):
    return prefill_batch(*nnx.split(model), tokens, counts, state, options)


def start(model: Ouro, texts, limits, options: DecodeOptions = DENSE, pages: int = 0, seed: int = 0) -> DecodeState:
    """The state after the prompts: one token is sampled. limits: tokens to sample at most, one for all or one each."""
    requests = len(texts)
    paged = paging.create(
        planes=CONFIG.planes,
        pages=pages or requests * WIDTH,
        page_size=PAGE_SIZE,
        kv_heads=CONFIG.num_kv_heads,
        key_width=CONFIG.head_dim,
        requests=requests,
        pages_per_request=WIDTH,
    )
    state = DecodeState(
        paged=paged,
        selector=options.selector.init(paged.kv, requests),
        tokens=jnp.zeros(requests, jnp.int32),
        generated=jnp.zeros(requests, jnp.int32),
        limits=jnp.broadcast_to(jnp.array(limits, jnp.int32), requests),
        started=jnp.zeros(requests, bool),
        done=jnp.zeros(requests, bool),
        keys=request_keys(seed, requests),
    )
    tokens = np.zeros((requests, LONGEST), np.int32)
    for row, text in zip(tokens, texts):
        row[: len(text)] = text
    return _prefill(model, jnp.array(tokens), jnp.array([len(text) for text in texts]), state, options)[0]


@functools.partial(jax.jit, static_argnames="options")
def _step(model: Ouro, state: DecodeState, options: DecodeOptions):
    return decode_chunk(*nnx.split(model), state, options, 1)


def plain(model: Ouro, state: DecodeState, steps: int, options: DecodeOptions = DENSE) -> tuple[list, DecodeState]:
    """(the tokens of each request after the first one, the state) of plain decoding, step by step: one compilation."""
    tokens: list[list[int]] = [[] for _ in state.tokens]
    for _ in range(steps):
        state, out = _step(model, state, options)
        for text, token in zip(tokens, np.asarray(out.tokens[0]).tolist()):
            text.extend([token] if token >= 0 else [])
    return tokens, state


@functools.partial(jax.jit, static_argnames=("options", "speculation"))
def _round(model, state, most, forced, options, speculation):
    propose, accept = speculation_accept.propose, speculation_accept.accept

    def chosen(logits, keys, generated, sampling):
        tokens, q = propose(logits, keys, generated, sampling)
        column = jnp.minimum((generated - state.generated)[:, None], forced.shape[1] - 1)
        wanted = jnp.take_along_axis(forced, column, axis=1)[:, 0]
        return jnp.where(wanted >= 0, wanted, tokens), q

    def cut(*arguments):
        tokens, accepted = accept(*arguments)
        return tokens, jnp.minimum(accepted, most)

    with (
        mock.patch.object(speculation_accept, "propose", chosen),
        mock.patch.object(speculation_accept, "accept", cut),
    ):
        return speculative_round(model, state, options, speculation)


def one_round(
    model: Ouro, state: DecodeState, speculation: Speculation, options: DecodeOptions = DENSE, *, forced=None, most=99
) -> tuple[DecodeState, RoundOutput]:
    """A round. forced: i32[B, K] candidates, -1 for the draft's own. most: of the drafts, accept these at most."""
    forced = np.full((len(state.tokens), speculation.drafts), -1) if forced is None else np.asarray(forced)
    return _round(model, state, jnp.int32(most), jnp.array(forced, jnp.int32), options, speculation)


def speculate(
    model: Ouro, state: DecodeState, speculation: Speculation, options: DecodeOptions = DENSE, most: int = 99
) -> tuple[list, DecodeState, list[RoundOutput]]:
    """Rounds until all are done: (the tokens of each request after the first one, the state, what each round told)."""
    tokens: list[list[int]] = [[] for _ in state.tokens]
    outs = []
    while not bool(state.done.all()):
        state, out = one_round(model, state, speculation, options, most=most)
        outs.append(out)
        for text, row in zip(tokens, np.asarray(out.tokens)):
            text.extend(int(x) for x in row if x >= 0)
        assert len(outs) < 200
    return tokens, state, outs


@jax.jit
def _margins(model: Ouro, tokens):
    best, _ = jax.lax.top_k(model.logits(model.forward(tokens).hidden[-1]), 2)
    return best[..., 0] - best[..., 1]


def assert_same_text(model: Ouro, texts, expected: list[list[int]], found: list[list[int]], bound: float) -> int:
    """Two continuations of each prompt are equal, but from where the best two logits are within `bound` on.

    Both without the first token after the prompt, which comes from the prompt. Returns how many differ.
    """
    different = 0
    for text, a, b in zip(texts, expected, found):
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        assert at is not None or len(a) == len(b)
        if at is not None:
            different += 1
            whole = (text + a[:at])[-64:]
            margin = _margins(model, jnp.array(whole + [0] * (64 - len(whole)))[None])[0, len(whole) - 1]
            assert margin < bound, (text, at, a, b, margin)
    return different
