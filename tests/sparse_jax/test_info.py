"""The report on this machine says what is true of it."""

import jax
import pytest

from sparse_jax import info


def test_report_covers_every_operation_of_this_machine():
    found = info.report()
    assert found["versions"]["jax"] == jax.__version__
    assert [device["id"] for device in found["devices"]] == [device.id for device in jax.devices()]
    plain = {"to_slots", "merge_attention"}
    with_kernel = {
        "paged_attention",
        "page_sparse_attention",
        "token_sparse_attention",
        "mla_sparse_attention",
        "indexer_scores",
        "top_k",
        "h2o_accumulate",
        "reference_capture",
        "reference_consume",
    }
    assert set(found["operations"]) == plain | with_kernel
    on_gpu = jax.default_backend() == "gpu"
    for name in with_kernel:
        assert found["operations"][name]["implementation"] == ("triton" if on_gpu else "xla")
    for name in plain:
        assert found["operations"][name] == {
            "implementation": "xla",
            "why": "plain jnp on every device",
        }


def test_an_operation_that_fails_is_reported_not_raised():
    def broken():
        raise NotImplementedError("no such\ndevice")

    found = info.operation(broken, has_kernel=True)
    assert found == {"implementation": "none", "why": "NotImplementedError: no such device"}


CPU = {"id": 0, "kind": "cpu", "platform": "cpu", "memory_gb": None, "capability": None}
TURING = {"id": 0, "kind": "Tesla T4", "platform": "gpu", "memory_gb": 15.0, "capability": "7.5"}
HOPPER = {"id": 0, "kind": "NVIDIA H200", "platform": "gpu", "memory_gb": 105.0, "capability": "9.0"}


@pytest.mark.parametrize(
    ("device", "nvidia", "hint"),
    [(CPU, False, None), (CPU, True, "pip install"), (TURING, True, "compute capability 7.5"), (HOPPER, True, None)],
)
def test_hints_say_what_to_do(device, nvidia, hint):
    found = info.hints([device], nvidia)
    assert len(found) == (hint is not None)
    assert all(hint in text for text in found)
