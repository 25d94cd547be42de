"""What a kernel must be to quantise or dequantise."""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor

from kernelhub.ops.known_calls import Repeatable


class QuantizeAdapter(Repeatable, abc.ABC):
    """A kernel of `quantize_fp8`, `quantize_nvfp4`, `quantize_mxfp4` or `quantize_mxfp8`, made for one problem.

    To write one:

    1. In `__init__(problem)` choose what is static; which format it is follows from the op whose record names it.
    2. In `launch` write the codes and the scales, bit for bit as `kernelhub.ops.quant` says, and return nothing.

    The op has checked what its contract says. x may have any strides; nothing is empty.
    """

    def __init__(self, problem: Any) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(self, x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None) -> None:
        """Quantise rows [M, K]; where blocks share a scale, matrices [B, M, K].

        Args:
            x: [M, K], or [B, M, K].
            codes: float8_e4m3fn of that shape, or uint8 [M, K / 2]; any strides.
            scale: of any strides; [1, 1] for a tensor, [M, 1] for tokens, [M, groups], or
                [B, blocks of rows, blocks of columns]. Where the problem is `static` and the format fp8 it is read.
            global_scale: float32 of one element for nvfp4, which is read where the problem is `static`, else written.
        """


class DequantizeAdapter(Repeatable, abc.ABC):
    """A kernel of `dequantize_fp8`, `dequantize_nvfp4`, `dequantize_mxfp4` or `dequantize_mxfp8`.

    As `QuantizeAdapter`; the result is ``code * scale``, rounded to float32, then times the global scale, if there
    is one, rounded to float32, then rounded to the result's dtype.
    """

    def __init__(self, problem: Any) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(self, codes: Tensor, scale: Tensor, global_scale: Tensor | None, out: Tensor) -> None:
        """Shapes as of `QuantizeAdapter.launch`, with out in place of x."""
