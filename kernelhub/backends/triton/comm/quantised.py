"""From calls of `all_reduce_rms_norm` with a format to their Triton launch over memory of all ranks."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.connected import Connections, aligned, fresh, is_aligned
from kernelhub.backends.shared.repeat import identified
from kernelhub.backends.shared.slot_memory import UNIT, Workspace
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.comm.adapter import LARGEST, ConnectedRmsNorm, piece_bytes
from kernelhub.backends.triton.comm.at_once import MOST as MOST_AT_ONCE
from kernelhub.backends.triton.comm.connection import Connection
from kernelhub.backends.triton.comm.fused_rms_norm_quant import all_reduce_rms_norm_quant_kernel
from kernelhub.backends.triton.comm.tiles import quantised_row_tile
from kernelhub.backends.triton.comm.two_shot_rms_norm_quant import two_shot_rms_norm_quant_kernel
from kernelhub.backends.triton.fused_quant.adapter import static_form
from kernelhub.backends.triton.operands import as_bytes
from kernelhub.ops.comm.problem import MESSAGE_BYTES, AllReduceRmsNormProblem
from kernelhub.ops.fused_quant.formats import GIVEN, GROUPS, out_form, scale_kind
from kernelhub.ops.fused_quant.problem import FP8_TOKEN

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

if triton.knobs.runtime.interpret:
    interpreter.repair()


class _RmsNormQuant(ConnectedRmsNorm):
    """What both kernels of `all_reduce_rms_norm` that quantise do."""

    kernel: Any

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        self._dtype = getattr(torch, problem.dtype)
        row_bytes = problem.hidden_size * self._dtype.itemsize
        # Of one launch. Sixteen rows of codes are whole units, so that each piece of a result is aligned.
        self._rows: int = max(UNIT, self.piece() // row_bytes // UNIT * UNIT)
        self._slot_bytes = self.slot_rows() * row_bytes
        self._tile = quantised_row_tile(problem.hidden_size, self._dtype.itemsize)
        self._connections = Connections[Connection]()

    @abc.abstractmethod
    def piece(self) -> int:
        """Most bytes of one launch."""

    @abc.abstractmethod
    def slot_rows(self) -> int:
        """Rows that the slot of a sender must hold."""

    def static(self) -> dict[str, Any]:
        """Static arguments of this kernel alone."""
        return {}

    def more_sizes(self, rows: int) -> tuple[int, ...]:
        """Scalar arguments of this kernel alone."""
        return ()

    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        problem = self.problem
        form, hidden_size = problem.format, problem.hidden_size
        static = {"H": hidden_size, "BLOCK": self._tile.bytes // self._dtype.itemsize, **static_form(problem)}
        static |= self.static()
        connection = Connection("all_reduce_rms_norm", self.kernel, static, self._tile, workspace)
        row = torch.empty(hidden_size, dtype=self._dtype, device=workspace.device)
        weight = row.to(getattr(torch, problem.weight_dtype))
        shape, kind = out_form(row.shape, form, self._dtype)
        given = row.new_empty(1, dtype=torch.float32) if form in GIVEN else None
        scale = None
        if form in (FP8_TOKEN, *GROUPS):
            scale = as_bytes(row.new_empty(1, dtype=scale_kind(form, getattr(torch, problem.scale_dtype))))
        operands = (row, row, weight, given, as_bytes(row.new_empty(shape, dtype=kind)), scale, row)
        connection.compile(operands, (1, 1e-6, 1, 1, *self.more_sizes(1)))
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
            connection(rows, operands, (rows, eps, *strides, *self.more_sizes(rows)), timeout_s)
        else:
            for begin in range(0, rows, self._rows):
                piece = slice(begin, begin + self._rows)
                a, b, c, d = (item.view(rows, -1)[piece] for item in (source, before, *targets))
                part = None if scales is None else scales[piece]
                operands = (a, b, weight, given_scale, c, part, d)
                connection(len(a), operands, (len(a), eps, *strides, *self.more_sizes(len(a))), timeout_s)
        for item, target in zip((codes, residual_out), targets, strict=True):
            if target is not item:
                item.copy_(target)


class OneShotRmsNormQuant(_RmsNormQuant):
    """In one step: every rank sends all rows to every rank."""

    kernel = all_reduce_rms_norm_quant_kernel

    def piece(self) -> int:
        return piece_bytes(self.problem)

    def slot_rows(self) -> int:
        return self._rows


class TwoShotRmsNormQuant(_RmsNormQuant):
    """In two steps: each rank adds up every W-th row."""

    kernel = two_shot_rms_norm_quant_kernel

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        self._tile = self._tile._replace(ahead=self._tile.ahead * problem.world_size)  # each goes to one rank

    def piece(self) -> int:
        return MESSAGE_BYTES.get(self.problem.message, LARGEST)

    def slot_rows(self) -> int:
        return 2 * self._part(self._rows)

    def static(self) -> dict[str, Any]:
        looked_at = self._tile.bytes // self._dtype.itemsize * (self.problem.world_size - 1)
        return {"AT_ONCE": looked_at <= MOST_AT_ONCE}

    def more_sizes(self, rows: int) -> tuple[int, ...]:
        return (self._part(rows),)

    def _part(self, rows: int) -> int:
        return -(-rows // self.problem.world_size)
