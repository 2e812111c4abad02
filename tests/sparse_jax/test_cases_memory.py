"""Small inputs that other systems got wrong, one test each, named after the report list's rows: where it is read.

Rows on models, selectors and paged state are tested with those.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from sparse_jax import Config, page_sparse_attention, paged_attention, to_slots, token_sparse_attention
from tests.attention_cases import CASES, AttentionCase, call, make_inputs, reference
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax.scalar_attention import KERNELS, LN2, attend, every_implementation, expect, ids, one, pool


@pytest.mark.parametrize("implementation", KERNELS)
def test_case_PAD_1_padding_row(implementation):
    case = dataclasses.replace(CASES["gqa4"], B=4, lengths=(3, 1, 2, 0))
    x = make_inputs(case)
    whole = call("paged", case, x, implementation=implementation, config=Config(exact=True))
    three = {n: a[:3] if n in ("q", "page_table", "lengths") else a for n, a in x.items()}
    part = call(
        "paged", dataclasses.replace(case, B=3), three, implementation=implementation, config=Config(exact=True)
    )
    assert_same_bits(whole.out[:3], part.out)
    assert (whole.out[3] == 0).all()
    assert jnp.isneginf(whole.lse[3]).all()


@every_implementation
def test_case_PAD_3_more_rows_than_tokens(implementation):
    for rows, length, seen in ((2, 0, [0, 0]), (4, 2, [0, 0, 1, 2])):
        got = attend(
            [0.0] * 4, [1.0] * 4, length, page_size=4, implementation=implementation, q=jnp.ones((1, rows, 1, 1))
        )
        np.testing.assert_allclose(np.exp(got.lse.ravel()), seen, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "pages"), [("float8_e4m3fn", 58257), ("float8_e4m3fn", 116512), ("bfloat16", 58257)])
def test_case_INT32_1_pages_past_2_to_the_31(dtype, pages):
    """The same keys in page 1 and in the pages around the limit; the second one-byte pool passes 2^32 elements."""
    page_size, width = 64, 576
    rng = np.random.default_rng(0)
    page = jnp.asarray(rng.standard_normal((1, page_size, width)), dtype)
    places = [1, 58254, 58255, pages - 1]
    k = jnp.zeros((pages, 1, page_size, width), dtype).at[jnp.array(places)].set(page)
    q = jnp.asarray(rng.standard_normal((1, 2, width)), "bfloat16")
    for op in ("paged", "page_sparse", "token_sparse"):
        results = []
        for place in places:
            if op == "paged":
                got = paged_attention(q, k, k, ids([place]), ids(64), implementation="triton")
            elif op == "page_sparse":
                got = page_sparse_attention(q, k, k, ids([place]), ids(64), ids([[0]]), implementation="triton")
            else:
                slots = place * page_size + jnp.arange(64, dtype=jnp.int32).reshape(1, 1, 64)
                got = token_sparse_attention(q, k, k, slots, implementation="triton")
            results.append(got)
        assert jnp.isfinite(results[0].lse).all()
        assert float(jnp.abs(results[0].out).max()) > 0
        for got in results[1:]:
            assert_same_bits(got.out, results[0].out)
            assert_same_bits(got.lse, results[0].lse)


@pytest.mark.gpu
def test_case_INT32_2_page_stride_of_an_array_of_all_layers():
    """Pages 1,039,680 elements apart, as in a pool of all layers: the last two lie around 2^31."""
    heads, width, places = 285, 57, (3, 2064, 2065, 2066)
    rng = np.random.default_rng(0)
    page = jnp.asarray(rng.standard_normal((heads, 64, width)), jnp.bfloat16)
    pool = jnp.zeros((2067, heads, 64, width), jnp.bfloat16).at[jnp.array(places)].set(page)
    assert pool[0].size == 1_039_680
    q = jnp.asarray(rng.standard_normal((1, heads, width)), jnp.bfloat16)
    outs = [paged_attention(q, pool, pool, ids([place]), ids(64), implementation="triton").out for place in places]
    assert float(jnp.abs(outs[0]).max()) > 0
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


def test_case_COMPILE_1_and_2_lengths_do_not_retrace():
    traces = []

    @jax.jit
    def step(length):
        traces.append(length)
        k, v = pool([0.0] * 128, 8), pool(range(128), 8)
        return paged_attention(one(), k, v, ids(range(16)), length, implementation="interpret")

    for length in range(1, 101):
        got = step(ids(length))
        np.testing.assert_allclose(got.out.item(), (length - 1) / 2, rtol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize("implementation", KERNELS)
def test_case_COMPILE_3_split_counts_in_one_process(implementation):
    """Grids 2, 5, 3, 4, twice, in mixed order: jax#40847 gave an earlier one's size."""
    case = AttentionCase(name="grids", Hq=2, Hkv=1, B=1, W=40, C=8)
    x = make_inputs(case)
    for op in ("paged", "page_sparse", "token_sparse"):
        expected = reference(op, case, x).out
        for splits in (2, 5, 3, 4, 5, 2):
            config = Config(splits=splits, block_tokens=16)
            assert_close(call(op, case, x, implementation=implementation, config=config).out, expected)


@every_implementation
def test_case_POISON_1_and_4_unused_slots(implementation):
    nan = np.nan
    got = attend([0, 0, nan, nan], [1, 3, nan, nan], 2, page_size=4, implementation=implementation)
    expect(got, 2.0, LN2)


