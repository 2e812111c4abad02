"""DeepSeek-style decoders: latent attention, an indexer that chooses what each token sees, a mixture of experts.

    h = embed(tokens)
    for l in 0 .. L-1:
        h = h + Attention_l(N1_l(h))           latent attention; a layer without indexer sees what its leader chose
        h = h + F_l(N2_l(h))                   F_l: an MLP in the first layers, experts afterwards
    logits = head(norm(h))

    the extra layer, which predicts the token after the next from hidden states h_i and the next token t_{i+1}:
        u_i = W [N_e(embed t_{i+1}) | N_h(h_i)]
        logits = head(norm_x(Layer(u)_i))

It is a looped model with one loop: plane l is layer l. Layers differ, so they are a plain loop, not a scan.
Legend: B requests, S tokens, H hidden width, V vocabulary, L layers.

Source: DeepSeek-V3, arXiv 2412.19437, DeepSeek-V3.2, and GLM-5 (facts only).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from models import latent_attention
from models.deepseek_config import DeepseekConfig as DeepseekConfig
from models.deepseek_config import IndexerConfig as IndexerConfig
from models.experts import ExpertsConfig as ExpertsConfig
from models.experts import MixtureOfExperts
from models.interface import Attend, Cache, Keep, LoopOutput, keep_all
from models.latent_attention import Choice
from models.latent_layers import LatentAttention
from models.layers import MLP, RMSNorm, check_loops, matrix
from models.rotary import Yarn as Yarn


def _norm(config: DeepseekConfig, param_dtype) -> RMSNorm:
    return RMSNorm(config.hidden_size, value=1.0, eps=config.norm_eps, param_dtype=param_dtype)


class Layer(nnx.Module):
    """One layer: latent attention, then an MLP or experts."""

    def __init__(self, config: DeepseekConfig, layer: int, *, rngs: nnx.Rngs, param_dtype):
        self.input_layernorm = _norm(config, param_dtype)  # N1
        self.self_attn = LatentAttention(config, layer, rngs=rngs, param_dtype=param_dtype)
        self.post_attention_layernorm = _norm(config, param_dtype)  # N2
        hidden, wide = config.hidden_size, config.intermediate_size
        self.mlp: MixtureOfExperts | MLP
        if config.experts is not None and layer >= config.first_dense:
            self.mlp = MixtureOfExperts(hidden, config.experts, rngs=rngs, param_dtype=param_dtype)
        else:
            self.mlp = MLP(hidden, wide, rngs=rngs, param_dtype=param_dtype)

    def __call__(
        self,
        h: jax.Array,
        positions: jax.Array,
        plane: jax.Array,
        attend: Attend,
        cache: Cache,
        chosen: Choice | None,
    ) -> tuple[jax.Array, Choice | None, Cache]:
        """Add both branches to h [B, S, H] -> (h, what the layers that follow see, new cache)."""
        mixed, chosen, cache = self.self_attn(self.input_layernorm(h), positions, plane, attend, cache, chosen)
        h = h + mixed
        return h + self.mlp(self.post_attention_layernorm(h)), chosen, cache


class ExtraLayer(nnx.Module):
    """Predicts one more token: embeds the next one, joins it with the hidden state, runs a layer of its own."""

    def __init__(self, config: DeepseekConfig, layer: int, *, rngs: nnx.Rngs, param_dtype):
        self.enorm, self.hnorm = _norm(config, param_dtype), _norm(config, param_dtype)
        self.eh_proj = matrix(rngs, config.hidden_size, 2 * config.hidden_size, param_dtype=param_dtype)
        self.layer = Layer(config, layer, rngs=rngs, param_dtype=param_dtype)
        self.norm = _norm(config, param_dtype)

    def __call__(
        self, h: jax.Array, embedded: jax.Array, positions: jax.Array, plane: jax.Array, attend: Attend, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """From h [B, S, H] and the embedded next tokens [B, S, H] -> (hidden [B, S, H] after the norm, new cache)."""
        joined = jnp.concatenate([self.enorm(embedded), self.hnorm(h)], axis=-1)
        h = jnp.einsum("bsj,hj->bsh", joined, self.eh_proj[...].astype(h.dtype))
        h, _, cache = self.layer(h, positions, plane, attend, cache, None)
        return self.norm(h), cache


class Deepseek(nnx.Module):
    """The model. Parameters are `param_dtype` (the router float32); activations, the residual too, are `dtype`.

    attention: implementation of `jax.nn.dot_product_attention` for whole sequences (None, "xla" or "cudnn").
    """

    def __init__(
        self,
        config: DeepseekConfig,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        attention: Literal["xla", "cudnn"] | None = None,
    ):
        self.config, self.dtype, self.attention = config, jnp.dtype(dtype), attention
        count, table = config.num_layers, (config.vocab_size, config.hidden_size)
        self.embed_tokens = matrix(rngs, *table, param_dtype=param_dtype)  # [V, H]
        self.layers = nnx.List([Layer(config, n, rngs=rngs, param_dtype=param_dtype) for n in range(count)])
        self.norm = _norm(config, param_dtype)
        self.lm_head = matrix(rngs, *table, param_dtype=param_dtype)  # [V, H]
        extra = range(count, count + config.mtp_layers)
        self.extra = nnx.List([ExtraLayer(config, n, rngs=rngs, param_dtype=param_dtype) for n in extra])

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

        h [B, S, H]: what `embed` gave; positions i32[B, S]. `attend` is called once per plane, in order, with a
        `LatentQuery` (see `LatentAttention`), and threads `cache` on. `keep` picks the tokens whose result is wanted.
        Returns (LoopOutput of the kept tokens, one loop, zero gates; new cache). Raises ValueError for other loops than
        the only one.
        """
        check_loops(first, 1 if last is None else last, 1)
        chosen = None
        for plane, layer in enumerate(self.layers):
            h, chosen, cache = layer(h, positions, jnp.int32(plane), attend, cache, chosen)
        hidden = keep(self.norm(h))[None]
        return LoopOutput(hidden, jnp.zeros(hidden.shape[:-1], jnp.float32)), cache

    def predict(
        self,
        hidden: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: Cache,
        *,
        extra: int = 0,
    ) -> tuple[jax.Array, Cache]:
        """Hidden states that predict the token after the next, from an extra layer; `logits` maps them to tokens.

        hidden [B, S, H] after the final norm (of `loops`, or of the extra layer before) at positions i32[B, S]; tokens
        i32[B, S] those that follow them. The extra layer is plane `num_layers + extra`. Returns (hidden, new cache).
        Raises ValueError without such a layer.
        """
        if not 0 <= extra < len(self.extra):
            raise ValueError(f"the model has {len(self.extra)} extra layers, got number {extra}")
        plane = jnp.int32(self.config.num_layers + extra)
        return self.extra[extra](hidden, self.embed(tokens), positions, plane, attend, cache)

    def causal(
        self, plane, q, k, v, cache: Cache, implementation: str | None = None
    ) -> tuple[tuple[jax.Array, Choice | None], Cache]:
        """Attention inside the sequence itself, as the model defines it; an `Attend` that leaves the cache alone."""
        return latent_attention.causal(q, k[:, :, 0], v[:, :, 0], self.attention, implementation), cache

    def forward(self, tokens: jax.Array) -> LoopOutput:
        """Full causal forward of tokens i32[B, S] at positions 0 .. S-1, without a cache.

        Right padding changes nothing before it. Returns hidden [1, B, S, H] and gate_logits f32[1, B, S] of zeros.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        return self.loops(self.embed(tokens), positions, self.causal, ())[0]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Map hidden [..., H] to f32[..., V], accumulated and kept in float32."""
        head = self.lm_head[...].astype(hidden.dtype)
        return jnp.einsum("...h,vh->...v", hidden, head, preferred_element_type=jnp.float32)
