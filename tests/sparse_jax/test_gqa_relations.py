"""What scenarios of sparse GQA have to do with each other, and wrong inputs that the comparison must tell apart."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from tests import gqa_scenarios as scenarios
from tests.compare import assert_close
from tests.gqa_check import assert_right, every_scenario
from tests.gqa_inputs import attend, paged, reference, seen_counts, sequences
from tests.gqa_scenarios import named

TOKENS = [*scenarios.DECODE, *scenarios.BEYOND_TOKEN]
PAGES = [*scenarios.PAGE_SPARSE, *scenarios.BEYOND_PAGE]


def chosen(cases, *names):
    return [named(name, cases) for name in names]


@every_scenario(
    [
        *chosen(TOKENS, "gqa_2to1_with_3_draft_tokens", "gqa_group3_non_power_of_two", "e4m3_token_scales"),
        *chosen(PAGES, "group31", "draft_8"),
    ],
    interpreted=("gqa_2to1_with_3_draft_tokens",),
)
def test_everything_chosen_is_dense_attention(case, implementation):
    """C of at least the length: out and lse are those of `paged_attention` on the same pool."""
    unit = case.P if case.op == "page_sparse" else 1
    case = dataclasses.replace(case, C=-(-max(case.lengths) // unit), per_token=True)
    seqs = sequences(case)
    ids = np.broadcast_to(np.arange(case.C), seqs.chosen.shape)
    if case.op == "token_sparse":  # which has no causal mask
        ids = np.where(ids <= seqs.positions[..., None, None], ids, -1)
    x = paged(case, seqs._replace(chosen=ids))
    sparse = attend(case, x, implementation)
    dense = sparse_jax.paged_attention(
        x["q"], x["k_pages"], x["v_pages"], x["page_table"], x["lengths"],
        k_scale=x["k_scale"], v_scale=x["v_scale"], implementation=implementation,
    )  # fmt: skip
    assert_close(sparse.out, dense.out, case.dtype)
    assert_close(sparse.lse, dense.lse, case.dtype, name="lse")


@every_scenario(
    chosen(PAGES, "msa_gqa_decode_topk4", "page_size_8", "varlen_batch", "head_tables", "e4m3_token_scales"),
    interpreted=("e4m3_token_scales",),
)
def test_pages_are_the_tokens_in_them(case, implementation):
    """`page_sparse_attention` equals `token_sparse_attention` over the slots of the same pages."""
    seqs = sequences(case)
    ids = (seqs.chosen[..., None] * case.P + np.arange(case.P)).reshape(*seqs.chosen.shape[:3], -1)
    seen = np.repeat(seqs.chosen >= 0, case.P, axis=-1) & (ids <= seqs.positions[..., None, None])
    tokens = dataclasses.replace(case, op="token_sparse", C=ids.shape[-1], per_token=True)
    pages = attend(case, paged(case, seqs), implementation)
    same = attend(tokens, paged(tokens, seqs._replace(chosen=np.where(seen, ids, -1))), implementation, packed=False)
    assert_close(pages.out, same.out, case.dtype)
    assert_close(pages.lse, same.lse, case.dtype, name="lse")


@every_scenario(
    [*chosen(TOKENS, "gqa_2to1_with_3_draft_tokens", "draft_8"), *chosen(PAGES, "msa_gqa_linear_draft_tokens")],
    interpreted=("gqa_2to1_with_3_draft_tokens",),
)
def test_drafts_in_one_call_equal_single_tokens(case, implementation):
    """Row t of T alone, with a length that ends at it. Not in bits: the matrix shapes differ."""
    seqs = sequences(case)
    together = attend(case, paged(case, seqs), implementation)
    for t in range(max(case.queries)):
        lengths = tuple(s - q + t + 1 for s, q in zip(case.lengths, case.queries))
        single = dataclasses.replace(case, queries=(1,) * len(lengths), lengths=lengths)
        row = seqs._replace(
            q=seqs.q[:, t : t + 1],
            k=seqs.k[:, : max(lengths)],
            v=seqs.v[:, : max(lengths)],
            positions=seqs.positions[:, t : t + 1],
            chosen=seqs.chosen[:, t : t + 1],
        )
        alone = attend(single, paged(single, row), implementation)
        assert_close(alone.out, together.out[:, t : t + 1], case.dtype)
        assert_close(alone.lse, together.lse[:, t : t + 1], case.dtype, name="lse")


@every_scenario(chosen(PAGES, "msa_gqa_linear_draft_tokens", "varlen_batch", "head_tables"))
def test_packed_queries_equal_a_padded_batch(case, implementation):
    """Block-sparse rows, one for each query token, each with its own table row, length and position."""
    seqs = sequences(case)
    assert_right(case, attend(case, paged(case, seqs), implementation, packed=True), reference(case, seqs))


def test_queries_at_an_offset_that_choose_all_before_them_are_dense():
    case = named("msa_gqa_custom_per_request_q_offsets", PAGES)
    seqs = sequences(case)
    x = paged(case, seqs)
    dense = sparse_jax.paged_attention(
        x["q"], x["k_pages"], x["v_pages"], x["page_table"], x["lengths"], q_positions=x["positions"]
    )
    got = attend(case, x, "xla")
    assert_close(got.out, dense.out, case.dtype)
    assert_close(got.lse, dense.lse, case.dtype, name="lse")


def wrong_sequences(case, seqs):
    """The wrong inputs that make sense for a scenario, by name: sequences, and counts of what is seen or None."""
    yield "ids shifted by one", seqs._replace(chosen=np.where(seqs.chosen >= 0, seqs.chosen + 1, -1)), None
    if case.Hkv > 1:
        yield "V of the wrong head", seqs._replace(v=np.roll(seqs.v, 1, axis=2)), None
        yield "K of the wrong head", seqs._replace(k=np.roll(seqs.k, 1, axis=2)), None
        yield "ids of the wrong head", seqs._replace(chosen=np.roll(seqs.chosen, 1, axis=2)), None
    if case.op == "token_sparse" and (seqs.chosen < 0).any():
        yield "absent ids read as 0", seqs._replace(chosen=np.maximum(seqs.chosen, 0)), None
    late = seqs._replace(positions=np.where(seqs.positions >= 0, 2**30, -1))
    if case.op == "page_sparse" and (seen_counts(case, late) != seen_counts(case, seqs)).any():
        yield "causal mask dropped", seqs, seen_counts(case, late)
    if case.scales:
        yield "K scale missing", seqs._replace(k_scale=None), None
        yield "V scale missing", seqs._replace(v_scale=None), None


@pytest.mark.parametrize("case", scenarios.ATTENTION, ids=lambda case: f"{case.op}_{case.phase}_{case}")
def test_wrong_inputs_are_told_apart(case):
    """At every scenario's tolerance. A comparison that forgives a wrong input is no test."""
    seqs = sequences(case)
    right = reference(case, seqs)
    rounded = right._replace(out=right.out.astype(jnp.dtype(case.result_dtype)))
    assert_right(case, rounded, right)
    for name, wrong, counts in wrong_sequences(case, seqs):
        if name == "ids of the wrong head" and (wrong.chosen == seqs.chosen).all():
            continue
        try:
            assert_right(case, rounded, reference(case, wrong, counts))
        except AssertionError:
            continue
        pytest.fail(f"{name} was forgiven")


