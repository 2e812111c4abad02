"""What a plane of latent attention attends to: inside a sequence, and in a step over the paged cache.

The cache keeps one row for each token, its latent c and rotary key k_pe, which all heads share: the pool of keys. The
pool of values holds the keys of the indexer. A head h reads the same numbers in two ways, equal in exact arithmetic:

    whole sequences   q = [q_nope | q_pe],  k = [W_UK c | k_pe],  v = W_UV c            (multi-head)
    absorbed          q = [W_UK^T q_nope | q_pe],  k = [c | k_pe],  out = W_UV (sum of p c)     (multi-query)

With an indexer, a query sees the `topk` tokens that it scores highest, whichever the form; ties go to earlier tokens.
A layer with an indexer chooses for those without that follow it, and finds the slots once for all of them (`Choice`).
Legend: B requests, S or T tokens, Hq heads, d_n / d_r / d_v widths of a head (without position, rotary, value),
d_c latent width, E = d_c + d_r, P tokens of a page, C chosen tokens. In einsum strings: b, s, n (head), d, v, c.

Source: DeepSeek-V2, arXiv 2405.04434, and DeepSeek-V3.2.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import sparse_jax
from sparse_jax.index_keys import IndexKeys
from sparse_jax.latent_cache import LatentCache
from sparse_jax.paging import PageView
from sparse_jax.selectors import DSA, Attended, Dense, Selector
from sparse_jax.selectors.views import inside_pool

QUERY_BLOCK = 64
"""Query tokens that are masked and attended at once where the indexer chooses inside a sequence."""


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


class Choice(NamedTuple):
    """What a leader chose, for itself and for the layers that follow it."""

    tokens: jax.Array  # i32[B, S, C] token ids ascending, then -1
    slots: jax.Array  # i32[B, S, C] where they lie: in plane 0 of the paged cache, inside a sequence in its own pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentQuery:
    """The queries of one layer, and what it takes to read latents with them.

    Arrays lead with [B, S]; what all tokens share leads with [1, 1]. So rows can be taken apart by `jax.tree.map`.
    """

    q_nope: jax.Array  # [B, S, Hq, d_n]
    q_pe: jax.Array  # [B, S, Hq, d_r] rotated
    w_uk: jax.Array  # [1, 1, Hq, d_n, d_c]
    w_uv: jax.Array  # [1, 1, Hq, d_v, d_c]
    index_q: jax.Array | None  # [B, S, index heads, d_I]; None in a layer without indexer
    index_weights: jax.Array | None  # f32[B, S, index heads]
    chosen: Choice | None  # of the leader, for a layer without indexer
    scale: float = _static()
    topk: int | None = _static()  # None: the model has no indexer


def causal(
    q: LatentQuery,
    latents: jax.Array,
    index_keys: jax.Array,
    attention: Any = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Choice | None]:
    """Attention inside sequences: latents [B, S, E], index_keys [B, S, d_I] at positions 0 .. S-1.

    Multi-head form, with a mask where the indexer chooses; absorbed form over the chosen tokens where that multiplies
    less, which is so for long sequences. attention: the implementation of `jax.nn.dot_product_attention`;
    implementation: of this library's operations. Returns (out [B, S, Hq, d_v], the Choice of topk tokens, or None where
    everything is seen because S is at most topk).
    """
    options, v_width = {"scale": q.scale, "implementation": attention}, q.w_uv.shape[-2]
    if q.topk is None or latents.shape[1] <= q.topk:
        heads = _same_width(*multi_head(q, latents))
        return jax.nn.dot_product_attention(*heads, is_causal=True, **options)[..., :v_width], None
    chosen = q.chosen if q.index_q is None else _choose_inside(q, index_keys, implementation)
    assert chosen is not None  # the first layer has an indexer
    width = q.w_uk.shape[-1]
    # Multiplications of a head and query: a mask spares none, so a causal one costs all S keys.
    masked = latents.shape[1] * (q.q_nope.shape[-1] + q.q_pe.shape[-1] + v_width)
    if q.topk * (latents.shape[-1] + width) < masked:
        return _gathered(q, latents, chosen.slots, implementation), chosen
    queries, keys, values = _same_width(*multi_head(q, latents))
    return _masked(queries, keys, values, chosen.tokens, options)[..., :v_width], chosen


def multi_head(q: LatentQuery, latents: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the heads read in multi-head form: queries and keys [B, S, Hq, d_n + d_r], values [B, S, Hq, d_v]."""
    width = q.w_uk.shape[-1]
    heads = (*latents.shape[:2], q.q_nope.shape[2], latents.shape[-1] - width)
    queries = jnp.concatenate([q.q_nope, q.q_pe], axis=-1)
    k_nope = jnp.einsum("bsc,ndc->bsnd", latents[..., :width], q.w_uk[0, 0])
    keys = jnp.concatenate([k_nope, jnp.broadcast_to(latents[:, :, None, width:], heads)], axis=-1)
    return queries, keys, jnp.einsum("bsc,nvc->bsnv", latents[..., :width], q.w_uv[0, 0])


