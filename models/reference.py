"""Reference correction in a decode step of a looped model: which loop does what, and what passes between them.

    loops before the first capture    attention of the step's selector
    a capture loop                    dense attention, which publishes a reference for each layer
    the loops after it                corrected from the reference: only its keys of the own plane are read

All loops of a token run in one traced step, so the references are a temporary of that step, without slots or leases.
`sparse_jax.reference_store` is for tokens at different loop depths in one step, and for rounds that overlap.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import operator

import jax
import jax.numpy as jnp

from models.interface import ModelConfig
from sparse_jax import Reference, reference_capture, reference_store, retained_count, retained_counts
from sparse_jax.attention_call import Call
from sparse_jax.paging import PageView
from sparse_jax.reference import consume_rows, keys_seen
from sparse_jax.reference_store import CAPTURE, CONSUME, DENSE, Plan, ReferenceStore

SELECT = DENSE  # what a loop does that neither captures nor consumes: ordinary attention, through the selector


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceCorrection:
    """Options of reference correction; hashable, so static under `jax.jit`.

    retention: share of the keys that a reference keeps, in (0, 1]: `retained_count` of what a row sees. capture_loops:
    0-based and rising; the loops that attend densely and publish a reference for those up to the next of them. The
    published method has one, loop 1; more of them re-capture. NumPy's numbers are kept as Python's.
    Raises ValueError for other values.
    """

    retention: float = 0.1
    capture_loops: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        number = isinstance(self.retention, numbers.Real) and not isinstance(self.retention, bool)
        if not number or not 0 < self.retention <= 1:
            raise ValueError(f"retention must be above 0 and at most 1, got {self.retention!r}")
        try:
            # A truth value becomes -1, which is refused like any loop below 0.
            loops = tuple(-1 if isinstance(loop, bool) else operator.index(loop) for loop in self.capture_loops)
        except TypeError:  # no sequence, or one of something else
            loops = ()
        if not loops or loops[0] < 0 or any(loop >= later for loop, later in itertools.pairwise(loops)):
            raise ValueError(f"capture_loops must be rising loops from 0 up, at least one, got {self.capture_loops!r}")
        object.__setattr__(self, "retention", float(self.retention))
        object.__setattr__(self, "capture_loops", loops)

    def check(self, loops: int) -> None:
        """Raises ValueError unless a model with `loops` loops has one to correct after every capture."""
        if self.capture_loops[-1] >= loops - 1:
            raise ValueError(
                f"a model with {loops} loop{'s' * (loops != 1)} has none to correct after the capture_loops "
                f"{self.capture_loops}: a capture serves the loops behind it"
            )

    def modes(self, loops: int) -> tuple[int, ...]:
        """What each loop does."""
        first = self.capture_loops[0]
        return tuple(CAPTURE if u in self.capture_loops else SELECT if u < first else CONSUME for u in range(loops))

    def segments(self, loops: int, first: int, last: int) -> list[tuple[int, int, int]]:
        """(first loop, last plus one, mode): neighbours that do the same, of the loops first .. last - 1."""
        by_mode = itertools.groupby(range(first, last), key=self.modes(loops).__getitem__)
        runs = [(mode, list(run)) for mode, run in by_mode]
        return [(run[0], run[-1] + 1, mode) for mode, run in runs]


def empty_references(correction: ReferenceCorrection, config: ModelConfig, rows: int, tokens: int) -> Reference:
    """References of `rows` rows in every layer that see up to `tokens` tokens, flat: reference layer * rows + row."""
    size, heads, width = config.num_layers * rows, config.num_heads, config.head_dim
    return Reference(
        indices=jnp.full((size, heads, retained_count(tokens, correction.retention)), -1, jnp.int32),
        count=jnp.zeros(size, jnp.int32),
        mass=jnp.zeros((size, heads), jnp.float32),
        output=jnp.zeros((size, heads, width), jnp.float32),
        contribution=jnp.zeros((size, heads, width), jnp.float32),
    )


def retained_mass(references: Reference, requests: int) -> jax.Array:
    """Mass of the references of one row of each request: f32[2, B], the mean and the least over layers and heads."""
    mass = references.mass.reshape(-1, requests, references.mass.shape[-1])
    return jnp.stack([mass.mean(axis=(0, 2)), mass.min(axis=(0, 2))])


def capture(
    correction: ReferenceCorrection,
    references: Reference,
    at: jax.Array,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    view: PageView,
    implementation: str | None,
) -> tuple[jax.Array, Reference]:
    """Dense attention of q [B, T, Hq, D] that publishes a reference of each row.

    at: i32[B, T] where it goes, -1 for nowhere; or i32[] where the first one goes, and the others behind it.
    Returns (out [B, T, Hq, D], references).
    """
    counts = _counts(correction, q, k_pages, view)
    output, new = reference_capture(
        q, k_pages, v_pages, view.page_table, view.lengths, counts,
        capacity=references.indices.shape[-1], implementation=implementation,
    )  # fmt: skip

    def put(old: jax.Array, rows: jax.Array) -> jax.Array:
        if at.ndim == 0:
            return jax.lax.dynamic_update_slice_in_dim(old, rows, at, axis=0)
        # "drop" mode lets -1 wrap, so what goes nowhere goes past the end.
        return old.at[jnp.where(at >= 0, at, old.shape[0]).reshape(-1)].set(rows, mode="drop")

    return output.out, jax.tree.map(put, references, new.flat(2))


def consume(
    references: Reference,
    at: jax.Array,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    view: PageView,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, T, Hq, D] corrected from the references `at`, as for `capture`; a row without one gives 0.

    Returns (out [B, T, Hq, D], i32[B, T] tokens read, summed over the heads: each query head reads its own keys, but
    where all are kept a KV head is read once, as by dense attention).
    """
    call = Call.of(q, k_pages, v_pages, None, None, None, None)
    rows = at if at.ndim else at + jnp.arange(q.shape[0] * q.shape[1], dtype=jnp.int32).reshape(q.shape[:2])
    out = consume_rows(
        call, view.page_table, view.lengths, references, rows, None, implementation=implementation, config=None
    )
    count = jnp.where(rows >= 0, references.count[jnp.maximum(rows, 0)], 0)
    return out, _read(count, q, k_pages, view)


