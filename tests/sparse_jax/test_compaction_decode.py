"""Decoding from a compacted cache: every way to attend, in a scan, with drafts, donated, in 64-bit mode."""

import dataclasses
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from sparse_jax import compaction, paging
from tests import oracle
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax.scalar_attention import every_implementation
from tests.sparse_jax.test_compaction import chosen
from tests.sparse_jax.test_paging import counts_of, make

B, HQ, HKV, D, P, PROMPT, STEPS = 3, 4, 2, 16, 4, 9, 4
LENGTHS, KEPT = (9, 5, 7), (4, 2, 3)
IDS = ([[0, 3, 4, 8], [1, 2, 7, 8]], [[0, 4], [3, 4]], [[1, 2, 3], [4, 5, 6]])
NEW = PROMPT + STEPS  # tokens of a request at most


def draw(seed=0):
    """q [B, NEW, Hq, D], k and v [B, NEW, Hkv, D] by position, whether the token is kept or not."""
    rng = np.random.default_rng(seed)
    shapes = ((B, NEW, HQ, D), (B, NEW, HKV, D), (B, NEW, HKV, D))
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def empty():
    sizes = {"planes": 2, "pages": 16, "page_size": P, "kv_heads": HKV, "key_width": D, "requests": B}
    return compaction.track(paging.create(**sizes, pages_per_request=4))


def compacted(k, v):
    """Both planes hold what the heads keep of the prompt."""
    state, room = compaction.reserve_prompt(empty(), counts_of(*LENGTHS), counts_of(*KEPT), 6)
    for plane in range(2):
        state, _ = compaction.write_prompt(state, plane, room, chosen(*IDS), k[:, :PROMPT], v[:, :PROMPT])
    return state


def at(x, positions):
    """Rows of x [B, NEW, ...] at positions i32[B, T]."""
    return jnp.take_along_axis(x, positions[..., None, None], axis=1)


def step(state, q, k, v, rows=1, implementation="xla"):
    """Writes `rows` tokens of each request and attends from plane 1, in every way: (state, {way: output})."""
    positions = state.full_lengths[:, None] + jnp.arange(rows)
    state, reservation = compaction.reserve(state, jnp.full(B, rows, jnp.int32), rows)
    for plane in range(2):
        state, _ = compaction.write(state, plane, reservation, at(k, positions), at(v, positions))
    view, pools = paging.view(state.paged, 1), paging.flat(state.paged.kv)
    q_positions = compaction.query_positions(state, rows)
    q = at(q, q_positions)
    table, lengths = view.page_table, view.lengths
    by_position = {"q_positions": q_positions, "key_positions": state.key_positions, "implementation": implementation}
    pages = jnp.broadcast_to(jnp.array([0, 2], jnp.int32), (B, HKV, 2))  # the first and the third
    places = jnp.stack([jnp.ones_like(lengths), jnp.full_like(lengths, 2), lengths - 1], axis=1)
    places = jnp.broadcast_to(places[:, None], (B, HKV, 3))
    slots = sparse_jax.to_slots(places, table, jnp.arange(B, dtype=jnp.int32), page_size=P, lengths=lengths)
    return state, {
        "paged": sparse_jax.paged_attention(q, *pools, table, lengths, **by_position),
        "window": sparse_jax.paged_attention(q, *pools, table, lengths, window=6, **by_position),
        "page_sparse": sparse_jax.page_sparse_attention(q, *pools, table, lengths, pages, **by_position),
        "token_sparse": sparse_jax.token_sparse_attention(q, *pools, slots, implementation=implementation),
    }


jit_step, jit_compacted = jax.jit(step, static_argnums=(4, 5)), jax.jit(compacted)