def _same_width(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Padded with zeros, which change neither scores nor sums: the attention of JAX wants one width."""
    width = max(array.shape[-1] for array in arrays)
    return tuple(jnp.pad(array, [(0, 0)] * 3 + [(0, width - array.shape[-1])]) for array in arrays)


def _blocks(x: jax.Array) -> jax.Array:
    """Query rows by block: [B, S, ...] -> [blocks, B, rows, ...], the last one padded with zeros."""
    rows = min(QUERY_BLOCK, x.shape[1])
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % rows)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, rows, *x.shape[2:]), 1, 0)


def _together(blocks: jax.Array, tokens: int) -> jax.Array:
    """[blocks, B, rows, ...] -> [B, S, ...]."""
    blocks = jnp.moveaxis(blocks, 0, 1)
    return blocks.reshape(blocks.shape[0], -1, *blocks.shape[3:])[:, :tokens]


def _as_pages(rows: jax.Array) -> jax.Array:
    """Rows [B, S, D] of sequences as a pool [N, P, D], N / B pages for each, the last one padded with zeros."""
    page_size = 64 if rows.shape[1] >= 64 else 1
    return jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % page_size), (0, 0)]).reshape(-1, page_size, rows.shape[2])


def _choose_inside(q: LatentQuery, index_keys: jax.Array, implementation: str | None) -> Choice:
    """What each token of a sequence sees, topk of them; the sequence is a pool of pages."""
    requests, tokens = index_keys.shape[:2]
    keys = _as_pages(index_keys)
    table = jnp.arange(keys.shape[0], dtype=jnp.int32).reshape(requests, -1)
    lengths = jnp.full(requests, tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (requests, tokens))

    def block(x: tuple[jax.Array, ...]) -> jax.Array:
        index_q, weights, positions = x
        return _choose(index_q, weights, keys, table, lengths, positions, q.topk, implementation)

    blocks = jax.tree.map(_blocks, (q.index_q, q.index_weights, positions))
    chosen = _together(jax.lax.map(block, blocks), tokens)
    first = jnp.arange(requests, dtype=jnp.int32)[:, None, None] * (table.shape[1] * keys.shape[1])
    return Choice(chosen, jnp.where(chosen >= 0, first + chosen, -1))


def _masked(queries, keys, values, chosen: jax.Array, options: dict[str, Any]) -> jax.Array:
    """Attention [B, S, Hq, D] of each token to those that were chosen for it, i32[B, S, C], -1 absent."""
    requests, tokens = chosen.shape[:2]
    request, row = jnp.arange(requests)[:, None, None], jnp.arange(min(QUERY_BLOCK, tokens))[:, None]

    def block(x: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, chosen = x
        at = jnp.where(chosen >= 0, chosen, tokens)
        mask = jnp.zeros((requests, row.size, tokens), bool).at[request, row, at].set(True, mode="drop")
        return jax.nn.dot_product_attention(queries, keys, values, mask=mask[:, None], **options)

    return _together(jax.lax.map(block, (_blocks(queries), _blocks(chosen))), tokens)


def _gathered(q: LatentQuery, latents: jax.Array, slots: jax.Array, implementation: str | None) -> jax.Array:
    """The same [B, S, Hq, d_v] in absorbed form, of latents [B, S, E]: only those in slots i32[B, S, C] are read."""
    pool = _as_pages(latents)

    def block(x: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, slots = x
        options: dict[str, Any] = {"scale": q.scale, "value_dim": q.w_uk.shape[-1], "implementation": implementation}
        return sparse_jax.mla_sparse_attention(rows, pool, slots, **options).out

    out = _together(jax.lax.map(block, (_blocks(_absorbed(q)), _blocks(slots))), latents.shape[1])
    return jnp.einsum("bsnc,nvc->bsnv", out, q.w_uv[0, 0])


def _absorbed(q: LatentQuery) -> jax.Array:
    """Queries [B, S, Hq, E] that meet latents as they are cached."""
    return jnp.concatenate([jnp.einsum("bsnd,ndc->bsnc", q.q_nope, q.w_uk[0, 0]), q.q_pe], axis=-1)


def _choose(index_q, weights, key_pages, page_table, lengths, q_positions, k, implementation) -> jax.Array:
    """The k best tokens of each row that it sees, i32[B, T, k] ascending, then -1: the only place that chooses."""
    scores = sparse_jax.indexer_scores(
        jax.lax.stop_gradient(index_q),
        jax.lax.stop_gradient(weights),
        jax.lax.stop_gradient(key_pages),
        page_table,
        lengths,
        q_positions=q_positions,
        k=k,
        implementation=implementation,
    )
    return sparse_jax.top_k(scores, k, order="id", implementation=implementation)


def attend(
    selector: Selector,
    state: Any,
    q: LatentQuery,
    k_pages: jax.Array | LatentCache,
    v_pages: jax.Array | IndexKeys,
    view: PageView,
    *,
    q_positions: jax.Array | None = None,
    implementation: str | None = None,
) -> Attended:
    """One step of one plane, absorbed form: q [B, T], k_pages [planes * N, 1, P, E], v_pages [planes * N, 1, P, d_I].

    Quantised pages come as `paging.flat` gives them. selector: "dsa", the indexer's choice, or "dense", everything;
    q_positions i32[B, T]: as in `paged_attention`. A layer that chooses converts its ids to slots of plane 0, and the
    layers that follow it move these to their own planes. The `out` of the result is (out [B, T, Hq, d_v], the Choice
    for them). Raises ValueError for another selector, and for "dsa" without an indexer.
    """
    latents, keys = _without_heads(k_pages), _without_heads(v_pages)
    total, page_size = (latents.data if isinstance(latents, LatentCache) else latents).shape[:2]
    plane, pages = view.plane, total if view.pages is None else view.pages
    view = inside_pool(view, total)
    k, rows = tokens_chosen(selector, q.topk), q.q_nope.shape[1]
    capacity = view.page_table.shape[1] * page_size
    if k is None:
        if q_positions is None:
            q_positions = view.lengths[:, None] - rows + jnp.arange(rows, dtype=jnp.int32)
        token = jnp.arange(capacity, dtype=jnp.int32)
        seen = jnp.minimum(q_positions + 1, view.lengths[:, None])
        chosen = _with_slots(jnp.where(token < seen[..., None], token, -1), view, plane * pages, page_size)
        read = jnp.clip(seen.max(axis=1, keepdims=True), 0, capacity)  # the rows share one walk
    else:
        if q.index_q is None:
            assert q.chosen is not None  # the first layer has an indexer
            chosen = q.chosen
        else:
            of_index = q.index_q, q.index_weights, keys, view.page_table, view.lengths, q_positions
            tokens = _choose(*of_index, min(k, capacity), implementation)
            chosen = _with_slots(tokens, view, plane * pages, page_size)
        read = (chosen.tokens >= 0).sum(axis=(1, 2), dtype=jnp.int32)[:, None]
    output = sparse_jax.mla_sparse_attention(
        _absorbed(q),
        latents,
        sparse_jax.plane_slots(chosen.slots, plane, pages=pages, page_size=page_size),
        scale=q.scale,
        value_dim=q.w_uk.shape[-1],
        implementation=implementation,
    )
    out: Any = jnp.einsum("bsnc,nvc->bsnv", output.out, q.w_uv[0, 0]), chosen
    return Attended(output._replace(out=out), state, read, chosen.tokens.reshape(view.lengths.size, 1, -1))


def _without_heads(pages: Any) -> Any:
    """[planes * N, P, D] of plain pages [planes * N, 1, P, D]."""
    return pages.reshape(-1, *pages.shape[2:]) if isinstance(pages, jax.Array) else pages


def _with_slots(tokens: jax.Array, view: PageView, first: Any, page_size: int) -> Choice:
    """Tokens i32[B, T, C] of a view, and their slots in plane 0; first: the page of the pool where the plane begins."""
    table = jnp.where(view.page_table >= 0, view.page_table - first, -1)
    request = jnp.repeat(jnp.arange(tokens.shape[0], dtype=jnp.int32), tokens.shape[1])
    rows = tokens.reshape(request.size, -1)
    slots = sparse_jax.to_slots(rows, table, request, page_size=page_size, lengths=view.lengths)
    return Choice(tokens, slots.reshape(tokens.shape))


def tokens_chosen(selector: Selector, topk: int | None) -> int | None:
    """How many tokens a row reads, None for all; topk: what the model's own indexer chooses, None without one.

    Raises ValueError for a selector other than "dense" and "dsa", and for "dsa" without an indexer.
    """
    if isinstance(selector, Dense):
        return None
    if not isinstance(selector, DSA):
        raise ValueError(
            f"latent attention is read by the selectors 'dsa' and 'dense', got {type(selector).__name__}: the others "
            "rank keys of heads, which the cache does not have"
        )
    if topk is None:
        raise ValueError(
            "the selector 'dsa' is the choice of the model's indexer, and this model has none: use 'dense'"
        )
    return topk if selector.k is None else selector.k
