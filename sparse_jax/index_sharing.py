"""Layers that share the choice of one indexer: who leads whom, and the leader's slots in another plane."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse_jax.validation import INT32_MAX, as_ids, as_int, check_shape, debug_ids, require

_FULL = {"F": True, "full": True, "S": False, "shared": False}


class IndexLayer(NamedTuple):
    """What one layer attends to.

    full: it runs an indexer of its own. leader: the layer whose ids it uses, its own number where a group opens.
    """

    full: bool
    leader: int


def index_layers(
    num_layers: int, *, freq: int = 1, offset: int = 2, pattern: Sequence[str] | None = None
) -> tuple[IndexLayer, ...]:
    """Which layers choose their tokens and which reuse the choice of an earlier layer.

    Layer i is full if `max(i - offset + 1, 0) % freq == 0`. pattern overrides the rule: a string of F and S ("FFSSS"),
    or a list of "full" and "shared", one for each layer.
    A full layer opens a group, and so does layer 0; shared layers join the group before them. So shared layers before
    the first full one follow layer 0, which has no indexer then: its ids come from elsewhere.
    Raises ValueError for counts below 1, a negative offset, and a pattern of another length or with other types.
    Source: the index sharing of GLM-5.
    """
    num_layers, freq, offset = as_int("num_layers", num_layers), as_int("freq", freq), as_int("offset", offset)
    require(num_layers >= 1, f"num_layers must be at least 1, got {num_layers}")
    require(freq >= 1, f"freq must be at least 1, got {freq}")
    require(offset >= 0, f"offset must be at least 0, got {offset}")
    if pattern is None:
        kinds = [max(i - offset + 1, 0) % freq == 0 for i in range(num_layers)]
    else:
        wrong = [kind for kind in pattern if kind not in _FULL]
        require(not wrong, f"pattern must hold {', '.join(_FULL)}, got {wrong[:3]} in {pattern!r}")
        require(len(pattern) == num_layers, f"pattern must have num_layers = {num_layers} entries, got {len(pattern)}")
        kinds = [_FULL[kind] for kind in pattern]
    layers, leader = [], 0
    for i, full in enumerate(kinds):
        leader = i if full else leader
        layers.append(IndexLayer(full, leader))
    return tuple(layers)


def plane_slots(slots: Any, plane: Any, *, pages: int, page_size: int, page_stride: int | None = None) -> jax.Array:
    """The slots of plane 0 in another plane of the same pool: one constant more, so a group converts its ids once.

    slots: i32[...], as `to_slots` gives them for plane 0. plane: an int or i32[], which may be traced.
    pages: N, the pages of one plane; page_size and page_stride as for `to_slots`. With page_stride = page_size, the
    default, planes lie one after the other ([planes, N, P, ...]): the constant is `plane * N * P`. Above page_size they
    lie between one page and the next ([N, planes, P, ...]): it is `plane * P`.

    Returns i32[...]. Absent slots and slots beyond plane 0 give -1, and so do all in a plane that the stride has no
    room for, or whose slots would not fit in 32 bits. Raises ValueError for sizes that do not fit.
    """
    slots, plane = as_ids("slots", slots), as_ids("plane", plane)
    check_shape("plane", plane, ())
    pages, page_size = as_int("pages", pages), as_int("page_size", page_size)
    stride = page_size if page_stride is None else as_int("page_stride", page_stride)
    require(pages >= 1, f"pages must be at least 1, got {pages}")
    require(page_size >= 1, f"page_size must be at least 1, got {page_size}")
    require(stride >= page_size, f"page_stride must be at least page_size, got {stride} and {page_size}")
    require(pages * stride <= INT32_MAX, f"pages * page_stride must fit in 32 bits, got {pages} * {stride}")
    step = pages * page_size if stride == page_size else page_size
    planes = INT32_MAX // step if stride == page_size else stride // page_size
    return _plane_slots(slots, plane, rows=pages * stride, stride=stride, page_size=page_size, planes=planes, step=step)


@functools.partial(jax.jit, static_argnames=("rows", "stride", "page_size", "planes", "step"))
def _plane_slots(
    slots: jax.Array, plane: jax.Array, *, rows: int, stride: int, page_size: int, planes: int, step: int
) -> jax.Array:
    debug_ids("slots", slots, rows)
    debug_ids("plane", plane, planes)
    of_plane_0 = (slots >= 0) & (slots < rows) & (slots % stride < page_size)
    inside = of_plane_0 & (plane >= 0) & (plane < planes)
    return jnp.where(inside, slots + plane * step, -1)
