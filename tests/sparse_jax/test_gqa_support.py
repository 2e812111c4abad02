"""The support matrix of sparse GQA and MQA: every decode, draft and block-sparse scenario, by its name.

Prefill is in test_gqa_prefill.py, compaction in test_gqa_compaction.py, what scenarios must have to do with each other
in test_gqa_relations.py.
"""

import collections

from tests import gqa_scenarios as scenarios
from tests.gqa_check import check_scenario, every_scenario


@every_scenario(
    scenarios.DECODE,
    interpreted=(
        "gqa_group3_non_power_of_two",
        "gqa_2to1_with_3_draft_tokens",
        "topk128_exceeds_some",
        "fp16_d80_8q4kv",
        "e4m3_d64_8q4kv_out_e4m3",
        "page_size_8",
    ),
)
def test_token_sparse(case, implementation):
    check_scenario(case, implementation)


@every_scenario(scenarios.PAGE_SPARSE, interpreted=("msa_gqa_linear_draft_tokens", "msa_gqa_decode_topk4"))
def test_page_sparse(case, implementation):
    check_scenario(case, implementation)


@every_scenario(scenarios.BEYOND_TOKEN, interpreted=("topk33", "draft_lengths_differ", "e4m3_queries", "e4m3_d7_dv3"))
def test_token_sparse_beyond(case, implementation):
    check_scenario(case, implementation)


@every_scenario(scenarios.BEYOND_PAGE, interpreted=("varlen_batch", "draft_8"))
def test_page_sparse_beyond(case, implementation):
    check_scenario(case, implementation)


def test_no_scenario_is_missing():
    """The lists have the members and the names that those tests have, each once."""
    sizes = {
        "TOKEN_DECODE": 18, "DTYPE_GRID": 14, "E4M3_GRID": 12, "PAGE_GRID": 5, "TOKEN_PREFILL": 6, "COMPACTION": 5,
        "PAGE_SPARSE": 12,
    }  # fmt: skip
    assert {name: len(getattr(scenarios, name)) for name in sizes} == sizes
    for cases in (scenarios.DECODE, scenarios.TOKEN_PREFILL, scenarios.COMPACTION, scenarios.PAGE_SPARSE):
        assert max(collections.Counter(case.name for case in cases).values()) == 1
    assert {case.G for case in scenarios.TOKEN_DECODE} == {2, 3, 4, 8, 16, 24, 31, 32}
    assert {case.P for case in scenarios.DECODE} == {8, 16, 32, 64, 128, 256, 512}
    assert {case.C for case in scenarios.PAGE_SPARSE} == {4, 8, 16, 32}
