"""Which implementation of an operation runs: the only switch is the argument `implementation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import lowering

IMPLEMENTATIONS = (None, "xla", "triton", "interpret")

NO_GPU = (
    'implementation="triton" is a GPU kernel and this computation is compiled for another platform. Use '
    'implementation="xla" (plain jnp, differentiable) or implementation="interpret" (the kernel in the Pallas '
    "interpreter, slow), or leave implementation=None."
)
NOT_DIFFERENTIABLE = (
    'The kernel behind implementation="{}" is not differentiable. Use implementation="xla", which is, or leave '
    "implementation=None, which differentiates the plain-jnp meaning."
)


def run(
    implementation: str | None,
    operands: tuple[Any, ...],
    *,
    xla: Callable[..., Any],
    kernel: Callable[..., Any],
    refusal: str | None = None,
) -> Any:
    """Calls `xla(*operands)` or `kernel(*operands, interpret=...)`; both return the same shapes and dtypes.

    implementation: one of IMPLEMENTATIONS. refusal: why the kernel does not support these operands, if so. Raises
    ValueError where the kernel is lowered for a CPU, NotImplementedError(refusal) if the kernel was asked for, and
    TypeError when the kernel is differentiated.
    """
    if implementation == "xla" or (implementation is None and refusal):
        return xla(*operands)
    if refusal:
        raise NotImplementedError(refusal)

    def on_gpu(*args: Any) -> Any:
        return kernel(*args, interpret=False)

    if implementation is None:
        # Differentiation replaces the kernel by its meaning, in both directions.
        best = jax.custom_jvp(lambda *args: lowering.for_platform(args, gpu=on_gpu, other=xla))
        best.defjvp(lambda primals, tangents: jax.jvp(xla, primals, tangents))
        return best(*operands)

    def forward(*args: Any) -> Any:
        if implementation == "interpret":
            return kernel(*args, interpret=True)
        return lowering.for_platform(args, gpu=on_gpu, other=lambda *args: lowering.unavailable(NO_GPU, xla, *args))

    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(NOT_DIFFERENTIABLE.format(implementation))

    only_forward = jax.custom_jvp(forward)
    only_forward.defjvp(refuse)
    return only_forward(*operands)
