"""The suites: their inputs, what they measure on a CPU, and that all they would measure on a GPU lowers for one."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from pallas_kernels.lowering import lower_for_cuda
from sparse_jax.bench import attention, cases, inputs, mla, peers, reference, run, step, suites, timing, topk
from sparse_jax.bench.entries import Candidate
from sparse_jax.bench.profiler import Profile
from tests.sparse_jax.bench.shapes import BRIEF, TINY, TINY_MLA, TINY_STEP, TINY_TOP_K, any_timing


def test_inputs_are_shuffled_distinct_and_in_range():
    pools, lists = inputs.make_pools(TINY), inputs.make_lists(jax.random.key(0), TINY)
    assert pools.k.shape == pools.v.shape == (TINY.pages, 2, 8, 16)
    assert float(jnp.std(pools.k)) == pytest.approx(1, abs=0.05)
    assert not np.array_equal(pools.k, pools.v)
    table = np.asarray(lists.page_table)
    assert len(set(table.ravel())) == table.size
    assert not np.array_equal(np.sort(table.ravel()), table.ravel())
    for rows, width in ((lists.page_indices, 2), (lists.slots, 16)):
        assert rows.shape == (2, 2, width)
        assert rows.dtype == jnp.int32
        assert all(len(set(row)) == width for row in np.asarray(rows).reshape(-1, width))
    for request in range(2):  # the chosen tokens lie on the request's own pages
        assert set(np.asarray(lists.slots)[request].ravel() // 8) <= set(table[request])
    assert lists.scores.shape == (2, 2, 64)


def test_summaries_and_eight_bit_pools_are_those_of_the_keys():
    pools = inputs.make_pools(TINY)
    np.testing.assert_array_equal(pools.pages.lo, np.asarray(pools.k).min(axis=2))
    np.testing.assert_array_equal(pools.pages.hi, np.asarray(pools.k).max(axis=2))
    narrow = inputs.to_fp8(pools)
    np.testing.assert_allclose(narrow.k.astype(jnp.float32) * narrow.scale, pools.k, rtol=0.07, atol=2e-4)


def test_small_batches_get_a_pool_larger_than_the_cache():
    case = next(case for case in cases.ATTENTION if case.name == "b1-32k")
    page = 2 * case.kv_heads * case.page_size * case.head_dim * 2
    assert case.pages * page >= 512 * 2**20 > 2 * timing.L2_BYTES
    assert case.pages % case.chunk_pages == 0


def test_bytes_are_those_of_the_shapes():
    case = next(case for case in cases.ATTENTION if case.name == "b64-32k")
    rows, queries = 64 * 8, 2 * 64 * 32 * 128 * 2
    kept = 2 * rows * 2048 * 128 * 2
    found = {op.name: op.bytes(case) for op in attention.OPS}
    assert found["token-sparse"] == kept + queries + 4 * rows * 2048
    assert found["token-sparse, fp8 KV"] == kept / 2 + queries + 4 * rows * 2048
    assert found["page-sparse"] == kept + queries + 2 * 4 * rows * 32
    assert found["select + page-sparse"] == kept + queries + 64 * 512 * 4 + 2 * 64 * 512 * 8 * 128 * 2
    assert found["select + token-sparse"] == kept + queries + 64 * 512 * 4 + rows * 32_768 * 4
    assert found["dense"] == 2 * rows * 32_768 * 128 * 2 + queries + 64 * 512 * 4


@pytest.mark.parametrize("suite", suites.SUITES)
def test_cases_are_known_by_different_names_and_the_quick_ones_exist(suite):
    module = suites.SUITES[suite]
    names = [case.name for case in (*module.CASES, *module.CASES_CPU)]
    assert len(set(names)) == len(names)
    assert set(module.QUICK) <= set(names)
    assert suites.select_cases(suite) == list(module.CASES_CPU)
    assert 0 < len(suites.select_cases(suite, quick=True)) <= len(module.CASES_CPU)


def test_cases_are_chosen_by_pattern():
    assert [case.name for case in suites.select_cases("attention", ["b8-32k", "b1-*"])] == [
        "b8-32k",
        "b1-32k",
        "b1-128k",
        "b1-8k",
    ]
    with pytest.raises(ValueError, match="no case b9000; there are b64-32k"):
        suites.select_cases("attention", ["b9000"])
    with pytest.raises(ValueError, match="unknown suite 'nonsense'; there are attention, topk, select, step"):
        suites.select_cases("nonsense")


def test_the_reference_suite_compares_capture_and_consume_with_dense(tiny_suites):
    result = run("reference", effort=BRIEF)
    assert [row.op for row in result.rows] == ["dense", "capture", "consume"]
    assert all(row.microseconds > 0 and not row.note for row in result.rows), result.rows
    assert result.rows[0].details["of dense"] == 1
    looped = next(case for case in cases.REFERENCE if case.name == "b16-8k")
    assert looped.kept_tokens == 820
    found = {op.name: op.bytes for op in reference.ops(looped, None)}
    keys_and_values, references = 2 * 16 * 16 * 128 * 2, 16 * 16 * (4 * 820 + 2 * 4 * 128)
    assert found["capture"] - found["dense"] == references
    assert found["consume"] == 820 * keys_and_values + keys_and_values + references


def test_operations_of_cases_exist():
    assert {op for case in cases.ATTENTION for op in case.ops} <= {op.name for op in attention.OPS}


def test_attention_on_a_cpu_measures_plain_xla_and_says_so(tiny_suites):
    seen = []
    result = run("attention", effort=BRIEF, on_row=lambda result, row: seen.append(row))
    assert [(row.op, row.implementation) for row in result.rows] == [(op.name, "xla") for op in attention.OPS]
    assert seen == result.rows
    assert all(row.microseconds > 0 and row.of_copy is None and not row.note for row in result.rows), result.rows
    assert "plain XLA only" in result.notes[0]


def test_selections_choose_what_they_should():
    q, pools = inputs.make_query(TINY), inputs.make_pools(TINY)
    lists = inputs.make_lists(jax.random.key(0), TINY)
    options = {"implementation": "xla", "config": None}
    best = jnp.argsort(-lists.scores, axis=-1)[..., : TINY.kept_tokens]
    page = jnp.take_along_axis(lists.page_table[:, None], best // 8, axis=2)
    expected = attention._tokens(q, pools, lists._replace(slots=page * 8 + best % 8), **options)
    got = attention._select_tokens(q, pools, lists, **options)
    np.testing.assert_allclose(got.out, expected.out, rtol=1e-5, atol=1e-5)
    some = attention._select_pages(q, pools, lists, **options)
    assert bool(jnp.isfinite(some.out).all())
    assert bool((some.lse < attention._dense(q, pools, lists, **options).lse).all())


def test_top_k_on_a_cpu_is_right(tiny_suites):
    result = run("topk", effort=BRIEF)
    assert [(row.op, row.implementation) for row in result.rows] == [
        ("top-k by id", "xla"),
        ("top-k by score", "xla"),
        ("top-k by score", "lax.top_k"),
    ]
    assert all(row.microseconds > 0 and row.error == 0 and not row.note for row in result.rows), result.rows


def test_wrong_ids_show_as_an_error(tiny_suites, monkeypatch):
    right = sparse_jax.top_k
    monkeypatch.setattr(sparse_jax, "top_k", lambda *args, **options: right(*args, **options).at[..., 0].set(7))
    rows = run("topk", effort=BRIEF, only="by score", with_peers=False).rows
    assert rows[0].error == pytest.approx(1 / TINY_TOP_K.k, rel=0.5)


def test_kernel_times_of_top_k_are_those_of_the_calls_alone(monkeypatch):
    def profile(run, calls):
        assert len(run()) == calls == 2
        return Profile({"top_k": timing.KernelTime(0.9, 1.0)}, {})

    linked = any_timing()._replace(kernels={"top_k": timing.KernelTime(0.9, 1.0), "link": timing.KernelTime(0.1, 1.0)})
    monkeypatch.setattr(timing.Chain, "time", lambda chain, effort: linked)
    monkeypatch.setattr(timing, "profile", profile)
    sets = [topk.make_scores(jax.random.key(seed), TINY_TOP_K) for seed in range(2)]
    carry = jnp.full((2, 3), 40), jnp.zeros((2, 3, 5), jnp.int32)
    found = topk.TopKChain(topk._lax, carry, sets, 2, hold=True).time(BRIEF)
    assert (list(found.kernels), found.kernel_microseconds) == (["top_k"], 0.9)


def test_scores_hold_the_wanted_zeros():
    scores = topk.make_scores(jax.random.key(0), dataclasses.replace(TINY_TOP_K, rows=(100,), zeros=0.25))
    assert float(jnp.mean(scores == 0)) == pytest.approx(0.25, abs=0.03)
    assert TINY_TOP_K.bytes == 4 * 6 * (40 + 5)


def test_steps_on_a_cpu_go_through_every_layer(tiny_suites):
    result = run("step", effort=BRIEF, only="select + page-sparse, reserve")
    assert [row.details["layers"] for row in result.rows] == [1, 2]
    assert all(row.microseconds > 0 and not row.note for row in result.rows), result.rows
    assert ["us a layer" in row.details for row in result.rows] == [False, True]
    assert result.rows[1].bytes == 2 * result.rows[0].bytes


def test_choosing_on_a_cpu_is_measured_against_dense(tiny_suites):
    result = run("select", effort=BRIEF, only="step: ")
    names = [row.op.removeprefix("step: ") for row in result.rows]
    assert names[0] == "dense"
    assert {"quest", "gqa_h2o_sparse_attention", "h2o", "h2o, evict"} <= set(names)
    assert all(row.microseconds > 0 and not row.note for row in result.rows), result.rows
    dense = result.rows[0].microseconds
    assert all(row.details["times dense"] == pytest.approx(dense / row.microseconds) for row in result.rows)
    alone = run("select", effort=BRIEF, only="h2o accumulate, max").rows
    assert [row.bytes for row in alone] == [2 * 64 * 2 * (16 * 4 + 8)]  # every key once, every sum read and written


@pytest.mark.parametrize("name", ["token-sparse", "select + page-sparse, reserve"])
def test_steps_write_the_pool_of_their_layers_only_and_leave_the_lengths(name):
    variant = next(variant for variant in step.VARIANTS if variant.name == name)
    model = step.Model(TINY_STEP)
    before = np.asarray(model.carry.paged.kv.k)
    steps = step.Steps(model, variant, 1, None)
    steps.compile()
    steps.run()
    steps.watch()  # with several runs in flight, each of which takes the state of the one before
    after = model.carry
    changed = np.asarray(after.paged.kv.k) != before
    assert changed[0].any()
    assert not changed[1].any()
    tokens = changed[0].any(axis=(1, 3)).sum()  # each request writes a new token each step, or one again and again
    assert tokens == TINY.batch * (step.STEPS if variant.reserves else 1)
    grown = step.STEPS if variant.reserves else 1
    np.testing.assert_array_equal(after.paged.table.lengths, TINY.context - step.STEPS + grown)
    assert bool(jnp.isfinite(after.h).all())
    model.carry.paged.kv.k.delete()
    assert not model.live_carry().paged.kv.k.is_deleted()


def test_what_a_layer_costs_is_the_slope():
    kernels = {"a": timing.KernelTime(2.0, 3.0)}
    measured = [(1, any_timing()._replace(microseconds=15.0, kernels=kernels))]
    assert step._slopes(measured) == {}
    more = {"a": timing.KernelTime(10.0, 9.0), "b": timing.KernelTime(6.0, 8.0)}
    measured.append((8, any_timing()._replace(microseconds=50.0, kernels=more)))
    expected = {"us a layer": 5.0, "kernel us a layer": 2.0, "kernels a layer": 2.0}
    assert step._slopes(measured) == pytest.approx(expected)


def test_launches_and_waits_are_told_apart():
    host = {"cuGraphLaunch": 1.0, "cuLaunchKernel": 2.0, "cuLaunchKernelEx": 1.0, "cuStreamSynchronize": 3.0}
    watched = types.SimpleNamespace(watch=lambda: types.SimpleNamespace(host=host))
    assert step._launches(watched) == {"graphs launched": 1, "kernels launched": 3, "waits": 3}


def test_inputs_that_do_not_fit_become_a_note(tiny_suites, monkeypatch):
    monkeypatch.setattr(inputs, "make_pools", lambda case: 1 / 0)
    result = run("attention", effort=BRIEF)
    assert result.rows == []
    assert "tiny: ZeroDivisionError" in result.notes[1]


def test_no_case_is_begun_after_the_minutes(tiny_suites):
    result = run("attention", effort=BRIEF, minutes=-1)
    assert result.rows == []
    assert "not begun" in result.notes[1]


def test_error_is_the_relative_distance_to_plain_xla():
    meaning = attention.Meaning(lambda x: 2 * x, jnp.array([0.5, 1.0]))
    first = any_timing(jnp.array([1.0, 2.1]))
    with pytest.raises(RuntimeError, match="was not checked"):
        meaning.error(first)
    meaning.compile()
    assert meaning.error(first) == {"error": pytest.approx(0.1 / 5**0.5, rel=1e-4)}


def test_peers_get_settings_that_divide_the_table():
    for case in cases.ATTENTION:
        for settings in peers.jax_paged_settings(case):
            part, rest = divmod(case.pages_per_request, settings["k_splits"])
            assert rest == 0
            assert part % settings["pages_per_compute_block"] == 0


def test_contiguous_peers_read_the_memory_of_the_pool():
    case = dataclasses.replace(TINY, pool_bytes=2**18)
    q, pools = inputs.make_query(case), inputs.make_pools(case)
    chain = peers._contiguous_chain(case, q, pools, jax.nn.dot_product_attention)
    chain.compile()
    first = chain.time(BRIEF).first
    pages = case.batch * case.pages_per_request
    assert pages < case.pages
    k, v = (np.asarray(x[:pages]).reshape(2, 64, 2, 16) for x in (pools.k, pools.v))
    scores = np.einsum("bkgd,bskd->bkgs", np.asarray(q).reshape(2, 2, 2, 16) / 4, k)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(first, np.einsum("bkgs,bskd->bkgd", weights, v).reshape(2, 4, 16), atol=1e-4)


class FakeTorch:
    """Stands where torch would be measured."""

    def compile(self):
        pass

    def time(self, effort):
        return any_timing()._replace(first=None)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The GPU part of the suites, up to the point where a compiler for the GPU would be needed."""
    lowered = []

    def lower(chain):
        lowered.append(lower_for_cuda(chain.function, *chain.arguments).as_text())

    def shapes(function):
        return lambda *args, **options: jax.eval_shape(lambda: function(*args, **options))

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing.Chain, "compile", lower)
    monkeypatch.setattr(attention.Meaning, "compile", lambda meaning: None)
    monkeypatch.setattr(timing.Chain, "time", lambda chain, effort: any_timing())
    for name in ("make_query", "make_pools", "make_sets", "to_fp8"):
        monkeypatch.setattr(inputs, name, shapes(getattr(inputs, name)))
    monkeypatch.setitem(peers.DENSE, "torch SDPA, contiguous", lambda *rest: [Candidate(FakeTorch())])
    monkeypatch.setattr(topk, "_torch_top_k", lambda *rest: [Candidate(FakeTorch())])
    return lowered


