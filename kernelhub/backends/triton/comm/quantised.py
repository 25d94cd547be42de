"""From calls of `all_reduce_rms_norm` with a format to their Triton launch over memory of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.comm.adapter import ConnectedRmsNorm, piece_bytes
from kernelhub.backends.triton.comm.connection import Connection, Connections, aligned, fresh, identified, is_aligned
from kernelhub.backends.triton.comm.fused_rms_norm_quant import all_reduce_rms_norm_quant_kernel
from kernelhub.backends.triton.comm.tiles import quantised_row_tile
from kernelhub.backends.triton.comm.workspace import UNIT, Workspace
from kernelhub.backends.triton.fused_quant.adapter import static_form
from kernelhub.backends.triton.operands import as_bytes
from kernelhub.ops.comm.problem import AllReduceRmsNormProblem
from kernelhub.ops.fused_quant.formats import GIVEN, GROUPS, out_form, scale_kind
from kernelhub.ops.fused_quant.problem import FP8_TOKEN

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

if triton.knobs.runtime.interpret:
    interpreter.repair()


class OneShotRmsNormQuant(ConnectedRmsNorm):
    """Sum, residual, norm and quantisation in one launch and one step."""

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        self._dtype = getattr(torch, problem.dtype)
        row_bytes = problem.hidden_size * self._dtype.itemsize
        # Of one launch. Sixteen rows of codes are whole units, so that each piece of a result is aligned.
        self._rows = max(UNIT, piece_bytes(problem) // row_bytes // UNIT * UNIT)
        self._slot_bytes = self._rows * row_bytes
        self._tile = quantised_row_tile(problem.hidden_size, self._dtype.itemsize)
        self._connections = Connections()

    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        problem = self.problem
        form, hidden_size = problem.format, problem.hidden_size
        static = {"H": hidden_size, "BLOCK": self._tile.bytes // self._dtype.itemsize, **static_form(problem)}
        connection = Connection("all_reduce_rms_norm", all_reduce_rms_norm_quant_kernel, static, self._tile, workspace)
        row = torch.empty(hidden_size, dtype=self._dtype, device=workspace.device)
        weight = row.to(getattr(torch, problem.weight_dtype))
        shape, kind = out_form(row.shape, form, self._dtype)
        given = row.new_empty(1, dtype=torch.float32) if form in GIVEN else None
        scale = None
        if form in (FP8_TOKEN, *GROUPS):
            scale = as_bytes(row.new_empty(1, dtype=scale_kind(form, getattr(torch, problem.scale_dtype))))
        operands = (row, row, weight, given, as_bytes(row.new_empty(shape, dtype=kind)), scale, row)
        connection.compile(operands, (1, 1e-6, 1, 1))
        return self._connections.keep(group_name, connection)

    def launch(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        residual_out: Tensor,
        group: ProcessGroup,
        timeout_s: float,
        given_scale: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        if not out.shape[0]:
            return
        connection = self.connection(group)
        given = (x, residual, weight, out, residual_out, given_scale, scale)
        key, tensors = identified((x.shape, eps, timeout_s), *given)
        connection.repeated.run(key, tensors, self._launch_anew, connection, *given, eps, timeout_s)

    def repeated(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        residual_out: Tensor,
        group: ProcessGroup,
        timeout_s: float,
        given_scale: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Any:
        connection = self._connections.get(group)
        given = (x, residual, weight, out, residual_out, given_scale, scale)
        return connection and connection.repeated.sequence_of(*identified((x.shape, eps, timeout_s), *given))

    def _launch_anew(
        self,
        connection: Connection,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        out: Tensor,
        residual_out: Tensor,
        given_scale: Tensor | None,
        scale: Tensor | None,
        eps: float,
        timeout_s: float,
    ) -> None:
        rows = out.shape[0]
        codes, scales = as_bytes(out), None if scale is None else as_bytes(scale)
        targets = [item if is_aligned(item) else fresh(item) for item in (codes, residual_out)]
        source, before, weight = aligned(x), aligned(residual), aligned(weight)
        strides = (0, 0) if scales is None else scales.stride()
        if rows <= self._rows:
            operands = (source, before, weight, given_scale, targets[0], scales, targets[1])
            connection(rows, operands, (rows, eps, *strides), timeout_s)
        else:
            for begin in range(0, rows, self._rows):
                piece = slice(begin, begin + self._rows)
                a, b, c, d = (item.view(rows, -1)[piece] for item in (source, before, *targets))
                part = None if scales is None else scales[piece]
                connection(len(a), (a, b, weight, given_scale, c, part, d), (len(a), eps, *strides), timeout_s)
        for item, target in zip((codes, residual_out), targets, strict=True):
            if target is not item:
                item.copy_(target)