def capture_leased(
    correction: ReferenceCorrection,
    store: ReferenceStore,
    plan: Plan,
    layer: jax.Array,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    view: PageView,
    implementation: str | None,
) -> tuple[jax.Array, ReferenceStore, jax.Array]:
    """`capture` of one layer into slots of a store. Returns (out, store, stale i32[])."""
    counts = _counts(correction, q, k_pages, view)
    output, store, stale = reference_store.capture(
        store, plan, layer, q, k_pages, v_pages, view.page_table, view.lengths, counts, implementation=implementation
    )
    return output.out, store, stale


def consume_leased(
    store: ReferenceStore,
    plan: Plan,
    layer: jax.Array,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    view: PageView,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`consume` of one layer from slots of a store. Returns (out, tokens read, stale i32[] with uncaptured rows)."""
    out, stale, uncaptured = reference_store.consume(
        store, plan, layer, q, k_pages, v_pages, view.page_table, view.lengths, implementation=implementation
    )
    count = jnp.where(plan.slots >= 0, store.references.count[jnp.maximum(plan.slots, 0), layer], 0)
    return out, _read(count, q, k_pages, view), stale + uncaptured


def _seen(q: jax.Array, k_pages: jax.Array, view: PageView) -> tuple[jax.Array, int]:
    """(keys that each row sees, i32[B, T]; the most that a row can see)."""
    tokens = view.page_table.shape[-1] * k_pages.shape[2]
    return keys_seen(view.lengths, q.shape[1], tokens), tokens


def _counts(correction: ReferenceCorrection, q: jax.Array, k_pages: jax.Array, view: PageView) -> jax.Array:
    """How many of the keys that it sees each row keeps, i32[B, T]."""
    seen, tokens = _seen(q, k_pages, view)
    return jnp.asarray(retained_counts(tokens, correction.retention))[seen]


def _read(count: jax.Array, q: jax.Array, k_pages: jax.Array, view: PageView) -> jax.Array:
    """Tokens that corrected rows read, summed over the heads: i32[B, T] of the counts of their references."""
    full = count == _seen(q, k_pages, view)[0]
    return count * jnp.where(full, k_pages.shape[1], q.shape[2])
