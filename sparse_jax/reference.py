"""Reference correction as public operations: capture attention once, correct it from few keys in later loops.

The reference of a row belongs to one token, layer and query head. A capture publishes it beside dense attention; each
later loop of the same token reads the chosen keys of its own plane and corrects the stored output with them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from pallas_kernels import Config
from sparse_jax import dispatch, xla
from sparse_jax.attention import PAGED
from sparse_jax.attention_call import AttentionOutput, Call, Options, config_of, refusal_of
from sparse_jax.ops import retained_count
from sparse_jax.tuning import Tuning
from sparse_jax.validation import (
    INT32_MAX,
    as_array,
    as_ids,
    as_int,
    check_shape,
    debug_check,
    debug_ids,
    debug_lengths,
    require,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reference:
    """What a capture keeps of each row, for every query head by itself.

    The leading axes are those of the rows: [B] or [B, T], like q; [slots, layers] in a `ReferenceStore`.
    """

    indices: jax.Array  # i32[..., Hq, capacity] token ids, rising, then -1
    count: jax.Array  # i32[...] how many; 0 = nothing was published
    mass: jax.Array  # f32[..., Hq] their probability under the softmax over all keys
    output: jax.Array  # f32[..., Hq, Dv] dense output, rounded to the dtype of q
    contribution: jax.Array  # f32[..., Hq, Dv] sum of probability times value over them

    def flat(self, leading: int) -> Reference:
        """The same with the first `leading` axes as one: the references that `reference_consume` picks from."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[leading:]), self)


def retained_counts(most: int, retention: float) -> np.ndarray:
    """i32[most + 1]: `retained_count` of 0 .. most keys, to be looked up on the device.

    The ceiling is that of the product in double precision, so a count may not be computed on the device from a length.
    """
    return retained_count(np.arange(most + 1), retention)


def keys_seen(lengths: jax.Array, rows: int, capacity: int) -> jax.Array:
    """Keys that each of the last `rows` tokens of a request sees, itself included: i32[B, rows] of lengths i32[B]."""
    # The most negative length would wrap.
    seen = jnp.maximum(lengths, 0)[:, None] - rows + 1 + jnp.arange(rows, dtype=jnp.int32)
    return jnp.clip(seen, 0, capacity)


def reference_capture(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    counts: Any,
    *,
    capacity: int,
    scale: float | None = None,
    implementation: str | None = None,
    config: Config | Tuning | None = None,
) -> tuple[AttentionOutput, Reference]:
    """Dense attention, and a reference of each row: its most probable keys and what they contribute.

    With p the softmax over all n keys that a row sees and sel its `counts` most probable ones:

        mass = sum over sel of p_j,  contribution = sum over sel of p_j v_j,  output = the dense output

    q: [B, Hq, D] or [B, T, Hq, D]; k_pages, v_pages, page_table: as for `paged_attention`. lengths: i32[B].
    counts: i32[B] or, where q has the T axis, i32[B, T]: `retained_count` of what each row sees, from a table made on
    the host (`retained_counts`). Below 0 counts as 0, above what the row sees as all of it.
    capacity: how many indices a reference has room for. A larger count publishes nothing (count 0); `checked` raises.

    Returns (AttentionOutput, Reference). The output has the bits of `paged_attention` with the same implementation and
    config. Each query head chooses for itself; ties go to the lowest id; no key is forced in. A row with a count of 0
    has indices -1 and zeros. Raises ValueError for arguments that do not fit each other. Source: reference correction
    for looped models, the public FlashLoop code and its review.
    """
    call = Call.of(q, k_pages, v_pages, None, None, None, None)
    page_table, lengths = _table(call, page_table, lengths)
    options = call.options(scale, None, None, implementation, config)
    capacity = as_int("capacity", capacity)
    require(1 <= capacity <= INT32_MAX, f"capacity must be at least 1, got {capacity}")
    counts = _per_row("counts", call, counts)
    output, reference = _capture((call.q, call.k_pages, call.v_pages, page_table, lengths, counts), capacity, options)
    if call.single:
        output, reference = jax.tree.map(lambda x: x[:, 0], (output, reference))
    return output, reference


def reference_consume(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    reference: Reference,
    *,
    scale: float | None = None,
    implementation: str | None = None,
    config: Config | Tuning | None = None,
) -> jax.Array:
    """Attention of a later loop, corrected from the keys of a reference alone.

        out = output + mass * a - contribution,  a = attention of q over the reference's keys and values of this loop

    q, k_pages, v_pages, page_table, lengths: as for `reference_capture`, of the later loop: its own keys and values.
    reference: what `reference_capture` returned for these rows.

    Returns out like q, with Dv last. A row whose count is 0 gives 0. One whose count is all that it sees is dense
    attention, with the bits of `paged_attention` with the same implementation and config. Other keys are not read.
    Raises ValueError for arguments that do not fit each other. Source: as for `reference_capture`.
    """
    call = Call.of(q, k_pages, v_pages, None, None, None, None)
    rows = jnp.arange(call.q.shape[0] * call.q.shape[1], dtype=jnp.int32).reshape(call.q.shape[:2])
    leading = call.q.shape[:1] if call.single else call.q.shape[:2]
    reference = check_reference(reference, leading, call.q.shape[2], call.v_pages.shape[-1])
    out = consume_rows(
        call,
        page_table,
        lengths,
        reference.flat(len(leading)),
        rows,
        scale,
        implementation=implementation,
        config=config,
    )
    return out[:, 0] if call.single else out


