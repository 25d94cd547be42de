"""Adapters of `grouped_gemm` whose launches are repeated where a call comes again with other tensors."""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor

from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands
from kernelhub.ops.gemm.grouped.problem import GroupedGemmProblem


class RepeatedGrouped(GroupedGemmAdapter):
    """A subclass makes the launches of a call in `_launch_anew`; a call like one before it makes those again."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated()

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        self._repeated.run(out.shape, _tensors(operands, out), self._launch_anew, operands, out)

    def repeated(self, operands: GroupedOperands, out: Tensor) -> Any:
        return self._repeated.sequence_of(out.shape, _tensors(operands, out))

    @abc.abstractmethod
    def _launch_anew(self, operands: GroupedOperands, out: Tensor) -> None:
        """As `GroupedGemmAdapter.launch`."""


def _tensors(operands: GroupedOperands, out: Tensor) -> list[Tensor]:
    """Those that a call reads or writes."""
    return [out, *[one for one in operands if one is not None]]
