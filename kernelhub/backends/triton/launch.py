"""Launches an already compiled variant of a kernel without Triton's lookup.

`kernel[grid](...)` inspects each of some sixty arguments to find the compiled variant; that is most
of what a launch costs the host. This module has all that a variant depends on: the static arguments, which are fixed
per launcher, and the dtypes, strides and alignment of the operands, which the caller names as `variant`. Sizes
are not specialised on. So the first launch of a variant goes through Triton, and later ones to what it compiled,
by kernelhub's own launcher where `direct` can.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import triton
from triton.backends.driver import GPUDriver

from kernelhub.backends.shared.direct import direct_launch
from kernelhub.backends.shared.launches import WATCHED, Launch, Step, name_of
from kernelhub.ops.operands import check_eager
from kernelhub.ops.precision import own_precision

_MOST_VARIANTS = 256  # kept per launcher; strides of batched tensors change with their lengths


class _Ready(NamedTuple):
    """A compiled variant.

    Attributes:
        compiled: Triton's CompiledKernel.
        direct: the launcher's kernel; None if Triton launches it.
        launch: launches it with a grid and all arguments but the static ones; False if Triton has to, for a profiler.
    """

    compiled: Any
    direct: Any
    launch: Any


class Launcher:
    """A jitted kernel with its static arguments, which are last in its signature.

    `cluster` programs that follow each other are launched as a cluster, though Triton compiles each for itself.
    `captured_only`: one that begins while the kernel before it ends (`launch_pdl`) does so only where it is captured.
    `options` are Triton's, such as `enable_fp_fusion`.
    """

    def __init__(
        self,
        kernel: Any,
        static: Mapping[str, Any],
        num_warps: int,
        num_stages: int = 3,
        cluster: int = 1,
        captured_only: bool = False,
        **options: Any,
    ) -> None:
        names = [name for name in kernel.arg_names if name in static]
        self._kernel, self._cluster, self._captured_only = kernel, cluster, captured_only
        self._name = name_of(kernel)
        self._named = {**static, "num_warps": num_warps, "num_stages": num_stages, **options}
        self._static = tuple(static[name] for name in names)
        self._ready: dict[Hashable, _Ready] = {}
        assert sorted(kernel.arg_names[-len(static) :]) == sorted(static), "static arguments must be last"

    def __call__(self, programs: int, variant: Hashable | None, *arguments: Any) -> None:
        """Launch on the current device.

        Args:
            programs: size of the grid.
            variant: equal for arguments of equal dtypes, strides and alignment on one device; None if that is
                not known, and Triton is to look.
            arguments: everything but the static arguments, in order.
        """
        check_eager(self._name)
        if WATCHED.launches is not None:
            WATCHED.launches.append(Launch(self, programs, variant, arguments))
        ready = self._ready.get(variant)
        if ready is None and self._cluster > 1:
            assert variant is not None, "Triton would launch it without its cluster"
            self.prepare(programs, variant, *arguments)
            ready = self._ready.get(variant)
        if ready is not None:
            if not ready.launch(programs // self._cluster, *arguments):
                ready.compiled[(programs // self._cluster, 1, 1)](*arguments, *self._static)
            return
        with own_precision():  # of the interpreter, whose products are torch's
            compiled = self._kernel[(programs,)](*arguments, **self._named)
        self._keep(variant, compiled, len(arguments))

    def prepare(self, programs: int, variant: Hashable | None, *arguments: Any) -> None:
        """Compile and load what such a launch needs, without the launch."""
        if variant in self._ready or triton.knobs.runtime.interpret:
            return
        compiled = self._kernel.warmup(*arguments, grid=(programs,), **self._named)
        if isinstance(triton.runtime.driver.active, GPUDriver):
            compiled._init_handles()
            self._keep(variant, compiled, len(arguments))

    def step(self, programs: int, variant: Hashable | None, *arguments: Any) -> Step | None:
        """A launch like one that was made, to be repeated with other tensors; None if Triton has to launch it."""
        ready = self._ready.get(variant)
        return (
            None if ready is None or ready.direct is None else Step(ready.direct, programs // self._cluster, arguments)
        )

    def _keep(self, variant: Hashable | None, compiled: Any, given: int) -> None:
        """Keep a compiled variant for later launches."""
        if compiled is not None and variant is not None:  # the interpreter compiles nothing
            if len(self._ready) >= _MOST_VARIANTS:
                self._ready.clear()
            if self._cluster > 1:  # what Triton's launcher reads: warps, programs of a cluster, shared memory
                warps, _, shared = compiled.packed_metadata
                compiled.packed_metadata = (warps, self._cluster, shared)
            direct = direct_launch(compiled, given, cluster=self._cluster, captured_only=self._captured_only)
            self._ready[variant] = _Ready(compiled, direct, _not_launched if direct is None else direct.launch)


def _not_launched(*arguments: Any) -> bool:
    return False