@pytest.mark.parametrize("only", ["dense", "page-sparse", "token-sparse"])
@pytest.mark.filterwarnings("ignore:jax.experimental.pallas.ops.gpu.paged_attention is deprecated:DeprecationWarning")
def test_attention_lowers_for_a_gpu(as_on_a_gpu, monkeypatch, only):
    plain = functools.partial(sparse_jax.top_k, implementation="xla")  # top-k has tests of its own
    monkeypatch.setattr(sparse_jax, "top_k", lambda *args, order, implementation: plain(*args, order=order))
    case = next(case for case in cases.ATTENTION if case.name == "b8-32k")
    rows = list(attention.rows(case, timing.Plan(BRIEF, 1e12, only=only)))
    failed = {row.implementation: row.note for row in rows if row.note and "was not checked" not in row.note}
    missing = {"tokamax, contiguous": "not installed: tokamax"} if "tokamax, contiguous" in failed else {}
    if only == "dense":
        assert [row.implementation for row in rows] == ["xla", "triton", *peers.DENSE, "triton"]
        assert failed.pop("jax cudnn, contiguous").startswith("RuntimeError: cuDNN is not detected")
    assert failed == missing
    assert sum("triton" in text for text in as_on_a_gpu) >= sum(row.implementation == "triton" for row in rows)


