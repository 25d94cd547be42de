"""The adapter interface of `fp4_gemm`."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor

from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.ops.known_calls import Repeatable


@dataclass(frozen=True, slots=True)
class Activations:
    """The operand a, of the problem's `a_format`.

    Attributes:
        codes: [M, K] of bfloat16, float16 or float8_e4m3fn, or bytes [M, K / 2]; any strides.
        scale: None for bfloat16 and float16; float32 [1, 1] or [M, 1] for fp8, else as of the format, float8_e8m0fnu as
            bytes.
        global_scale: float32 of one element for nvfp4.
    """

    codes: Tensor
    scale: Tensor | None
    global_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """The operand b, of the problem's `b_format` and `weight_layout`.

    Attributes:
        codes: bytes [N, K / 2] of any strides, or as `pack` of the kernel made them.
        scale: float8_e4m3fn [N, K / 16], or bytes of float8_e8m0fnu [N, K / 32], of any strides, or as packed.
        global_scale: float32 of one element for nvfp4.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None


class Fp4GemmAdapter(Repeatable, abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` write into `out` and return nothing.
    3. A kernel with a layout of its own is a `kernelhub.ops.packed.PackingAdapter` too: its `pack` takes codes, scale
       and global scale as in a checkpoint, and gives ``codes``, ``scale`` and ``global_scale``.

    The op has checked what its contract says.
    """

    def __init__(self, problem: Fp4GemmProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(self, a: Activations, b: Weights, bias: Tensor | None, out: Tensor) -> None:
        """out [M, N] in the problem's out_dtype, of any strides; M and N > 0; bias [N], float32 or out's dtype.

        The bias is contiguous.
        """
