"""Plans for the prompts of a batch, made on the host: who decodes, which prompts go together, what fits in a buffer.

Everything here is plain arithmetic on lengths that the host knows. Lengths are sequences of ints or integer arrays.
Source: the batch metadata of vLLM's sparse MLA.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sparse_jax.validation import INT32_MAX, as_int, require

MASK_ENTRIES = 2**25  # 128 MiB of int32 words
# Query heads, latent width, un-rotated, rotary and value width of a head.
MASKED_MHA_GEOMETRIES = ((128, 512, 128, 64, 128), (64, 512, 192, 64, 256), (64, 512, 256, 0, 256))


class BatchSplit(NamedTuple):
    """The first `decodes` requests decode, the next `prefills` are prompts; padding rows are in neither."""

    decodes: int
    prefills: int
    decode_tokens: int
    prefill_tokens: int


def split_decodes_and_prefills(query_lengths: Any, threshold: int, *, prefilling: Any = None) -> BatchSplit:
    """How many requests at the front of a batch decode together, and how many after them are prompts.

    query_lengths: tokens of each request in this step. Requests of length 0 are padding and stand at the end.
    threshold: the most tokens of a decoding request: 1, or 1 + drafts.
    prefilling: bool for each request, or None: it is still in its prompt, so however short, it does not decode.

    Decodes are uniform: they have the length of the first request, and the first request that differs is a prompt, as
    are all after it. Raises ValueError for negative lengths, padding before a request, a threshold below 1, or flags
    for another number of requests.
    """
    lengths, threshold = _lengths("query_lengths", query_lengths), as_int("threshold", threshold)
    require(threshold >= 1, f"threshold must be at least 1, got {threshold}")
    flags = [False] * len(lengths) if prefilling is None else np.asarray(prefilling, bool).tolist()
    require(len(flags) == len(lengths), f"prefilling must cover {len(lengths)} requests, got {len(flags)}")
    real = sum(n > 0 for n in lengths)
    require(all(lengths[:real]), f"query_lengths must have padding (0) at the end only, got {lengths}")
    decodes = 0
    while decodes < real and lengths[decodes] == lengths[0] <= threshold and not flags[decodes]:
        decodes += 1
    return BatchSplit(decodes, real - decodes, sum(lengths[:decodes]), sum(lengths[decodes:]))


def dense_prefill(lengths: Any, k: int, *, force_sparse: bool = False) -> bool:
    """Whether the prompts of a step may run as dense attention, without an indexer: every set would be everything.

    lengths: tokens of each prompt in the cache, this step's included. k: how many tokens a row chooses.
    True if the longest is at most k, unless force_sparse. Raises ValueError for negative lengths and a k below 1.
    """
    longest, k = max(_lengths("lengths", lengths), default=0), as_int("k", k)
    require(k >= 1, f"k must be at least 1, got {k}")
    return longest <= k and not force_sparse


def masked_mha_available(
    num_heads: int, latent_dim: int, nope_dim: int, rope_dim: int, value_dim: int, *, quantized: bool = False
) -> bool:
    """Whether a serving engine has dense attention with a bit mask of the chosen set for this model.

    num_heads: of the whole model, not of one device; the widths are those of the un-absorbed heads. quantized: the
    cache is stored in 8 or 4 bits, which rules it out. The engine runs it on GPUs of compute capability 10.x only.
    """
    return (num_heads, latent_dim, nope_dim, rope_dim, value_dim) in MASKED_MHA_GEOMETRIES and not quantized


def masked_mha_entries(batch: int, query: int, context: int = 0) -> int:
    """int32 words of the bit masks of a step: [batch, query rounded up to its tile, one bit for each key].

    query: tokens of the longest prompt; context: keys of the longest context chunk. The tile has 128 rows up to 128
    queries and 256 above. Raises ValueError for negative sizes.
    """
    sizes = {"batch": batch, "query": query, "context": context}
    for name, size in sizes.items():
        require(as_int(name, size) >= 0, f"{name} must be at least 0, got {size}")
    tile = 128 if query <= 128 else 256
    return batch * math.ceil(query / tile) * tile * math.ceil(max(query, context) / 32)


def masked_mha_workspace_fits(batch: int, query: int, context: int = 0, *, entries: int = MASK_ENTRIES) -> bool:
    """Whether the masks of `masked_mha_entries` fit in a workspace of so many int32 words (default 128 MiB)."""
    return masked_mha_entries(batch, query, context) <= as_int("entries", entries)


def split_prefill_chunks(lengths: Any, buffer: int) -> list[tuple[int, int]]:
    """Consecutive requests whose keys go through one buffer together: (start, end) of each chunk.

    lengths: tokens of each request. buffer: tokens it holds; an exact fit is allowed. A chunk closes when the next
    request would exceed the buffer. Raises ValueError for negative lengths and one above the buffer.
    """
    lengths, buffer = _lengths("lengths", lengths), as_int("buffer", buffer)
    chunks, start, held = [], 0, 0
    for i, length in enumerate(lengths):
        require(length <= buffer, f"lengths must fit in the buffer of {buffer}, got {length} at {i}")
        if held + length > buffer:
            chunks.append((start, i))
            start, held = i, 0
        held += length
    return [*chunks, (start, len(lengths))] if lengths else []


def workspace_starts(lengths: Any, chunks: Any) -> np.ndarray:
    """Where each request starts in the buffer of its chunk: i32[B], an exclusive running sum from 0 in each chunk.

    lengths: tokens of each request; chunks: as `split_prefill_chunks` gives them. The result is the argument of
    `to_slots`. Raises ValueError for negative lengths, chunks that do not follow one another over all requests, and
    starts above 32 bits.
    """
    lengths, bounds = _lengths("lengths", lengths), [tuple(chunk) for chunk in chunks]
    ends = [0, *(end for _, end in bounds)]
    require(
        ends[-1] == len(lengths) and all(a == b <= c for (b, c), a in zip(bounds, ends)),
        f"chunks must follow one another from 0 to {len(lengths)}, got {bounds}",
    )
    starts = [sum(lengths[start:i]) for start, end in bounds for i in range(start, end)]
    require(max(starts, default=0) <= INT32_MAX, f"lengths must sum up within 32 bits, got {max(starts, default=0)}")
    return np.array(starts, np.int32)


def split_indexer_prefill_chunks(
    lengths: Any, query_lengths: Any, workspace: int, max_bytes: int
) -> list[tuple[slice, slice]]:
    """Chunks of an indexer's work, so that gathered keys and float32 scores stay within two buffers.

    lengths: keys of each request; query_lengths: its query tokens in this step. workspace: keys that are gathered at a
    time; max_bytes: of the scores, 4 for each pair of a query and a key of the chunk.

    A chunk takes requests while both limits hold, and at least one. If that one has too many scores, its queries are
    cut into pieces, of one query at least. A request longer than the workspace is a chunk of its own all the same.
    Returns (requests, queries counted from the first of the chunk) of each piece. A request of length 0 gives nothing.
    Raises ValueError for negative lengths and lists of different sizes.
    """
    keys, queries = _lengths("lengths", lengths), _lengths("query_lengths", query_lengths)
    require(
        len(keys) == len(queries), f"lengths and query_lengths must have one size, got {len(keys)} and {len(queries)}"
    )
    workspace, scores = as_int("workspace", workspace), as_int("max_bytes", max_bytes) // 4
    pieces, start = [], 0
    while start < len(keys):
        end, rows, columns = start + 1, queries[start], keys[start]
        while (
            end < len(keys)
            and columns + keys[end] <= workspace
            and (rows + queries[end]) * (columns + keys[end]) <= scores
        ):
            end, rows, columns = end + 1, rows + queries[end], columns + keys[end]
        step = max(1, scores // columns) if columns else 1
        for first in range(0, rows if columns else 0, step):
            pieces.append((slice(start, end), slice(first, min(first + step, rows))))
        start = end
    return pieces


def _lengths(name: str, values: Any) -> list[int]:
    """A list of ints of at least 0."""
    array = np.asarray(values)
    require(array.ndim == 1, f"{name} must be [B], got the shape {list(array.shape)}")
    require(array.size == 0 or np.issubdtype(array.dtype, np.integer), f"{name} must hold integers, got {array.dtype}")
    lengths = [int(n) for n in array]
    require(all(n >= 0 for n in lengths), f"{name} must be at least 0, got {lengths}")
    return lengths
