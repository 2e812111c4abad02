"""What every test run needs: few threads, 32-bit mode, no compilation cache, and a reason where a GPU is missing."""

import collections
import gc
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any

# Set before JAX starts. Two workers (`pytest -n 2`) share two cores: one thread each is faster than two fighting. Most
# of the time goes into compiling for the CPU: in one piece each, as there is no core left for a second one, and by the
# older emitters of XLA, which take half as long; later versions do not know them any more.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_multi_thread_eigen=false",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false" if importlib.metadata.version("jaxlib").startswith("0.10.") else "",
    ]
)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # in processes that tests start, too, such as those of notebooks
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest

jax.config.update("jax_enable_x64", False)  # tests of 64-bit mode switch it on for themselves
jax.config.update("jax_enable_compilation_cache", False)  # a test must see what this code compiles to


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker ends with one; `gpu` is skipped without a GPU."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu or jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason=f"needs a GPU; JAX runs on {jax.default_backend()} here")
    for item in needs_gpu:
        item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What is loaded by now stays: garbage is looked for elsewhere, and less often, as tracing makes many objects."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each reason why tests were skipped, instead of one for each place."""
    reasons = collections.Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="module", autouse=True)
def _programs_of_a_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Quick code generation, except for an `optimised` file; and its programs end with it.

    Each program takes several memory mappings and a process may have 65,530 of them: whole runs ended in a crash.
    """
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("optimised") is None)
    yield
    jax.clear_caches()
    gc.collect()
