import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.evaluation import diagnostics
from sparse_jax.paging import PageView

B, HKV, G, P, W, D, POOL = 3, 2, 3, 4, 6, 8, 40
LENGTHS = [21, 24, 0]


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, POOL, HKV, P, D)).astype(np.float32)
    q = rng.normal(size=(B, HKV * G, D)).astype(np.float32) * 2
    table = rng.permutation(POOL)[: B * W].reshape(B, W).astype(np.int32)
    k[~np.isin(np.arange(POOL), table)] = np.nan  # of others
    k[table[0, 5], :, 1:] = v[table[0, 5], :, 1:] = np.nan  # behind the last token
    read = rng.random((B, HKV, W * P)) < 0.3
    return q, k, v, table, read


def diagnose(case, out, read):
    q, k, v, table, _ = case
    view = PageView(jnp.array(table), jnp.array(LENGTHS, jnp.int32), jnp.int32(0))
    return jax.tree.map(np.asarray, diagnostics.diagnose(jnp.array(q), out, jnp.array(k), jnp.array(v), view, read))


def by_hand(case, read):
    """Mass, oracle, recall and dense output of each request, in float64 and loops."""
    q, k, v, table, _ = case
    results, outputs = np.zeros((B, 3)), np.zeros((B, HKV * G, D))
    for b in range(B):
        length = LENGTHS[b]
        for head in range(HKV if length else 0):
            keys, values = (x[table[b], head].reshape(-1, D)[:length].astype(np.float64) for x in (k, v))
            rows = q[b, head * G : (head + 1) * G].astype(np.float64)
            s = rows @ keys.T / np.sqrt(D)
            p = np.exp(s - s.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            outputs[b, head * G : (head + 1) * G] = p @ values
            share, chosen = p.mean(0), set(np.flatnonzero(read[b, head, :length]))
            best = set(np.argsort(-share)[: len(chosen)])
            results[b] += [share[list(chosen)].sum(), share[list(best)].sum(), len(chosen & best) / max(len(chosen), 1)]
    return (results / HKV).T, outputs


def test_equals_a_count_by_hand(case):
    read = case[-1]
    (mass, oracle, recall), outputs = by_hand(case, read)
    out = outputs + np.array([0.1, 0.2, 0.3])[:, None, None]
    found = diagnose(case, jnp.array(out, jnp.float32), jnp.array(read))
    np.testing.assert_allclose(found.mass, mass, atol=1e-5)
    np.testing.assert_allclose(found.oracle, oracle, atol=1e-5)
    np.testing.assert_allclose(found.recall, recall, atol=1e-6)
    norms = [np.linalg.norm(outputs[b]) for b in (0, 1)]
    expected = [0.1 * np.sqrt(HKV * G * D) / norms[0], 0.2 * np.sqrt(HKV * G * D) / norms[1], 0]
    np.testing.assert_allclose(found.error, expected, rtol=1e-4)
    assert (found.mass[:2] < found.oracle[:2]).all()


def test_everything_read_is_the_oracle(case):
    _, outputs = by_hand(case, np.ones_like(case[-1]))
    found = diagnose(case, jnp.array(outputs, jnp.float32), jnp.ones(case[-1].shape, bool))
    for value in (found.mass, found.oracle, found.recall):
        np.testing.assert_allclose(value, [1, 1, 0], atol=1e-5)
    assert found.error.max() < 1e-5


def test_nothing_read_has_nothing(case):
    found = diagnose(case, jnp.zeros((B, HKV * G, D)), jnp.zeros(case[-1].shape, bool))
    for value in (found.mass, found.oracle, found.recall):
        np.testing.assert_array_equal(value, 0)
    np.testing.assert_allclose(found.error, [1, 1, 0], rtol=1e-5)


def test_ties_at_the_edge_count_for_the_method():
    """Four equal keys, two read: any two are as good as the oracle's."""
    view = PageView(jnp.zeros((1, 1), jnp.int32), jnp.full(1, 4, jnp.int32), jnp.int32(0))
    pages, q = jnp.ones((1, 1, 4, 2)), jnp.ones((1, 1, 2))
    for chosen in ([0, 1], [2, 3], [1, 3]):
        read = diagnostics.read_mask(jnp.array([[chosen]]), 4)
        found = diagnostics.diagnose(q, q, pages, pages, view, read)
        np.testing.assert_allclose([found.mass[0], found.oracle[0], found.recall[0]], [0.5, 0.5, 1])


def test_mask_ignores_what_is_no_position():
    positions = jnp.array([[[3, -1, 9, 3, 8, np.iinfo(np.int32).min]]], jnp.int32)
    np.testing.assert_array_equal(np.flatnonzero(diagnostics.read_mask(positions, 8)[0, 0]), [3])
