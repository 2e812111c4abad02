"""Small inputs that other systems got wrong, one test each, named after the report list's rows: what is computed.

Rows on models, selectors and paged state are tested with those.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import Config, merge_attention, page_sparse_attention, paged_attention, token_sparse_attention
from tests.attention_cases import AttentionCase, call, make_inputs, poisoned, reference
from tests.compare import assert_close
from tests.sparse_jax.scalar_attention import KERNELS, LN2, attend, every_implementation, expect, ids, one, pool

QUANT = {"k_scale": jnp.float32(0.5), "v_scale": jnp.float32(0.25)}


@every_implementation
@pytest.mark.parametrize("path", ["dense", "window", "split", "page", "token", "draft", "token_scales"])
def test_case_QUANT_1(path, implementation):
    k, v = pool([4.0, 0.0], 1, jnp.float8_e4m3fn), pool([2.0, 8.0], 1, jnp.float8_e4m3fn)
    options, table = {"implementation": implementation, **QUANT}, ids([0, 1])
    if path == "token_scales":
        options |= {"k_scale": jnp.full((2, 1, 1), 0.5), "v_scale": jnp.full((2, 1, 1), 0.25)}
    if path == "page":
        got = page_sparse_attention(one(), k, v, table, ids(2), ids([[1, 0]]), **options)
    elif path == "token":
        got = token_sparse_attention(one(), k, v, ids([[0, 1]]), **options)
    elif path == "draft":
        got = paged_attention(jnp.ones((1, 2, 1, 1)), k, v, table, ids(2), q_positions=ids([1, 1]), **options)
        got = jax.tree.map(lambda x: x[:, 1], got)
    else:
        extra = {"window": {"window": 2}, "split": {"config": Config(splits=2)}}.get(path, {})
        got = paged_attention(one(), k, v, table, ids(2), **options, **extra)
    expect(got, 0.67880, 2.12693, rtol=1e-5)


@every_implementation
def test_case_QUANT_2_output(implementation):
    """e4m3 output is clipped before the cast."""
    values = [448.0, 464.0, 465.0, 1000.0, -1000.0]
    k, v = pool([0.0] * 5, 1), pool(values, 1)
    q, slots = jnp.ones((5, 1, 1)), jnp.arange(5, dtype=jnp.int32).reshape(5, 1, 1)
    got = token_sparse_attention(q, k, v, slots, out_dtype=jnp.float8_e4m3fn, implementation=implementation)
    assert got.out.dtype == jnp.float8_e4m3fn
    assert got.out.astype(jnp.float32).ravel().tolist() == [448, 448, 448, 448, -448]
    scaled = token_sparse_attention(
        q, k, v, slots, out_dtype=jnp.float8_e4m3fn, out_scale=4.0, implementation=implementation
    )
    assert scaled.out.astype(jnp.float32).ravel().tolist() == [112, 112, 120, 256, -256]  # 116 and 116.25 lie between


@every_implementation
def test_case_QUANT_7(implementation):
    """A NaN key and an Inf value reach the row that attends them, and no other."""
    k, v = pool([0.0, np.nan, 0.0, 0.0], 1), pool([1.0, 1.0, np.inf, 2.0], 1)
    got = token_sparse_attention(
        jnp.ones((4, 1, 1)), k, v, ids([[0]], [[1]], [[2]], [[3]]), implementation=implementation
    )
    out = got.out.ravel()
    assert out[0] == 1
    assert jnp.isnan(out[1])
    assert not jnp.isfinite(out[2])
    assert out[3] == 2


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(("Hq", "Hkv"), [(28, 4), (12, 2), (24, 4), (40, 8), (64, 4)])
def test_case_HEADS_1(Hq, Hkv, implementation):
    case = AttentionCase(name=f"heads_{Hq}_{Hkv}", Hq=Hq, Hkv=Hkv, D=128, Dv=128, B=1, W=2)
    x = poisoned("paged", case, make_inputs(case))
    assert_close(call("paged", case, x, implementation=implementation).out, reference("paged", case, x).out)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("D", [80, 96, 192])
def test_case_HEADS_2(D, implementation):
    """The default scale is that of the true width; padded lanes are never seen."""
    case = AttentionCase(name=f"width_{D}", Hq=2, Hkv=1, D=D, Dv=D, B=1, W=2)
    x = poisoned("paged", case, make_inputs(case))
    got = call("paged", case, x, implementation=implementation)
    assert_close(got.out, reference("paged", dataclasses.replace(case, scale=D**-0.5), x).out)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("Hq", [48, 17])
def test_case_HEADS_3(Hq, implementation):
    case = AttentionCase(name=f"tile_{Hq}", Hq=Hq, Hkv=1, B=1, W=2)
    x = poisoned("paged", case, make_inputs(case))
    expected = reference("paged", case, x).out
    assert_close(call("paged", case, x, implementation=implementation).out, expected)
    tiled = call("paged", case, x, implementation=implementation, config=Config(block_rows=16))
    assert_close(tiled.out, expected)


@every_implementation
def test_case_LSE_1_empty_parts(implementation):
    for parts in (1, 2, 3, 8):
        got = merge_attention(jnp.full((parts, 1, 1), jnp.nan), jnp.full((parts, 1), -jnp.inf))
        assert got.out.tolist() == [[0.0]]
        assert got.lse.tolist() == [-np.inf]
        config = Config(splits=parts)
        empty = attend([0.0], [1.0], 0, page_size=1, table=[0], implementation=implementation, config=config)
        assert (empty.out.item(), empty.lse.item()) == (0.0, -np.inf)


def test_case_LSE_2_natural_logarithm():
    got = merge_attention(jnp.array([[[0.0]], [[4.0]]]), jnp.array([[0.0], [np.log(3)]]))
    expect(got, 3.0, np.log(4))


@every_implementation
def test_case_LSE_3_fully_masked(implementation):
    for got in (
        attend([0.0], [1.0], 0, page_size=1, implementation=implementation),
        attend([0.0], [1.0], 1, page_size=1, implementation=implementation, q_positions=ids(-1)),
        token_sparse_attention(one(), pool([0.0], 1), pool([1.0], 1), ids([[-1]]), implementation=implementation),
    ):
        assert (got.out.item(), got.lse.item()) == (0.0, -np.inf)


def test_case_LSE_4_weightless_nan():
    got = merge_attention(jnp.array([[[jnp.nan]], [[3.0]]]), jnp.array([[-jnp.inf], [0.0]]))
    assert (got.out.item(), got.lse.item()) == (3.0, 0.0)
    faint = merge_attention(jnp.array([[[jnp.nan]], [[3.0]]]), jnp.array([[-1e9], [0.0]]))
    assert faint.out.item() == 3.0


@every_implementation
def test_case_LSE_5_row_before_the_first_key(implementation):
    q = jnp.ones((1, 2, 1, 1))
    got = attend([2.0], [5.0], 1, page_size=1, implementation=implementation, q=q)
    assert got.out.ravel().tolist() == [0.0, 5.0]
    assert got.lse.ravel().tolist() == [-np.inf, 2.0]


@every_implementation
def test_case_SPEC_2_rows_use_their_requests_tables(implementation):
    """Rows use tables [0, 0, 0, 1, 1, 1] and see [5, 6, 7, 2, 3, 4] keys: with equal scores lse is their logarithm."""
    k, v = pool([0.0] * 16, 4), pool(range(16), 4)
    q = jnp.ones((2, 3, 1, 1))
    got = paged_attention(q, k, v, ids([0, 1], [2, 3]), ids(7, 4), implementation=implementation)
    np.testing.assert_allclose(np.exp(got.lse.ravel()), [5, 6, 7, 2, 3, 4], rtol=1e-5)
    np.testing.assert_allclose(got.out.ravel(), [2, 2.5, 3, 8.5, 9, 9.5], rtol=1e-5)


@every_implementation
def test_case_SPEC_3_and_INTERP_2_drafts_see_the_cache(implementation):
    for cached, total in ((2, 4), (5, 7)):
        got = attend(
            [0.0] * total, range(total), total, page_size=1, implementation=implementation, q=jnp.ones((1, 2, 1, 1))
        )
        np.testing.assert_allclose(np.exp(got.lse.ravel()), [cached + 1, cached + 2], rtol=1e-5)


@every_implementation
def test_case_EVICT_1_position_after_eviction(implementation):
    """Tokens 1 and 3 of 0-5 are gone and the next has come: it sits at 6, and sees what was kept."""
    positions = jnp.asarray([0, 2, 4, 5, 6, 0, 0, 0], jnp.int32).reshape(1, 1, 8)
    options = {"implementation": implementation, "key_positions": positions, "q_positions": ids(6)}
    expect(attend([0.0] * 8, range(8), 5, page_size=8, **options), 2.0, np.log(5))
    expect(attend([0.0] * 8, range(8), 5, page_size=8, window=3, **options), 3.0, np.log(3))  # positions 4 to 6


@every_implementation
def test_case_EVICT_2_true_positions(implementation):
    """Kept positions [0, 2, 5] and the two new tokens: row 0 does not see token 7."""
    positions = jnp.asarray([0, 2, 5, 6, 7, 0, 0, 0], jnp.int32).reshape(1, 1, 8)
    got = attend(
        [0.0] * 8, range(8), 5, page_size=8, implementation=implementation, q=jnp.ones((1, 2, 1, 1)),
        q_positions=ids([6, 7]), key_positions=positions,
    )  # fmt: skip
    np.testing.assert_allclose(np.exp(got.lse.ravel()), [4, 5], rtol=1e-5)


@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_case_SINK_1_and_2_counted_once(dtype, implementation):
    sinks, (k, v) = jnp.zeros(1), (pool([0.0, 0, 0, 0], 2, dtype), pool([3.0, 3, 3, 3], 2, dtype))
    for splits in (1, 2, 4):
        config = Config(splits=splits, block_tokens=16)
        got = paged_attention(
            one(), k, v, ids([0, 1]), ids(2), sinks=sinks, config=config, implementation=implementation
        )
        expect(got, 2.0, LN2)
        empty = paged_attention(
            one(), k, v, ids([0, 1]), ids(0), sinks=sinks, config=config, implementation=implementation
        )
        assert (empty.out.item(), empty.lse.item()) == (0.0, -np.inf)
    merged = merge_attention(jnp.full((2, 1, 1), 3.0), jnp.zeros((2, 1)), sinks=sinks)
    expect(merged, 2.0, LN2)


@every_implementation
def test_case_SINK_3_soft_cap_saturates(implementation):
    got = token_sparse_attention(
        jnp.ones((2, 1, 1)), pool([5000.0, -10000.0], 1), pool([1.0, 2.0], 1), ids([[0]], [[1]]), soft_cap=50.0,
        implementation=implementation,
    )  # fmt: skip
    expect(got, [1.0, 2.0], [50.0, -50.0])


def test_case_DTYPE_1_state_keeps_its_types_in_a_scan():
    def step(carry, _):
        out = attend([0.0, 1.0], [1.0, 3.0], 2, page_size=2, q=jnp.ones((1, 1, 1)) + 0 * carry.out)
        return out, out.lse

    start = attend([0.0, 1.0], [1.0, 3.0], 2, page_size=2)
    last, _ = jax.lax.scan(step, start, None, length=3)
    for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(last)):
        assert a.aval.strip_weak_type() == b.aval.strip_weak_type()
        assert not a.weak_type


@every_implementation
def test_case_MASK_2_one_token_sees_all(implementation):
    expect(attend([0.0] * 4, range(4), 4, page_size=4, implementation=implementation), 1.5, np.log(4))


@every_implementation
def test_case_PREC_1_full_precision(implementation):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s) for s in ((1, 2, 128), (4, 1, 64, 128), (4, 1, 64, 128)))
    got = paged_attention(
        *(jnp.asarray(a, jnp.float32) for a in (q, k, v)), ids(range(4)), ids(256), implementation=implementation
    )
    q, k, v = (np.asarray(a, np.float32).astype(np.float64) for a in (q, k, v))
    s = q[0] @ k.reshape(256, 128).T * 128**-0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    expected = p / p.sum(-1, keepdims=True) @ v.reshape(256, 128)
    assert np.abs(np.asarray(got.out[0]) - expected).max() < 1e-5


@every_implementation
def test_case_WINDOW_1_and_2(implementation):
    got = attend([0.0] * 12, range(12), 9, page_size=4, implementation=implementation, window=6)
    expect(got, 5.5, np.log(6))
    got = attend([0.0] * 12, range(12), 10, page_size=4, implementation=implementation, window=4)
    expect(got, 7.5, np.log(4))  # keys 6 to 9: the query's own token counts
