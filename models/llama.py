"""Llama-style decoders, SmolLM2 among them: pre-norm layers, rotary positions, grouped heads, a gated MLP.

    h = embed(tokens)
    for l in 0 .. L-1:
        h = h + Attention_l(N1_l(h))
        h = h + down_l(silu(gate_l x) * up_l x)      with x = N2_l(h)
    logits = head(final_norm(h))                     the head is the embedding where the two are tied

It is a looped model with one loop: plane l is layer l. The layers' parameters are stacked, [L, ...], and run in one
`lax.scan`, so that 30 layers compile like one.

Legend: B requests, S tokens, H hidden width, F feed-forward width, V vocabulary, Hq / Hkv query / key-value heads,
D head width, L layers. In einsum strings: b, s, h, f, v, n (query head), k (KV head), d.

Source: Llama, arXiv 2302.13971, and SmolLM2, arXiv 2502.02737.
"""

import dataclasses
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx

from models.interface import Attend, Cache, Keep, KeysAndValues, LoopOutput, keep_all
from models.layers import RMSNorm, check_loops, check_sizes, rms_norm
from models.rotary import rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(KeysAndValues):
    """Sizes of one model. `tied_embeddings`: the embedding is the head, too."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e4
    norm_eps: float = 1e-5
    max_positions: int = 2048
    tied_embeddings: bool = True
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        check_sizes(self, *sizes, "head_dim", "max_positions")

    @property
    def loops(self) -> int:
        """One: a plain decoder."""
        return 1

    @property
    def planes(self) -> int:
        """Key/value planes: one for each layer."""
        return self.num_layers

    @property
    def exit_threshold(self) -> float:
        """There is nothing to exit from."""
        return 1.0

    @property
    def exit_step(self) -> int | None:
        """There is nothing to exit from."""
        return None

    @classmethod
    def smollm2_135m(cls, **changes) -> Self:
        """SmolLM2-135M: 30 layers, groups of 3 query heads, 134,515,008 parameters."""
        sizes: dict[str, Any] = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30}
        heads = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "rope_theta": 1e5, "max_positions": 8192}
        return cls(**(sizes | heads | {"bos_id": 1, "stop_ids": (0, 2)} | changes))


class Layers(nnx.Module):
    """The parameters of all layers; the first axis is the layer, matrices are [L, out, in] as checkpoints store them.

    Fresh matrices are normal with a standard deviation of fan_in ** -0.5.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, param_dtype):
        layers, hidden, wide = config.num_layers, config.hidden_size, config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def matrix(*shape: int) -> nnx.Param:
            values = jax.random.normal(rngs.params(), (layers, *shape), jnp.float32) * shape[-1] ** -0.5
            return nnx.Param(values.astype(param_dtype))

        self.input_norm = nnx.Param(jnp.ones((layers, hidden), param_dtype))  # N1
        self.q_proj = matrix(q_width, hidden)
        self.k_proj = matrix(kv_width, hidden)
        self.v_proj = matrix(kv_width, hidden)
        self.o_proj = matrix(hidden, q_width)
        self.mlp_norm = nnx.Param(jnp.ones((layers, hidden), param_dtype))  # N2
        self.gate_proj = matrix(wide, hidden)
        self.up_proj = matrix(wide, hidden)
        self.down_proj = matrix(hidden, wide)

    def stacked(self) -> dict[str, jax.Array]:
        """Every parameter by name, [L, ...]: what a scan over the layers slices."""
        return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(self, nnx.Param))}


