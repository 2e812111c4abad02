"""The mla suite: its inputs, what its bytes and FLOP count, and that what it would measure on a GPU lowers for one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from pallas_kernels.lowering import lower_for_cuda
from sparse_jax.bench import attention, cases, mla, run, suites, timing
from tests.sparse_jax.bench.shapes import BRIEF, TINY_MLA, any_timing

OPS = {op.name: op for op in mla.OPS}


def named(name):
    return next(case for case in (*cases.MLA, *cases.MLA_MORE) if case.name == name)


def test_every_operation_runs_on_a_cpu_and_is_compared_with_dense(tiny_suites):
    result = run("mla", effort=BRIEF)
    assert [row.op for row in result.rows] == list(OPS)
    assert all(row.microseconds > 0 and not row.note for row in result.rows), result.rows
    assert result.rows[0].details["times dense"] == 1
    assert all(("times dense" in row.details) == ("MLA" in row.op) for row in result.rows)
    sparse = result.rows[1]
    assert sparse.bytes == 2 * 16 * 40 * 4 + 2 * 4 * (40 + 32) * 4
    flop = 2 * 2 * 4 * 16 * (40 + 32)
    assert sparse.details["TFLOP/s"] == pytest.approx(flop / sparse.microseconds / 1e6)


def test_bytes_and_flop_are_those_of_the_specification():
    case = named("b128-32k-h128-t2")
    rows, width = 2 * 128, 576 + 512
    vectors = rows * 128 * width * 2
    assert OPS["sparse MLA"].flop(case) == 2 * rows * 128 * 2048 * width
    assert OPS["sparse MLA"].bytes(case) == rows * 2048 * 1152 + vectors
    assert OPS["sparse MLA, fp8_ds_mla"].bytes(case) == rows * 2048 * 656 + vectors
    assert OPS["sparse MLA, nvfp4_ds_mla"].bytes(case) == rows * 2048 * 352 + vectors
    assert OPS["dense MLA"].bytes(case) == 128 * 32_768 * 1152 + vectors  # both rows of a request read the same
    assert OPS["dense MLA"].flop(case) == 16 * OPS["sparse MLA"].flop(case)
    scan = 2 * rows * 32_768 * 64 * 128
    assert OPS["indexer"].flop(case) == scan
    asked, table = rows * 64 * (2 * 128 + 4), 4 * 128 * 512
    scores = 4 * rows * 32_768
    assert OPS["indexer"].bytes(case) == 128 * 32_768 * 256 + asked + table + scores
    assert OPS["indexer, fp8 keys"].bytes(case) == 128 * 32_768 * 132 + asked + table + scores
    both = OPS["select + sparse MLA, fp8"]
    assert both.flop(case) == scan + OPS["sparse MLA"].flop(case)
    parts = OPS["indexer, fp8 keys"].bytes(case) + OPS["sparse MLA, fp8_ds_mla"].bytes(case)
    assert both.bytes(case) == parts - scores


def test_shapes_are_the_product_and_operations_exist():
    every = (*cases.MLA, *cases.MLA_MORE)
    shapes = [(c.heads, c.batch, c.query_tokens, c.context) for c in every if c.context >= 32 * 1024]
    assert len(set(shapes)) == len(shapes) == 3 * 4 * 2 * 2
    # The pool that figures of others are for.
    assert [c.name for c in every if c.context < 32 * 1024] == ["b128-8k-h128", "b128-8k-h64", "b128-8k-h16"]
    assert {op for case in cases.MLA for op in (*case.ops, *case.plain)} <= set(OPS)
    found = suites.select_cases("mla", ["b8-*-h64*"])
    assert [case.name for case in found] == ["b8-32k-h64", "b8-32k-h64-t2", "b8-128k-h64", "b8-128k-h64-t2"]
    assert all(case.pages * case.page_size * 1152 >= 2**30 and case.pages % case.chunk_pages == 0 for case in found)


def test_inputs_are_the_same_numbers_in_every_format():
    plain, fp8, nvfp4, keys, narrow = mla.make_given(
        TINY_MLA,
        tuple(OPS[name] for name in ("sparse MLA", "sparse MLA, fp8_ds_mla", "sparse MLA, nvfp4_ds_mla"))
        + (OPS["indexer"], OPS["indexer, fp8 keys"]),
    )
    assert plain.latents.shape == (TINY_MLA.pages, 8, 40)
    assert (plain.keys, keys.latents) == (None, None)
    for cache, rtol in ((fp8.latents, 0.07), (nvfp4.latents, 0.5)):
        np.testing.assert_allclose(sparse_jax.dequantize_latent(cache), plain.latents, rtol=rtol, atol=0.2)
    np.testing.assert_allclose(sparse_jax.dequantize_index_keys(narrow.keys), keys.keys, rtol=0.07, atol=0.02)


def test_choosing_finds_the_tokens_with_the_best_scores():
    case = dataclasses.replace(TINY_MLA, query_tokens=2)
    (given,) = mla.make_given(case, (OPS["select + sparse MLA"],))
    (lists,) = mla.make_sets(case, 1)
    table = np.asarray(lists.page_table)
    assert len(set(table.ravel())) == table.size
    np.testing.assert_array_equal(np.sort(lists.slots), np.sort(lists.sorted_slots))
    scores = np.asarray(mla._score(case, given, lists))
    assert np.isneginf(scores[:, 0, -1]).all()  # the first of two rows does not see the second
    best = np.argsort(-scores, axis=-1, kind="stable")[..., : case.kept_tokens]
    slots = np.take_along_axis(table[:, None], best // 8, axis=2) * 8 + best % 8
    expected = mla._sparse(case, given, lists._replace(slots=jnp.asarray(slots)))
    got = mla._select(case, given, lists, implementation="xla", config=None)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_dense_reads_every_token():
    (given,) = mla.make_given(TINY_MLA, (OPS["dense MLA"],))
    (lists,) = mla.make_sets(TINY_MLA, 1)
    got = np.asarray(mla._dense(TINY_MLA, given, lists))[:, 0]
    rows = np.asarray(given.latents)[np.asarray(lists.page_table)].reshape(2, 64, 40)
    s = np.einsum("bhe,bse->bhs", given.q[:, 0], rows) * 192**-0.5
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    np.testing.assert_allclose(got, np.einsum("bhs,bsv->bhv", p, rows[..., :32]), rtol=1e-4, atol=1e-5)


def test_kernels_lower_for_a_gpu(monkeypatch):
    lowered = []

    def lower(chain):
        lowered.append(lower_for_cuda(chain.function, *chain.arguments).as_text())

    def shapes(function):
        return lambda *args: jax.eval_shape(lambda: function(*args))

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing.Chain, "compile", lower)
    monkeypatch.setattr(timing.Chain, "time", lambda chain, effort: any_timing(chain.arguments[0]))
    monkeypatch.setattr(attention.Meaning, "compile", lambda meaning: None)
    for name in ("make_given", "make_sets"):
        monkeypatch.setattr(mla, name, shapes(getattr(mla, name)))
    rows = list(mla.rows(named("b8-128k-h128"), timing.Plan(BRIEF, 1e12, only="MLA")))
    assert [row.implementation for row in rows] == ["triton"] * len(rows)
    assert all("was not checked" in row.note for row in rows), rows
    assert len(lowered) == len(rows) == 5
    assert all("triton" in text for text in lowered)


def test_what_is_not_seen_is_no_error(monkeypatch):
    (entry,) = [
        mla._entry(OPS["indexer"], TINY_MLA, given, mla.make_sets(TINY_MLA, 1), timing.Plan(BRIEF), "triton", {})
        for given in mla.make_given(TINY_MLA, (OPS["indexer"],))
    ]
    (meaning,) = entry.beside
    meaning.compile()
    right = meaning.run(*meaning.arguments)
    assert entry.finish(any_timing(right))["error"] == 0
    assert entry.finish(any_timing(right.at[0, 0, 0].set(jnp.nan)))["error"] != 0