@every_implementation
def test_case_POISON_2_another_request(implementation):
    def run(bad):
        k, v = pool([0.0, 0, bad, bad, bad, bad, bad, bad], 4), pool([1.0, 3, bad, bad, bad, bad, bad, bad], 4)
        return paged_attention(jnp.ones((2, 1, 1)), k, v, ids([0], [1]), ids(2, 4), implementation=implementation)

    clean, sick = run(0.0), run(np.nan)
    assert_same_bits(clean.out[0], sick.out[0])
    assert_same_bits(clean.lse[0], sick.lse[0])
    assert jnp.isnan(sick.out[1]).all()


@every_implementation
def test_case_POISON_3_fp8_page_0(implementation):
    bits = jnp.full((3, 1, 2, 1), 0x7F, jnp.uint8)
    nan = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    k, v = (nan.at[2, 0].set(jnp.array(x, jnp.float8_e4m3fn)[:, None]) for x in ([0.0, 0.0], [1.0, 3.0]))
    got = paged_attention(one(), k, v, ids([2, -1]), ids(2), implementation=implementation)
    expect(got, 2.0, LN2)


def test_case_HOST_1_numpy_table_changed_after_the_call():
    table = np.array([[0, 1]], np.int32)
    for implementation in ("xla", None):
        table[:] = [[0, 1]]
        got = paged_attention(
            one(), pool([0.0] * 4, 2), pool([1.0, 1, 3, 3], 2), table, ids(4), implementation=implementation
        )
        table[:] = -1
        expect(got, 2.0, np.log(4))


@every_implementation
def test_case_BOUNDS_1_wild_page(implementation):
    args = [one(), pool([0.0] * 6, 2), pool([10.0, 10, 1, 3, 20, 20], 2), ids([1, 99]), ids(4)]
    expect(paged_attention(*args, implementation=implementation), 2.0, LN2)
    with pytest.raises(Exception, match=r"page_table.*99"):
        sparse_jax.checked(lambda *a: paged_attention(*a, implementation=implementation))(*args)


def test_case_BOUNDS_2_row_of_no_request():
    slots, counts = to_slots(ids([0], [0], [0]), ids([3], [4]), ids(0, 1, 2), page_size=4, compact=True)
    assert slots.ravel().tolist() == [12, 16, -1]
    assert counts.tolist() == [1, 1, 0]


@every_implementation
def test_case_BOUNDS_3_page_0_is_ordinary(implementation):
    expect(attend([0.0, 0.0], [1.0, 3.0], 2, page_size=2, implementation=implementation), 2.0, LN2)


@every_implementation
def test_case_BOUNDS_4_requests_start_at_their_own_pages(implementation):
    k, v, table = pool([0.0] * 12, 4), pool(range(12), 4), ids([0, 1], [2, -1])
    both = paged_attention(jnp.ones((2, 1, 1)), k, v, table, ids(5, 3), implementation=implementation)
    expect(both, [2.0, 9.0], [np.log(5), np.log(3)])
    for b in range(2):
        single = paged_attention(one(), k, v, table[b : b + 1], ids((5, 3)[b]), implementation=implementation)
        expect(single, both.out[b], both.lse[b])


@every_implementation
def test_case_STRIDE_1_and_2_how_an_array_was_made(implementation):
    """K and V interleaved page by page, K every second token of a longer array, V a transpose of token-first."""
    case = CASES["gqa4"]
    x = make_inputs(case)
    k, v = x["k_pages"], x["v_pages"]
    both = jnp.stack([k, v], axis=1)
    longer = jnp.full((*k.shape[:2], 2 * case.P, case.D), jnp.nan).at[:, :, ::2].set(k)
    token_first = jnp.asarray(np.ascontiguousarray(np.swapaxes(np.asarray(v), 1, 2)))
    expected = call("paged", case, x, implementation=implementation).out
    for made in ((both[:, 0], both[:, 1]), (longer[:, :, ::2], v), (k, jnp.swapaxes(token_first, 1, 2))):
        y = {**x, "k_pages": made[0], "v_pages": made[1]}
        run = jax.jit(lambda y: call("paged", case, y, implementation=implementation).out)
        assert_same_bits(run(y), expected)


@pytest.mark.gpu
def test_case_GRID_1_more_than_65535_rows():
    for rows in (65536, 65537):
        k, v = pool([0.0] * 64, 16), pool(range(64), 16)
        slots = (jnp.arange(rows, dtype=jnp.int32) % 64).reshape(rows, 1, 1)
        got = token_sparse_attention(jnp.ones((rows, 1, 1)), k, v, slots, implementation="triton").out.ravel()
        np.testing.assert_array_equal(got, np.arange(rows) % 64)


@every_implementation
def test_case_SPLIT_2_order_of_ids(implementation):
    """The same ids in another order: within tolerance."""
    case = CASES["gqa4"]
    x = make_inputs(case)
    turned = {**x, "slots": x["slots"][..., ::-1], "page_indices": x["page_indices"][..., ::-1]}
    for op in ("page_sparse", "token_sparse"):
        a, b = (call(op, case, y, implementation=implementation) for y in (x, turned))
        assert_close(a.out, b.out)
        assert_close(a.lse, b.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("S", [6144, 8864, 16384])
def test_case_PAGE_1_page_sizes_agree(S):
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((16384, 64)), jnp.bfloat16) for _ in range(2))
    q, outs = jnp.asarray(rng.standard_normal((1, 4, 64)), jnp.bfloat16), []
    for page_size in (16, 64, 256):
        split = [a.reshape(-1, 1, page_size, 64) for a in (k, v)]
        outs.append(paged_attention(q, *split, ids(range(16384 // page_size)), ids(S), implementation="triton").out)
    for out in outs[1:]:
        assert_close(out, outs[0], "bfloat16")
