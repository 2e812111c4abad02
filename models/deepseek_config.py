"""Sizes of a DeepSeek-style model: latent attention, its indexer, its experts."""

import dataclasses
from typing import Any, Self

from models.experts import ExpertsConfig
from models.interface import float_type
from models.latent_attention import tokens_chosen
from models.layers import check_at_least_one
from models.rotary import Yarn
from sparse_jax import selectors
from sparse_jax.index_keys import index_key_bytes
from sparse_jax.index_sharing import IndexLayer, index_layers
from sparse_jax.latent_cache import FORMATS, latent_bytes
from sparse_jax.validation import QUERY_DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """The lightning indexer, which chooses the `topk` tokens that a layer attends to.

    interleaved: layout of its rotary pairs, which need not be that of the attention. hadamard: mix the widths of
    queries and keys, which changes no score but spreads outliers. freq, offset, pattern: which layers have an indexer
    and which reuse the choice of an earlier one, see `sparse_jax.index_sharing.index_layers`.
    """

    heads: int
    head_dim: int
    topk: int = 2048
    interleaved: bool = False
    hadamard: bool = False
    freq: int = 1
    offset: int = 2
    pattern: str | tuple[str, ...] | None = None

    def __post_init__(self):
        check_at_least_one(self, "heads", "head_dim", "topk")
        if self.hadamard and self.head_dim & (self.head_dim - 1):
            raise ValueError(f"a Hadamard matrix needs a head_dim that is a power of two, got {self.head_dim}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekConfig:
    """Sizes of one model.

    q_rank: width that queries are squeezed through, None: not at all. latent_dim, rope_dim: what the cache keeps of a
    token. nope_dim, rope_dim, v_dim: widths of a head. indexer: None is dense attention. experts: None is a plain MLP
    in all layers, else in the first `first_dense` ones. yarn: has an effect where max_positions is above its original
    positions. mtp_layers: layers that predict further tokens, for drafts.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    latent_dim: int = 512
    q_rank: int | None = None
    rope_theta: float = 1e4
    rope_interleaved: bool = True
    yarn: Yarn | None = None
    norm_eps: float = 1e-6
    max_positions: int = 4096
    experts: ExpertsConfig | None = None
    first_dense: int = 0
    indexer: IndexerConfig | None = None
    mtp_layers: int = 0
    bos_id: int | None = 0
    stop_ids: tuple[int, ...] = (1,)

    def __post_init__(self):
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "latent_dim")
        check_at_least_one(self, *sizes, "nope_dim", "v_dim", "max_positions")
        if self.q_rank is not None:
            check_at_least_one(self, "q_rank")
        if self.rope_dim < 0 or self.rope_dim % 2:
            raise ValueError(f"rope_dim must be even and at least 0, got {self.rope_dim}")
        for name in ("first_dense", "mtp_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.indexer is None:
            return
        if self.q_rank is None:
            raise ValueError("the indexer takes the squeezed query, so it needs a q_rank")
        if self.indexer.head_dim < self.rope_dim:
            raise ValueError(f"the indexer's head_dim {self.indexer.head_dim} is below rope_dim {self.rope_dim}")
        if not self.index_layers[0].full:
            raise ValueError(f"the first layer has no earlier one to share with, got pattern {self.indexer.pattern!r}")

    @property
    def loops(self) -> int:
        """One: a plain decoder."""
        return 1

    @property
    def planes(self) -> int:
        """Planes of the cache: one for each layer. Drafts of the extra layers need `mtp_layers` more."""
        return self.num_layers

    @property
    def num_kv_heads(self) -> int:
        """All heads read the same latents."""
        return 1

    @property
    def head_dim(self) -> int:
        """E, the width of a cached row: latent, then rotary key."""
        return self.latent_dim + self.rope_dim

    @property
    def value_dim(self) -> int:
        """Width of what is cached beside a row: the indexer's key, which shared layers leave zero; 1 without one."""
        return 1 if self.indexer is None else self.indexer.head_dim

    @property
    def exit_threshold(self) -> float:
        """There is nothing to exit from."""
        return 1.0

    @property
    def exit_step(self) -> int | None:
        """There is nothing to exit from."""
        return None

    def pools(self, cache_dtype: Any) -> dict[str, Any]:
        """What the model says to `paging.create`: one head, widths, type.

        cache_dtype: float32, bfloat16, float16, or a format of `LatentCache`; then the indexer's keys are quantised,
        too (`IndexKeys`). Raises ValueError for another one, and for a format that cannot hold the model's columns.
        """
        sizes = {"kv_heads": 1, "key_width": self.head_dim, "value_width": self.value_dim}
        if not (isinstance(cache_dtype, str) and cache_dtype in FORMATS):
            wanted = f"float32, bfloat16, float16 or {', '.join(FORMATS)} for a model of latent attention"
            return sizes | {"dtype": float_type(cache_dtype, QUERY_DTYPES, wanted)}
        try:
            latent_bytes(cache_dtype, self.latent_dim, self.rope_dim)
            if self.indexer is not None:
                index_key_bytes(self.indexer.head_dim)
        except ValueError as error:
            raise ValueError(f"cache_dtype {cache_dtype!r} cannot hold what this model caches: {error}") from None
        return sizes | {"dtype": cache_dtype, "latent_dim": self.latent_dim}

    def selector_for(self, wanted: selectors.Selector | None) -> selectors.Selector:
        """What a step reads; for None the indexer's choice, or everything where there is none.

        Raises ValueError for another selector than "dense", or "dsa" with an indexer.
        """
        if wanted is None:
            return selectors.get("dense" if self.indexer is None else "dsa")
        tokens_chosen(wanted, None if self.indexer is None else self.indexer.topk)
        return wanted

    @property
    def stretched(self) -> Yarn | None:
        """`yarn` where it has an effect: positions beyond the original ones."""
        return self.yarn if self.yarn and self.max_positions > self.yarn.original_positions else None

    @property
    def scale(self) -> float:
        """Of the scores: that of the un-absorbed heads, which absorption must not change, times YaRN's factor."""
        return (self.nope_dim + self.rope_dim) ** -0.5 * (self.stretched.sharpening if self.stretched else 1.0)

    @property
    def index_layers(self) -> tuple[IndexLayer, ...]:
        """Of each layer: whether it has an indexer, and whose choice it uses. Raises ValueError without an indexer."""
        if self.indexer is None:
            raise ValueError("the model has no indexer")
        i = self.indexer
        return index_layers(self.num_layers, freq=i.freq, offset=i.offset, pattern=i.pattern)

    def has_indexer(self, layer: int) -> bool:
        """Whether the layer has an indexer of its own; extra layers, from num_layers on, have one if the model does."""
        return self.indexer is not None and (layer >= self.num_layers or self.index_layers[layer].full)

    @classmethod
    def v3_2(cls, **changes) -> Self:
        """DeepSeek-V3.2: 61 layers, 671 billion parameters, without the extra layer."""
        sizes: dict[str, Any] = {"vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432}
        sizes |= {"num_layers": 61, "num_heads": 128, "q_rank": 1536, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}
        experts = ExpertsConfig(count=256, per_token=8, width=2048, groups=8, groups_chosen=4, scale=2.5)
        parts = {"experts": experts, "first_dense": 3, "indexer": IndexerConfig(heads=64, head_dim=128)}
        return cls(**(sizes | parts | {"max_positions": 163_840, "yarn": Yarn(factor=40.0)} | changes))
