"""The kernels of reference correction from one body: interpreter, lowering for CUDA, GPU; mutations that must fail."""

import dataclasses
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_call import decode_shape
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.top_k import LARGEST_K, rounds, top_k
from sparse_jax import Config
from tests import numpy_reference
from tests.attention_cases import AttentionCase
from tests.compare import assert_close, assert_same_bits
from tests.reference_cases import as_reference, capture, consume, dense, loops, seen_of, unselected_poisoned
from tests.top_k_cases import KINDS, assert_right, make_lengths, make_rows, right_ids

CASES = {
    case.name: case
    for case in [
        AttentionCase(name="bf16_g7_p64", dtype="bfloat16", Hq=7, Hkv=1, P=64, W=2),
        AttentionCase(name="fp16_g7_d7_dv3_p64", dtype="float16", Hq=7, Hkv=1, D=7, Dv=3, P=64, W=2, T=2),
        AttentionCase(name="draft4_splits", T=4, Hq=4, D=16, Dv=16, lengths=(61, 80)),
    ]
}
E4M3 = AttentionCase(name="e4m3_g3_d24_dv40_p1_head_tables", dtype="bfloat16", cache_dtype="float8_e4m3fn", B=3, Hq=6)
E4M3 = dataclasses.replace(E4M3, D=24, Dv=40, P=1, W=37, lengths=(0, 37, 29), head_tables=True)
CASES[E4M3.name] = E4M3
SPLITS = Config(splits=3, block_tokens=16)
CONFIGS = {name: SPLITS if name == "draft4_splits" else None for name in CASES}


def run(case, implementation, config=None, change=lambda x, r: (x, r), *, retention=0.4, capacity=None):
    """Both loops by the kernels, poisoned; whatever `change` does to their arrays and to the reference.

    Returns ((output, reference, corrected), (the same of the NumPy transcription)).
    """
    first, later, counts = loops(case, retention)
    options, capacity = {"implementation": implementation, "config": config}, capacity or case.P * case.W
    found = numpy_reference.capture(first, counts, capacity)
    gold = as_reference(found)
    output, reference = capture(change(first, gold)[0], counts, capacity, **options)
    later = unselected_poisoned(later, gold)
    corrected = consume(*change(later, gold), **options)
    return (output, reference, corrected), (found, gold, numpy_reference.consume(later, found))


def check(case, implementation, config=None, change=lambda x, r: (x, r), **options):
    (output, reference, corrected), (found, gold, expected) = run(case, implementation, config, change, **options)
    precision = case.cache_dtype or case.dtype
    assert output.out.dtype == corrected.dtype == jnp.dtype(case.dtype)
    assert_close(output.out, found["out"], precision)
    assert_close(output.lse, found["lse"], precision, name="lse")
    assert_same_bits(reference.count, gold.count, name="count")
    # Two keys that are a rounding apart may change places on a GPU; the mass shows whether it is more than that.
    same = np.asarray(reference.indices == gold.indices).all(axis=-1)
    assert same.all() or (implementation == "triton" and same.mean() > 0.95), f"{same.mean():.1%} of the rows agree"
    assert_close(reference.mass, gold.mass, name="mass")
    contribution = jnp.where(same[..., None], reference.contribution, gold.contribution)
    assert_close(contribution, gold.contribution, name="contribution")
    rounded = jnp.where((reference.count > 0)[..., None, None], output.out.astype(jnp.float32), 0.0)
    assert_same_bits(reference.output, rounded, name="output")
    assert_close(corrected, expected, precision, name="corrected")


# The interpreter is slow to compile; queries and output of E4M3 are bfloat16, too.
@pytest.mark.parametrize("name", [name for name in CASES if name != "bf16_g7_p64"])
def test_interpret(name):
    check(CASES[name], "interpret", CONFIGS[name])


def both_loops(x, counts, config, capacity):
    _, reference = capture(x, counts, capacity, implementation="triton", config=config)
    return reference, consume(x, reference, implementation="triton", config=config)


def lowered(case, config, capacity=40):
    first, _, counts = loops(case, poison=False)
    return lower_for_cuda(functools.partial(both_loops, config=config, capacity=capacity), first, counts).as_text()


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_cuda(name):
    text = lowered(CASES[name], CONFIGS[name])
    ours = [f"reference_{kernel}" for kernel in ("capture", "sum", "consume", "merge")]
    for kernel in ("paged_decode", "top_k", *ours):
        assert kernel in text, kernel
    assert "optimization_barrier" in text, "without it XLA may copy the pool between a capture and the next write"


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        ("float32", Config(block_tokens=128, num_warps=8, splits=2)),
        ("bfloat16", Config(exact=True)),
        ("float16", None),
    ],
    ids=str,
)
def test_lowers_for_cuda_in_every_config(dtype, config):
    lowered(dataclasses.replace(CASES["draft4_splits"], dtype=dtype, D=80, Dv=96, W=9), config)