class Llama(nnx.Module):
    """The model. Parameters are `param_dtype`; activations, the residual stream included, are `dtype`.

    attention: implementation of `jax.nn.dot_product_attention` for whole sequences (None, "xla" or "cudnn").
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        attention: Literal["xla", "cudnn"] | None = None,
    ):
        self.config, self.dtype, self.attention = config, jnp.dtype(dtype), attention

        def table() -> nnx.Param:  # [V, H]
            values = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32)
            return nnx.Param((values * config.hidden_size**-0.5).astype(param_dtype))

        self.embed_tokens = table()
        self.layers = Layers(config, rngs=rngs, param_dtype=param_dtype)
        self.norm = RMSNorm(config.hidden_size, value=1.0, eps=config.norm_eps, param_dtype=param_dtype)
        if not config.tied_embeddings:
            self.lm_head = table()

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Look up tokens i32[B, S] -> [B, S, H] in `dtype`."""
        return self.embed_tokens[...][tokens].astype(self.dtype)

    def loops(
        self,
        h: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: Cache,
        keep: Keep = keep_all,
        *,
        first: int = 0,
        last: int | None = None,
    ) -> tuple[LoopOutput, Cache]:
        """Run the layers, the only loop, with the given attention; every forward and every step comes through here.

        h [B, S, H]: what `embed` gave; positions i32[B, S]. `attend` is called in one `lax.scan`, once per plane, in
        the order of the planes, with the plane as a traced i32[], and threads `cache` on. `keep` picks the tokens whose
        result is wanted from h. Returns (LoopOutput of the kept tokens, one loop, zero gates; new cache). Raises
        ValueError for other loops than the only one.
        """
        check_loops(first, 1 if last is None else last, 1)

        def layer(carry, plane_and_weights):
            h, cache = carry
            plane, weights = plane_and_weights
            w = {name: weight.astype(self.dtype) for name, weight in weights.items()}
            x = rms_norm(h, w["input_norm"], self.config.norm_eps)
            mixed, cache = self._attention(x, w, positions, plane, attend, cache)
            h = h + mixed
            h = h + self._mlp(rms_norm(h, w["mlp_norm"], self.config.norm_eps), w)
            return (h, cache), None

        planes = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (h, cache), _ = jax.lax.scan(layer, (h, cache), (planes, self.layers.stacked()))
        hidden = keep(self.norm(h))[None]
        return LoopOutput(hidden, jnp.zeros(hidden.shape[:-1], jnp.float32)), cache

    def _attention(self, x, w: dict[str, jax.Array], positions, plane, attend: Attend, cache: Cache):
        """Attend from x [B, S, H] at positions i32[B, S] -> (out [B, S, H], new cache)."""
        c = self.config
        q_proj = w["q_proj"].reshape(c.num_heads, c.head_dim, c.hidden_size)
        k_proj = w["k_proj"].reshape(c.num_kv_heads, c.head_dim, c.hidden_size)
        v_proj = w["v_proj"].reshape(c.num_kv_heads, c.head_dim, c.hidden_size)
        o_proj = w["o_proj"].reshape(c.hidden_size, c.num_heads, c.head_dim)
        q = rotate(jnp.einsum("bsh,ndh->bsnd", x, q_proj), positions, c.rope_theta, interleaved=False)
        k = rotate(jnp.einsum("bsh,kdh->bskd", x, k_proj), positions, c.rope_theta, interleaved=False)
        v = jnp.einsum("bsh,kdh->bskd", x, v_proj)
        out, cache = attend(plane, q, k, v, cache)
        return jnp.einsum("bsnd,hnd->bsh", out, o_proj), cache

    def _mlp(self, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        """Map x [B, S, H] to [B, S, H]."""
        gate = jnp.einsum("bsh,fh->bsf", x, w["gate_proj"])
        up = jnp.einsum("bsh,fh->bsf", x, w["up_proj"])
        return jnp.einsum("bsf,hf->bsh", jax.nn.silu(gate) * up, w["down_proj"])

    def causal(self, plane, q, k, v, cache: Cache, implementation=None) -> tuple[jax.Array, Cache]:
        """Dense causal attention inside the sequence itself; an `Attend` that leaves the cache alone."""
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention), cache

    def forward(self, tokens: jax.Array) -> LoopOutput:
        """Full causal forward of tokens i32[B, S] at positions 0 .. S-1, without a cache.

        Right padding changes nothing before it. Returns hidden [1, B, S, H] and gate_logits f32[1, B, S] of zeros.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        return self.loops(self.embed(tokens), positions, self.causal, ())[0]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Map hidden [..., H] to f32[..., V], accumulated and kept in float32."""
        head = (self.embed_tokens if self.config.tied_embeddings else self.lm_head)[...].astype(hidden.dtype)
        return jnp.einsum("...h,vh->...v", hidden, head, preferred_element_type=jnp.float32)
