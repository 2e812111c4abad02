"""What JAX's profiler saw: time and launches of each kernel, when the GPU was idle, and what calls the host made."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

CUDA_LAUNCH = re.compile(r"cu(Graph|Launch|Mem\w*cpy|Stream\w*Sync|Event\w*Sync|Ctx\w*Sync)")


class KernelTime(NamedTuple):
    """One kernel by name, as a share of one call."""

    microseconds: float  # of all its launches together
    launches: float


class Profile(NamedTuple):
    """What one call did, on average."""

    kernels: dict[str, KernelTime]  # by falling time
    host: dict[str, float]  # CUDA calls that launch, copy or wait, and how often
    idle: tuple[float, ...] = ()  # microseconds between first and last kernel of all calls with none running, falling
    span: float = 0.0  # microseconds from the first kernel's start to the last one's end, of all calls

    @property
    def microseconds(self) -> float:
        """Time that kernels were running."""
        return sum(kernel.microseconds for kernel in self.kernels.values())

    @property
    def busy(self) -> float:
        """Share of the time from the first kernel to the last during which one was running."""
        return 1 - sum(self.idle) / self.span if self.span else 0.0

    @property
    def launches(self) -> float:
        """Kernels that ran."""
        return sum(kernel.launches for kernel in self.kernels.values())


def profile(run: Callable[[], Any], calls: int = 1, runs: int = 3) -> Profile:
    """Profiles `runs` runs of a compiled function that makes `calls` calls each. Raises what the profiler raises.

    XLA launches kernel by kernel while it is watched, unless compiled with xla_enable_command_buffers_during_profiling.
    """
    options = jax.profiler.ProfileOptions()
    # Python's calls and the compiled programs are not asked for, and would slow everything down.
    options.python_tracer_level, options.host_tracer_level, options.enable_hlo_proto = 0, 1, False
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready([run() for _ in range(runs)])
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    total, launches, host = collections.Counter[str](), collections.Counter[str](), collections.Counter[str]()
    running: list[tuple[float, float]] = []
    for plane in planes:
        for line in plane.lines:
            if "/device:GPU" in plane.name and "Stream" in line.name:
                for event in line.events:
                    total[event.name] += event.duration_ns
                    launches[event.name] += 1
                    running.append((event.start_ns, event.start_ns + event.duration_ns))
            elif "/host" in plane.name:
                host.update(event.name for event in line.events if CUDA_LAUNCH.match(event.name))
    per_call = 1 / (runs * calls)
    kernels = {
        name: KernelTime(nanoseconds / 1e3 * per_call, launches[name] * per_call)
        for name, nanoseconds in total.most_common()
    }
    return Profile(kernels, {name: count * per_call for name, count in host.most_common()}, *idle_between(running))


def idle_between(running: list[tuple[float, float]]) -> tuple[tuple[float, ...], float]:
    """(gaps between intervals of nanoseconds in which none runs, falling; from the first start to the last end)."""
    gaps, free = [], min((start for start, _ in running), default=0.0)
    first = free
    for start, end in sorted(running):
        if start > free:
            gaps.append((start - free) / 1e3)
        free = max(free, end)
    return tuple(sorted(gaps, reverse=True)), (free - first) / 1e3