def test_extra_cases_measure_the_kernels_only(as_on_a_gpu):
    case = next(case for case in cases.ATTENTION if case.name == "b8-32k-keep512")
    rows = list(attention.rows(case, timing.Plan(BRIEF, 1e12)))
    assert [(row.op, row.implementation) for row in rows] == [("page-sparse", "triton"), ("token-sparse", "triton")]


def test_top_k_measures_its_kernel_on_a_gpu(as_on_a_gpu, monkeypatch):
    asked = []

    def top_k(scores, k, lengths, *, order, implementation):
        asked.append((order, implementation))
        return jnp.zeros((*scores.shape[:-1], k), jnp.int32)

    monkeypatch.setattr(sparse_jax, "top_k", top_k)
    monkeypatch.setattr(timing.Chain, "time", lambda chain, effort: any_timing(first=chain.arguments[0]))
    rows = list(topk.rows(TINY_TOP_K, timing.Plan(BRIEF, 1e12)))
    assert [row.implementation for row in rows] == ["triton", "triton", "lax.top_k", "torch.topk"]
    assert set(asked) == {("id", "triton"), ("score", "triton")}
    assert not any(row.note for row in rows), rows
    assert rows[0].error > 0  # zeros are not the right ids
    assert rows[3].error is None


@pytest.fixture(scope="module")
def bfloat16_model():
    return step.Model(dataclasses.replace(TINY_STEP, attention=dataclasses.replace(TINY, dtype="bfloat16")))


