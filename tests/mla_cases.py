"""Inputs of the tests of sparse MLA: frozen cases in lists, and arrays made from them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import sparse_jax
from sparse_jax import LatentCache, dequantize_latent, quantize_latent
from tests.attention_cases import invalid

FORMATS = ("fp8_ds_mla", "nvfp4_ds_mla")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaCase:
    """One shape. stored: the dtype of plain rows, or the format of a LatentCache."""

    name: str
    B: int = 2
    T: int = 1
    Hq: int = 5
    C: int = 61
    latent: int = 32
    rope: int = 16
    N: int = 9
    P: int = 4
    dtype: str = "float32"
    stored: str = "float32"
    scales: str = "power_of_two"  # of fp8
    row_lists: bool = False  # a list for each of the T rows
    sinks: bool = False
    empty: bool = False  # the last list holds nothing
    scale: float = 0.2
    seed: int = 0

    def __str__(self):
        return self.name

    @property
    def options(self):
        return {"scale": self.scale, "value_dim": self.latent}


COMMON = [
    MlaCase(name="small"),
    MlaCase(name="draft3_bf16", T=3, Hq=16, C=64, latent=48, rope=8, dtype="bfloat16", stored="bfloat16", empty=True),
    MlaCase(name="draft3_row_lists", T=3, Hq=1, C=100, row_lists=True, sinks=True, empty=True),
    MlaCase(name="fp8", Hq=16, latent=128, rope=16, dtype="bfloat16", stored="fp8_ds_mla", empty=True),
    MlaCase(name="nvfp4", Hq=16, latent=64, rope=16, dtype="bfloat16", stored="nvfp4_ds_mla", empty=True),
]
CORNER = [
    MlaCase(name="one_slot", Hq=1, C=1, P=1, latent=40, rope=0, B=1),
    MlaCase(name="h33_fp16", Hq=33, T=3, P=64, N=2, latent=40, rope=0, dtype="float16", stored="float16"),
    MlaCase(name="bf16_rows_f32_query", stored="bfloat16", P=1, N=50, sinks=True),
    MlaCase(name="f32_rows_bf16_query", dtype="bfloat16", latent=48, rope=8),
    MlaCase(name="h128_512", Hq=128, B=1, latent=512, rope=64, dtype="bfloat16", stored="bfloat16", sinks=True),
    MlaCase(name="fp8_no_rope", Hq=33, latent=256, rope=0, dtype="float16", stored="fp8_ds_mla", sinks=True),
    MlaCase(name="fp8_fp16_query", Hq=16, latent=128, rope=64, dtype="float16", stored="fp8_ds_mla"),
    MlaCase(name="fp8_raw_scales", latent=256, dtype="bfloat16", stored="fp8_ds_mla", scales="raw"),
    MlaCase(name="fp8_512", Hq=5, B=1, latent=512, rope=64, P=64, N=2, dtype="bfloat16", stored="fp8_ds_mla"),
    MlaCase(name="fp8_f32_query", T=3, row_lists=True, latent=128, rope=16, stored="fp8_ds_mla", P=1, N=50),
    MlaCase(name="nvfp4_512", Hq=16, B=1, latent=512, rope=64, dtype="bfloat16", stored="nvfp4_ds_mla", sinks=True),
    MlaCase(name="nvfp4_f32_query", T=3, C=100, latent=64, rope=16, stored="nvfp4_ds_mla", P=64, N=2, empty=True),
    MlaCase(name="nvfp4_fp16_query", C=1, latent=192, rope=0, dtype="float16", stored="nvfp4_ds_mla"),
]
CASES = {case.name: case for case in COMMON + CORNER}


def make_inputs(case):
    """q, pool, slots, sinks: each list holds one slot twice, and every kind of invalid id among valid ones."""
    rng = np.random.default_rng(case.seed + sum(map(ord, case.name)))
    width, tokens = case.latent + case.rope, case.N * case.P
    rows = rng.standard_normal((case.N, case.P, width))
    # Groups of 16 columns of different sizes, so that a wrong scale shows.
    sizes = np.exp2(rng.permutation(-(-width // 16)) % 4 - 2.0)
    rows = jnp.asarray(rows * np.repeat(sizes, 16)[:width], jnp.float32)
    lists = (case.B, case.T) if case.row_lists else (case.B,)
    slots = rng.integers(0, tokens, (*lists, case.C))
    slots = np.where(rng.random(slots.shape) < 0.25, invalid(rng, slots.shape, tokens), slots)
    slots[..., 0] = slots[..., -1] = np.abs(slots[..., 0]) % tokens
    if case.empty:
        slots[(-1,) * len(lists)] = invalid(rng, case.C, tokens)
    sinks = jnp.asarray(rng.standard_normal(case.Hq), jnp.float32) if case.sinks else None
    return {
        "q": jnp.asarray(rng.standard_normal((case.B, case.T, case.Hq, width)), case.dtype),
        "pool": store(rows, case.stored, case.latent, case.scales),
        "slots": jnp.asarray(slots, jnp.int32),
        "sinks": sinks,
    }


def store(rows, stored, latent, scales="power_of_two"):
    """rows f32[N, P, E] as a pool of that dtype or format."""
    if stored in FORMATS:
        data = quantize_latent(rows, stored, latent_dim=latent, scales=scales)
        return LatentCache(data, stored, latent, rows.shape[-1] - latent)
    return rows.astype(stored)


def poisoned(x, byte=0x7F):
    """The inputs with NaN in every row that nobody chose: of bytes 0x7F, NaN in e4m3, or 0xFF, NaN in all types."""
    pool, slots = x["pool"], np.asarray(x["slots"], np.int64)
    data = pool.data if isinstance(pool, LatentCache) else pool
    tokens = data.shape[0] * data.shape[1]
    chosen = np.zeros(tokens, bool)
    chosen[slots[(slots >= 0) & (slots < tokens)]] = True
    chosen = chosen.reshape(*data.shape[:2], 1)
    if isinstance(pool, LatentCache):
        return {**x, "pool": dataclasses.replace(pool, data=jnp.where(chosen, data, jnp.uint8(byte)))}
    return {**x, "pool": jnp.where(chosen, data, jnp.nan)}


def call(x, *, implementation, config=None, **options):
    """Runs the public operation on the arrays of `make_inputs`."""
    return sparse_jax.mla_sparse_attention(
        x["q"], x["pool"], x["slots"], sinks=x["sinks"], implementation=implementation, config=config, **options
    )


def reference(case, x):
    """The plain-jnp meaning in float32 at highest precision, on the same (dequantised) rows."""
    pool = x["pool"]
    pool = dequantize_latent(pool) if isinstance(pool, LatentCache) else pool.astype(jnp.float32)
    return call({**x, "pool": pool, "q": x["q"].astype(jnp.float32)}, implementation="xla", **case.options)
