"""Latent attention by itself: both forms agree, rows are apart, and who may choose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from models import latent_attention
from models.latent_attention import Choice, LatentQuery
from sparse_jax import selectors, to_slots
from sparse_jax.paging import PageView

DENSE, DSA = selectors.get("dense"), selectors.get("dsa")
HEADS, D_N, D_R, D_V, D_C, D_I, P, TOKENS = 3, 5, 2, 4, 8, 6, 4, 11
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


LATENTS, KEYS = normal(2, TOKENS, D_C + D_R), normal(2, TOKENS, D_I)
QUERY = LatentQuery(
    q_nope=normal(2, TOKENS, HEADS, D_N),
    q_pe=normal(2, TOKENS, HEADS, D_R),
    w_uk=normal(1, 1, HEADS, D_N, D_C),
    w_uv=normal(1, 1, HEADS, D_V, D_C),
    index_q=normal(2, TOKENS, 16, D_I),
    index_weights=normal(2, TOKENS, 16),
    chosen=None,
    scale=(D_N + D_R) ** -0.5,
    topk=4,
)
TABLE = np.array([[7, 2, 4], [0, 5, 3]], np.int32)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def pool(rows):
    """Rows [2, TOKENS, width] in the pages of TABLE; everything else is NaN."""
    pages = np.full((9, 1, P, rows.shape[-1]), np.nan, np.float32)
    for request, position in np.ndindex(2, TOKENS):
        pages[TABLE[request, position // P], 0, position % P] = rows[request, position]
    return jnp.asarray(pages)


PAGES, KEY_PAGES = pool(np.asarray(LATENTS)), pool(np.asarray(KEYS))


def last_rows(query, count):
    return jax.tree.map(lambda x: x if x.shape[:2] == (1, 1) else x[:, TOKENS - count :], query)


def stepped(query, selector, rows=3, lengths=(TOKENS, TOKENS), **options):
    view = PageView(jnp.asarray(TABLE), jnp.asarray(lengths, jnp.int32), jnp.int32(0))
    return latent_attention.attend(selector, (), last_rows(query, rows), PAGES, KEY_PAGES, view, **options)


def numpy_dense(request, row, tokens):
    """One query in float64, with keys and values of heads made from the latents."""
    get = lambda x: np.asarray(x, np.float64)  # noqa: E731
    c, pe = get(LATENTS)[request, tokens, :D_C], get(LATENTS)[request, tokens, D_C:]
    score = np.einsum("nd,ndc,tc->nt", get(QUERY.q_nope)[request, row], get(QUERY.w_uk)[0, 0], c)
    score = (score + get(QUERY.q_pe)[request, row] @ pe.T) * QUERY.scale
    p = np.exp(score - score.max(axis=1, keepdims=True))
    return np.einsum("nt,tc,nvc->nv", p / p.sum(axis=1, keepdims=True), c, get(QUERY.w_uv)[0, 0])


def numpy_choice(request, row):
    score = np.einsum("jd,td->jt", np.float64(QUERY.index_q)[request, row], np.float64(KEYS)[request, : row + 1])
    score = np.maximum(score, 0).T @ np.float64(QUERY.index_weights)[request, row]
    return sorted(np.argsort(-score, kind="stable")[: QUERY.topk].tolist())


def test_both_forms_are_those_of_numpy():
    dense = dataclasses.replace(QUERY, topk=None)
    for query, selector in ((dense, DENSE), (QUERY, DSA)):
        whole, _ = jax.jit(latent_attention.causal)(query, LATENTS, KEYS)
        out, _ = stepped(query, selector).output.out
        for request, row in np.ndindex(2, TOKENS):
            tokens = list(range(row + 1)) if selector is DENSE else numpy_choice(request, row)
            expected = numpy_dense(request, row, tokens)
            np.testing.assert_allclose(whole[request, row], expected, atol=1e-5)
            if row >= TOKENS - 3:
                np.testing.assert_allclose(out[request, row - TOKENS + 3], expected, atol=1e-5)


def test_a_step_says_what_it_chose_and_read():
    attended = stepped(QUERY, DSA)
    _, (chosen, slots) = attended.output.out
    for request, row in np.ndindex(2, 3):
        assert slots[request, row].tolist() == [TABLE[request, x // P] * P + x % P for x in chosen[request, row]]
        assert chosen[request, row].tolist() == numpy_choice(request, TOKENS - 3 + row)
    np.testing.assert_array_equal(attended.tokens_read, [[12], [12]])
    np.testing.assert_array_equal(attended.positions, np.asarray(chosen).reshape(2, 1, 12))
    np.testing.assert_array_equal(stepped(QUERY, DENSE).tokens_read, [[TOKENS], [TOKENS]])
    assert (np.asarray(stepped(QUERY, selectors.get("dsa", k=2)).tokens_read) == 6).all()


def test_many_blocks_of_queries_are_those_of_one(monkeypatch):
    one = latent_attention.causal(QUERY, LATENTS, KEYS)
    monkeypatch.setattr(latent_attention, "QUERY_BLOCK", 4)
    many = latent_attention.causal(QUERY, LATENTS, KEYS)
    np.testing.assert_allclose(many[0], one[0], atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, many[1], one[1])


def test_chosen_latents_alone_give_what_a_mask_does():
    """Long sequences are read in absorbed form; both are the same attention, absent choices included."""
    chosen = latent_attention._choose_inside(QUERY, KEYS, None)
    assert (chosen.tokens == -1).any()
    np.testing.assert_array_equal(chosen.slots[1], np.where(chosen.tokens[1] >= 0, TOKENS + chosen.tokens[1], -1))
    heads = latent_attention._same_width(*latent_attention.multi_head(QUERY, LATENTS))
    masked = latent_attention._masked(*heads, chosen.tokens, {"scale": QUERY.scale})[..., :D_V]
    np.testing.assert_allclose(latent_attention._gathered(QUERY, LATENTS, chosen.slots, None), masked, atol=5e-6)
    out, again = latent_attention.causal(QUERY, LATENTS, KEYS)  # 4 * (10 + 8) < 11 * (7 + 4)
    jax.tree.map(np.testing.assert_array_equal, again, chosen)
    np.testing.assert_array_equal(out, latent_attention._gathered(QUERY, LATENTS, chosen.slots, None))
    wide = dataclasses.replace(QUERY, topk=8)  # 8 * 18 >= 121
    chosen = latent_attention._choose_inside(wide, KEYS, None).tokens
    np.testing.assert_array_equal(
        latent_attention.causal(wide, LATENTS, KEYS)[0],
        latent_attention._masked(*heads, chosen, {"scale": QUERY.scale})[..., :D_V],
    )


def test_what_fits_in_topk_is_dense_and_needs_no_choice():
    fits = dataclasses.replace(QUERY, topk=TOKENS)
    out, chosen = latent_attention.causal(fits, LATENTS, KEYS)
    assert chosen is None
    np.testing.assert_array_equal(out, latent_attention.causal(dataclasses.replace(QUERY, topk=None), LATENTS, KEYS)[0])
    np.testing.assert_allclose(stepped(fits, DSA).output.out[0], stepped(fits, DENSE).output.out[0], atol=1e-6)


def follower_of(tokens):
    """A layer without indexer whose leader chose these tokens i32[C] for every row of a step and inside sequences."""
    tokens = jnp.broadcast_to(jnp.array(tokens, jnp.int32), (2, TOKENS, len(tokens)))
    request = np.arange(2)[:, None, None]
    step = Choice(tokens, jnp.where(tokens >= 0, TABLE[request, tokens // P] * P + tokens % P, -1))
    inside = Choice(tokens, jnp.where(tokens >= 0, TOKENS * request + tokens, -1))
    query = dataclasses.replace(QUERY, index_q=None, index_weights=None)
    return dataclasses.replace(query, chosen=step), dataclasses.replace(query, chosen=inside)


def test_a_layer_without_indexer_reads_what_its_leader_chose():
    step, inside = follower_of([0, 2, -1, 7])
    out, same = stepped(step, DSA, rows=1).output.out
    jax.tree.map(np.testing.assert_array_equal, same, jax.tree.map(lambda x: x[:, :1], step.chosen))
    whole, _ = latent_attention.causal(inside, LATENTS, KEYS)
    for request in range(2):
        expected = numpy_dense(request, TOKENS - 1, [0, 2, 7])
        np.testing.assert_allclose(out[request, 0], expected, atol=1e-5)
        np.testing.assert_allclose(whole[request, -1], expected, atol=1e-5)


def test_followers_find_the_leaders_tokens_in_their_own_planes(monkeypatch):
    """Slots of a plane are those that a conversion by its own table gives, bit for bit."""
    pool_of = lambda pages, plane: jnp.roll(jnp.pad(pages, ((0, 18), *[(0, 0)] * 3)), plane * 9, axis=0)  # noqa: E731
    table = jnp.asarray(np.where(TABLE == 2, -1, TABLE))  # a page that is gone
    seen, attention = [], sparse_jax.mla_sparse_attention

    def noted(q, pool, slots, **options):
        seen.append(slots)
        return attention(q, pool, slots, **options)

    monkeypatch.setattr(sparse_jax, "mla_sparse_attention", noted)

    def attend(query, plane):
        view = PageView(jnp.where(table >= 0, 9 * plane + table, -1), jnp.array([TOKENS, 7]), jnp.int32(0), plane, 9)
        pools = pool_of(PAGES, plane), pool_of(KEY_PAGES, plane)
        return latent_attention.attend(DSA, (), last_rows(query, 3), *pools, view), view

    led, _ = attend(QUERY, 1)
    out, choice = led.output.out
    monkeypatch.setattr(sparse_jax, "to_slots", None)  # nobody converts again
    follower = dataclasses.replace(QUERY, index_q=None, index_weights=None)
    chosen = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (TOKENS - 3, 0), (0, 0))), choice)
    for plane in (jnp.int32(0), 1, 2):
        followed, view = attend(dataclasses.replace(follower, chosen=chosen), plane)
        jax.tree.map(np.testing.assert_array_equal, followed.output.out, (out, choice))
        np.testing.assert_array_equal(followed.tokens_read, led.tokens_read)
        own = to_slots(
            choice.tokens.reshape(6, -1), view.page_table, np.repeat([0, 1], 3), page_size=P, lengths=view.lengths
        )
        np.testing.assert_array_equal(seen[-1].reshape(6, -1), own)
    assert not set(np.asarray(choice.tokens)[0].ravel()) & {4, 5, 6, 7}


def test_rows_are_independent_and_absent_ones_are_zero():
    both = stepped(QUERY, DSA, rows=1)
    first = stepped(QUERY, DSA, rows=1, lengths=(TOKENS, 0))
    np.testing.assert_array_equal(first.output.out[0][0], both.output.out[0][0])
    assert not np.asarray(first.output.out[0][1]).any()
    assert first.tokens_read.tolist() == [[4], [0]]
    padding = stepped(QUERY, DENSE, rows=2, q_positions=jnp.array([[10, -1], [-1, 10]]))
    assert not np.asarray(padding.output.out[0][[0, 1], [1, 0]]).any()
    assert np.isfinite(padding.output.out[0]).all()


def test_only_dsa_and_dense_read_latents():
    with pytest.raises(ValueError, match="read by the selectors 'dsa' and 'dense', got Quest"):
        stepped(QUERY, selectors.get("quest"))
    with pytest.raises(ValueError, match="this model has none: use 'dense'"):
        stepped(dataclasses.replace(QUERY, topk=None), DSA)
    with pytest.raises(ValueError, match="DSA: k is a whole number of tokens, at least 1; got 0"):
        selectors.get("dsa", k=0)
    view = PageView(jnp.asarray(TABLE), jnp.full(2, TOKENS, jnp.int32), jnp.int32(0))
    with pytest.raises(ValueError, match="'dsa' is the choice of a model's own indexer"):
        DSA.attend((), jnp.zeros((2, 1, 2, 8)), PAGES, KEY_PAGES, view)
