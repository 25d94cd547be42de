"""The adapter interfaces of `rms_norm_quant` and `silu_and_mul_quant`."""

from __future__ import annotations

import abc

from torch import Tensor

from kernelhub.ops.fused_quant.problem import ActivationProblem, NormProblem
from kernelhub.ops.known_calls import Repeatable


class NormAdapter(Repeatable, abc.ABC):
    """A kernel of `rms_norm_quant`, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` write the results, as `kernelhub.ops.fused_quant` says, and return nothing.

    The op has checked what its contract says. Tensors may have any strides; nothing is empty. `residual_out` may be
    `residual` or `x` itself: read what a place holds before writing it.
    """

    def __init__(self, problem: NormProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        given_scale: Tensor | None,
        out: Tensor,
        scale: Tensor | None,
        residual_out: Tensor | None,
    ) -> None:
        """Write the results of rows.

        Args:
            x: [M, K].
            weight: [K].
            eps: added to the mean of the squares.
            residual: [M, K], if the problem has one.
            given_scale: float32 of one element: the scale of fp8_tensor, the global scale of nvfp4; else None.
            out: [M, K] in x's dtype or float8_e4m3fn, or uint8 [M, K / 2] for nvfp4.
            scale: [M, groups], written; None for formats without.
            residual_out: [M, K], for the sum in x's dtype, if the problem has a residual.
        """


class ActivationAdapter(Repeatable, abc.ABC):
    """A kernel of `silu_and_mul_quant`, made for one problem; as `NormAdapter`."""

    def __init__(self, problem: ActivationProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(self, x: Tensor, given_scale: Tensor | None, out: Tensor, scale: Tensor | None) -> None:
        """Write the results of rows: x [M, 2 K], the gate first; the others as of `NormAdapter.launch`."""