def expected(q, k, v, way, steps, rows=1):
    """The last row's output and lse after `steps` single tokens, from the whole sequences."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros((B, rows, HQ, D)), np.zeros((B, rows, HQ))
    for b, t, head in np.ndindex(B, rows, HQ):
        h = head // (HQ // HKV)
        position = LENGTHS[b] + steps - rows + t
        cached = [*IDS[b][h], *range(LENGTHS[b], LENGTHS[b] + steps)]  # positions, by place
        seen = {
            "paged": cached,
            "window": [i for i in cached if i > position - 6],
            "page_sparse": cached[:P] + cached[2 * P : 3 * P],
            "token_sparse": [cached[1], cached[2], cached[-1]],
        }[way]
        seen = [i for i in seen if i <= position]
        out[b, t, head], lse[b, t, head], _ = oracle.attend(
            q[b, position, head], k[b, seen, h], v[b, seen, h], scale=D**-0.5
        )
    return out, lse


@every_implementation
def test_decode_in_a_scan_sees_true_positions(implementation):
    q, k, v = draw()

    @jax.jit
    def decode(state, k, v):
        return jax.lax.scan(
            lambda state, _: step(state, q, k, v, implementation=implementation), state, None, length=STEPS
        )

    state, outs = decode(jit_compacted(k, v), k, v)
    np.testing.assert_array_equal(state.full_lengths, np.add(LENGTHS, STEPS))
    np.testing.assert_array_equal(state.paged.table.lengths, np.add(KEPT, STEPS))
    for i, way in itertools.product(range(STEPS), outs):
        out, lse = expected(q, k, v, way, i + 1)
        assert_close(outs[way].out[i], out, name=f"{way} out")
        assert_close(outs[way].lse[i], lse, name=f"{way} lse")


@every_implementation
def test_drafts_see_what_was_kept_and_earlier_drafts(implementation):
    q, k, v = draw()
    _, got = jit_step(jit_compacted(k, v), q, k, v, 3, implementation)
    for way in ("paged", "window", "page_sparse"):
        out, lse = expected(q, k, v, way, 3, rows=3)
        assert_close(got[way].out, out, name=f"{way} out")
        assert_close(got[way].lse, lse, name=f"{way} lse")


def test_wrong_positions_are_told_apart():
    """By place instead of by position, the window would see other keys."""
    q, k, v = draw()
    by_place = jax.jit(compaction.track)(jit_compacted(k, v).paged)
    _, got = jit_step(by_place, q, k, v, 1, "xla")
    with pytest.raises(AssertionError):
        assert_close(got["window"].lse, expected(q, k, v, "window", 1)[1])


def test_both_ways_give_the_same_bits():
    """Kept at prefill, or compacted in pages and decoded on."""
    q, k, v = draw()

    @jax.jit
    def in_pages(k, v):
        state, reservation = compaction.reserve(empty(), counts_of(*LENGTHS), PROMPT)
        for plane in range(2):
            state, _ = compaction.write(state, plane, reservation, k[:, :PROMPT], v[:, :PROMPT])
        return compaction.compact(state, chosen(*IDS))[0]

    one, other = (jit_step(state, q, k, v, 1, "xla")[1] for state in (in_pages(k, v), jit_compacted(k, v)))
    jax.tree.map(assert_same_bits, one, other)


def test_contract_4_what_was_left_out_may_hold_anything():
    q, k, v = draw()
    kept = np.zeros((B, NEW, HKV, 1), bool)
    for b, h in np.ndindex(B, HKV):
        kept[b, IDS[b][h], h] = True
        kept[b, LENGTHS[b] :, h] = True
    sick = [jnp.where(kept, x, jnp.nan) for x in (k, v)]
    clean, dirty = (jit_step(jit_compacted(*x), q, *x, 1, "xla")[1] for x in ((k, v), sick))
    jax.tree.map(assert_same_bits, clean, dirty)


def test_contract_9_types_are_the_same_in_and_out():
    with jax.enable_x64(True):
        _, k, v = draw()

        def body(state, _):
            state, room = compaction.reserve_prompt(state, counts_of(3, 0, 2), counts_of(1, 0, 2), 6)
            state, written = compaction.write_prompt(state, 0, room, chosen(*IDS), k[:, :PROMPT], v[:, :PROMPT])
            state, reservation = compaction.reserve(state, counts_of(1, 1, 1), 1)
            state, also = compaction.write(state, 0, reservation, k[:, :1], v[:, :1])
            state, compacted = compaction.compact(state, chosen(*IDS))
            state, shared = compaction.share(state, 0, 1, 3)
            state, released = compaction.release(state, jnp.array([False, True, False]))
            extra = (room, written, also, compacted, shared, released, compaction.query_positions(state, 2))
            return state, extra

        after, extra = jax.lax.scan(body, empty(), None, length=2)
        after = dataclasses.replace(after, paged=dataclasses.replace(after.paged, kv=()))
        for leaf in jax.tree.leaves((after, extra)):
            assert leaf.dtype == jnp.int32
            assert not leaf.weak_type


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_contract_9_a_donated_pool_is_not_copied(dtype):
    """By the temporary memory of the compiled step: compacting a cache, then one token of decode."""
    sizes = {"pages": 256, "page_size": 16, "key_width": 64, "value_width": 64, "pages_per_request": 32}
    state = compaction.track(make(planes=2, dtype=dtype, kv_heads=2, **sizes))
    new = jnp.zeros((3, 1, 2, 64))

    def run(state, ids):
        state, _ = compaction.compact(state, ids)
        state, reservation = compaction.reserve(state, counts_of(1, 1, 1), 1)
        return compaction.write(state, 0, reservation, new, new)

    compiled = jax.jit(run, donate_argnums=0).lower(state, chosen(*IDS)).compile()
    memory, pool = compiled.memory_analysis(), state.paged.kv.k.nbytes
    assert memory.temp_size_in_bytes < pool / 8, (memory.temp_size_in_bytes, pool)
    assert memory.alias_size_in_bytes >= 2 * pool


def test_code_in_the_guide_runs():
    """The section of docs/operations.md, whose last line is the output of a decode step."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    section = text[text.index("## KV compaction") :]
    (block,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    names: dict = {}
    exec(compile(block, "operations.md", "exec"), names)
    assert names["attended"].out.shape == (2, 8, 64)
    assert names["state"].full_lengths.tolist() == [101, 61]
    assert names["state"].paged.table.lengths.tolist() == [33, 33]
