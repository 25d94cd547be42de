"""Launches what puts the columns of activations side by side as kernels of float4 weights take them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.triton.decoded_planes import decoded_planes_kernel
from kernelhub.backends.triton.fp4 import LEFT_OF_MX, planes_kernel
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.operands import strides_of

BLOCK = 256  # words of a program, each of four columns
_FEW, _FEW_ROWS, _MANY_ROWS = 512, 1, 4


class Planes:
    """Columns 0, 4, 8 ..., then 1, 5, 9 ..., then those from 2 and from 3."""

    def __init__(self, k: int, masked: bool = False) -> None:
        self._k = k
        self._masked = masked
        self._launchers: dict[int, Launcher] = {}

    def __call__(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """x [rows, K] or, masked, [groups, rows, K], of which there are `lengths` [groups]: as new
        [..., K up to a multiple of 4]."""
        out = x.new_empty((*x.shape[:-1], -(-self._k // 4) * 4))
        rows = x.numel() // self._k
        block_rows = _FEW_ROWS if rows <= _FEW else _MANY_ROWS
        launcher = self._launchers.get(block_rows)
        if launcher is None:
            static = {"K": self._k, "MASKED": self._masked, "BLOCK_ROWS": block_rows, "BLOCK": BLOCK}
            launcher = self._launchers[block_rows] = Launcher(planes_kernel, static, num_warps=4, num_stages=1)
        strides = strides_of(x, 3)
        aligned = not x.data_ptr() & 15
        launcher(
            -(-rows // block_rows) * -(-self._k // (4 * BLOCK)),
            (x.get_device(), x.dtype, strides) if aligned else None,
            x,
            lengths,
            out,
            rows,
            x.shape[-2],
            *strides,
        )
        return out


class DecodedPlanes:
    """The same of activations in nvfp4, mxfp4 or mxfp8, decoded to bfloat16, over `left`."""

    def __init__(self, k: int, form: str, masked: bool) -> None:
        self._k = k
        self._form = form
        self.left = LEFT_OF_MX.get(form, 1.0)
        self._masked = masked
        self._launchers: dict[int, Launcher] = {}

    def __call__(self, x: Tensor, scale: Tensor, lengths: Tensor | None) -> Tensor:
        """Bytes x [rows, K or K / 2] and of scales [rows, ceil(K / 16 or 32)], or masked: as new [..., K up to 4]."""
        out = torch.empty((*x.shape[:-1], -(-self._k // 4) * 4), dtype=torch.bfloat16, device=x.device)
        rows = x.shape[:-1].numel()
        block_rows = _FEW_ROWS if rows <= _FEW else _MANY_ROWS
        launcher = self._launchers.get(block_rows)
        if launcher is None:
            static = {
                "K": self._k,
                "FORMAT": self._form,
                "PART": 1.0 / self.left,
                "MASKED": self._masked,
                "BLOCK_ROWS": block_rows,
                "BLOCK": BLOCK,
            }
            launcher = Launcher(decoded_planes_kernel, static, num_warps=4, num_stages=1)
            self._launchers[block_rows] = launcher
        strides = (*strides_of(x, 3), *strides_of(scale, 3))
        aligned = not x.data_ptr() & 15
        launcher(
            -(-rows // block_rows) * -(-self._k // (4 * BLOCK)),
            (x.get_device(), strides) if aligned else None,
            x,
            scale,
            lengths,
            out,
            rows,
            x.shape[-2],
            *strides,
        )
        return out


def wide(codes: Tensor) -> bool:
    """Whether rows of bytes, of whole words, are contiguous and begin at multiples of 16 bytes."""
    *strides, last = codes.stride()
    if last != 1 or codes.shape[-1] % 2:
        return False
    return not any(place & 15 for place in (codes.data_ptr(), *strides))


def words(codes: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Wide codes as int16, and strides in units of 16 bytes, which shows the compiler that they are multiples."""
    return codes.view(torch.int16), (*(stride // 16 for stride in codes.stride()[:-1]), 1)
