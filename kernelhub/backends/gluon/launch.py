"""Launches Gluon kernels: descriptors of operands on the host, and variants that are looked up once.

A host descriptor is a kernel's parameter by value, so a captured launch holds the addresses of its operands, as a graph
requires anyway. The first launch of a variant goes through Triton, and later ones to what it compiled, by kernelhub's
own launcher where `direct` can: it encodes a tensor map only where the address or the shape has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.gluon.language import TensorDescriptor, gl
from kernelhub.backends.shared.direct import direct_launch
from kernelhub.backends.shared.launches import WATCHED, Launch, Step, name_of
from kernelhub.backends.shared.operands import is_aligned
from kernelhub.ops.operands import check_eager

_MOST_VARIANTS = 256  # kept per launcher; strides of batched tensors change with their lengths
_MOST_ROWS = 256  # of a block that TMA copies at once
_TYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.uint8: gl.uint8,
    torch.int32: gl.int32,
}


class _Ready(NamedTuple):
    """A compiled variant.

    Attributes:
        compiled: Triton's CompiledKernel.
        direct: the launcher's kernel; None if Triton launches it.
    """

    compiled: Any
    direct: Any


class Launcher:
    """A jitted kernel with its static arguments, which are last in its signature.

    Attributes:
        kernel: the jitted function.
        static: values of its static arguments by name.
        num_warps: warps of the default partition.
    """

    def __init__(self, kernel: Any, static: Mapping[str, Any], num_warps: int = 4) -> None:
        self.kernel, self.static, self.num_warps = kernel, dict(static), num_warps
        self._name = name_of(kernel)
        assert sorted(kernel.arg_names[-len(static) :]) == sorted(static), "static arguments must be last"
        self._values = tuple(static[name] for name in kernel.arg_names if name in static)
        self._ready: dict[Hashable, _Ready] = {}

    def __call__(self, grid: int | tuple[int, ...], variant: Hashable | None, *arguments: Any) -> None:
        """Launch on the current device.

        Args:
            grid: size of the grid, up to three numbers.
            variant: equal for arguments for which Triton compiles the same: equal dtypes on one device, equal alignment
                of pointers and equal numbers where it specialises on them; None if Triton is to look.
            arguments: everything but the static arguments, in order: tensors, descriptors, numbers.
        """
        check_eager(self._name)
        if WATCHED.launches is not None:
            WATCHED.launches.append(Launch(self, grid, variant, arguments))
        sizes = grid if isinstance(grid, tuple) else (grid,)
        ready = self._ready.get(variant)
        if ready is not None:
            if ready.direct is None or not ready.direct.launch(grid, *arguments):
                ready.compiled[(*sizes, 1, 1)[:3]](*arguments, *self._values)
            return
        compiled = self.kernel[sizes](*arguments, **self.static, num_warps=self.num_warps)
        if variant is not None and compiled is not None:
            if len(self._ready) >= _MOST_VARIANTS:
                self._ready.clear()
            self._ready[variant] = _Ready(compiled, direct_launch(compiled, len(arguments)))

    def step(self, programs: int | tuple[int, ...], variant: Hashable | None, *arguments: Any) -> Step | None:
        """A launch like one that was made, to be repeated with other tensors; None if Triton has to launch it."""
        ready = self._ready.get(variant)
        return None if ready is None or ready.direct is None else Step(ready.direct, programs, arguments)


def descriptor(
    tensor: Tensor,
    block: Sequence[int],
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    """A host descriptor of a tensor that `readable_by_tma` holds for.

    Args:
        tensor: gives address and dtype, and shape and strides if those are not given.
        block: what one copy moves.
        shape: elements beyond it are read as 0 and not written.
        strides: in elements; the last is 1.
    """
    return TensorDescriptor(
        tensor,
        list(tensor.shape if shape is None else shape),
        list(tensor.stride() if strides is None else strides),
        list(block),
        layout_of_block(tuple(block), tensor.dtype),
    )


@functools.lru_cache(maxsize=256)
def layout_of_block(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The layout in shared memory that wgmma reads a block in."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _TYPES[dtype])


def rows_for_tma(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where TMA cannot read it: of 16-byte rows, if the last dimension has such."""
    single = tensor.ndim == 2 and tensor.shape[0] == 1 and tensor.stride(1) == 1 and not tensor.data_ptr() & 15
    if single:  # whatever its stride is, there is no second row
        return tensor.as_strided(tensor.shape, (-(-tensor.shape[1] // 16) * 16, 1))
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
