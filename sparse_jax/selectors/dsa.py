"""The choice of a model's own indexer (DeepSeek sparse attention)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from sparse_jax.paging import PageView
from sparse_jax.selectors.base import Attended, Selector, register
from sparse_jax.validation import require


@register("dsa")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DSA(Selector):
    """Reads the tokens that the model's lightning indexer scores highest; for models of latent attention with one.

    k: how many for each query row, None: as many as the model was trained with. The common options have no effect. The
    indexer is part of the model, so the model attends; over a plain cache `attend` raises ValueError.
    Source: DeepSeek-V3.2.
    """

    k: int | None = None

    reads_all_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_whole("k", 1, optional=True)

    def attend(
        self,
        state: Any,
        q: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        view: PageView,
        *,
        plane: Any = 0,
        **options: Any,
    ) -> Attended:
        """Raises ValueError: only a model with an indexer can attend so."""
        del state, q, v_pages, view, plane, options
        require(k_pages.ndim == 4, f"k_pages must be [planes * N, Hkv, P, D], got {list(k_pages.shape)}")
        raise ValueError(
            "the selector 'dsa' is the choice of a model's own indexer: it works with models of latent attention that "
            "have one, not with keys and values of heads"
        )
