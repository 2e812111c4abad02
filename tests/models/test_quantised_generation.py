"""Models of latent attention over quantised caches, against plain caches of the numbers that quantised ones hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.deepseek import Deepseek, IndexerConfig
from models.generate import generate
from models.llama import Llama
from models.ouro import Ouro
from models.speculation import Speculation
from sparse_jax import dequantize_latent, paging, quantize_index_keys, quantize_latent
from sparse_jax.selectors import DSA, Dense
from tests.models.configs import small_llama, small_ouro
from tests.models.deepseek_setting import INDEXER, decoded, random_tokens, small_deepseek

SHARED = IndexerConfig(**(vars(INDEXER) | {"pattern": "FS", "hadamard": True}))
SMALL = small_deepseek(num_layers=2, experts=None, indexer=SHARED, mtp_layers=1)
TOKENS, PROMPTS, LENGTHS = random_tokens(), (7, 9), (14, 12)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Deepseek:
    return Deepseek(SMALL, rngs=nnx.Rngs(0))


def rounded(k, v, format):
    """Latents [..., 20] and index keys [..., 8] as a quantised cache would hold them."""
    sizes = {"latent_dim": 16, "rope_dim": k.shape[-1] - 16}
    k = dequantize_latent(quantize_latent(k, format, latent_dim=16), format=format, **sizes)
    values, scale = quantize_index_keys(v)
    return k, values.astype(jnp.float32) * scale[..., None]


class Rounding:
    """Stores what a quantised cache would hold in a plain one."""

    def store(self, paged, state, plane, reservation, k, v):
        return super().store(paged, state, plane, reservation, *rounded(k, v, self.format))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundingDSA(Rounding, DSA):
    format: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundingDense(Rounding, Dense):
    format: str


def same_logits(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)
        np.testing.assert_array_equal(np.argmax(a, axis=-1), np.argmax(b, axis=-1))


@pytest.mark.parametrize(("format", "size"), [("fp8_ds_mla", 28), ("nvfp4_ds_mla", 16)])
def test_decoding_reads_the_numbers_that_the_format_holds(model, format, size):
    logits, out = decoded(model, TOKENS, PROMPTS, LENGTHS, DSA(), format)
    expected, plain = decoded(model, TOKENS, PROMPTS, LENGTHS, RoundingDSA(format=format))
    same_logits(logits, expected)
    np.testing.assert_array_equal(out.tokens_read, plain.tokens_read)
    latents, keys = paging.flat(out.paged.kv)
    assert latents.data.shape[1:] == (4, size)
    assert keys.data.shape[1:] == (4 * 12,)
    for plane, request in np.ndindex(2, 2):
        pairs = zip(paging.gather(out.paged, plane, request), paging.gather(plain.paged, plane, request))
        for held, number in pairs:
            np.testing.assert_allclose(held, number, atol=1e-6)


def test_a_model_without_indexer_keeps_latents_alone():
    model = Deepseek(dataclasses.replace(SMALL, indexer=None, mtp_layers=0), rngs=nnx.Rngs(1))
    logits, out = decoded(model, TOKENS, PROMPTS, (9, 10), Dense(), "fp8")
    same_logits(logits, decoded(model, TOKENS, PROMPTS, (9, 10), RoundingDense(format="fp8"))[0])
    assert out.paged.kv.v.shape[-1] == 1
    assert not np.asarray(out.paged.kv.v).any()


def test_generation_with_and_without_drafts_from_an_fp8_cache(model):
    """Drafts that are taken back leave bytes behind their request's length alone."""

    def made(speculation):
        options = {"max_tokens": [9, 6], "page_size": 4, "cache_dtype": "fp8_e4m3", "speculation": speculation}
        result = generate(model, [[5, 9, 2, 60, 33, 7, 8], [1, 2, 3]], **options)
        for _ in result:
            pass
        assert result.stats().stale == 0
        return result

    plain, drafted = made(None), made(Speculation(drafts=3, by="extra"))
    assert drafted.tokens == plain.tokens
    assert drafted.stats().acceptance < 1
    for plane, request in np.ndindex(2, 2):
        length = int(plain.state.paged.table.lengths[request])
        a, b = (paging.gather(result.state.paged, plane, request) for result in (plain, drafted))
        for x, y in zip(a, b):
            # Rows that are computed together differ by roundings of float32, now and then by a step of e4m3.
            np.testing.assert_allclose(x[:length], y[:length], rtol=0.13, atol=1e-3)


def test_each_model_says_which_cache_it_cannot_read(model):
    others = Ouro(small_ouro(), rngs=nnx.Rngs(0)), Llama(small_llama(), rngs=nnx.Rngs(0))
    for other in others:
        for value in ("fp8_ds_mla", "nvfp4", "int8", jnp.int8, "float8_e5m2", "float64"):
            named = getattr(value, "__name__", value)
            with pytest.raises(ValueError, match=rf"cache_dtype must be float32, .*keys and values; got .*{named}"):
                generate(other, [[1]], cache_dtype=value)
    for value in ("float8_e4m3fn", "float64", "nvfp4", 8):
        with pytest.raises(ValueError, match=rf"cache_dtype must be float32, .*nvfp4_ds_mla.*; got {value!r}"):
            generate(model, [[1]], cache_dtype=value)


@pytest.mark.parametrize(
    ("changes", "value", "message"),
    [
        ({"latent_dim": 24}, "nvfp4_ds_mla", "latent_dim a positive multiple of 16.* got 24 and 4"),
        ({"latent_dim": 18}, "fp8", "latent_dim a positive multiple of 4.* got 18 and 4"),
        ({"indexer": IndexerConfig(heads=2, head_dim=6)}, "fp8_ds_mla", "dim must be a positive multiple of 4.* got 6"),
    ],
)
def test_columns_that_a_format_cannot_hold(changes, value, message):
    config = dataclasses.replace(SMALL, **changes)
    with pytest.raises(ValueError, match=f"cache_dtype '{value}' cannot hold what this model caches: .*{message}"):
        config.pools(value)
    assert config.pools("bfloat16")["dtype"] == jnp.bfloat16
