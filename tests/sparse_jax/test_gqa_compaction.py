"""Compaction at prefill: dense attention of the prompt, a cache of what each KV head kept, and decode from it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_jax import compaction, paged_attention, paging
from tests import gqa_scenarios as scenarios
from tests.gqa_check import assert_right, every_scenario
from tests.gqa_inputs import paged, reference, sequences
from tests.gqa_scenarios import Scenario, named

reserve_prompt = jax.jit(compaction.reserve_prompt, static_argnums=3)
reserve, view = jax.jit(compaction.reserve, static_argnums=2), jax.jit(paging.view)
write_prompt, write, compact, track = map(
    jax.jit, (compaction.write_prompt, compaction.write, compaction.compact, compaction.track)
)


def as_attention(case):
    """The scenario's prompt as one attention call in which every query sees all pages up to itself."""
    return Scenario(
        name=case.name, op="page_sparse", phase="prefill", queries=case.lengths, lengths=case.lengths,
        Hq=case.Hq, Hkv=case.Hkv, D=case.D, P=case.P, C=-(-max(case.lengths) // case.P), per_token=False,
        dtype=case.dtype,
    )  # fmt: skip


def kept_ids(lengths, heads, width, seed=3):
    """min(width, length) sorted token ids of each request and KV head, then -1: i32[B, Hkv, width]."""
    rng, ids = np.random.default_rng(seed), np.full((len(lengths), heads, width), -1)
    for b, h in np.ndindex(ids.shape[:2]):
        count = min(width, lengths[b])
        ids[b, h, :count] = np.sort(rng.choice(lengths[b], count, replace=False))
    return ids


def empty_state(case, W, planes=2):
    requests = len(case.lengths)
    paged = paging.create(
        planes=planes, pages=requests * W, page_size=case.P, kv_heads=case.Hkv, key_width=case.D,
        requests=requests, pages_per_request=W, dtype=case.dtype,
    )  # fmt: skip
    return track(paged)


def compacted_at_prefill(state, lengths, counts, ids, k, v):
    state, room = reserve_prompt(state, jnp.array(lengths), jnp.array(counts), ids.shape[-1])
    for plane in range(state.paged.kv.planes):
        state, stale = write_prompt(state, plane, room, jnp.asarray(ids, jnp.int32), jnp.asarray(k), jnp.asarray(v))
        assert int(stale) == 0
    return state


def compacted_in_pages(state, lengths, ids, k, v):
    state, reservation = reserve(state, jnp.array(lengths), k.shape[1])
    for plane in range(state.paged.kv.planes):
        state, _ = write(state, plane, reservation, jnp.asarray(k), jnp.asarray(v))
    state, stale = compact(state, jnp.asarray(ids, jnp.int32))
    assert int(stale) == 0
    return state


def assert_cache(state, plane, ids, counts, k, v):
    """Place j of head h holds, bit for bit, key and value of token ids[b, h, j], and its true position."""
    np.testing.assert_array_equal(state.paged.table.lengths, counts)
    table, page_size = np.asarray(view(state.paged, plane).page_table), state.paged.kv.page_size
    positions, pools = np.asarray(state.key_positions), [np.asarray(x) for x in paging.flat(state.paged.kv)]
    for b, count in enumerate(counts):
        place, heads = np.arange(count), np.arange(ids.shape[1])[:, None]
        at = (table[b, place // page_size], heads, place % page_size)
        np.testing.assert_array_equal(positions[at], ids[b, :, :count])
        for pool, prompt in zip(pools, (k, v)):
            assert pool[at].tobytes() == prompt[b][ids[b, :, :count], heads].tobytes()
    pages = sum(-(-count // page_size) for count in counts)
    assert int(state.paged.pool.free_count) == state.paged.kv.pages - pages, "nothing else is held"


def assert_serves_decode(case, state, ids, k, v, implementation):
    """One more token for each request, at the position after the whole prompt."""
    batch, rng = len(case.lengths), np.random.default_rng(4)
    new_k, new_v = (rng.standard_normal((batch, 1, case.Hkv, case.D)).astype(k.dtype) for _ in range(2))
    state, reservation = reserve(state, jnp.ones(batch, jnp.int32), 1)
    state, _ = write(state, 1, reservation, jnp.asarray(new_k), jnp.asarray(new_v))
    positions = compaction.query_positions(state)
    np.testing.assert_array_equal(positions[:, 0], case.lengths)
    q = rng.standard_normal((batch, 1, case.Hq, case.D)).astype(k.dtype)
    seen = view(state.paged, 1)
    got = paged_attention(
        jnp.asarray(q), *paging.flat(state.paged.kv), seen.page_table, seen.lengths,
        q_positions=positions, key_positions=state.key_positions, implementation=implementation,
    )  # fmt: skip

    size = max(case.lengths) + 1
    whole = [np.zeros((batch, size, *x.shape[2:]), x.dtype) for x in (k, v)]
    counts = np.zeros((batch, 1, case.Hkv, size), int)
    for b, length in enumerate(case.lengths):
        for x, old, new in zip(whole, (k, v), (new_k, new_v)):
            x[b, :length], x[b, length] = old[b, :length], new[b, 0]
        for h in range(case.Hkv):
            counts[b, 0, h, ids[b, h][ids[b, h] >= 0]] = 1
        counts[b, 0, :, length] = 1
    step = dataclasses.replace(as_attention(case), queries=(1,) * batch, lengths=tuple(s + 1 for s in case.lengths))
    seqs = sequences(step)._replace(q=q, k=whole[0], v=whole[1])
    assert_right(step, got, reference(step, seqs, counts))


@every_scenario(scenarios.COMPACTION, interpreted=("mha_8q8kv",))
def test_compaction(case, implementation):
    attention = as_attention(case)
    seqs = sequences(attention)
    x = paged(attention, seqs)
    dense = paged_attention(
        x["q"], x["k_pages"], x["v_pages"], x["page_table"], x["lengths"], q_positions=x["positions"],
        implementation=implementation,
    )  # fmt: skip
    assert_right(attention, dense, reference(attention, seqs))
    ids = kept_ids(case.lengths, case.Hkv, case.kept)
    state = compacted_at_prefill(empty_state(case, case.W), case.lengths, case.counts, ids, seqs.k, seqs.v)
    for plane in range(2):
        assert_cache(state, plane, ids, case.counts, seqs.k, seqs.v)


@every_scenario([named(name, scenarios.COMPACTION) for name in ("batch2_var_seq", "mha_8q8kv")])
def test_a_compacted_cache_serves_decode(case, implementation):
    """Whether only the kept tokens were written, or the cache was compacted in pages, which are free again then."""
    seqs = sequences(as_attention(case))
    ids = kept_ids(case.lengths, case.Hkv, case.kept)
    for state in (
        compacted_at_prefill(empty_state(case, case.W), case.lengths, case.counts, ids, seqs.k, seqs.v),
        compacted_in_pages(empty_state(case, case.W), case.lengths, ids, seqs.k, seqs.v),
    ):
        for plane in range(2):
            assert_cache(state, plane, ids, case.counts, seqs.k, seqs.v)
        np.testing.assert_array_equal(state.full_lengths, case.lengths)
        assert_serves_decode(case, state, ids, seqs.k, seqs.v, implementation)