MUTATIONS = {
    "nothing": lambda x, r: (x, r),
    "v_of_the_wrong_head": lambda x, r: ({**x, "v_pages": jnp.roll(x["v_pages"], 1, axis=1)}, r),
    "k_of_the_wrong_head": lambda x, r: ({**x, "k_pages": jnp.roll(x["k_pages"], 1, axis=1)}, r),
    "pages_shifted": lambda x, r: ({**x, "page_table": x["page_table"] + 1}, r),
    "mask_of_the_row_dropped": lambda x, r: ({**x, "lengths": x["lengths"] + 3}, r),
    "ids_shifted": lambda x, r: (x, dataclasses.replace(r, indices=r.indices + 1)),
    "ids_of_the_other_head": lambda x, r: (x, dataclasses.replace(r, indices=r.indices[:, :, ::-1])),
    "one_id_left_out": lambda x, r: (x, dataclasses.replace(r, indices=r.indices.at[..., 0].set(-1))),
    "mass_is_1": lambda x, r: (x, dataclasses.replace(r, mass=jnp.ones_like(r.mass))),
    "contribution_left_out": lambda x, r: (x, dataclasses.replace(r, contribution=jnp.zeros_like(r.contribution))),
    "output_left_out": lambda x, r: (x, dataclasses.replace(r, output=jnp.zeros_like(r.output))),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_fails(mutation):
    """A comparison that forgives a wrong input is no test."""
    attempt = functools.partial(check, CASES["draft4_splits"], "interpret", SPLITS, MUTATIONS[mutation])
    if mutation == "nothing":
        attempt()
        return
    with pytest.raises(AssertionError):
        attempt()


def full_and_partial_rows_are_right(case, implementation, config=None, retention=0.1):
    """Rows that keep everything have the bits of dense attention, and so has what a capture returns.

    Rows that keep less stand between them.
    """
    first, later, counts = loops(case, retention)
    full = np.arange(counts.size).reshape(counts.shape) % 3 != 1
    counts = np.where(full, seen_of(first), counts).astype(np.int32)
    options, capacity = {"implementation": implementation, "config": config}, case.P * case.W
    output, reference = capture(first, counts, capacity, **options)
    attended = dense(first, **options)
    assert_same_bits(output.out, attended.out)
    assert_same_bits(output.lse, attended.lse, name="lse")
    corrected, exact = consume(later, reference, **options), dense(later, **options).out
    assert_same_bits(corrected[full], exact[full])
    partial = ~full & np.asarray(seen_of(first) > 1)
    assert partial.any()
    assert (jnp.abs(corrected - exact)[partial].max(axis=(-1, -2)) > 0).all()


def test_interpret_full_rows_beside_others():
    full_and_partial_rows_are_right(CASES["draft4_splits"], "interpret", SPLITS)


GPU_CASES = [
    AttentionCase(
        name=f"{dtype}_{'mha' if kv_heads == 8 else 'gqa'}_t{tokens}_p{page_size}", dtype=dtype, Hkv=kv_heads, T=tokens,
        P=page_size, W=3072 // page_size, D=128, Dv=128, lengths=(3001, 2048),
    )
    for dtype, kv_heads, tokens, page_size in itertools.product(("float32", "bfloat16"), (8, 2), (1, 4), (16, 64))
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("config", [None, SPLITS, Config(exact=True)], ids=str)
def test_gpu(name, config):
    check(CASES[name], "triton", config)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_long_rows(case):
    check(case, "triton", retention=0.1, capacity=512)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, Config(exact=True)], ids=str)
@pytest.mark.parametrize("case", [*CASES.values(), *GPU_CASES], ids=str)
def test_gpu_full_rows_and_captures_have_the_bits_of_dense_attention(case, config):
    full_and_partial_rows_are_right(case, "triton", config)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_requirement_19_full_retention_in_batches(dtype, batch):
    rng = np.random.default_rng(batch)
    lengths = tuple(int(n) for n in rng.integers(1, 2049, batch))
    case = AttentionCase(name="full", dtype=dtype, B=batch, W=32, P=64, D=128, Dv=128, lengths=lengths)
    first, later, counts = loops(case, 1.0, poison=False)
    _, reference = capture(first, counts, 2048, implementation="triton")
    assert_same_bits(consume(later, reference, implementation="triton"), dense(later, implementation="triton").out)


