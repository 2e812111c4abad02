"""Ouro, a looped decoder: the same L layers run U times, each pass with key/value planes of its own.

    h = embed(tokens)
    for u in 0 .. U-1:
        for l in 0 .. L-1:
            h = h + N2_l(Attention_{l,u}(N1_l(h)))
            h = h + N4_l(MLP_l(N3_l(h)))
        h = final_norm(h)                        inside the loop: its output feeds the next one
        g_u = gate(h)
    logits = head(h of the exit loop)

There is no input re-injection and nothing knows the loop, except that `Attention_{l,u}` reads plane `u * L + l` alone.

Legend: B requests, S tokens, H hidden width, F feed-forward width, V vocabulary, Hq / Hkv query / key-value heads,
G = Hq / Hkv, D head width, L layers, U loops. In einsum strings: b, s, h, f, v, n (query head), k (KV head), d.

Source: Ouro, arXiv 2510.25741 and its published modelling code (facts only).
"""

import dataclasses
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx

from models.interface import Attend, Cache, Keep, KeysAndValues, LoopOutput, keep_all
from models.layers import RMSNorm, check_loops, check_sizes
from models.rotary import rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitConfig:
    """How fresh parameters are drawn. Matrices are normal; `scale_by_fan_in` multiplies their std by fan_in ** -0.5."""

    embedding_std: float = 0.02
    matrix_std: float = 0.02
    head_std: float = 0.02
    scale_by_fan_in: bool = False
    branch_norm: float = 1.0  # N2 and N4, the norms after attention and after the MLP
    gate_std: float = 0.02
    gate_bias: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuroConfig(KeysAndValues):
    """Sizes of one Ouro. `exit_threshold >= 1` means fixed depth; an `exit_step` (0-based loop) goes before it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    loops: int = 4
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    max_positions: int = 65_536
    exit_threshold: float = 1.0
    exit_step: int | None = None
    bos_id: int | None = 0
    stop_ids: tuple[int, ...] = (0, 2)  # the shipped eos of 0 is wrong for chat, which ends with 2
    init: InitConfig = dataclasses.field(default=InitConfig(), compare=False)  # no part of what the model computes

    def __post_init__(self):
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        check_sizes(self, *sizes, "loops", "max_positions")
        if self.exit_step is not None and not 0 <= self.exit_step < self.loops:
            raise ValueError(f"exit_step must be a loop from 0 to {self.loops - 1}, got {self.exit_step}")

    @property
    def planes(self) -> int:
        """Key/value planes: one for each (loop, layer); plane of (u, l) is `u * num_layers + l`."""
        return self.loops * self.num_layers

    @classmethod
    def ouro_1_4b(cls, **changes) -> Self:
        """Ouro-1.4B: 24 layers, 4 loops, 1,434,652,673 parameters."""
        sizes: dict[str, Any] = {"vocab_size": 49_152, "hidden_size": 2048, "intermediate_size": 5632, "num_layers": 24}
        heads = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 128}
        return cls(**(sizes | heads | changes))

    @classmethod
    def ouro_2_6b(cls, **changes) -> Self:
        """Ouro-2.6B: Ouro-1.4B with 48 layers, 2,667,974,657 parameters."""
        return cls.ouro_1_4b(**({"num_layers": 48} | changes))

    @classmethod
    def tiny(cls, **changes) -> Self:
        """The shipped byte-level model that this project trains: 2 layers, 4 loops, 3,155,713 parameters."""
        sizes: dict[str, Any] = {"vocab_size": 264, "hidden_size": 384, "intermediate_size": 1024, "num_layers": 2}
        heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "rope_theta": 1e4, "max_positions": 4096}
        # N2 and N4 start at 0.35: the 4 branches of one loop then add about half the variance of the embedding.
        init = InitConfig(
            embedding_std=1.0,
            matrix_std=1.0,
            head_std=0.5,
            scale_by_fan_in=True,
            branch_norm=0.35,
            gate_std=0.0,
            gate_bias=-1.0,
        )
        return cls(**(sizes | heads | {"bos_id": 256, "stop_ids": (257,), "init": init} | changes))


def matrix(key: jax.Array, shape: tuple[int, int], std: float, init: InitConfig, param_dtype) -> nnx.Param:
    """A normal matrix [out, in], stored the way the checkpoints store it."""
    scale = std * (shape[1] ** -0.5 if init.scale_by_fan_in else 1.0)
    return nnx.Param((jax.random.normal(key, shape, jnp.float32) * scale).astype(param_dtype))


class Attention(nnx.Module):
    """Projections and rotary positions; what is attended to is the business of `attend`."""

    def __init__(self, config: OuroConfig, *, rngs: nnx.Rngs, param_dtype):
        self.config = config
        std, init = config.init.matrix_std, config.init
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = matrix(rngs.params(), (q_width, config.hidden_size), std, init, param_dtype)
        self.k_proj = matrix(rngs.params(), (kv_width, config.hidden_size), std, init, param_dtype)
        self.v_proj = matrix(rngs.params(), (kv_width, config.hidden_size), std, init, param_dtype)
        self.o_proj = matrix(rngs.params(), (config.hidden_size, q_width), std, init, param_dtype)

    def __call__(
        self, x: jax.Array, positions: jax.Array, plane: jax.Array, attend: Attend, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Attend from x [B, S, H] at positions i32[B, S] -> (out [B, S, H], new cache)."""
        c, dtype = self.config, x.dtype
        q_proj = self.q_proj[...].astype(dtype).reshape(c.num_heads, c.head_dim, c.hidden_size)
        k_proj = self.k_proj[...].astype(dtype).reshape(c.num_kv_heads, c.head_dim, c.hidden_size)
        v_proj = self.v_proj[...].astype(dtype).reshape(c.num_kv_heads, c.head_dim, c.hidden_size)
        o_proj = self.o_proj[...].astype(dtype).reshape(c.hidden_size, c.num_heads, c.head_dim)
        q = rotate(jnp.einsum("bsh,ndh->bsnd", x, q_proj), positions, c.rope_theta, interleaved=False)
        k = rotate(jnp.einsum("bsh,kdh->bskd", x, k_proj), positions, c.rope_theta, interleaved=False)
        v = jnp.einsum("bsh,kdh->bskd", x, v_proj)
        out, cache = attend(plane, q, k, v, cache)
        return jnp.einsum("bsnd,hnd->bsh", out, o_proj), cache


