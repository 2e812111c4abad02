import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.exit_gate import chosen_exit, exit_log_probabilities, exit_loop, select_exit
from tests.models.configs import small_llama


def logit(p):
    p = np.asarray(p, np.float64)
    return jnp.asarray(np.log(p / (1 - p)), jnp.float32)


def test_probabilities_by_hand():
    p = jnp.exp(exit_log_probabilities(logit([0.1, 0.5, 0.25, 0.9])))  # the last lambda does not matter
    np.testing.assert_allclose(p, [0.1, 0.9 * 0.5, 0.9 * 0.5 * 0.25, 0.9 * 0.5 * 0.75], rtol=1e-6)
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("gate", [-200.0, -3.0, 0.0, 3.0, 200.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_probabilities_sum_to_one_with_finite_gradients(gate, dtype):
    gates = jnp.full((4, 2), gate, dtype)
    log_p = exit_log_probabilities(gates)
    assert log_p.dtype == jnp.float32
    np.testing.assert_allclose(jnp.exp(log_p).sum(axis=0), 1.0, atol=1e-6)

    def entropy(gates):
        log_p = exit_log_probabilities(gates)
        return -jnp.sum(jnp.exp(log_p) * log_p)

    assert jnp.isfinite(jax.grad(entropy)(gates.astype(jnp.float32))).all()


def test_leaves_at_the_first_loop_whose_cdf_reaches_the_threshold():
    gates = logit([0.1, 0.5, 0.25, 0.9])  # CDF 0.1, 0.55, 0.6625
    for threshold, loop in [(0.0, 0), (0.09, 0), (0.11, 1), (0.54, 1), (0.56, 2), (0.66, 2), (0.67, 3), (0.999, 3)]:
        assert int(exit_loop(gates, threshold=threshold)) == loop


def test_threshold_zero_leaves_at_loop_zero_even_if_every_lambda_is_zero():
    assert int(exit_loop(jnp.full(4, -200.0), threshold=0.0)) == 0


@pytest.mark.parametrize("threshold", [1.0, 1.5, float("inf")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_threshold_one_runs_all_loops_when_every_lambda_rounds_to_one(threshold, dtype):
    gates = jnp.full((4, 3), 200.0, dtype)
    assert float(jax.nn.sigmoid(gates).min()) == 1.0
    np.testing.assert_array_equal(exit_loop(gates, threshold=threshold), [3, 3, 3])


def test_cdf_is_float32_for_bf16_gates():
    """In BF16 the CDF of these gates is 1 at loop 1; in float32 it stays below 0.9999."""
    gates = logit([0.99, 0.98, 0.6, 0.5]).astype(jnp.bfloat16)
    assert int(exit_loop(gates, threshold=0.99985)) == 2


def test_step_goes_before_threshold():
    gates = jnp.full((4, 2), 200.0)
    np.testing.assert_array_equal(exit_loop(gates, threshold=0.0, step=2), [2, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 4}, "exit step must be a loop from 0 to 3, got 4"),
        ({"threshold": -0.1}, "exit threshold must be 0 or more"),
        ({"threshold": float("nan")}, "exit threshold must be 0 or more"),
    ],
)
def test_refuses_impossible_exits(options, message):
    with pytest.raises(ValueError, match=message):
        exit_loop(jnp.zeros((4, 1)), **options)


@pytest.mark.parametrize("wanted", [(0.5, None), (1.0, None), (None, 0)])
def test_a_model_of_one_loop_has_nothing_to_exit_from(wanted):
    assert chosen_exit(small_llama(), None, None) == {"threshold": 1.0, "step": None}
    told = "exit_step 0" if wanted[0] is None else f"exit_threshold {wanted[0]}"
    with pytest.raises(ValueError, match=f"^{told}: an exit is among the loops of a looped model, and this model has"):
        chosen_exit(small_llama(), *wanted)


def test_batch_with_different_exits_equals_single_requests():
    rng = np.random.default_rng(0)
    gates = jnp.asarray(rng.normal(size=(4, 5, 3)) * 3, jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(4, 5, 3, 8)), jnp.float32)
    chosen, loops = select_exit(hidden, gates, threshold=0.6)
    assert len(set(np.asarray(loops).ravel().tolist())) > 1
    for b in range(5):
        one, loop = select_exit(hidden[:, b : b + 1], gates[:, b : b + 1], threshold=0.6)
        np.testing.assert_array_equal(one[0], chosen[b])
        np.testing.assert_array_equal(loop[0], loops[b])
        for s in range(3):
            np.testing.assert_array_equal(chosen[b, s], hidden[loops[b, s], b, s])


def test_select_exit_shows_shapes_that_do_not_agree():
    with pytest.raises(ValueError, match=r"\(4, 2, 3, 8\) and gate_logits \(4, 3\)"):
        select_exit(jnp.zeros((4, 2, 3, 8)), jnp.zeros((4, 3)))