def consume_rows(
    call: Call,
    page_table: Any,
    lengths: Any,
    references: Reference,
    rows: jax.Array,
    scale: float | None,
    *,
    implementation: str | None,
    config: Config | Tuning | None,
) -> jax.Array:
    """`reference_consume` with the reference of each row picked from R of them by rows i32[B, T]; -1 gives 0.

    Returns out [B, T, Hq, Dv].
    """
    page_table, lengths = _table(call, page_table, lengths)
    options = call.options(scale, None, None, implementation, config)
    return _consume((call.q, call.k_pages, call.v_pages, page_table, lengths), rows, references, options)


@functools.partial(jax.jit, static_argnames=("capacity", "options"))
def _capture(operands: tuple[jax.Array, ...], capacity: int, options: Options) -> tuple[AttentionOutput, Reference]:
    q, k_pages, v_pages, page_table, lengths, counts = operands
    _check_values(k_pages, page_table, lengths)
    debug_check(
        counts <= capacity,
        "counts: must be at most the capacity of {capacity}, got {most}",
        capacity=jnp.int32(capacity),
        most=jnp.max(counts),
    )
    seen = keys_seen(lengths[:, 0], q.shape[1], page_table.shape[-1] * k_pages.shape[2])
    counts = jnp.where(counts > capacity, 0, jnp.clip(counts, 0, seen))

    def meaning(*args: Any) -> Any:
        out, *kept = xla.reference_capture(*args, capacity=capacity, scale=options.scale)
        return out.astype(q.dtype), *kept

    def kernel(*args: Any, interpret: bool) -> Any:
        config = config_of(PAGED, options, (*args[:5], None, None, None, None))
        return pallas_kernels.reference_capture(
            *args, capacity=capacity, scale=options.scale, config=config, interpret=interpret
        )

    found = dispatch.run(
        options.implementation,
        (q, k_pages, v_pages, page_table, lengths, seen, counts),
        xla=meaning,
        kernel=kernel,
        refusal=refusal_of(k_pages, v_pages),
    )
    # Who goes on with the output waits for what is kept, too: else XLA may write the next layer into the pool while
    # values are still read for this one, and so copy the pool.
    out, lse, indices, *sums = lax.optimization_barrier(found)
    return AttentionOutput(out, lse), Reference(indices, counts, *sums)


@functools.partial(jax.jit, static_argnames=("options",))
def _consume(operands: tuple[jax.Array, ...], rows: jax.Array, references: Reference, options: Options) -> jax.Array:
    q, k_pages, v_pages, page_table, lengths = operands
    _check_values(k_pages, page_table, lengths)
    seen = keys_seen(lengths[:, 0], q.shape[1], page_table.shape[-1] * k_pages.shape[2])

    def meaning(*args: Any) -> Any:
        return xla.reference_consume(*args, scale=options.scale).astype(q.dtype)

    def kernel(*args: Any, interpret: bool) -> Any:
        config = config_of(PAGED, options, (*args[:5], None, None, None, None))
        return pallas_kernels.reference_consume(*args, scale=options.scale, config=config, interpret=interpret)

    kept = references.indices, references.count, references.mass, references.output, references.contribution
    return dispatch.run(
        options.implementation,
        (*operands, seen, rows, *kept),
        xla=meaning,
        kernel=kernel,
        refusal=refusal_of(k_pages, v_pages),
    )


def _check_values(k_pages: jax.Array, page_table: jax.Array, lengths: jax.Array) -> None:
    debug_ids("page_table", page_table, k_pages.shape[0])
    debug_lengths("lengths", lengths, page_table.shape[-1] * k_pages.shape[2])


def _table(call: Call, page_table: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
    """page_table i32[B, Hkv or 1, W] and lengths i32[B, 1]."""
    page_table, lengths = call.table(page_table, lengths)
    if lengths.shape[1] > 1:
        raise NotImplementedError(
            f"lengths must be one a request, [{lengths.shape[0]}], got {list(lengths.shape)}: a reference has one "
            "count for all heads"
        )
    return page_table, lengths


def _per_row(name: str, call: Call, value: Any) -> jax.Array:
    """i32[B, T] of a value that has the T axis where q has it."""
    value = as_ids(name, value)
    check_shape(name, value, call.q.shape[:1] if call.single else call.q.shape[:2])
    return value.reshape(call.q.shape[:2])


def check_reference(reference: Reference, leading: tuple[int, ...], heads: int, width: int) -> Reference:
    """The same as device arrays.

    Raises ValueError unless dtypes are right, and shapes those of these rows, heads and width of values.
    """
    require(isinstance(reference, Reference), f"reference must be a Reference, got {type(reference).__name__}")
    ends = {"indices": (heads, None), "count": (), "mass": (heads,), "output": (heads, width)}
    arrays = {}
    for name, end in (ends | {"contribution": (heads, width)}).items():
        array, is_int = as_array(f"reference.{name}", getattr(reference, name)), name in ("indices", "count")
        wanted = jnp.int32 if is_int else jnp.float32
        require(array.dtype == wanted, f"reference.{name} must be {jnp.dtype(wanted)}, got {array.dtype}")
        check_shape(f"reference.{name}", array, (*leading, *end))
        arrays[name] = array
    require(
        arrays["indices"].shape[-1] >= 1,
        f"reference.indices must have at least one column, got {list(arrays['indices'].shape)}",
    )
    return Reference(**arrays)
