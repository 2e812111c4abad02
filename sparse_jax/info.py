"""What is installed here, what JAX runs on, and which implementation each operation would use, and why."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import sparse_jax
from pallas_kernels import lowering

PACKAGES = ("sparse-jax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "torch")
OLDEST_CAPABILITY = 8.0  # Pallas' Triton lowering needs Ampere or newer


def report() -> dict[str, Any]:
    """Everything `sparse-jax info` shows.

    Returns:
        `versions` {name: version}; `devices` [{id, kind, platform, memory_gb, capability}];
        `operations` {name: {implementation, why}}, found by lowering a small call of each for the default device;
        `hints` [text], what to do where something is missing.
    """
    devices = [_describe(device) for device in jax.devices()]
    return {
        "versions": versions(),
        "devices": devices,
        "operations": {name: operation(call, has_kernel) for name, (call, has_kernel) in _operations().items()},
        "hints": hints(devices, nvidia=shutil.which("nvidia-smi") is not None),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of those packages of `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _describe(device: Any) -> dict[str, Any]:
    stats = device.memory_stats() or {}  # a CPU has none
    memory = stats.get("bytes_limit")
    return {
        "id": device.id,
        "kind": device.device_kind,
        "platform": device.platform,
        "memory_gb": None if memory is None else round(memory / 1e9, 1),
        "capability": getattr(device, "compute_capability", None),
    }


def _operations() -> dict[str, tuple[Callable[[], Any], bool]]:
    """A small call of every operation, and whether it has a kernel. Shapes: B 1, Hq 4, Hkv 2, D 64, N 2, P 16."""
    q, pool = jnp.zeros((1, 4, 64), jnp.bfloat16), jnp.zeros((2, 2, 16, 64), jnp.bfloat16)
    table, lengths, ids = jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32), jnp.zeros((1, 2, 16), jnp.int32)
    request = jnp.zeros(1, jnp.int32)
    latents, index_keys = jnp.zeros((2, 16, 48), jnp.bfloat16), sparse_jax.create_index_keys(2, 16, 64)
    outs, lses = jnp.zeros((2, 1, 4, 64)), jnp.zeros((2, 1, 4))
    reference = sparse_jax.Reference(jnp.zeros((1, 4, 8), jnp.int32), lengths, lses[0], outs[0], outs[0])
    return {
        "paged_attention": (lambda: sparse_jax.paged_attention(q, pool, pool, table, lengths), True),
        "page_sparse_attention": (lambda: sparse_jax.page_sparse_attention(q, pool, pool, table, lengths, ids), True),
        "token_sparse_attention": (lambda: sparse_jax.token_sparse_attention(q, pool, pool, ids), True),
        "mla_sparse_attention": (
            lambda: sparse_jax.mla_sparse_attention(q[..., :48], latents, ids[:, 0], scale=0.1, value_dim=32),
            True,
        ),
        "indexer_scores": (lambda: sparse_jax.indexer_scores(q, lses[0], index_keys, table, lengths), True),
        "to_slots": (lambda: sparse_jax.to_slots(ids, table, request, page_size=16), False),
        "merge_attention": (lambda: sparse_jax.merge_attention(outs, lses), False),
        "top_k": (lambda: sparse_jax.top_k(jnp.zeros((1, 64)), 4), True),
        "h2o_accumulate": (
            lambda: sparse_jax.h2o_accumulate(
                jnp.zeros((2, 2, 16)), q, pool, table, 32 * lengths, k=4, reserved=(1, 1)
            ),
            True,
        ),
        "reference_capture": (
            lambda: sparse_jax.reference_capture(q, pool, pool, table, lengths, lengths, capacity=8),
            True,
        ),
        "reference_consume": (lambda: sparse_jax.reference_consume(q, pool, pool, table, lengths, reference), True),
    }


def operation(call: Callable[[], Any], has_kernel: bool) -> dict[str, str]:
    """What `implementation=None` means here, read off the lowered program: it is what would really run."""
    device = jax.devices()[0]
    try:
        lowered = jax.jit(call).lower().as_text()
    except Exception as error:  # a report must also come out where an operation does not work
        return {"implementation": "none", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    if lowering.names_kernel(lowered):
        return {
            "implementation": "triton",
            "why": f"JAX runs on {device.device_kind}, which the Pallas kernels support",
        }
    if not has_kernel:
        return {"implementation": "xla", "why": "plain jnp on every device"}
    return {
        "implementation": "xla",
        "why": f"JAX runs on {device.device_kind} here; the Pallas kernels need an NVIDIA GPU",
    }


def hints(devices: list[dict[str, Any]], nvidia: bool) -> list[str]:
    """What to do about a GPU that is not used. `nvidia`: whether this machine has NVIDIA's driver tools."""
    found = []
    gpus = [device for device in devices if device["platform"] in ("gpu", "cuda")]
    if nvidia and not gpus:
        found.append(
            "This machine has an NVIDIA driver but JAX sees no GPU: pip install 'sparse-jax[cuda13]' "
            "(or [cuda12] for an older driver), and look at JAX_PLATFORMS if it is set."
        )
    for device in gpus:
        capability = device["capability"]
        if capability and float(capability) < OLDEST_CAPABILITY:
            found.append(
                f"{device['kind']} has compute capability {capability}; the kernels need {OLDEST_CAPABILITY} (Ampere) "
                'or newer. Use implementation="xla" on it.'
            )
    return found