@pytest.mark.parametrize("variant", step.VARIANTS, ids=lambda variant: variant.name)
def test_steps_lower_for_a_gpu(variant, bfloat16_model):
    model = bfloat16_model
    function = step.Steps(model, variant, 2, None).function
    assert "triton" in lower_for_cuda(function, model.carry, model.weights, model.length).as_text()


@pytest.mark.gpu
def test_suites_on_a_gpu_time_the_kernels_and_find_them_right(monkeypatch):
    case = dataclasses.replace(TINY, context=256, q_heads=8, head_dim=64, page_size=16, dtype="bfloat16")
    monkeypatch.setattr(attention, "CASES", (case,))
    monkeypatch.setattr(topk, "CASES", (TINY_TOP_K,))
    monkeypatch.setattr(step, "CASES", (dataclasses.replace(TINY_STEP, attention=case),))
    monkeypatch.setattr(reference, "CASES", (case,))
    latents = dataclasses.replace(TINY_MLA, heads=16, latent_dim=128, rope_dim=16, dtype="bfloat16")
    monkeypatch.setattr(mla, "CASES", (latents,))
    for suite in suites.SUITES:
        result = run(suite, effort=BRIEF)
        kernels = [row for row in result.rows if row.implementation == "triton"]
        assert all(not row.note and row.microseconds > 0 and row.of_copy > 0 for row in kernels), kernels
        assert all(math.isclose(row.error or 0, 0, abs_tol=2e-2) for row in kernels), kernels
        assert result.environment["driver"] != "none"
