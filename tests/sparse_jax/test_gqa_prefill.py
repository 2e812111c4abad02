"""Token-sparse prefill: every scenario by its name, beside the compaction that the same prompt may go through."""

from sparse_jax import paged_attention
from tests import gqa_scenarios as scenarios
from tests.compare import assert_close, assert_same_bits
from tests.gqa_check import check_scenario, every_scenario
from tests.gqa_inputs import attend, paged, sequences
from tests.gqa_scenarios import named
from tests.sparse_jax.test_gqa_compaction import (
    assert_cache,
    compacted_at_prefill,
    empty_state,
    kept_ids,
)


@every_scenario(scenarios.TOKEN_PREFILL, interpreted=("topk4_very_sparse",))
def test_token_sparse_prefill(case, implementation):
    """Packed rows, one for each prompt token, each with ids of its own, over the whole prompt.

    What is attended to and what is kept are two selections of one prompt: neither disturbs the other.
    """
    check_scenario(case, implementation)
    seqs = sequences(case)
    x = paged(case, seqs)
    before = attend(case, x, implementation)
    ids, counts = kept_ids(case.lengths, case.Hkv, 64), tuple(min(64, length) for length in case.lengths)
    state = compacted_at_prefill(empty_state(case, W=4), case.lengths, counts, ids, seqs.k, seqs.v)
    assert_cache(state, 1, ids, counts, seqs.k, seqs.v)
    assert_same_bits(attend(case, x, implementation).out, before.out)


@every_scenario([named("topk128_near_dense", scenarios.TOKEN_PREFILL)])
def test_prefill_that_chooses_everything_is_dense(case, implementation):
    """No prompt of topk128_near_dense has more tokens than are chosen."""
    x = paged(case, sequences(case))
    dense = paged_attention(
        x["q"], x["k_pages"], x["v_pages"], x["page_table"], x["lengths"], q_positions=x["positions"],
        implementation=implementation,
    )  # fmt: skip
    got = attend(case, x, implementation)
    assert_close(got.out, dense.out, case.dtype)
    assert_close(got.lse, dense.lse, case.dtype, name="lse")
