"""How things are timed: chains of calls in one scan, several jits in flight, medians; and the copy bandwidth.

Kernel by kernel, as the profiler sees them: `profiler.py`.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_jax.bench.profiler import KernelTime, Profile, profile

L2_BYTES = 60 * 2**20  # H100 and H200
MOST_SETS = 16
LEAST_ROUNDS = 2
# The more input sets rotate, the shorter a call is: starting a jit, which costs the host 0.2 ms, must not show.
LEAST_ROUNDS_PER_SET = 4
# XLA launches the body of a scan as one CUDA graph if it holds at least five kernels, as that of a model's layers does.
LEAST_CALLS_IN_BODY = 8
PROFILED_BELOW = 3000  # microseconds: what the host costs shows beside calls this short

# (carry, fixed inputs, one input set) -> carry of the same shapes and dtypes
Step = Callable[[Any, Any, Any], Any]


class Effort(NamedTuple):
    """How long to measure."""

    repeats: int = 7
    seconds: float = 0.25  # of all repeats together
    calls: int = 10  # in one jit, at least


DEFAULT_EFFORT = Effort()
BRIEF = Effort(repeats=2, seconds=0.05)  # to choose among settings


class Plan(NamedTuple):
    """What a suite is asked to do with each of its cases."""

    effort: Effort = DEFAULT_EFFORT
    copy_bandwidth: float | None = None  # of this device, bytes per second; None where it is no yardstick
    config: Any = None  # a sparse_jax.Config for our kernels; None leaves the choice to them
    with_peers: bool = True  # measure other projects' implementations too
    only: str = ""  # measure operations whose name contains this


class Timing(NamedTuple):
    """Wall time of one call inside a chain, in microseconds, and what the first call returned."""

    microseconds: float  # median of the repeats
    low: float  # fastest repeat
    high: float  # slowest repeat
    kernel_microseconds: float | None = None  # the profiler's sum of kernel times; None where it was not read
    first: Any = None  # what the first call returned
    kernels: dict[str, KernelTime] | None = None  # the same by kernel

    def with_kernels(self, run: Callable[[], Any], calls: int) -> "Timing":
        """With the kernel times of a function that makes `calls` calls; without any where they cannot be right."""
        seen = _believable(run, calls, wall=self.microseconds)
        if seen is None:
            return self._replace(kernel_microseconds=None, kernels=None)
        return self._replace(kernel_microseconds=seen.microseconds, kernels=seen.kernels)


def sets_to_rotate(bytes_per_call: int) -> int:
    """How many input sets make the bytes read between two uses of one set exceed twice the L2 cache."""
    return min(MOST_SETS, max(1, -(-2 * L2_BYTES // bytes_per_call)))


def _chain(
    step: Step, rounds: int, passes: int, hold: bool, carry: Any, fixed: Any, sets: Sequence[Any]
) -> tuple[Any, Any]:
    """Calls `step` with each set, `rounds * passes` times, and once before: (last output, output of that first call).

    Each call's output is the next one's query, so no call can be dropped, merged with another, or run beside it. The
    rounds are a scan, as decode loops are.
    """

    def call(carry: Any, inputs: Any) -> Any:
        if hold:
            carry, inputs = lax.optimization_barrier((carry, inputs))
        return step(carry, fixed, inputs)

    def one_round(carry: Any, _: None) -> tuple[Any, None]:
        for inputs in list(sets) * passes:
            carry = call(carry, inputs)
        return carry, None

    first = call(carry, sets[0])
    return lax.scan(one_round, first, None, length=rounds)[0], first


_PLAIN_XLA = threading.Lock()


class Chain:
    """A chain of calls of one step: compiled first (in any thread), timed later.

    hold: keep XLA from doing work on an input set once for all calls that share it, such as a gather. A kernel that
    takes the query needs no such barrier.
    """

    def __init__(
        self, step: Step, carry: Any, fixed: Any, sets: Sequence[Any], *, calls: int = 10, hold: bool = False
    ) -> None:
        passes = 1 if hold else -(-LEAST_CALLS_IN_BODY // len(sets))
        least = max(LEAST_ROUNDS, LEAST_ROUNDS_PER_SET * len(sets) if len(sets) > 1 and not hold else 0)
        rounds = max(least, -(-calls // (passes * len(sets))))
        self.hold = hold
        self.calls = rounds * passes * len(sets) + 1
        self.arguments = (carry, fixed, list(sets))
        self.function = functools.partial(_chain, step, rounds, passes, hold)

    def compile(self) -> None:
        """Traces and compiles."""
        # XLA tries its own matrix products on the device meanwhile: the largest do not fit there beside each other.
        with _PLAIN_XLA if self.hold else contextlib.nullcontext():
            self.run = jax.jit(self.function).lower(*self.arguments).compile()

    def time(self, effort: Effort) -> Timing:
        """Runs it once uncounted, then measures. Raises MemoryError as `check_memory` does."""
        check_memory(self.run)
        _, first = jax.block_until_ready(self.run(*self.arguments))
        return timed(lambda: self.run(*self.arguments), self.calls, effort)._replace(first=first)


def check_memory(compiled: jax.stages.Compiled) -> None:
    """Raises MemoryError where what a function needs beside its inputs is more than is free."""
    needed = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", needed) - stats.get("bytes_in_use", 0)
    if needed > free:
        raise MemoryError(f"needs {needed / 1e9:.1f} GB beside its inputs, {free / 1e9:.1f} GB are free")


def measure(
    step: Step, carry: Any, fixed: Any, sets: Sequence[Any], effort: Effort = DEFAULT_EFFORT, hold: bool = False
) -> Timing:
    """Times one step at once. Suites compile many chains first, see `entries.py`."""
    chain = Chain(step, carry, fixed, sets, calls=effort.calls, hold=hold)
    chain.compile()
    return chain.time(effort)


def timed(run: Callable[[], Any], calls: int, effort: Effort) -> Timing:
    """Times a compiled function that makes `calls` calls; it has run before."""
    once = _seconds(run, queued=1)
    # Waiting costs about 0.4 ms each time, so many jits are in flight before one wait; long ones need no company.
    queued = int(np.clip(effort.seconds / effort.repeats / once, 1, 200))
    repeats = effort.repeats if once < 1 else 2
    samples = [_seconds(run, queued) / (queued * calls) * 1e6 for _ in range(repeats)]
    median = float(np.median(samples))
    timing = Timing(median, min(samples), max(samples))
    if jax.default_backend() == "gpu" and median < PROFILED_BELOW and effort != BRIEF:
        return timing.with_kernels(run, calls)
    return timing


def _seconds(run: Callable[[], Any], queued: int) -> float:
    start = time.perf_counter()
    for _ in range(queued):
        out = run()
    jax.block_until_ready(out)
    return time.perf_counter() - start


def _believable(run: Callable[[], Any], calls: int, wall: float) -> Profile | None:
    """What the profiler saw of one call; None where its kernel times cannot be right beside the wall time."""
    try:
        seen = profile(run, calls)
    except Exception:  # a profiler that is absent or changed must not cost the measurement
        return None
    return seen if 0.1 * wall < seen.microseconds < 1.3 * wall else None


def copy_bandwidth(nbytes: int | None = None, repeats: int = 5) -> float:
    """Bytes read plus bytes written per second by the faster of a plain copy and an elementwise kernel."""
    on_gpu = jax.default_backend() == "gpu"
    count = (nbytes or (2**32 if on_gpu else 2**26)) // 4
    data = jax.random.bits(jax.random.key(0), (count,), jnp.uint32)
    best = 0.0
    for copy in (jax.jit(jnp.copy), jax.jit(lambda x: x ^ jnp.uint32(1))):
        jax.block_until_ready(copy(data))
        seconds = [_seconds(functools.partial(copy, data), queued=8) / 8 for _ in range(repeats)]
        best = max(best, 2 * data.nbytes / float(np.median(seconds)))
    return best


def short_message(error: BaseException, limit: int = 160) -> str:
    """An error as one line for a table."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:limit]
