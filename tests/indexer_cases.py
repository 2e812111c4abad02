"""Inputs of the indexer's tests: frozen cases in lists, and arrays made from them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import sparse_jax
from sparse_jax import IndexKeys, create_index_keys, dequantize_index_keys, write_index_keys
from tests.attention_cases import invalid


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerCase:
    """One shape. stored: the dtype of plain keys, or "index_keys". Lengths are drawn unless given."""

    name: str
    B: int = 2
    T: int = 1
    heads: int = 5
    dim: int = 24
    P: int = 16
    W: int = 5
    dtype: str = "float32"
    stored: str = "float32"
    lengths: tuple[int, ...] | None = None
    q_positions: bool = False
    k: int | None = None
    whole: bool = False  # numbers so small and whole that nothing is rounded
    seed: int = 0

    def __str__(self):
        return self.name


QUANTISED = {"dtype": "bfloat16", "stored": "index_keys"}
COMMON = [
    IndexerCase(name="small"),
    IndexerCase(name="draft3_bf16", T=3, heads=64, dim=128, P=64, W=3, dtype="bfloat16", stored="bfloat16"),
    IndexerCase(name="fp8", heads=64, dim=128, P=64, W=3, **QUANTISED),
    IndexerCase(name="fp8_draft5_k", T=5, heads=5, dim=24, P=16, W=7, lengths=(42, 110), k=40, **QUANTISED),
]
CORNER = [
    IndexerCase(name="one_head_p1", heads=1, dim=16, P=1, W=61),
    IndexerCase(name="p128", heads=1, dim=16, P=128, W=1, dtype="float16", stored="float16"),
    IndexerCase(name="lengths", B=5, T=3, lengths=(1000, 2**31 - 1, 0, -5, 1), P=64, W=3),
    IndexerCase(name="positions_k", B=4, T=5, q_positions=True, k=20, P=16, W=5),
    IndexerCase(name="bf16_keys_f32_query", stored="bfloat16", P=128, W=2, lengths=(130, 256)),
    IndexerCase(name="f32_keys_bf16_query", T=3, dtype="bfloat16", P=1, W=100),
    IndexerCase(name="fp8_p1", heads=1, dim=16, P=1, W=61, **QUANTISED),
    IndexerCase(name="fp8_f32_query", T=3, P=128, W=2, stored="index_keys", lengths=(128, 129)),
    IndexerCase(name="fp8_fp16_query", heads=64, P=64, W=3, dtype="float16", stored="index_keys", q_positions=True),
    IndexerCase(name="fp8_lengths", B=5, T=3, lengths=(1000, 2**31 - 1, 0, -5, 61), k=60, P=16, **QUANTISED),
]
CASES = {case.name: case for case in COMMON + CORNER}


def make_inputs(case):
    """Arrays of a case: shuffled pages, and invalid ids of every kind among the valid ones."""
    rng = np.random.default_rng(case.seed + sum(map(ord, case.name)))
    pages, capacity = case.B * case.W + 2, case.W * case.P
    table = rng.permutation(pages)[: case.B * case.W].reshape(case.B, case.W)
    table[:, 1:] = np.where(rng.random((case.B, case.W - 1)) < 0.15, invalid(rng, (1,), pages), table[:, 1:])
    table[0, 1:2] = pages if case.W > 2 else table[0, 1:2]
    lengths = case.lengths or tuple(rng.integers(1 + capacity // 2, capacity + 1, case.B))
    position = rng.integers(-1, capacity, (case.B, case.T))
    position = np.where(rng.random(position.shape) < 0.2, -1, position)
    position[0, 0] = 2**31 - 1

    def draw(*shape):
        return rng.integers(-3, 4, shape).astype(np.float32) if case.whole else rng.standard_normal(shape)

    # Keys of different sizes, so that a wrong scale shows.
    keys = draw(pages, case.P, case.dim) * np.exp2(rng.integers(-2, 2, (pages, case.P, 1)))
    weights = draw(case.B, case.T, case.heads) * (1 if case.whole else (case.heads * case.dim) ** -0.5)
    return {
        "q": jnp.asarray(draw(case.B, case.T, case.heads, case.dim), case.dtype),
        "weights": jnp.asarray(weights, jnp.float32),
        "keys": store(jnp.asarray(keys, jnp.float32), case.stored),
        "page_table": jnp.asarray(table, jnp.int32),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "q_positions": jnp.asarray(position, jnp.int32) if case.q_positions else None,
    }


def store(keys, stored):
    """keys f32[N, P, d] as plain keys of that dtype or as IndexKeys."""
    if stored != "index_keys":
        return keys.astype(stored)
    pages, page_size, dim = keys.shape
    empty = create_index_keys(pages, page_size, dim)
    return write_index_keys(empty, jnp.arange(pages * page_size), keys.reshape(-1, dim))


def seen_by_rows(case, x):
    """How many tokens each row sees, i64[B, T], from the contract alone."""
    lengths = np.asarray(x["lengths"], np.int64)[:, None]
    position = lengths - case.T + np.arange(case.T) if x["q_positions"] is None else np.asarray(x["q_positions"])
    return np.clip(np.minimum(position.astype(np.int64) + 1, lengths), 0, case.W * case.P)


def poisoned(case, x, byte=0x7F):
    """The inputs with NaN in every key that no row needs: of bytes 0x7F, NaN in e4m3, or 0xFF, NaN in all types.

    A row that sees at most k tokens needs none.
    """
    seen = seen_by_rows(case, x)
    needed = np.where(seen > (case.k or 0), seen, 0).max(axis=1)
    table, pages = np.asarray(x["page_table"]), case.B * case.W + 2
    kept = np.zeros((pages, case.P), bool)
    for request in range(case.B):
        for place in range(needed[request]):
            page = table[request, place // case.P]
            if 0 <= page < pages:
                kept[page, place % case.P] = True
    keys = x["keys"]
    if not isinstance(keys, IndexKeys):
        return {**x, "keys": jnp.where(kept[..., None], keys, jnp.nan)}
    of_bytes = np.concatenate([np.repeat(kept, case.dim, axis=1), np.repeat(kept, 4, axis=1)], axis=1)
    return {**x, "keys": dataclasses.replace(keys, data=jnp.where(of_bytes, keys.data, jnp.uint8(byte)))}


def call(x, *, implementation, k=None, config=None):
    """Runs the public operation on the arrays of `make_inputs`."""
    return sparse_jax.indexer_scores(
        x["q"],
        x["weights"],
        x["keys"],
        x["page_table"],
        x["lengths"],
        q_positions=x["q_positions"],
        k=k,
        implementation=implementation,
        config=config,
    )


def reference(case, x):
    """The plain-jnp meaning in float32 at highest precision, on the same (dequantised) keys."""
    keys = x["keys"]
    keys = dequantize_index_keys(keys) if isinstance(keys, IndexKeys) else keys.astype(jnp.float32)
    return call({**x, "keys": keys, "q": x["q"].astype(jnp.float32)}, implementation="xla", k=case.k)
