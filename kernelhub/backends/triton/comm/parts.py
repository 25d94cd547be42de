"""From calls of `all_gather` and `reduce_scatter` to their Triton launches over memory of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.backends.shared.connected import Connections, aligned, fresh, is_aligned
from kernelhub.backends.shared.operands import up_to
from kernelhub.backends.shared.repeat import identified
from kernelhub.backends.shared.slot_memory import UNIT, Workspace, workspace_before, workspace_for
from kernelhub.backends.triton.comm.connection import Connection
from kernelhub.backends.triton.comm.part_kernels import all_gather_kernel, reduce_scatter_kernel
from kernelhub.backends.triton.comm.tiles import one_shot_tile
from kernelhub.ops.comm.adapter import AllGatherAdapter, ReduceScatterAdapter
from kernelhub.ops.comm.problem import MESSAGE_BYTES, AllGatherProblem, ReduceScatterProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Parts:
    """A kernel whose messages are parts of whole units of 16 bytes, with its connections.

    Args:
        op: for messages.
        kernel: the jitted function.
        dtype: of the elements.
        part_bytes: most of a part.
    """

    def __init__(self, op: str, kernel: Any, dtype: torch.dtype, part_bytes: int) -> None:
        self._op, self._kernel, self._dtype = op, kernel, dtype
        self._part_bytes = up_to(part_bytes, UNIT)
        self._tile = one_shot_tile(self._part_bytes)
        self._connections = Connections[Connection]()

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        self.attach(group.group_name, workspace_for(group, x.device, self._part_bytes, timeout_s))

    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        """Serve a group that has a workspace. This communicates with no rank."""
        static = {"BLOCK": self._tile.bytes // self._dtype.itemsize}
        connection = Connection(self._op, self._kernel, static, self._tile, workspace)
        example = torch.empty(UNIT, dtype=self._dtype, device=workspace.device)
        connection.compile((example, example), (1,))
        return self._connections.keep(group_name, connection)

    def exchange(self, x: Tensor, out: Tensor, parts: tuple[int, int], group: ProcessGroup, timeout_s: float) -> None:
        """Launch the kernel, with copies where parts are not whole units at aligned addresses.

        Args:
            x, out: operand and result, any strides.
            parts: how many of equal size each has.
            group, timeout_s: of the call.
        """
        connection = self._connections.get(group)
        if connection is None:
            connection = self.attach(group.group_name, workspace_before(group, self._part_bytes))
        key, tensors = identified((x.shape, timeout_s), x, out)
        connection.repeated.run(key, tensors, self._exchange_anew, connection, x, out, parts, timeout_s)

    def sequence_of(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> Any:
        """Of a call that was made, as of `Repeated.sequence_of`."""
        connection = self._connections.get(group)
        return connection and connection.repeated.sequence_of(*identified((x.shape, timeout_s), x, out))

    def _exchange_anew(
        self, connection: Connection, x: Tensor, out: Tensor, parts: tuple[int, int], timeout_s: float
    ) -> None:
        size = x.nbytes // parts[0]
        count, padded = size // x.itemsize, up_to(size, UNIT) // x.itemsize
        if count == padded:
            source, target = aligned(x), out if is_aligned(out) else fresh(out)
        else:
            source, target = x.new_zeros((parts[0], padded)), x.new_empty((parts[1], padded))
            source[:, :count] = x.reshape(parts[0], count)
        units = padded * x.itemsize // UNIT
        connection(-(-units * UNIT // self._tile.bytes), (source, target), (units,), timeout_s)
        if target is not out:
            out.copy_(target.view(parts[1], padded)[:, :count].reshape(out.shape))


class AllGather(AllGatherAdapter):
    """Every rank sends its rows to every rank."""

    def __init__(self, problem: AllGatherProblem) -> None:
        super().__init__(problem)
        dtype, most = getattr(torch, problem.dtype), MESSAGE_BYTES[problem.message]
        self.parts = _Parts("all_gather", all_gather_kernel, dtype, most)

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        self.parts.connect(x, group, timeout_s)

    def launch(
        self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float, rows: Sequence[int] | None = None
    ) -> None:
        if x.nbytes:
            self.parts.exchange(x, out, (1, self.problem.world_size), group, timeout_s)

    def repeated(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> Any:
        return self.parts.sequence_of(x, out, group, timeout_s)


class ReduceScatter(ReduceScatterAdapter):
    """Every rank sends each rank its part, and adds up its own."""

    def __init__(self, problem: ReduceScatterProblem) -> None:
        super().__init__(problem)
        dtype, most = getattr(torch, problem.dtype), MESSAGE_BYTES[problem.message]
        self.parts = _Parts("reduce_scatter", reduce_scatter_kernel, dtype, -(-most // problem.world_size))

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        self.parts.connect(x, group, timeout_s)

    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        if x.nbytes:
            self.parts.exchange(x, out, (self.problem.world_size, 1), group, timeout_s)

    def repeated(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> Any:
        return self.parts.sequence_of(x, out, group, timeout_s)
