"""Small models of latent attention, and decoding them step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from models import decode
from models.deepseek import Deepseek, DeepseekConfig, ExpertsConfig, IndexerConfig
from sparse_jax import paging

PAGES, PAGE_SIZE = 16, 4
EXPERTS = ExpertsConfig(count=8, per_token=2, width=8, groups=4, groups_chosen=2, scale=2.5)
INDEXER = IndexerConfig(heads=32, head_dim=8, topk=5)  # many heads: scores hardly tie
"""Chooses 5 tokens."""


def small_deepseek(**changes) -> DeepseekConfig:
    """3 layers, the first without experts; some 20,000 parameters."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "max_positions": 128}
    heads = {"num_heads": 4, "nope_dim": 8, "rope_dim": 4, "v_dim": 6, "latent_dim": 16, "q_rank": 12}
    parts = {"experts": EXPERTS, "first_dense": 1, "indexer": INDEXER, "bos_id": None, "stop_ids": ()}
    return DeepseekConfig(**(sizes | heads | parts | changes))


def empty(config: DeepseekConfig, requests: int, cache_dtype="float32") -> paging.PagedState:
    sizes = {"planes": config.planes, "pages": PAGES, "page_size": PAGE_SIZE}
    return paging.create(**sizes, requests=requests, pages_per_request=6, **config.pools(cache_dtype))


prefill = jax.jit(decode.prefill, static_argnames="selector")
step = jax.jit(decode.decode_step, static_argnames=("selector", "implementation"))


def decoded(
    model: Deepseek, tokens: np.ndarray, prompts, lengths, selector, cache_dtype="float32"
) -> tuple[list, decode.DecodeOutput]:
    """Logits [request][position - prompt] of prefill and teacher-forced steps over pages, and the last output."""
    out = prefill(model, tokens, jnp.array(prompts), empty(model.config, len(prompts), cache_dtype), selector, ())
    logits = [[row] for row in np.asarray(out.logits)]
    for taken in range(max(n - p for p, n in zip(prompts, lengths))):
        at = np.array([p + taken if p + taken < n else -1 for p, n in zip(prompts, lengths)], np.int32)
        out = step(model, tokens[np.arange(len(at)), at], at, out.paged, selector, ())
        for request, position in enumerate(at):
            if position >= 0:
                logits[request].append(np.asarray(out.logits[request]))
    np.testing.assert_array_equal(out.paged.table.lengths, lengths)
    assert int(out.stale) == 0
    return logits, out


@functools.cache
def random_tokens(requests: int = 2, count: int = 18) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (requests, count)).astype(np.int32)