class MLP(nnx.Module):
    """The gated feed-forward down(silu(gate x) * up x)."""

    def __init__(self, config: OuroConfig, *, rngs: nnx.Rngs, param_dtype):
        std, init = config.init.matrix_std, config.init
        wide, narrow = config.intermediate_size, config.hidden_size
        self.gate_proj = matrix(rngs.params(), (wide, narrow), std, init, param_dtype)
        self.up_proj = matrix(rngs.params(), (wide, narrow), std, init, param_dtype)
        self.down_proj = matrix(rngs.params(), (narrow, wide), std, init, param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [B, S, H] to [B, S, H]."""
        gate = jnp.einsum("bsh,fh->bsf", x, self.gate_proj[...].astype(x.dtype))
        up = jnp.einsum("bsh,fh->bsf", x, self.up_proj[...].astype(x.dtype))
        return jnp.einsum("bsf,hf->bsh", jax.nn.silu(gate) * up, self.down_proj[...].astype(x.dtype))


class Layer(nnx.Module):
    """One layer with sandwich norms: one before and one after each block."""

    def __init__(self, config: OuroConfig, *, rngs: nnx.Rngs, param_dtype):
        def norm(value: float) -> RMSNorm:
            return RMSNorm(config.hidden_size, value=value, eps=config.norm_eps, param_dtype=param_dtype)

        self.input_layernorm = norm(1.0)  # N1
        self.input_layernorm_2 = norm(config.init.branch_norm)  # N2
        self.post_attention_layernorm = norm(1.0)  # N3
        self.post_attention_layernorm_2 = norm(config.init.branch_norm)  # N4
        self.self_attn = Attention(config, rngs=rngs, param_dtype=param_dtype)
        self.mlp = MLP(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(
        self, h: jax.Array, positions: jax.Array, plane: jax.Array, attend: Attend, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Add both branches to h [B, S, H] -> (h, new cache)."""
        mixed, cache = self.self_attn(self.input_layernorm(h), positions, plane, attend, cache)
        h = h + self.input_layernorm_2(mixed)
        h = h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))
        return h, cache