MUTATIONS = {
    "v_of_the_wrong_head": ("gqa_8q4kv", lambda x: {**x, "v_pages": jnp.roll(x["v_pages"], 1, axis=1)}),
    "v_of_the_wrong_head_e4m3": (
        "e4m3_d64_8q4kv_out_e4m3", lambda x: {**x, "v_pages": jnp.roll(x["v_pages"], 1, axis=1)},
    ),
    "ids_shifted": ("fp16_d80_8q4kv", lambda x: {**x, "ids": x["ids"] - 1}),
    "absent_ids_read": ("topk128_exceeds_some", lambda x: {**x, "ids": np.maximum(x["ids"], 0)}),
    "k_scale_missing": ("e4m3_token_scales", lambda x: {**x, "k_scale": None}),
    "v_scale_missing": ("e4m3_tensor_scales", lambda x: {**x, "v_scale": None}),
    "pages_shifted": ("draft_8", lambda x: {**x, "ids": x["ids"] + 1}),
    "causal_mask_dropped": ("varlen_batch", lambda x: {**x, "positions": x["positions"] + 1}),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_fails(mutation):
    name, change = MUTATIONS[mutation]
    case = named(name, PAGES if mutation in ("pages_shifted", "causal_mask_dropped") else TOKENS)
    seqs = sequences(case)
    with pytest.raises(AssertionError):
        assert_right(case, attend(case, change(paged(case, seqs)), "xla"), reference(case, seqs))


def test_mutation_fails_scale_of_a_padded_width():
    case = named("bf16_d80_8q4kv", TOKENS)
    seqs = sequences(case)
    with pytest.raises(AssertionError):
        assert_right(case, attend(case, paged(case, seqs), "xla", scale=128**-0.5), reference(case, seqs))


@pytest.mark.parametrize("tokens", [4096, 32_768, 131_072])
def test_scenarios_scale_to_benchmark_lengths(tokens):
    """The same list is the benchmark list: query tokens stay, and the bytes read follow what is chosen."""
    for case in scenarios.BENCHMARK:
        longer = case.scaled(tokens)
        assert max(longer.lengths) == tokens
        assert longer.queries == case.queries
        assert all(start >= 0 for start in longer.first_positions)
        unit = case.P if case.op == "page_sparse" else 1
        lists = sum(case.queries) if case.per_token else len(case.queries)
        most = lists * case.C * unit * case.Hkv * (case.D + case.value_width) * jnp.dtype(case.pool_dtype).itemsize
        assert 0 < longer.bytes_read <= most
        if min(longer.lengths) >= case.C * unit:
            assert longer.bytes_read == most
