"""Sparse MLA, what its specification says beside values and bytes: ids are arguments, any C, heads of many devices."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_jax
from sparse_jax import Config, indexer_scores, merge_attention, mla_sparse_attention, to_slots, top_k
from tests import latent_gold, mla_cases
from tests.compare import assert_close, assert_same_bits
from tests.mla_cases import MlaCase
from tests.sparse_jax.scalar_attention import IMPLEMENTATIONS, every_implementation, ids
from tests.sparse_jax.test_cases_mla import draw
from tests.sparse_jax.test_cases_quantised_mla import every_format, store

OPTIONS = {"scale": 0.1, "value_dim": 128}


@pytest.mark.parametrize(
    ("operation", "argument"),
    [
        (sparse_jax.mla_sparse_attention, "slots"),
        (sparse_jax.token_sparse_attention, "slots"),
        (sparse_jax.page_sparse_attention, "page_indices"),
        (sparse_jax.to_slots, "token_ids"),
        (sparse_jax.plane_slots, "slots"),
    ],
)
def test_ids_are_an_argument_of_every_sparse_operation(operation, argument):
    """No buffer that something else fills: what a call reads is what it was given."""
    assert inspect.signature(operation).parameters[argument].default is inspect.Parameter.empty


@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
@pytest.mark.parametrize(
    "operation",
    [sparse_jax.quantize_latent, sparse_jax.write_latent, sparse_jax.dequantize_latent, mla_sparse_attention],
)
def test_quantised_latents_know_no_scale_of_a_whole_tensor(operation, name):
    """1, or 2 and 3: serving engines have such scales, and they have no effect on these layouts."""
    with pytest.raises(TypeError, match=name):
        operation(**{name: 2.0})


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("chosen", [1, 64, 1000, 2048, 4224])
def test_any_number_of_ids(chosen, implementation):
    """Those of the specification, some of them no multiple of anything; -1 and wild ids anywhere in the list."""
    case = MlaCase(name=f"c{chosen}", B=1, Hq=2, C=chosen, latent=16, rope=4, N=70, P=64)
    x = mla_cases.make_inputs(case)
    got = mla_cases.call(mla_cases.poisoned(x), implementation=implementation, **case.options)
    out, lse = latent_gold.mla(case, x)
    assert_close(got.out, out)
    assert_close(got.lse, lse, name="lse")


@every_implementation
@pytest.mark.parametrize(("heads", "ranks"), [(16, 8), (24, 4), (16, 4), (16, 1)])
def test_heads_of_several_devices_need_no_envelope(heads, ranks, implementation):
    """Tokens dealt out to the devices, each of which attends with the heads of all; merged, and each takes its own.

    Kernels that pad local and gathered heads to different counts refuse the first two.
    """
    rows, q = draw(24, 132), draw(1, heads * ranks, 132, seed=1)
    chosen = np.random.default_rng(2).permutation(24)[:13]
    cache, options = store(rows, page_size=1), OPTIONS | {"implementation": implementation}
    parts = [
        mla_sparse_attention(q, cache, ids(np.where(chosen % ranks == rank, chosen, -1)), **options)
        for rank in range(ranks)
    ]
    merged = merge_attention(*(jnp.stack([getattr(part, x) for part in parts]) for x in ("out", "lse")))
    for rank in (0, ranks - 1):
        own = slice(rank * heads, (rank + 1) * heads)
        alone = mla_sparse_attention(q[:, own], cache, ids(chosen), **options)
        assert_close(merged.out[:, own], alone.out)
        assert_close(merged.lse[:, own], alone.lse, name="lse")


@every_implementation
@every_format
def test_two_rows_of_a_larger_batch(format, implementation):
    """Rows that decode, of a batch in which others do not: their ids and queries alone, and their own bits."""
    q, cache = draw(5, 3, 132), store(draw(16, 132, seed=1), format, page_size=4)
    slots = np.random.default_rng(2).integers(-1, 16, (5, 20))
    run = functools.partial(mla_sparse_attention, **OPTIONS, implementation=implementation, config=Config(exact=True))
    whole, two = run(q, cache, slots), run(q[:2], cache, slots[:2])
    assert two.out.shape == (2, 3, 128)
    assert_same_bits(two.out, whole.out[:2])
    assert_same_bits(two.lse, whole.lse[:2])
    with pytest.raises(ValueError, match=r"slots must have the shape \[2, \*\], got \[5, 20\]"):
        run(q[:2], cache, slots)


@every_implementation
def test_rows_of_a_larger_batch_are_converted_with_their_own_requests(implementation):
    """Two query rows of twelve: the first two request ids, whatever the others are."""
    rng = np.random.default_rng(0)
    table, requests = rng.permutation(12).reshape(4, 3), np.array([2, 0, *rng.integers(0, 4, 10)])
    token_ids, rows, q = rng.integers(-1, 12, (2, 9)), draw(48, 132), draw(2, 3, 132, seed=1)
    slots = to_slots(token_ids, table, requests[:2], page_size=4)
    got = mla_sparse_attention(q, rows.reshape(12, 4, 132), slots, **OPTIONS, implementation=implementation)
    for row in range(2):
        tokens = [int(t) for t in token_ids[row] if t >= 0]
        x = np.float64(rows)[[4 * table[requests[row], t // 4] + t % 4 for t in tokens]]
        p = np.exp(0.1 * np.float64(q[row]) @ x.T)
        assert_close(got.out[row], p @ x[:, :128] / p.sum(-1, keepdims=True))


def test_conversion_is_the_same_with_and_without_jit():
    rng = np.random.default_rng(0)
    batch = rng.integers(-2, 50, (6, 30)), rng.integers(-1, 9, (3, 4)), rng.integers(-1, 4, 6)
    options = {"page_size": 8, "page_stride": 24, "lengths": np.array([30, 32, 7]), "compact": True}
    expected = jax.jit(functools.partial(to_slots, **options))(*batch)
    with jax.disable_jit():
        eager = to_slots(*batch, **options)
    for a, b in zip(eager, expected):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("kind", ["distinct", "ties"])
def test_top_k_of_a_row_is_that_of_the_top_k_of_its_chunks(kind, implementation):
    """So scores may be made and chosen from in pieces. Ties, masked scores, and chunks with less than k of them."""
    rng, k, size = np.random.default_rng(0), 37, 100
    scores = rng.integers(-3, 4, (4, 1000)) if kind == "ties" else rng.standard_normal((4, 1000))
    scores = jnp.asarray(np.where(rng.random((4, 1000)) < 0.2, -np.inf, scores), jnp.float32)
    scores = scores.at[1, :900].set(-jnp.inf).at[2, 20:].set(-jnp.inf)
    parts = top_k(scores.reshape(40, size), k, order="id", implementation=implementation).reshape(4, 10, k)
    parts = jnp.where(parts >= 0, parts + size * jnp.arange(10)[:, None], -1).reshape(4, 10 * k)
    held = jnp.where(parts >= 0, jnp.take_along_axis(scores, jnp.maximum(parts, 0), axis=1), -jnp.inf)
    best = top_k(held, k, implementation=implementation)
    got = jnp.where(best >= 0, jnp.take_along_axis(parts, jnp.maximum(best, 0), axis=1), -1)
    assert got.tolist() == top_k(scores, k, implementation=implementation).tolist()
    assert (got[2] >= 0).sum() < k


@every_implementation
def test_the_scales_of_quantised_queries_belong_into_the_weights(implementation):
    """Of each head its own: the scores are those of the queries that the eight bits stand for."""
    q = draw(2, 5, 32) * jnp.exp2(jnp.arange(5.0) * 3 - 6)[:, None]
    w, keys = draw(2, 5, seed=1), sparse_jax.create_index_keys(4, 8, 32)
    keys = sparse_jax.write_index_keys(keys, jnp.arange(32), draw(32, 32, seed=2))
    table, lengths = ids([2, 0], [3, 1]), ids(13, 16)
    values, scale = sparse_jax.quantize_index_query(q)
    values = values.astype("bfloat16")
    got = indexer_scores(values, w * scale, keys, table, lengths, implementation=implementation)
    meant = values.astype(jnp.float32) * scale[..., None]
    plain = sparse_jax.dequantize_index_keys(keys)
    assert_close(got, indexer_scores(meant, w, plain, table, lengths, implementation="xla"), name="scores")
    seen = jnp.isfinite(got)
    real = indexer_scores(q, w, plain, table, lengths, implementation="xla")[seen]
    assert jnp.linalg.norm(got[seen] - real) < 2**-4 * jnp.linalg.norm(real)
    without = indexer_scores(values, w, keys, table, lengths, implementation=implementation)
    assert jnp.linalg.norm(without[seen] - real) > jnp.linalg.norm(real)


@pytest.mark.parametrize("implementation", ["xla", None, IMPLEMENTATIONS[2]])  # JAX's interpreter refuses it
def test_case_TRANSFORM_2_and_TOPK_3_devices_that_share_the_heads_choose_the_same(implementation):
    """Heads of attention are split, the indexer is not: so every device has all scores, ties included."""
    devices, spec = jax.devices()[:2], jax.sharding.PartitionSpec
    mesh = jax.make_mesh((len(devices),), ("heads",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    q, pool = draw(2, 4, 6), draw(6, 4, 6, seed=1)
    index_q, w, keys = (jnp.round(draw(*shape, seed=2)) for shape in ((2, 8, 3), (2, 8), (6, 4, 3)))
    table, lengths = ids([4, 0, 2], [5, 1, 3]), ids(11, 9)

    def step(q, index_q, w):
        scores = indexer_scores(index_q, w, keys, table, lengths, implementation=implementation)
        chosen = top_k(scores, 5, implementation=implementation)
        slots = to_slots(chosen, table, ids(0, 1), page_size=4)
        out = mla_sparse_attention(q, pool, slots, scale=0.5, value_dim=4, implementation=implementation).out
        return out, jnp.broadcast_to(chosen[None], (1, *chosen.shape))

    of_heads = spec(None, "heads")
    run = jax.shard_map(step, mesh=mesh, in_specs=(of_heads, spec(), spec()), out_specs=(of_heads, spec("heads")))
    out, chosen = jax.jit(run)(q, index_q, w)
    expected, alone = step(q, index_q, w)
    assert_close(out, expected)
    for device in chosen:
        assert device.tolist() == alone[0].tolist()


@every_format
def test_case_PREFIX_1_scales_move_with_their_page(format):
    """A page that is copied or loaded back stands for the same numbers: its scales are among its bytes."""
    rows = draw(8, 132) * jnp.exp2(jnp.arange(8.0))[:, None]
    cache = store(rows, format, page_size=4)
    keys = sparse_jax.write_index_keys(sparse_jax.create_index_keys(2, 4, 132), jnp.arange(8), rows)
    for pool, read in ((cache, sparse_jax.dequantize_latent), (keys, sparse_jax.dequantize_index_keys)):
        moved = dataclasses.replace(pool, data=pool.data.at[0].set(pool.data[1]))
        assert_same_bits(read(moved)[0], read(pool)[1])
        assert (read(pool)[0] != read(pool)[1]).any()


@pytest.mark.gpu
def test_case_INT32_2_latents_of_an_array_of_all_layers():
    """Pages 1,069,056 elements apart, with those of 28 other layers between: the last one lies beyond 2^31."""
    planes, places = 29, (3, 2007, 2008, 2009)
    page = draw(64, 576, dtype="float16")
    pool = jnp.zeros((2010 * planes, 64, 576), "float16")
    at = jnp.array(places) * planes
    pool = jax.jit(lambda pool: pool.at[at].set(page), donate_argnums=0)(pool)
    assert places[2] * planes * page.size < 2**31 < places[3] * planes * page.size
    q, outs = draw(1, 16, 576, seed=1, dtype="float16"), []
    for place in places:
        slots = to_slots(ids(range(64)), ids([place]), ids(0), page_size=64, page_stride=64 * planes)
        outs.append(mla_sparse_attention(q, pool, slots, scale=192**-0.5, implementation="triton").out)
    assert float(jnp.abs(outs[0]).max()) > 0
    for out in outs[1:]:
        assert_same_bits(out, outs[0])
