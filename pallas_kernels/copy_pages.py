"""Copies whole pages inside their pools, in place: one launch, which ends at once where there is nothing to copy.

The same in plain jnp, `copy_pages` of `sparse_jax/paged_kv.py`, is a loop over the pages that there are to copy. A GPU
asks the host after each turn of such a loop whether to go on, even before the first, and that ends the CUDA graph which
it stands in. A gather and a scatter would have no loop, but move and hold all K pages in every step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import lowering
from pallas_kernels.config import next_power_of_two
from pallas_kernels.pairs import as_pairs

MOST_ELEMENTS = 8192  # in registers at once


def copy_pages_kernel(
    # inputs
    pool_refs,  # [planes, N, elements of a page] each
    sources_ref,  # i32[K]
    targets_ref,  # i32[K]
    # outputs
    *copied_refs,  # like the pools, and the same memory
):
    """One program: one page in one plane of all pools."""
    planes, pages, _ = pool_refs[0].shape
    entry, plane = lax.div(pl.program_id(0), jnp.int32(planes)), lax.rem(pl.program_id(0), jnp.int32(planes))
    source, target = sources_ref[entry], targets_ref[entry]
    present = (source >= 0) & (source < pages) & (target >= 0) & (target < pages)
    source, target = (jnp.where(present, page, 0) for page in (source, target))

    for pool_ref, copied_ref in zip(pool_refs, copied_refs, strict=True):
        _copy_page(pool_ref, copied_ref, plane, source, target, present)


def _copy_page(
    pool_ref: Any, copied_ref: Any, plane: jax.Array, source: jax.Array, target: jax.Array, present: jax.Array
) -> None:
    size = pool_ref.shape[-1]
    width = min(MOST_ELEMENTS, next_power_of_two(size))

    def copy(step: jax.Array, carry: None) -> None:
        # Past the end nothing is read or written. A `where` here would hide from the compiler that these are
        # neighbours, and with it the wide loads.
        place = step * width + jnp.arange(width, dtype=jnp.int32)
        row = lowering.load(pool_ref.at[plane, source, place], mask=place < size)
        lowering.store(copied_ref.at[plane, target, place], row, mask=place < size)

    blocks = jnp.where(present, jnp.int32(-(-size // width)), jnp.int32(0))
    lax.fori_loop(jnp.int32(0), blocks, copy, None)


def copy_pages(
    pools: tuple[jax.Array, ...], sources: jax.Array, targets: jax.Array, *, interpret: bool
) -> tuple[jax.Array, ...]:
    """Copies K pages, sources i32[K] to targets i32[K], in all planes of the pools [planes, N, ...].

    A pair with an id out of range, -1 too, is skipped. Targets differ from each other and from all sources.
    """
    # Pairs of bytes, for the sake of offsets in a pool between 2^31 and 2^32 bytes.
    rows = tuple(as_pairs(pool.reshape(*pool.shape[:2], -1)) for pool in pools)
    operands = rows, sources, targets
    shapes = tuple(lowering.result(row.shape, row.dtype, operands) for row in rows)
    copied = lowering.call(
        copy_pages_kernel,
        name="copy_pages",
        programs=sources.size * rows[0].shape[0],
        in_specs=jax.tree.map(lowering.whole, operands),
        out_specs=jax.tree.map(lowering.whole, shapes),
        out_shape=shapes,
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        aliases={i: i for i in range(len(rows))},
    )(*operands)
    return tuple(
        lax.bitcast_convert_type(new, pool.dtype).reshape(pool.shape) for new, pool in zip(copied, pools, strict=True)
    )
