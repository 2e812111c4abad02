"""The plain-jnp meaning of the attention operations against float64 NumPy."""

import pytest

from tests import oracle
from tests.attention_cases import COMMON, CORNER, OPS, make_inputs, poisoned, reference
from tests.compare import assert_close


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", COMMON + CORNER, ids=str)
def test_meaning(op, case):
    x = poisoned(op, case, make_inputs(case))
    weights = {} if op == "paged" else {"return_weights": True}
    actual = reference(op, case, x, **weights)
    out, lse, probabilities = oracle.attention(op, case, x)
    assert_close(actual.out, out)
    assert_close(actual.lse, lse, name="lse")
    if weights:
        assert_close(actual.weights, probabilities, name="weights")