class ExitGate(nnx.Module):
    """One number per token: linear with bias, in float32."""

    def __init__(self, config: OuroConfig, *, rngs: nnx.Rngs, param_dtype):
        init = config.init
        self.weight = matrix(rngs.params(), (1, config.hidden_size), init.gate_std, init, param_dtype)  # [1, H]
        self.bias = nnx.Param(jnp.full((1,), init.gate_bias, param_dtype))  # [1]

    def __call__(self, h: jax.Array) -> jax.Array:
        """Map h [B, S, H] to the gate logits f32[B, S]."""
        weight, bias = self.weight[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        # HIGHEST: one row of float32 costs nothing, and TF32 would move tokens over the exit threshold.
        score = jnp.einsum("bsh,oh->bso", h.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
        return (score + bias)[..., 0]


class Ouro(nnx.Module):
    """The model. Parameters are `param_dtype`; activations, the residual stream included, are `dtype`.

    attention: implementation of `jax.nn.dot_product_attention` for whole sequences (None, "xla" or "cudnn").
    embedding: "gather", or "one_hot" for training on a GPU, where the scatter-add of the gather's gradient is slow.
    """

    def __init__(
        self,
        config: OuroConfig,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        attention: Literal["xla", "cudnn"] | None = None,
        embedding: Literal["gather", "one_hot"] = "gather",
    ):
        self.config, self.dtype, self.attention, self.embedding = config, jnp.dtype(dtype), attention, embedding
        init, shape = config.init, (config.vocab_size, config.hidden_size)
        embedded = jax.random.normal(rngs.params(), shape, jnp.float32) * init.embedding_std
        self.embed_tokens = nnx.Param(embedded.astype(param_dtype))  # [V, H]
        self.layers = nnx.List([Layer(config, rngs=rngs, param_dtype=param_dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, value=1.0, eps=config.norm_eps, param_dtype=param_dtype)
        self.early_exit_gate = ExitGate(config, rngs=rngs, param_dtype=param_dtype)
        self.lm_head = matrix(rngs.params(), shape, init.head_std, init, param_dtype)  # [V, H]

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Look up tokens i32[B, S] -> [B, S, H] in `dtype`."""
        table = self.embed_tokens[...].astype(self.dtype)
        if self.embedding == "one_hot":
            return jnp.einsum("bsv,vh->bsh", jax.nn.one_hot(tokens, self.config.vocab_size, dtype=self.dtype), table)
        return table[tokens]

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
        """Run the loops first .. last - 1 with the given attention; every forward and every step comes through here.

        h [B, S, H]: what `embed` gave, or the loop before `first` left; positions i32[B, S]. `attend` is called once
        per plane, in the order of the planes, with the plane as a traced i32[] (the loops are one `lax.scan`), and
        threads `cache` on. `keep` picks the tokens whose result is wanted from h, all by default. Returns (LoopOutput
        of these loops and the kept tokens, new cache). Raises ValueError for loops that the model does not have.
        """
        layers, last = self.config.num_layers, self.config.loops if last is None else last
        check_loops(first, last, self.config.loops)

        def loop(carry, u):
            h, cache = carry
            for index, layer in enumerate(self.layers):
                h, cache = layer(h, positions, u * layers + index, attend, cache)
            h = self.norm(h)
            return (h, cache), (keep(h), self.early_exit_gate(keep(h)))

        loops = jnp.arange(first, last, dtype=jnp.int32)
        (_, cache), (hidden, gate_logits) = jax.lax.scan(loop, (h, cache), loops)
        return LoopOutput(hidden, gate_logits), cache

    def causal(self, plane, q, k, v, cache: Cache, implementation=None) -> tuple[jax.Array, Cache]:
        """Dense causal attention inside the sequence itself; an `Attend` that leaves the cache alone."""
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention), cache

    def forward(self, tokens: jax.Array) -> LoopOutput:
        """Full causal forward of tokens i32[B, S] at positions 0 .. S-1, all loops, without a cache.

        Right padding changes nothing before it. Returns hidden [U, B, S, H] and gate_logits f32[U, B, S].
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        return self.loops(self.embed(tokens), positions, self.causal, ())[0]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Map hidden [..., H] of any loop to f32[..., V].

        Accumulated and kept in float32: BF16 logits tie at the arg max.
        """
        head = self.lm_head[...].astype(hidden.dtype)
        return jnp.einsum("...h,vh->...v", hidden, head, preferred_element_type=jnp.float32)
