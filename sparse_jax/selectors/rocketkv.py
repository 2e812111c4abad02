"""RocketKV (arXiv 2502.14051): a prompt shrinks as in SnapKV, and each step reads the pages that Quest ranks best.

Two parts of this package, composed: `SnapKV` with a small window and a wide kernel decides what is held, `Quest` what a
step reads of that. The envelopes are those of the compacted pages, each KV head's own. (The paper ranks in the second
stage by envelopes over a part of the key's columns; here all columns count.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_jax import paging
from sparse_jax.attention import page_sparse_attention
from sparse_jax.compaction import PromptReservation
from sparse_jax.paging import PagedKV, PagedState, PageView, Reservation
from sparse_jax.selectors import budgets
from sparse_jax.selectors.base import Attended, register
from sparse_jax.selectors.evicting import Kept, positions_held
from sparse_jax.selectors.quest import Quest
from sparse_jax.selectors.snapkv import SnapKV
from sparse_jax.selectors.views import positions_read
from sparse_jax.validation import as_array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rocket:
    """What each of the two parts remembers."""

    kept: Kept
    pages: Any  # of `Quest`


@register("rocketkv")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RocketKV(SnapKV):
    """Holds `prompt_budget` tokens of a prompt and all later ones; a step reads pages of `budget` tokens of these.

    prompt_budget: a whole number of tokens or a share of the prompt. budget: any that `Quest` takes. sinks, recent:
    tokens that are held and whose pages are read in any case.
    """

    window: int = 32
    kernel: int = 63
    prompt_budget: Any = 2048

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_budget", budgets.checked("RocketKV prompt_budget", self.prompt_budget, None))
        super().__post_init__()

    def held_budget(self) -> Any:
        """See `Evicting.held_budget`."""
        return self.prompt_budget

    @property
    def quest(self) -> Quest:
        """The part that chooses pages."""
        return Quest(budget=self.budget, most=self.most, sinks=self.sinks, recent=self.recent, scale=self.scale)

    def init(self, kv: PagedKV, requests: int = 1) -> Any:
        """See `Selector.init`."""
        return Rocket(super().init(kv, requests), self.quest.init(kv, requests))

    def next_positions(self, paged: PagedState, state: Any) -> jax.Array:
        """See `Selector.next_positions`."""
        return super().next_positions(paged, state.kept)

    def reserve_prompt(
        self, paged: PagedState, state: Any, counts: jax.Array, width: int
    ) -> tuple[PagedState, Any, PromptReservation]:
        """See `Evicting.reserve_prompt`."""
        paged, kept, room = super().reserve_prompt(paged, state.kept, counts, width)
        return paged, dataclasses.replace(state, kept=kept), room

    def choose(self, state: Any, room: PromptReservation, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Evicting.choose`."""
        return super().choose(state.kept, room, q, k)

    def store_chosen(
        self,
        paged: PagedState,
        state: Any,
        plane: Any,
        room: PromptReservation,
        ids: jax.Array,
        scores: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> tuple[PagedState, Any, jax.Array]:
        """See `Evicting.store_chosen`."""
        paged, kept, stale = super().store_chosen(paged, state.kept, plane, room, ids, scores, k, v)
        keys = jnp.take_along_axis(k, jnp.maximum(ids, 0).swapaxes(1, 2)[..., None], axis=1)  # [B, C, Hkv, D]
        pages = self.quest.write(state.pages, keys, paging.flat_slots(paged, plane, room.reservation))
        return paged, Rocket(kept, pages), stale

    def reserve(
        self, paged: PagedState, state: Any, counts: jax.Array, width: int
    ) -> tuple[PagedState, Any, Reservation]:
        """See `Selector.reserve`."""
        paged, kept, reservation = super().reserve(paged, state.kept, counts, width)
        pages = self.quest.copy(state.pages, *paging.flat_copies(paged, reservation))
        return paged, Rocket(kept, pages), reservation

    def store(
        self, paged: PagedState, state: Any, plane: Any, reservation: Reservation, k: jax.Array, v: jax.Array
    ) -> tuple[PagedState, Any, jax.Array]:
        """See `Selector.store`."""
        paged, kept, stale = super().store(paged, state.kept, plane, reservation, k, v)
        pages = self.quest.write(state.pages, k, paging.flat_slots(paged, plane, reservation))
        return paged, Rocket(kept, pages), stale

    def select(
        self, state: Any, q: jax.Array, view: PageView, *, kv_heads: int, page_size: int, plane: Any = 0
    ) -> jax.Array | None:
        """See `Selector.select`: pages of what is held."""
        return self.quest.select(state.pages, q, view, kv_heads=kv_heads, page_size=page_size, plane=plane)

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
        """See `Selector.attend`; `options` go to `page_sparse_attention`."""
        q, sizes = as_array("q", q), {"kv_heads": k_pages.shape[1], "page_size": k_pages.shape[2]}
        chosen = self.select(state, q, view, plane=plane, **sizes)
        options = self.attention_options(state.kept, view, 1 if q.ndim == 3 else q.shape[1], options)
        output = page_sparse_attention(q, k_pages, v_pages, view.page_table, view.lengths, chosen, **options)
        places = positions_read(chosen, view, **sizes)
        positions = jnp.take_along_axis(positions_held(state.kept, view), jnp.maximum(places, 0), axis=-1)
        positions = jnp.where(places >= 0, positions, -1)
        return Attended(output, state, jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32), positions)
