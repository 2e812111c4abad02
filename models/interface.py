"""What decoding needs of a model: a looped model, where a plain decoder is one with a single loop.

Decoding, generation and evaluation know models by these types alone, so a new model is one file.
Legend: B requests, S tokens, H hidden width, V vocabulary, Hq / Hkv query / key-value heads, D head width, U loops.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from sparse_jax.selectors import Dense, Selector
from sparse_jax.validation import CACHE_DTYPES

Cache = Any
"""Whatever the attention of one call threads through the planes: `()`, the `Cache` of `models.loops`, ..."""

Attend = Callable[[jax.Array, Any, jax.Array, jax.Array, Cache], tuple[Any, Cache]]
"""(plane i32[], q [B, S, Hq, D], k [B, S, Hkv, D], v [B, S, Hkv, Dv], cache) -> (out [B, S, Hq, Dv], cache)

q and out of latent attention are pytrees, see `models.latent_attention`.
"""

Keep = Callable[[jax.Array], jax.Array]
"""Picks the tokens whose result is wanted from h [B, S, H]; "all of them" is `keep_all`."""


def keep_all(h: jax.Array) -> jax.Array:
    """Every token of h [B, S, H]."""
    return h


def float_type(cache_dtype: Any, allowed: tuple[Any, ...], wanted: str) -> Any:
    """The dtype that a user asked a cache for. Raises ValueError unless it is one of those that can be read."""
    try:
        dtype = jnp.dtype(cache_dtype)
    except TypeError:
        dtype = None
    if dtype is None or dtype not in map(jnp.dtype, allowed):
        raise ValueError(f"cache_dtype must be {wanted}; got {cache_dtype!r}")
    return dtype


class LoopOutput(NamedTuple):
    """What the loops of a model computed for every kept token."""

    hidden: jax.Array  # [U, B, S, H] in the compute dtype, after the final norm of each loop
    gate_logits: jax.Array  # f32[U, B, S] of the exit gate; zeros where there is one loop and nothing to choose


class KeysAndValues:
    """What configurations have in common whose heads read keys and values of one width."""

    num_kv_heads: int
    head_dim: int

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.head_dim

    def pools(self, cache_dtype: Any) -> dict[str, Any]:
        """What the model says to `paging.create`: heads, widths, type. Raises ValueError for types that no step reads.

        Eight bits hold keys and values as they are, without scales.
        """
        wanted = ", ".join(jnp.dtype(dtype).name for dtype in CACHE_DTYPES) + " for a model that caches keys and values"
        sizes = {"kv_heads": self.num_kv_heads, "key_width": self.head_dim, "value_width": self.value_dim}
        return sizes | {"dtype": float_type(cache_dtype, CACHE_DTYPES, wanted)}

    def selector_for(self, wanted: Selector | None) -> Selector:
        """What a step reads: what the caller wants, everything for None."""
        return Dense() if wanted is None else wanted


class ModelConfig(Protocol):
    """Sizes that decoding reads; a frozen dataclass provides them as fields or properties."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def num_layers(self) -> int:
        """Layers of one loop."""

    @property
    def num_heads(self) -> int:
        """Hq."""

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""

    @property
    def head_dim(self) -> int:
        """D."""

    @property
    def value_dim(self) -> int:
        """Dv."""

    @property
    def loops(self) -> int:
        """U."""

    @property
    def planes(self) -> int:
        """Key/value planes: one for each (loop, layer); plane of (u, l) is `u * num_layers + l`."""

    @property
    def max_positions(self) -> int:
        """Positions that the model was made for."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    @property
    def exit_threshold(self) -> float:
        """At 1 and above every token takes the last loop."""

    @property
    def exit_step(self) -> int | None:
        """A loop that goes before the threshold."""

    def pools(self, cache_dtype: Any) -> dict[str, Any]:
        """What the model says to `paging.create`: heads, widths, type. Raises ValueError for one it cannot read."""

    def selector_for(self, wanted: Selector | None) -> Selector:
        """What a step reads: what the caller wants, the model's own way for None.

        Raises ValueError for a selector that its attention cannot work with.
        """


class LoopedModel(Protocol):
    """A causal decoder over planes of keys and values. In practice an `nnx.Module`: decoding splits and merges it."""

    @property
    def config(self) -> ModelConfig:
        """Its sizes."""

    @property
    def dtype(self) -> Any:
        """Of the activations, and so of the cache by default."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        """What the first loop takes: tokens i32[B, S] -> h [B, S, H] in `dtype`."""

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
        """Run the loops first .. last - 1 (default: all) over h [B, S, H] at positions i32[B, S].

        h is what `embed` gave, or what the loop before `first` left: the `hidden` of its output, of every token.
        `attend` is called once per plane, in the order of the planes, with a plane that may be traced, and threads
        `cache` on. The output holds these loops only.
        """

    def causal(
        self, plane: Any, q: Any, k: jax.Array, v: jax.Array, cache: Cache, implementation: str | None = None
    ) -> tuple[Any, Cache]:
        """An `Attend`: causal attention inside the sequence itself, as the model defines it; leaves the cache alone.

        implementation: of this library's operations, where the model needs some for that.
        """

    def forward(self, tokens: jax.Array) -> LoopOutput:
        """Full causal forward of tokens i32[B, S] at positions 0 .. S-1, without a cache."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Map hidden [..., H] to f32[..., V]."""
