"""From a call of `fp8_gemm` scaled in blocks to its CUDA launch. The sizes decide the form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.mapped import Box, MappedKernel, Rows, bytes_box, floats_box, rows_of
from kernelhub.backends.cuda.shapes import blocks_for
from kernelhub.backends.shared.operands import aligned, is_aligned, is_writable_by_tma, on_device_of, up_to
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem

_SOURCE = "sm_90/fp8_gemm.cu"
_KINDS = "TTTT" + "PP" + "iiii" + "qqq" + "Pq"
_TURN, _TURN_PACKING = "turn_scales.cu", "2P5q"
_TURNED, _BLOCK = 8, 128  # columns of a thread, and threads


@dataclass(frozen=True)
class Form:
    """One kernel.

    Attributes:
        groups: warpgroups that multiply, 1 to 3.
        waves: times 64 rows of each.
        stages: steps of 128 columns of K whose operands are in shared memory.
        sharing: blocks of a cluster whose tiles have the same rows of a, each of which loads a share of them.
        early: whether a step waits for the next one's operands while its products are under way.
        columns: of a tile, 64 or 128.
        parts: of K, each of a block of its own, which are one cluster for each tile.
        loaders: threads of which one loads.
        resident: blocks of a multiprocessor.
        together: rows of tiles, or of those that share a, that are gone over together.
    """

    groups: int
    waves: int
    stages: int
    sharing: int = 1
    early: bool = False
    columns: int = 128
    parts: int = 1
    loaders: int = 128
    resident: int = 1
    together: int = 8

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 * self.groups * self.waves

    @property
    def cluster(self) -> int:
        """Blocks."""
        return self.sharing * self.parts

    @property
    def shared_bytes(self) -> int:
        """Of a block: operands, results or other parts' sums, scales of rows, barriers."""
        rows, made = self.rows, self.rows * self.columns * 2
        if self.parts > 1:
            made = self.rows * self.columns // self.parts * (self.parts - 1) * 4 + 16
        return self.stages * (rows + self.columns) * 128 + made + self.stages * (rows * 4 + 16)

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * self.groups + self.loaders

    def units(self, m: int, n: int) -> int:
        """Tiles, or neighbours of them that share a: what a cluster takes."""
        return -(-m // self.rows) * -(-n // (self.sharing * self.columns))

    def at_once(self, num_sms: int) -> int:
        """Clusters that run at the same time where each block has a multiprocessor of its own.

        A GPU has its multiprocessors in groups of up to 18, and no cluster is in two groups: of four blocks 30 ran on
        an H200, not 33 (benchmarks/results/cuda_gemm_few_rows_h200.json).
        """
        return (num_sms * 15 // 16 if self.cluster > 2 else num_sms) // self.cluster

    def clusters(self, m: int, n: int, num_sms: int) -> int:
        """Those of a launch. Where K is in parts each has one unit, else those that run at once have several."""
        units = self.units(m, n)
        return units if self.parts > 1 else min(units, self.at_once(num_sms))


HIGH = Form(groups=2, waves=2, stages=3, early=True)
MIDDLE = Form(groups=3, waves=1, stages=4, sharing=2)
LOW = Form(groups=2, waves=1, stages=5)
# Time of a row of a tile beside the others', as measured on an H200 (benchmarks/results/cuda_gemm_h200.json): in the
# first form two warpgroups leave the tensor cores idle more often, in the last one more is loaded for each product.
_ROW_TIMES = {HIGH: 1.0, MIDDLE: 0.99, LOW: 1.16}
# Forms with K in parts, and with how many steps each is faster than the forms above where all its clusters run at the
# same time. On an H200 (benchmarks/results/cuda_gemm_few_rows_h200.json) the last but one was faster with 56 steps and
# slower with 18, and lines through these times meet at 22; the last one was 3 to 16 % faster with 56 steps or more.
IN_PARTS = {
    Form(groups=2, waves=1, stages=8, early=True, columns=64, parts=2, loaders=32): 16,
    Form(groups=1, waves=1, stages=8, early=True, columns=128, parts=2, loaders=32): 16,
    Form(groups=1, waves=1, stages=3, early=True, columns=128, parts=4, loaders=32, resident=2): 16,
    Form(groups=1, waves=1, stages=6, early=True, columns=64, parts=2, loaders=32, resident=2): 16,
    Form(groups=2, waves=1, stages=5, sharing=2, early=True, parts=2, loaders=32): 32,
    Form(groups=3, waves=1, stages=4, sharing=2, early=True, parts=2): 56,
}
# Of one tile of rows and more columns than one round of tiles has, its clusters run one after the other. On an H200
# 1 to 64 rows with 36864 x 7168 took 0.66 to 0.71 of the time of the fastest form above (the same file, "beside"), with
# 24576 x 1536 0.98 to 1.03.
_IN_ROUNDS = next(form for form in IN_PARTS if form.rows == 64 and form.columns == 128 and form.parts == 2)
_LEAST_IN_ROUNDS = 32  # steps


def form_for(m: int, n: int, k: int, num_sms: int) -> Form:
    """That which takes the least time.

    Where all clusters of forms with K in parts run at the same time, it is the one of them whose blocks have least to
    do, and of those the one with the fewest blocks. Else blocks take tiles in rounds, of which the last takes as long
    as the others; so do blocks of few rows with K in parts, if there is more than one round.
    """
    steps = -(-k // 128)
    enough = (form for form, least in IN_PARTS.items() if steps >= least)
    in_parts = [form for form in enough if form.units(m, n) <= form.at_once(num_sms)]
    if in_parts:
        return min(in_parts, key=lambda form: (form.rows * form.columns // form.parts, form.units(m, n)))

    if m <= _IN_ROUNDS.rows and steps >= _LEAST_IN_ROUNDS and LOW.units(m, n) > num_sms:
        return _IN_ROUNDS

    def time(form: Form) -> float:
        rounds = -(-form.units(m, n) // (num_sms // form.cluster))
        return rounds * form.rows * _ROW_TIMES[form]

    return min(_ROW_TIMES, key=time)


class Fp8Gemm(Fp8GemmAdapter):
    """Scales of rows that TMA cannot read are turned first: side by side down the rows."""

    form: ClassVar[Form | None] = None  # in place of what the sizes decide

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        self._kernels: dict[Form, MappedKernel] = {}
        turning = library.library(_TURN, {}, problem.device)
        self._turn = turning.kernel("turn_scales", _TURN_PACKING, may_be_graph=True)  # one graph with the product
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
        form = self.form or form_for(m, n, self.problem.k, num_sms)
        kernel = self._kernels.get(form) or self._kernel(form)
        made = out
        if not (is_aligned(out) if form.parts > 1 else is_writable_by_tma(out)):  # where K is in parts threads store
            made = torch.empty((m, up_to(n, 8)), dtype=out.dtype, device=out.device)[:, :n]
        with on_device_of(a):
            scales = a_scale if is_aligned(a_scale.t()) else self._down_rows(a_scale)
            kernel(
                form.clusters(m, n, num_sms),
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
                made,
                made.stride(0),
            )
            if made is not out:
                out.copy_(made)

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Operands, a result and scales of rows that TMA cannot take as they are, in copies."""
        problem = self.problem
        copies = (num_tokens + problem.n) * problem.k + 2 * num_tokens * up_to(problem.n, 8)
        return copies + 4 * up_to(num_tokens, 4) * -(-problem.k // 128)

    def _down_rows(self, scale: Tensor) -> Tensor:
        """Scales [rows, columns] whose rows are side by side, columns a multiple of 16 bytes apart."""
        rows, columns = scale.shape
        made = torch.empty_strided(scale.shape, (1, up_to(rows, 4)), dtype=scale.dtype, device=scale.device)
        threads = rows * blocks_for(columns, _TURNED)
        given = scale, made, rows, columns, *scale.stride(), made.stride(1)
        self._turn(scale.get_device(), blocks_for(threads, _BLOCK), _BLOCK, *given)
        return made

    def _kernel(self, form: Form) -> MappedKernel:
        made = library.library(_SOURCE, constants_of(form, self.problem.bias), self.problem.device, specific=True)
        boxes = (
            bytes_box(form.rows // form.sharing, 128),
            bytes_box(form.columns, 128),
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
        "COLUMNS": form.columns,
        "SHARING": form.sharing,
        "PARTS": form.parts,
        "EARLY": int(form.early),
        "LOADERS": form.loaders,
        "RESIDENT": form.resident,
        "HAS_BIAS": int(bias),
        "ASKED_BYTES": form.shared_bytes,
    }
