"""`grouped_gemm` of float16 and of bfloat16: CUTLASS on sm_90.

The library's wrapper takes rows sorted by group. The function below it takes sizes and addresses of groups, which are
on the device, so masked rows run too, and nothing waits for them.
"""

from __future__ import annotations

import torch
from flashinfer.gemm.gemm_base import get_gemm_sm90_module
from torch import Tensor

from kernelhub.backends.flashinfer.calls import taking
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands, places
from kernelhub.ops.gemm.grouped.problem import GroupedGemmProblem

_SCRATCH_BYTES = 1 << 20  # two descriptors of 128 bytes for each multiprocessor
_TAKES = (
    "workspace_buffer",
    "int_workspace_buffer",
    "all_problems",
    "x_data",
    "w_data",
    "y_data",
    "x_stride",
    "w_stride",
    "y_stride",
    "y",
    "empty_x_data",
    "empty_y_data",
    "weight_column_major",
)


class Segments(GroupedGemmAdapter):
    """A product for each group, in one launch."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._multiply = taking(get_gemm_sm90_module().cutlass_segment_gemm_sm90, _TAKES)

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        a, b = row_major(operands.a), row_major(operands.b)
        made = row_major(out)  # with what it holds: rows of no group keep it
        with on_device_of(out):
            self._run(a, b, *places(operands), made)
        if not is_row_major(out):
            out.copy_(made)

    def _run(self, a: Tensor, b: Tensor, starts: Tensor, sizes: Tensor, out: Tensor) -> None:
        groups, n, k = b.shape
        bytes_of = a.element_size()
        problems = sizes.new_empty((groups, 3), dtype=torch.int32)
        problems[:, 0], problems[:, 1], problems[:, 2] = sizes, n, k
        strides_k, strides_n = (starts.new_full((groups,), stride) for stride in (k, n))
        ids = torch.arange(groups, device=a.device)
        self._multiply(
            torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device=a.device),
            sizes.new_empty(16),
            problems,
            starts * (k * bytes_of) + a.data_ptr(),
            ids * (n * k * bytes_of) + b.data_ptr(),
            starts * (n * bytes_of) + out.data_ptr(),
            strides_k,
            strides_k,
            strides_n,
            out,
            a.new_empty(0),
            out.new_empty(0),
            True,
        )

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Scratch memory, the description of groups, and contiguous operands and result."""
        problem = self.problem
        weights = problem.num_groups * problem.n * problem.k
        return _SCRATCH_BYTES + 128 * problem.num_groups + 2 * (num_tokens * (problem.k + problem.n) + weights)
