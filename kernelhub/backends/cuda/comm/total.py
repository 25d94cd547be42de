"""From calls of `all_reduce` to their CUDA launches over memory of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.backends.cuda.comm.connection import Connection
from kernelhub.backends.cuda.shapes import C_TYPES, blocks_for
from kernelhub.backends.shared.connected import Connections, aligned, fresh, is_aligned
from kernelhub.backends.shared.repeat import identified
from kernelhub.backends.shared.slot_memory import (
    MOST_PROGRAMS,
    UNIT,
    Workspace,
    turn_bytes,
    workspace_before,
    workspace_for,
)
from kernelhub.ops.comm.adapter import AllReduceAdapter
from kernelhub.ops.comm.problem import MESSAGE_BYTES, AllReduceProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class OneShot(AllReduceAdapter):
    """In one step: every rank sends everything to every rank.

    Attributes:
        threads: of a block.
        looks: of a thread at each of its units that are under way at a time.
        constants: that the source is compiled with.
    """

    source = "all_reduce.cu"
    threads = 128
    looks = 2

    def __init__(self, problem: AllReduceProblem) -> None:
        super().__init__(problem)
        self._dtype = getattr(torch, problem.dtype)
        most = min(turn_bytes(problem.world_size), MOST_PROGRAMS * self.threads * UNIT)  # a block has a counter
        self._longest = min(MESSAGE_BYTES[problem.message], most)
        self.constants: dict[str, str | int] = {
            "ELEMENT": C_TYPES[problem.dtype],
            "SIZE": self._dtype.itemsize,
            "WORLD": problem.world_size,
            "THREADS": self.threads,
            "LOOKS": self.looks,
        }
        self._connections = Connections[Connection]()

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        self.attach(group.group_name, workspace_for(group, x.device, UNIT, timeout_s))

    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        """Serve a group that has a workspace. This communicates with no rank."""
        given = (self.constants, self.problem.device, self.threads, workspace)
        connection = Connection("all_reduce", self.source, "all_reduce", *given, operands=2, numbers="q")
        return self._connections.keep(group_name, connection)

    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        if not x.nbytes:
            return
        connection = self._connections.get(group)
        if connection is None:
            connection = self.attach(group.group_name, workspace_before(group, UNIT))
        key, tensors = identified((x.shape, timeout_s), x, out)
        connection.repeated.run(key, tensors, self._launch_anew, connection, x, out, timeout_s)

    def repeated(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> Any:
        connection = self._connections.get(group)
        return connection and connection.repeated.sequence_of(*identified((x.shape, timeout_s), x, out))

    def _launch_anew(self, connection: Connection, x: Tensor, out: Tensor, timeout_s: float) -> None:
        source, target = aligned(x), out if is_aligned(out) else fresh(out)
        whole = blocks_for(x.nbytes, UNIT) * UNIT // x.itemsize
        if whole != x.numel():
            source = x.new_zeros(whole)
            source[: x.numel()] = x.reshape(-1)
            target = torch.empty_like(source)
        count = self._longest // x.itemsize
        for piece, into in zip(source.view(-1).split(count), target.view(-1).split(count), strict=True):
            units = piece.nbytes // UNIT
            connection(blocks_for(units, self.threads), (piece, into), (units,), timeout_s)
        if target is not out:
            out.copy_(target.view(-1)[: x.numel()].view(out.shape))
