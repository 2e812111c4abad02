"""Reported cases of other systems on sparse MLA: attention over latents. Its indexer: test_cases_indexer.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from sparse_jax import Config, merge_attention, mla_sparse_attention, plane_slots, to_slots
from tests.compare import assert_close, assert_same_bits
from tests.sparse_jax.scalar_attention import IMPLEMENTATIONS, KERNELS, LN2, every_implementation, expect, ids

NAN = np.nan


def latents(scores, values, page_size, dtype=jnp.float32):
    """[N, P, 2]: a value and a rotary column, which a query of (0, 1) makes the score."""
    rows = np.stack([np.broadcast_to(values, np.shape(scores)), scores], axis=-1).astype(np.float32)
    return jnp.asarray(rows, dtype).reshape(-1, page_size, 2)


def attend(pool, slots, *, rows=1, **options):
    slots = jnp.asarray(slots, jnp.int32)
    q = jnp.zeros((len(slots), 1, 2)) if rows == 1 else jnp.zeros((len(slots), rows, 1, 2))
    return mla_sparse_attention(q.at[..., 1].set(1.0), pool, slots, scale=1.0, value_dim=1, **options)


def draw(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@every_implementation
def test_case_QUANT_7_sick_rows(implementation):
    """A NaN and an Inf latent reach the rows that attend them, and no other."""
    pool = latents([0.0, NAN, 0, 0], [1.0, 1, np.inf, 2], 1)
    out = attend(pool, [[0], [1], [2], [3]], implementation=implementation).out.ravel()
    assert out[jnp.array([0, 3])].tolist() == [1, 2]
    assert jnp.isnan(out[1])
    assert not jnp.isfinite(out[2])


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("heads", [4, 8, 16, 17, 32, 48, 64, 128])
def test_case_HEADS_3_and_4(heads, implementation):
    """Every count on one GPU at 576/512, with a sink for each head."""
    q, pool, sinks = draw(1, heads, 576, seed=1), draw(2, 8, 576, seed=2), draw(heads, seed=3)
    options = {"scale": 192**-0.5, "sinks": sinks}
    slots = ids([9, 0, -1, 14, 3])
    got = mla_sparse_attention(q, pool, slots, implementation=implementation, **options)
    x = np.asarray(pool, np.float64).reshape(16, 576)[[9, 0, 14, 3]]
    p = np.exp(np.asarray(q[0], np.float64) @ x.T * 192**-0.5)
    expected = p @ x[:, :512] / (p.sum(-1) + np.exp(np.asarray(sinks, np.float64)))[:, None]
    assert_close(got.out[0], expected)
    assert_close(got.lse[0], np.log(p.sum(-1)), name="lse")


@every_implementation
def test_case_LSE_1_to_3_parts_and_empty_rows(implementation):
    """Two shards of mass 1 and 3; a row without keys; both under every number of splits."""
    pool = latents([0.0, np.log(3)], [0.0, 4.0], 1)
    for splits in (None, 1, 3):
        options = {"implementation": implementation, "config": splits and Config(splits=splits)}
        got = attend(pool, [[-1, 0, -1], [1, -1, -1], [-1] * 3], **options)
        assert (got.out[2].item(), got.lse[2].item()) == (0.0, -np.inf)
        merged = merge_attention(got.out, got.lse)
        expect(merged, 3.0, np.log(4))
        empty = merge_attention(got.out[2:], got.lse[2:])
        assert (empty.out.item(), empty.lse.item()) == (0.0, -np.inf)


@pytest.mark.parametrize("implementation", KERNELS)
def test_case_PAD_1_and_SPLIT_1_a_row_among_others(implementation):
    """Alone, with a padding row, with 7 others: the same bits with the exact configuration."""
    q, pool, slots = draw(8, 2, 24), draw(4, 16, 24, seed=1), np.random.default_rng(2).integers(0, 64, (8, 40))
    slots[1] = -1
    options = {"scale": 0.2, "value_dim": 16, "implementation": implementation, "config": Config(exact=True)}
    one, two, all_ = (mla_sparse_attention(q[:n], pool, slots[:n], **options) for n in (1, 2, 8))
    for other in (two, all_):
        assert_same_bits(other.out[0], one.out[0])
        assert_same_bits(other.lse[0], one.lse[0])
        assert (other.out[1] == 0).all()
        assert jnp.isneginf(other.lse[1]).all()


@every_implementation
def test_case_SPLIT_2_order_of_ids_and_place_of_pages(implementation):
    q, pool, slots = draw(2, 3, 24), draw(4, 16, 24, seed=1), np.random.default_rng(2).integers(-1, 64, (2, 40))
    options = {"scale": 0.2, "value_dim": 16, "implementation": implementation, "config": Config(exact=True)}
    expected = mla_sparse_attention(q, pool, slots, **options)
    turned = mla_sparse_attention(q, pool, slots[:, ::-1], **options)
    assert_close(turned.out, expected.out)
    assert_close(turned.lse, expected.lse, name="lse")
    place = np.array([2, 0, 3, 1])
    moved = np.where(slots < 0, -1, place[slots // 16] * 16 + slots % 16)
    elsewhere = mla_sparse_attention(q, pool[np.argsort(place)], moved, **options)
    assert_same_bits(elsewhere.out, expected.out)
    assert_same_bits(elsewhere.lse, expected.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_case_INT32_1_latents_past_2_to_the_31(dtype):
    """The same page of 64 latents before the limit, across it and past it."""
    page, places = draw(1, 64, 576, dtype=dtype), [1, 58254, 58255, 58256]
    pool = jnp.zeros((58257, 64, 576), dtype).at[jnp.array(places)].set(page)
    q, options = draw(1, 16, 576, seed=1, dtype=dtype), {"scale": 192**-0.5, "implementation": "triton"}
    got = [mla_sparse_attention(q, pool, place * 64 + ids(range(64)), **options) for place in places]
    assert float(jnp.abs(got[0].out).max()) > 0
    for other in got[1:]:
        assert_same_bits(other.out, got[0].out)
        assert_same_bits(other.lse, got[0].lse)


@pytest.mark.parametrize("implementation", KERNELS)
def test_case_COMPILE_3_split_counts_in_one_process(implementation):
    """Grids 2, 5, 3, 4, in mixed order: jax#40847 gave an earlier one's size."""
    q, pool, slots = draw(1, 2, 24), draw(4, 32, 24, seed=1), ids(range(128))
    options = {"scale": 0.2, "value_dim": 16}
    expected = mla_sparse_attention(q, pool, slots, implementation="xla", **options)
    for splits in (2, 5, 3, 4, 5, 2):
        config = Config(splits=splits, block_tokens=16)
        got = mla_sparse_attention(q, pool, slots, implementation=implementation, config=config, **options)
        assert_close(got.out, expected.out)


