"""From a call of `fp8_gemm` scaled in blocks to its CUDA launch. The sizes decide the form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.mapped import Box, MappedKernel, Rows, bytes_box, floats_box, rows_of
from kernelhub.backends.shared.operands import aligned, is_aligned, is_writable_by_tma, on_device_of, up_to
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem

_SOURCE = "sm_90/fp8_gemm.cu"
_KINDS = "TTTT" + "PP" + "iiii" + "qqq"
_COLUMNS = 128  # of a tile, and bytes of a step


@dataclass(frozen=True)
class Form:
    """One kernel.

    Attributes:
        groups: warpgroups that multiply, 2 or 3.
        waves: times 64 rows of each.
        stages: steps of 128 columns of K whose operands are in shared memory.
        shared: whether two blocks are a cluster, whose tiles have the same rows of a.
        early: whether a step waits for the next one's operands while its products are under way.
        together: rows of tiles, or of pairs of them, that are gone over together.
    """

    groups: int
    waves: int
    stages: int
    shared: bool = False
    early: bool = False
    together: int = 8

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 * self.groups * self.waves

    @property
    def cluster(self) -> int:
        """Blocks."""
        return 1 + self.shared

    @property
    def shared_bytes(self) -> int:
        """Of a block: operands, results, scales of rows, barriers."""
        rows = self.rows
        return self.stages * (rows + _COLUMNS) * 128 + rows * _COLUMNS * 2 + self.stages * (rows * 4 + 16)

    @property
    def threads(self) -> int:
        """Of a block: another four warps, one of which loads."""
        return 128 * (self.groups + 1)

    def units(self, m: int, n: int) -> int:
        """Tiles, or pairs of them that a cluster takes."""
        return -(-m // self.rows) * -(-n // (self.cluster * _COLUMNS))


HIGH = Form(groups=2, waves=2, stages=3, early=True)
MIDDLE = Form(groups=3, waves=1, stages=4, shared=True)
LOW = Form(groups=2, waves=1, stages=5)
# Time of a row of a tile beside the others', as measured on an H200 (benchmarks/results/cuda_gemm_h200.json): in the
# first form two warpgroups leave the tensor cores idle more often, in the last one more is loaded for each product.
_ROW_TIMES = {HIGH: 1.0, MIDDLE: 0.99, LOW: 1.16}


def form_for(m: int, n: int, num_sms: int) -> Form:
    """That which takes the least time: blocks take tiles in rounds, of which the last takes as long as the others."""

    def time(form: Form) -> float:
        rounds = -(-form.units(m, n) // (num_sms // form.cluster))
        return rounds * form.rows * _ROW_TIMES[form]

    return min(_ROW_TIMES, key=time)


class Fp8Gemm(Fp8GemmAdapter):
    """Scales of rows are copied if TMA cannot read them: side by side down the rows."""

    form: ClassVar[Form | None] = None  # in place of what the sizes decide

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        self._kernels: dict[Form, MappedKernel] = {}
        self._repeated = Repeated()

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        given = (a, b, a_scale, b_scale, bias, out)
        self._repeated.run(*self.identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*self.identified(*given))

    def _launch_anew(
        self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        m, n = out.shape
        steps = -(-self.problem.k // 128)
        num_sms = self.problem.device.num_sms
        form = self.form or form_for(m, n, num_sms)
        kernel = self._kernels.get(form) or self._kernel(form)
        made = out
        if not is_writable_by_tma(out):
            made = torch.empty((m, up_to(n, 8)), dtype=out.dtype, device=out.device)[:, :n]
        scales = _down_rows(a_scale)
        with on_device_of(a):
            kernel(
                min(form.units(m, n), num_sms // form.cluster),
                rows_of(aligned(a)),
                rows_of(aligned(b)),
                Rows(scales, (steps, m), (scales.stride(1), 1)),
                rows_of(made),
                b_scale,
                made if bias is None else bias,
                m,
                n,
                steps,
                form.together,
                b_scale.stride(0),
                b_scale.stride(1),
                0 if bias is None else bias.stride(0),
            )
            if made is not out:
                out.copy_(made)

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Operands, a result and scales of rows that TMA cannot take as they are, in copies."""
        problem = self.problem
        copies = (num_tokens + problem.n) * problem.k + 2 * num_tokens * up_to(problem.n, 8)
        return copies + 4 * up_to(num_tokens, 4) * -(-problem.k // 128)

    def _kernel(self, form: Form) -> MappedKernel:
        made = library.library(_SOURCE, constants_of(form, self.problem.bias), self.problem.device, specific=True)
        boxes = (
            bytes_box(form.rows // form.cluster, 128),
            bytes_box(_COLUMNS, 128),
            floats_box(1, form.rows),
            Box((64, 64)),
        )
        kernel = MappedKernel(made, "fp8_gemm", _KINDS, form.threads, form.shared_bytes, boxes, form.cluster)
        self._kernels[form] = kernel
        return kernel


def constants_of(form: Form, bias: bool) -> dict[str, int]:
    """What the source is compiled with."""
    return {
        "GROUPS": form.groups,
        "WAVES": form.waves,
        "STAGES": form.stages,
        "SHARED": int(form.shared),
        "EARLY": int(form.early),
        "HAS_BIAS": int(bias),
        "ASKED_BYTES": form.shared_bytes,
    }


def _down_rows(scale: Tensor) -> Tensor:
    """Scales [rows, columns] whose rows are side by side, columns a multiple of 16 bytes apart."""
    if is_aligned(scale.t()):
        return scale
    made = torch.empty_strided(scale.shape, (1, up_to(scale.shape[0], 4)), dtype=scale.dtype, device=scale.device)
    return made.copy_(scale)
