"""Prompts of latent attention at the sizes of released models: whole, after a context that is cached, and in chunks.

The sizes are those of vLLM's tests of sparse MLA, but for a quarter of the heads, which know nothing of each other; its
tolerance there is 0.01, and these are in float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import latent_attention
from models.deepseek import DeepseekConfig
from models.latent_attention import LatentQuery
from sparse_jax import selectors
from sparse_jax.paging import PageView

# Heads, latent width, un-rotated, rotary and value width of a head.
GEOMETRIES = [(32, 512, 128, 64, 128), (16, 512, 192, 64, 256), (16, 512, 256, 0, 256)]
INDEX_HEADS, INDEX_WIDTH, PAGE_SIZE = 4, 16, 32
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def prompt(geometry, tokens, topk):
    """A LatentQuery for every token of two requests, their latents [2, tokens, E] and index keys."""
    heads, d_c, d_n, d_r, d_v = geometry
    rng = np.random.default_rng(tokens)

    def draw(*shape, size=1.0):
        return jnp.asarray(size * rng.standard_normal(shape), jnp.float32)

    query = LatentQuery(
        q_nope=draw(2, tokens, heads, d_n, size=2.0),
        q_pe=draw(2, tokens, heads, d_r, size=2.0),
        w_uk=draw(1, 1, heads, d_n, d_c, size=d_c**-0.5),
        w_uv=draw(1, 1, heads, d_v, d_c, size=d_c**-0.5),
        index_q=draw(2, tokens, INDEX_HEADS, INDEX_WIDTH),
        index_weights=draw(2, tokens, INDEX_HEADS),
        chosen=None,
        scale=(d_n + d_r) ** -0.5,
        topk=topk,
    )
    return query, draw(2, tokens, d_c + d_r), draw(2, tokens, INDEX_WIDTH)


def expected(geometry, tokens, topk, request, rows, head):
    """[rows, d_v] of one head in float64, with its keys [W_UK c | k_pe] and values W_UV c."""
    query, latents, index_keys = (jax.tree.map(np.float64, x) for x in prompt(geometry, tokens, topk))
    c, k_pe = np.split(latents[request], [geometry[1]], axis=-1)
    keys, values = c @ query.w_uk[0, 0, head].T, c @ query.w_uv[0, 0, head].T
    scores = query.q_nope[request, :, head] @ keys.T + query.q_pe[request, :, head] @ k_pe.T
    likes = np.maximum(np.einsum("tjd,sd->tjs", query.index_q[request], index_keys[request]), 0)
    likes = np.einsum("tj,tjs->ts", query.index_weights[request], likes)
    out = []
    for row in rows:
        best = np.argsort(-likes[row, : row + 1], kind="stable")[:topk]
        p = np.exp(query.scale * (scores[row, best] - scores[row, best].max()))
        out.append(p @ values[best] / p.sum())
    return np.array(out)


def assert_right(found, geometry, tokens, topk, request, rows):
    """found [rows, Hq, d_v], of the first, a middle and the last head."""
    for head in (0, geometry[0] // 3, geometry[0] - 1):
        wanted = expected(geometry, tokens, topk, request, rows, head)
        np.testing.assert_allclose(found[:, head], wanted, atol=1e-4, rtol=0)
        assert np.abs(wanted).max() > 0.3


@every_geometry
@pytest.mark.parametrize(("lengths", "topk"), [((64, 128), 2048), ((256, 256), 200)], ids=["dense", "sparse"])
def test_whole_prompts(geometry, lengths, topk):
    """As long as the longest; in the shorter one what follows its end changes nothing before it."""
    query, latents, index_keys = prompt(geometry, max(lengths), topk)
    out, chosen = jax.jit(latent_attention.causal)(query, latents, index_keys)
    assert (chosen is None) == (topk >= max(lengths))
    for request, length in enumerate(lengths):
        rows = [0, 1, length // 2, length - 2, length - 1]
        assert_right(out[request, np.array(rows)], geometry, max(lengths), topk, request, rows)


def in_pages(rows, table, lengths):
    """Rows [2, tokens, width] in the pages of a table, 1 head; NaN where no token is."""
    pages = np.full((table.size + 2, 1, PAGE_SIZE, rows.shape[-1]), np.nan, np.float32)
    for request, length in enumerate(lengths):
        for at in range(0, length, PAGE_SIZE):
            count = min(PAGE_SIZE, length - at)
            pages[table[request, at // PAGE_SIZE], 0, :count] = rows[request, at : at + count]
    return jnp.asarray(pages)


@every_geometry
@pytest.mark.parametrize(
    ("lengths", "queries", "topk", "chunk"),
    [((128, 160), (64, 32), 2048, 64), ((448, 384), (256, 256), 200, 64)],
    ids=["dense", "sparse"],
)
def test_prompts_after_a_context_that_is_cached(geometry, lengths, queries, topk, chunk):
    """The last tokens of each request over its pages, some at a time; a shorter request has rows of padding."""
    query, latents, index_keys = prompt(geometry, max(lengths), topk)
    table = np.random.default_rng(0).permutation(2 * -(-max(lengths) // PAGE_SIZE)).reshape(2, -1).astype(np.int32)
    pools = in_pages(latents, table, lengths), in_pages(index_keys, table, lengths)
    attend = jax.jit(latent_attention.attend, static_argnums=(0, 1))
    view = PageView(jnp.asarray(table), jnp.array(lengths, jnp.int32), jnp.int32(0))
    take, found = functools.partial(jnp.take_along_axis, axis=1), [[], []]
    for first in range(0, max(queries), chunk):
        row = first + np.arange(chunk)
        at = np.stack([np.where(row < n, length - n + row, -1) for length, n in zip(lengths, queries)])
        rows = jax.tree.map(
            lambda x, at=at: x if x.shape[:2] == (1, 1) else take(x, at.reshape(2, chunk, *[1] * (x.ndim - 2))), query
        )
        attended = attend(selectors.get("dsa"), (), rows, *pools, view, q_positions=jnp.asarray(at, jnp.int32))
        out = np.asarray(attended.output.out[0])
        assert not out[at < 0].any()
        for request in range(2):
            found[request].append(out[request, at[request] >= 0])
    for request, (length, count) in enumerate(zip(lengths, queries)):
        out = np.concatenate(found[request])
        assert len(out) == count
        some = np.array([0, 1, count // 2, count - 1])
        assert_right(out[some], geometry, max(lengths), topk, request, (length - count + some).tolist())


@every_geometry
def test_the_scale_is_that_of_the_heads(geometry):
    """Never that of the latents: 512^-0.5 or 576^-0.5 would be another temperature."""
    heads, d_c, d_n, d_r, d_v = geometry
    sizes = {"nope_dim": d_n, "rope_dim": d_r, "v_dim": d_v, "latent_dim": d_c, "num_heads": heads}
    config = DeepseekConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, **sizes)
    assert config.scale == {192: 192**-0.5, 256: 0.0625}[d_n + d_r]
    assert config.head_dim == d_c + d_r
    wrong = dataclasses.replace(prompt(geometry, 128, 2048)[0], scale=config.head_dim**-0.5)
    out, _ = latent_attention.causal(wrong, *prompt(geometry, 128, 2048)[1:])
    with pytest.raises(AssertionError):
        assert_right(out[0, 100:101], geometry, 128, 2048, 0, [100])