def test_case_TRANSFORM_1_gradients():
    """Of attention against a plain softmax; a row without keys and a token that is not chosen get 0, never NaN."""
    q, pool, slots = draw(2, 2, 6), draw(2, 4, 6, seed=1).at[1, 3].set(NAN), ids([5, 0, 2], [-1, -1, -1])
    options = {"scale": 0.5, "value_dim": 4}

    def plain(q, pool):
        x = pool.reshape(8, 6)[slots[0]]
        return jnp.sum(jax.nn.softmax(0.5 * q[0] @ x.T) @ x[:, :4])

    def loss(implementation, q, pool):
        return mla_sparse_attention(q, pool, slots, implementation=implementation, **options).out.sum()

    expected = jax.grad(plain, (0, 1))(q, pool)
    for implementation in ("xla", None):
        for got, want in zip(jax.grad(functools.partial(loss, implementation), (0, 1))(q, pool), expected):
            assert_close(got, want)
    with pytest.raises(TypeError, match="differentia"):
        jax.grad(functools.partial(loss, "interpret"))(q, pool)


@pytest.mark.parametrize("implementation", ["xla", None, IMPLEMENTATIONS[2]])  # JAX's interpreter refuses it
def test_case_TRANSFORM_2_heads_split_over_devices_with_checking_on(implementation):
    """Over two devices where there are two; with one the same checks run."""
    devices, spec = jax.devices()[:2], jax.sharding.PartitionSpec
    mesh = jax.make_mesh((len(devices),), ("heads",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    args, options = (draw(1, 4, 6), draw(2, 4, 6, seed=1), ids([5, -1, 2])), {"scale": 0.5, "value_dim": 4}
    run = jax.shard_map(
        lambda *args: mla_sparse_attention(*args, implementation=implementation, **options).out,
        mesh=mesh,
        in_specs=(spec(None, "heads"), spec(), spec()),
        out_specs=spec(None, "heads"),
    )
    assert_close(jax.jit(run)(*args), mla_sparse_attention(*args, implementation="xla", **options).out)


@every_implementation
def test_case_POISON_what_is_not_chosen_changes_no_bit(implementation):
    """Unused slots, another request's page, page 0 where ids are absent, and 0x7F in it."""
    slots = [[4, -1, 5, -1], [8, -1, -1, -1]]

    def run(bad):
        pool = latents([bad, bad, bad, bad, 0, 0, bad, bad, bad, bad], [bad] * 4 + [1, 3] + [bad] * 4, 2)
        return attend(pool, slots, implementation=implementation)

    clean, sick = run(0.0), run(NAN)
    expect(jax.tree.map(lambda x: x[0], sick), 2.0, LN2)
    assert_same_bits(sick.out[0], clean.out[0])
    assert_same_bits(sick.lse[0], clean.lse[0])
    assert jnp.isnan(sick.out[1]).all()


def test_case_HOST_1_numpy_arguments_may_be_reused_at_once():
    slots = np.array([[0, 1]], np.int32)
    got = attend(latents([0.0, 0], [1.0, 3], 1), slots)
    slots[:] = -1
    expect(got, 2.0, LN2)


@every_implementation
def test_case_BOUNDS_1_and_3_wild_slots_and_page_0(implementation):
    """A slot past the pool is absent, not clamped; slot 0 is ordinary."""
    pool = latents(np.zeros(6), [1.0, 3, 10, 10, 20, 20], 2)
    slots = ids([0, 6, 2**31 - 1, -(2**31), 1])
    expect(attend(pool, slots, implementation=implementation), 2.0, LN2)
    with pytest.raises(Exception, match=r"slots.*\b6\b"):
        sparse_jax.checked(lambda s: attend(pool, s, implementation=implementation))(slots)


@every_implementation
def test_case_SINK_1_counted_once(implementation):
    pool, sinks = latents([0.0, 0], 3.0, 1), jnp.zeros(1)
    for splits in (1, 2, 4):
        config = Config(splits=splits, block_tokens=16)
        got = attend(pool, [[0, 1], [-1, -1]], sinks=sinks, config=config, implementation=implementation)
        expect(got, [2.0, 0.0], [LN2, -np.inf])


@every_implementation
def test_case_DTYPE_1_a_scan_over_steps(implementation):
    pool = latents([0.0, 1], [1.0, 3], 2, jnp.bfloat16)

    def step(carry, _):
        out = attend(pool, ids([0, 1]) + 0 * carry.out[..., 0].astype(jnp.int32), implementation=implementation)
        return out, out.lse

    start = attend(pool, [[0, 1]], implementation=implementation)
    last, _ = jax.lax.scan(step, start, None, length=3)
    for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(last)):
        assert (a.dtype, a.weak_type) == (b.dtype, False)


@pytest.mark.parametrize("mask", [np.array([[True, False]]), np.array([[1.0, 0.0]])])
def test_case_MASK_1_a_mask_is_no_list_of_slots(mask):
    with pytest.raises(ValueError, match=r"slots must hold integers, got (bool|float)"):
        mla_sparse_attention(jnp.ones((1, 1, 2)), latents([0.0, 5], [1.0, 9], 1), mask, scale=1.0, value_dim=1)


@every_implementation
def test_case_STRIDE_1_and_2_and_LOOP_1_how_a_pool_was_made(implementation):
    """Planes page by page in one array, every second token of a longer one; a plane reads rows of its own only."""
    pool, other = draw(3, 4, 6), draw(3, 4, 6, seed=1)
    q, slots, options = draw(1, 2, 6, seed=2), ids([9, -1, 0, 5]), {"scale": 0.5, "value_dim": 4}
    run = jax.jit(lambda *x: mla_sparse_attention(*x, implementation=implementation, **options).out)
    expected = [run(q, pool, slots), run(q, other, slots)]
    assert_same_bits(run(q, jnp.stack([pool, pool], axis=2).reshape(3, 8, 6)[:, ::2], slots), expected[0])
    strided = to_slots(ids([9, -1, 0, 5]), ids([0, 1, 2]), ids(0), page_size=4, page_stride=8)
    for plane in range(2):
        after = plane_slots(slots, plane, pages=3, page_size=4)
        assert_close(run(q, jnp.concatenate([pool, other]), after), expected[plane])
        between = plane_slots(strided, plane, pages=3, page_size=4, page_stride=8)
        assert_close(run(q, jnp.stack([pool, other], axis=1).reshape(6, 4, 6), between), expected[plane])


@every_implementation
def test_case_CP_1_and_2_tokens_dealt_out_to_devices(implementation):
    """Token p is on device p mod 2, at p // 2 there; merged, it is one device. Then one token on eight of them."""
    pool, q = draw(6, 1, 6), draw(1, 2, 6, seed=1)
    options = {"scale": 0.5, "value_dim": 4, "implementation": implementation}
    whole = mla_sparse_attention(q, pool, ids([0, 3, 4]), **options)
    parts = [mla_sparse_attention(q, pool[d::2], ids([[0, 2, -1], [-1, 1, -1]][d]), **options) for d in range(2)]
    merged = merge_attention(*(jnp.stack([getattr(part, x) for part in parts]) for x in ("out", "lse")))
    assert_close(merged.out, whole.out)
    assert_close(merged.lse, whole.lse, name="lse")
    for chosen in (0, -1):
        shards = attend(latents([6.0], 5.0, 1), [[chosen]] + [[-1]] * 7, implementation=implementation)
        expect(merge_attention(shards.out, shards.lse), *((5.0, 6.0) if chosen == 0 else (0.0, -np.inf)))


@pytest.mark.gpu
def test_case_GRID_1_more_than_65535_rows():
    pool = latents(np.zeros(64), np.arange(64.0), 16)
    for rows in (65536, 65537):
        got = attend(pool, (np.arange(rows) % 64)[:, None], implementation="triton").out.ravel()
        np.testing.assert_array_equal(got, np.arange(rows) % 64)


@every_implementation
def test_case_PREC_1_full_precision(implementation):
    q, pool = draw(1, 2, 96), draw(4, 64, 96, seed=1)
    options = {"scale": 96**-0.5, "value_dim": 64, "implementation": implementation}
    got = mla_sparse_attention(q, pool, ids(range(256)), **options)
    x = np.asarray(pool, np.float64).reshape(256, 96)
    p = np.exp(np.asarray(q[0], np.float64) @ x.T * 96**-0.5)
    assert np.abs(np.asarray(got.out[0]) - p @ x[:, :64] / p.sum(-1, keepdims=True)).max() < 1e-5


@every_implementation
def test_case_PAGE_1_page_sizes_agree(implementation):
    rows, q, slots = draw(512, 24), draw(1, 4, 24, seed=1), ids(range(3, 512, 7))
    options = {"scale": 0.2, "value_dim": 16, "implementation": implementation}
    outs = [mla_sparse_attention(q, rows.reshape(-1, p, 24), slots, **options).out for p in (16, 64, 256)]
    for out in outs[1:]:
        assert_close(out, outs[0])
