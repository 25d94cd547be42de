"""Launches an already compiled variant of a kernel without Triton's lookup.

`kernel[grid](...)` inspects each of some sixty arguments to find the compiled variant; that is most
of what a launch costs the host. This module has all that a variant depends on: the static arguments, which are fixed
per launcher, and the dtypes, strides and alignment of the operands, which the caller names as `variant`. Sizes
are not specialised on. So the first launch of a variant goes through Triton, and later ones to what it compiled,
through the CUDA driver where `direct` can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.driver import GPUDriver

from kernelhub.backends.triton.direct import Direct, Fixed, direct_launch
from kernelhub.ops.precision import own_precision

_MOST_VARIANTS = 256  # kept per launcher; strides of batched tensors change with their lengths


class Launcher:
    """A jitted kernel with its static arguments, which are last in its signature."""

    def __init__(self, kernel: Any, static: Mapping[str, Any], num_warps: int, num_stages: int = 3) -> None:
        names = [name for name in kernel.arg_names if name in static]
        self._kernel = kernel
        self._named = {**static, "num_warps": num_warps, "num_stages": num_stages}
        self._static = tuple(static[name] for name in names)
        self._compiled: dict[Hashable, tuple[Any, Direct | None]] = {}
        assert sorted(kernel.arg_names[-len(static) :]) == sorted(static), "static arguments must be last"

    def __call__(self, programs: int, variant: Hashable | None, *arguments: Any) -> None:
        """Launch on the current device.

        Args:
            programs: size of the grid.
            variant: equal for arguments of equal dtypes, strides and alignment on one device; None if that is
                not known, and Triton is to look.
            arguments: everything but the static arguments, in order.
        """
        ready = self._compiled.get(variant)
        if ready is not None:
            compiled, direct = ready
            if direct is None or not direct(programs, arguments):
                compiled[(programs, 1, 1)](*arguments, *self._static)
            return
        with own_precision():  # of the interpreter, whose products are torch's
            compiled = self._kernel[(programs,)](*arguments, **self._named)
        self._keep(variant, compiled, len(arguments))

    def prepare(self, programs: int, variant: Hashable | None, *arguments: Any) -> None:
        """Compile and load what such a launch needs, without the launch."""
        if variant in self._compiled or triton.knobs.runtime.interpret:
            return
        compiled = self._kernel.warmup(*arguments, grid=(programs,), **self._named)
        if isinstance(triton.runtime.driver.active, GPUDriver):
            compiled._init_handles()
            self._keep(variant, compiled, len(arguments))

    def _keep(self, variant: Hashable | None, compiled: Any, given: int) -> None:
        """Keep a compiled variant for later launches."""
        if compiled is not None and variant is not None:  # the interpreter compiles nothing
            if len(self._compiled) >= _MOST_VARIANTS:
                self._compiled.clear()
            self._compiled[variant] = compiled, direct_launch(compiled, given)

    def fixed(self, programs: int, variant: Hashable | None, *arguments: Any) -> Fixed | None:
        """Launches like one that was made, with other tensors; None if Triton has to launch them."""
        _, direct = self._compiled.get(variant, (None, None))
        return None if direct is None else direct.fixed(programs, arguments)


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, so that must be the operands' one."""
    if tensor.is_cuda and torch.cuda.is_initialized() and torch.cuda.current_device() != tensor.get_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