@pytest.mark.gpu
def test_gpu_same_call_same_bits():
    case = GPU_CASES[-1]
    first, later, counts = loops(case, 0.1, poison=False)
    runs = [capture(first, counts, 512, implementation="triton") for _ in range(3)]
    for output, reference in runs[1:]:
        for a, e in zip(jax.tree.leaves((output, reference)), jax.tree.leaves(runs[0]), strict=True):
            assert_same_bits(a, e)
    outs = [consume(later, runs[0][1], implementation="triton") for _ in range(3)]
    assert_same_bits(outs[1], outs[0])
    assert_same_bits(outs[2], outs[0])


# The argument `counts` of the top-k kernel: how many each row wants.


def make_counts(seed, rows, k, lengths):
    """0, 1, k, more than the row has, more than k, below 0, and anything between, in turn."""
    rng = np.random.default_rng(seed)
    odd = np.stack([np.zeros_like(lengths), np.ones_like(lengths), np.full_like(lengths, k), lengths.clip(0, k) + 1])
    odd = np.concatenate([odd, [np.full_like(lengths, 2**31 - 1), np.full_like(lengths, -5)]])
    some = rng.integers(0, k + 1, rows)
    return np.where(rng.random(rows) < 0.4, some, odd[rng.integers(0, 6, rows), np.arange(rows)]).astype(np.int32)


def right_counts(scores, k, lengths, counts, order):
    ids = right_ids(scores, k, lengths)
    size = np.asarray(scores).shape[1]
    ids = np.where((np.arange(k) < np.asarray(counts)[:, None]) & (ids >= 0), ids, size)
    ids = np.sort(ids, axis=1) if order == "id" else ids
    return np.where(ids == size, -1, ids)


@jax.jit
def interpreted(scores, lengths, counts):
    return top_k(scores, 12, lengths, order="id", interpret=True, counts=counts, chunk=32)


def test_top_k_with_counts():
    """Three rounds; 20 kinds of scores, many with ties at the boundary."""
    size, rows = 150, len(KINDS)
    assert len(rounds(size, 12, rows=rows, chunk=32)) == 3
    for seed in range(6):
        scores, lengths = make_rows(seed, size), make_lengths(seed, rows, size, 12)
        for counts in (make_counts(seed, rows, 12, lengths), np.zeros_like(lengths), np.ones_like(lengths)):
            ids = np.asarray(interpreted(scores, lengths, counts))
            expected = right_counts(scores, 12, lengths, counts, "id")
            assert (ids == expected).all(), np.argwhere(ids != expected)[0]
    assert_right(interpreted(scores, lengths, np.full_like(lengths, 12)), scores, 12, lengths, "id")


def test_sort_of_references_too_large_for_top_k(monkeypatch):
    """Above 8,192 ids of a row: the same choice, by a sort."""
    module = importlib.import_module("pallas_kernels.reference_capture")
    monkeypatch.setattr(module, "LARGEST_K", 4)
    rows, size = len(KINDS), 100
    q, pool = jnp.zeros((rows, 1, 1, 8)), jnp.zeros((1, 1, 4, 8))
    shape = decode_shape(q, pool, pool, per_token=False, scale=1.0, soft_cap=None, interpret=True)
    choose = jax.jit(module._chosen, static_argnums=(3, 4))
    for capacity, seed in itertools.product((7, 40, 120), range(3)):
        scores, lengths = make_rows(seed, size), make_lengths(seed, rows, size, capacity).clip(0, size)
        counts = make_counts(seed, rows, capacity, lengths).clip(0, np.minimum(lengths, capacity))
        ids = choose(scores[:, None, None], lengths[:, None], counts[:, None], capacity, shape)
        assert (np.asarray(ids)[:, 0, 0] == right_counts(scores, capacity, lengths, counts, "id")).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "size", "k"), [(20, 1000, 64), (20, 9295, LARGEST_K), (60, 40000, 2048)])
@pytest.mark.parametrize("order", ["id", "score"])
def test_gpu_top_k_with_counts(rows, size, k, order):
    scores, lengths = np.resize(make_rows(0, size), (rows, size)), make_lengths(0, rows, size, k)
    counts = make_counts(1, rows, k, lengths)
    ids = top_k(jnp.asarray(scores), k, jnp.asarray(lengths), order=order, interpret=False, counts=jnp.asarray(counts))
    assert (np.asarray(ids) == right_counts(scores, k, lengths, counts, order)).all()
