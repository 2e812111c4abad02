"""The account of a generation: what it took and what it read."""

import dataclasses
import sys

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """The account of a generation so far. Times are wall-clock seconds of finished device work, without compilation.

    kv_tokens_read: cached tokens that decode steps read, once per plane and KV head, rejected drafts' too, so it may be
    above kv_tokens_dense, what plain dense decoding would have read. Both leave out the prefill.
    """

    prompt_tokens: int
    tokens: int  # sampled in all, stop tokens included
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float | None  # of the decode steps, all requests together; None before the first
    kv_tokens_read: int
    kv_tokens_dense: int
    exit_loops: tuple[int, ...]  # decode tokens by the loop that gave their logits
    stale: int  # reads and writes of pages that had changed hands; 0 unless something else uses the pool
    peak_memory_bytes: int | None
    peak_memory_of: str  # "device", or "process" where the device does not tell
    retained_mass: float | None = None  # of the keys that reference correction kept, at its last capture: the mean
    retained_mass_least: float | None = None  # the same of the worst token, layer and query head
    acceptance: float | None = None  # of speculation: the share of the drafts that were right
    tokens_per_round: float | None = None  # of speculation: of each request that took part

    @property
    def kv_fraction(self) -> float | None:
        """Share of the cache that was read, None before the first decode step."""
        return self.kv_tokens_read / self.kv_tokens_dense if self.kv_tokens_dense else None


def peak_memory() -> tuple[int | None, str]:
    """(bytes, "device") at the peak since the process began, or (bytes, "process") where the device does not tell."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return int(statistics["peak_bytes_in_use"]), "device"
    try:
        import resource  # not there on Windows
    except ImportError:
        return None, "process"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024), "process"
