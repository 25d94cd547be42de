"""From calls of `all_reduce` and `all_reduce_rms_norm` to their Triton launches over memory of all ranks."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.connected import Connections, aligned, fresh, is_aligned
from kernelhub.backends.shared.repeat import identified
from kernelhub.backends.shared.slot_memory import MOST_PROGRAMS, UNIT, Workspace, workspace_before, workspace_for
from kernelhub.backends.triton.comm.at_once import MOST as MOST_AT_ONCE
from kernelhub.backends.triton.comm.clustered_rms_norm import clustered_rms_norm_kernel
from kernelhub.backends.triton.comm.connection import Connection
from kernelhub.backends.triton.comm.fused_rms_norm import all_reduce_rms_norm_kernel
from kernelhub.backends.triton.comm.one_shot import one_shot_kernel
from kernelhub.backends.triton.comm.polled_rms_norm import polled_rms_norm_kernel
from kernelhub.backends.triton.comm.received_rms_norm import received_rms_norm_kernel
from kernelhub.backends.triton.comm.split_rms_norm import split_rms_norm_kernel
from kernelhub.backends.triton.comm.tiles import Tile, one_shot_tile, row_tile, two_shot_tile
from kernelhub.backends.triton.comm.two_shot import two_shot_kernel
from kernelhub.backends.triton.comm.two_shot_rms_norm import two_shot_rms_norm_kernel
from kernelhub.backends.triton.comm.two_shot_row_norm import two_shot_row_norm_kernel
from kernelhub.ops.comm.adapter import AllReduceAdapter, AllReduceRmsNormAdapter
from kernelhub.ops.comm.problem import MESSAGE_BYTES, AllReduceProblem, AllReduceRmsNormProblem, CollectiveProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


LARGEST = 32 << 20  # bytes of a message that is sent by one launch; what is longer is sent in pieces
# Programs of a row with a norm, and the bytes of each. One program sends slowly: its multiprocessor stores
# 8 KB for each other rank. On H200 (comm_split_h200.json) 8 KB take 3.44, 3.32 and 2.98 us on 2 ranks with 1, 2 and 4
# programs, 4.62, 4.15 and 4.05 on 4; 256 KB 4.26, 4.06 and 3.91 on 2, 6.76, 6.21 and 6.55 on 4, later 6.28 and 6.24.
_MOST_PARTS, _LEAST_PART = 4, 2048
_SPLIT_RANKS = (2, 4)  # on which it conforms
_TURN_RANKS = (2,)  # on which it does so where each program of a row normalises its part
# Of two programs, rows of 2048, that gains 1 to 5 % and loses 2 to 6 % in place (comm_norm_parts_h200.json).
_LEAST_TURNS = 4
_SPLIT_BYTES = 256 << 10  # of a message: more rows have fewer programs each
# Programs that a GPU of 132 multiprocessors runs at once, two on each: 256 threads of so many registers.
_TWO_EACH, _REGISTERS_OF_TWO = 264, 128
# On 2 ranks a bucket is one launch up to 1 MB, where each row has as many programs then. In whole eights of rows, 18
# and 73 rows of 7168 were two: 7.15 and 11.12 us, one launch 3.86 and 6.98 (comm_norm_polled_h200.json).
_WHOLE_RANKS, _WHOLE_BYTES = (2,), 1 << 20
# Of a row whose programs are a cluster: bytes of each, one unit for each of 128 threads, as of the sum alone, and most
# programs, of which a cluster has eight on any GPU.
_LEAST_OF_CLUSTER, _MOST_OF_CLUSTER, _MOST_WARPS = 2048, 8, 8
_SENDERS = 264  # programs of a grid times ranks that are sent to: twice the multiprocessors of an H100
_SLOTS = 32 << 20  # most bytes of a set of slots, in one step; in two steps they are at most twice the largest piece


def piece_bytes(problem: CollectiveProblem) -> int:
    """Most bytes of one launch in one step, where each other rank has a slot for all of them."""
    longest = min(LARGEST, _SLOTS // (problem.world_size - 1)) // UNIT * UNIT
    return min(MESSAGE_BYTES.get(problem.message, longest), longest)


class _AllReduce(AllReduceAdapter):
    """What both kernels of `all_reduce` do.

    Attributes:
        longest: most bytes of one launch. A longer message is cut into several.
        early: of `early.py`, if the kernel has it: when the launch after one may begin.
        eager: launches that are not captured do so, too.
    """

    problem: AllReduceProblem
    kernel: Any
    early = 0
    eager = False

    def __init__(self, problem: AllReduceProblem) -> None:
        super().__init__(problem)
        self._dtype = getattr(torch, problem.dtype)
        self.longest = self.piece()
        self._tile = self.tile()
        self._connections = Connections[Connection]()

    @abc.abstractmethod
    def piece(self) -> int:
        """Most bytes of one launch, a multiple of 16."""

    @abc.abstractmethod
    def tile(self) -> Tile:
        """How the kernel is launched."""

    @abc.abstractmethod
    def slot_bytes(self) -> int:
        """What the slot of a sender must hold."""

    def static(self) -> dict[str, Any]:
        """Static arguments of this kernel alone."""
        return {}

    @abc.abstractmethod
    def sizes(self, num_bytes: int) -> tuple[int, tuple[int, ...]]:
        """Tiles of a message, and the scalar arguments of the kernel."""

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        workspace = workspace_for(group, x.device, self.slot_bytes(), timeout_s)
        self.attach(group.group_name, workspace)

    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        """Serve a group that has a workspace. This communicates with no rank."""
        static = {"BLOCK": self._tile.bytes // self._dtype.itemsize, **self.static()}
        connection = Connection(
            "all_reduce", self.kernel, static, self._tile, workspace, early=self.early, eager=self.eager
        )
        example = torch.empty(UNIT, dtype=self._dtype, device=workspace.device)
        connection.compile((example, example), self.sizes(example.nbytes)[1])
        return self._connections.keep(group_name, connection)

    def launch(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        if not x.nbytes:
            return
        connection = self._connections.get(group)
        if connection is None:
            connection = self.attach(group.group_name, workspace_before(group, self.slot_bytes()))
        key, tensors = identified((x.shape, timeout_s), x, out)
        connection.repeated.run(key, tensors, self._launch_anew, connection, x, out, timeout_s)

    def repeated(self, x: Tensor, out: Tensor, group: ProcessGroup, timeout_s: float) -> Any:
        connection = self._connections.get(group)
        return connection and connection.repeated.sequence_of(*identified((x.shape, timeout_s), x, out))

    def _launch_anew(self, connection: Connection, x: Tensor, out: Tensor, timeout_s: float) -> None:
        num_bytes = x.nbytes
        if num_bytes <= self.longest and is_aligned(x) and is_aligned(out):
            self.run(connection, x, out, timeout_s)
            return
        source, target = aligned(x), out if is_aligned(out) else fresh(out)
        count = self.longest // self._dtype.itemsize
        for piece, into in zip(source.view(-1).split(count), target.view(-1).split(count), strict=True):
            self.run(connection, piece, into, timeout_s)
        if target is not out:
            out.copy_(target)

    def run(self, connection: Connection, source: Tensor, target: Tensor, timeout_s: float) -> None:
        """Launch the kernel on contiguous tensors."""
        tiles, sizes = self.sizes(source.nbytes)
        connection(tiles, (source, target), sizes, timeout_s)


class OneShot(_AllReduce):
    """`all_reduce` in one step: every rank sends everything to every rank."""

    kernel = one_shot_kernel

    def __init__(self, problem: AllReduceProblem) -> None:
        super().__init__(problem)
        self._once = self.longest <= self._tile.bytes * self._tile.programs  # a program has one tile at most

    def piece(self) -> int:
        return piece_bytes(self.problem)

    def tile(self) -> Tile:
        return one_shot_tile(self.longest)

    def static(self) -> dict[str, Any]:
        return {"ONCE": self._once, "EARLY": self.early}

    def slot_bytes(self) -> int:
        return self.longest

    def sizes(self, num_bytes: int) -> tuple[int, tuple[int, ...]]:
        return -(-num_bytes // self._tile.bytes), (num_bytes // self._dtype.itemsize,)


class TwoShot(_AllReduce):
    """`all_reduce` in two steps: each rank adds up one part of the message, which must be whole units of 16 bytes."""

    kernel = two_shot_kernel

    def piece(self) -> int:
        return MESSAGE_BYTES.get(self.problem.message, LARGEST)

    def tile(self) -> Tile:
        return two_shot_tile(self.longest)

    def slot_bytes(self) -> int:
        return 2 * self._part(self.longest) * UNIT

    def sizes(self, num_bytes: int) -> tuple[int, tuple[int, ...]]:
        part = self._part(num_bytes)
        return -(-part * UNIT // self._tile.bytes), (num_bytes // self._dtype.itemsize, part)

    def _part(self, num_bytes: int) -> int:
        """Units of the part of a rank."""
        return -(-num_bytes // (UNIT * self.problem.world_size))

    def run(self, connection: Connection, source: Tensor, target: Tensor, timeout_s: float) -> None:
        odd = source.nbytes % UNIT
        if not odd:
            super().run(connection, source, target, timeout_s)
            return
        padded = source.new_zeros(source.numel() + (UNIT - odd) // source.element_size())
        padded[: source.numel()] = source.view(-1)
        super().run(connection, padded, padded, timeout_s)
        target.view(-1).copy_(padded[: source.numel()])


class ConnectedRmsNorm(AllReduceRmsNormAdapter):
    """A kernel of `all_reduce_rms_norm` with its connections; a subclass sets `_slot_bytes` and `_connections`."""

    problem: AllReduceRmsNormProblem
    _slot_bytes: int
    _connections: Connections[Connection]

    def connect(self, x: Tensor, group: ProcessGroup, timeout_s: float) -> None:
        self.attach(group.group_name, workspace_for(group, x.device, self._slot_bytes, timeout_s))

    @abc.abstractmethod
    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        """Serve a group that has a workspace. This communicates with no rank."""

    def connection(self, group: ProcessGroup) -> Connection:
        """That of a group, over the workspace of another plan where this adapter has not connected it."""
        found = self._connections.get(group)
        return self.attach(group.group_name, workspace_before(group, self._slot_bytes)) if found is None else found


class _RmsNorm(ConnectedRmsNorm):
    """What both kernels of `all_reduce_rms_norm` that write floats do."""

    kernel: Any
    early = 0  # of `early.py`, of kernels that use the slots of `turns.py`
    eager = False  # launches that are not captured may begin early, too
    registers = 0  # most of a thread; 0: the compiler's choice
    turns = False  # it uses the slots of `turns.py`, and has another kernel for results in the place of operands
    in_place_kernel: Any = received_rms_norm_kernel

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        self._dtype = getattr(torch, problem.dtype)
        row_bytes = problem.hidden_size * self._dtype.itemsize
        self._rows = self.rows_of_launch(row_bytes)
        self._slot_bytes = self.slot_rows() * row_bytes
        self._tile = row_tile(problem.hidden_size, self._dtype.itemsize)
        looked_at = self._tile.bytes // self._dtype.itemsize * (problem.world_size - 1)
        self._once = self._rows <= self._tile.programs and looked_at <= MOST_AT_ONCE  # a program has one row at most
        self._connections = Connections[Connection]()

    def static(self) -> dict[str, Any]:
        """Static arguments of this kernel alone, and of the one for results in place."""
        return {}

    def static_of_kernel(self) -> dict[str, Any]:
        """Those of this kernel that the one for results in place lacks."""
        return {}

    @abc.abstractmethod
    def piece(self) -> int:
        """Most bytes of one launch."""

    def rows_of_launch(self, row_bytes: int) -> int:
        """Most rows of one launch; eight are whole units."""
        return max(8, self.piece() // row_bytes // 8 * 8)

    @abc.abstractmethod
    def slot_rows(self) -> int:
        """Rows that the slot of a sender must hold."""

    @abc.abstractmethod
    def sizes(self, rows: int, eps: float, in_place: int) -> tuple[int, tuple[Any, ...]]:
        """Programs for a message, and the scalar arguments of the kernel.

        `in_place`: 2 if a result may be in the place of x, 1 if in that of the residual only, else 0.
        """

    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        hidden_size = self.problem.hidden_size
        static = {"H": hidden_size, "BLOCK": self._tile.bytes // self._dtype.itemsize, **self.static()}
        row = torch.empty(hidden_size, dtype=self._dtype, device=workspace.device)
        weight = row.to(getattr(torch, self.problem.weight_dtype))
        made = []
        given: list[tuple[Any, dict[str, Any], dict[str, Any]]]
        early = {"early": self.early, "eager": self.eager} if self.turns else {}
        own = {**static, **self.static_of_kernel(), **({"EARLY": self.early} if self.turns else {})}
        given = [(self.kernel, own, {"registers": self.registers, **early})]
        given += [(self.in_place_kernel, static, {})] if self.turns else []
        for kernel, fixed, options in given:
            options |= {"turns": self.turns}
            made.append(Connection("all_reduce_rms_norm", kernel, fixed, self._tile, workspace, **options))
            made[-1].compile((row, row, weight, row, row), self.sizes(1, 1e-6, 0)[1])
        connection = made[0]
        connection.in_place = made[1] if self.turns else None
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
        if not x.numel():
            return
        connection = self.connection(group)
        given = (x, residual, weight, out, residual_out)
        key, tensors = identified((x.shape, eps, timeout_s, _in_place(x, residual, out, residual_out)), *given)
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
    ) -> Any:
        connection = self._connections.get(group)
        values = (x.shape, eps, timeout_s, _in_place(x, residual, out, residual_out))
        given = identified(values, x, residual, weight, out, residual_out)
        return connection and connection.repeated.sequence_of(*given)

    def _launch_anew(
        self,
        connection: Connection,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        out: Tensor,
        residual_out: Tensor,
        eps: float,
        timeout_s: float,
    ) -> None:
        rows = x.numel() // self.problem.hidden_size
        targets = [item if is_aligned(item) else fresh(item) for item in (out, residual_out)]
        source, before, weight = aligned(x), aligned(residual), aligned(weight)
        in_place = _in_place(source, before, *targets)
        connection = connection.in_place if in_place and connection.in_place is not None else connection
        if rows <= self._rows:
            programs, sizes = self.sizes(rows, float(eps), in_place)
            connection(programs, (source, before, weight, *targets), sizes, timeout_s)
        else:
            parts = [item.view(rows, -1).split(self._rows) for item in (source, before, *targets)]
            for a, b, c, d in zip(*parts, strict=True):
                programs, sizes = self.sizes(len(a), float(eps), in_place)
                connection(programs, (a, b, weight, c, d), sizes, timeout_s)
        for item, target in zip((out, residual_out), targets, strict=True):
            if target is not item:
                item.copy_(target)


class OneShotRmsNorm(_RmsNorm):
    """In one step: every rank sends all rows to every rank."""

    kernel = all_reduce_rms_norm_kernel

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        self._split = self.split()
        if self._split >= _LEAST_TURNS and self._slot_bytes <= _SPLIT_BYTES and problem.world_size in _TURN_RANKS:
            self.kernel, self.turns = split_rms_norm_kernel, True

    def piece(self) -> int:
        return piece_bytes(self.problem)

    def static(self) -> dict[str, Any]:
        if self.turns:
            return {"SPLIT": self._split}
        # Of two ranks it is no faster where one program has a row: 3.51 and 3.54 us for 8 KB (comm_tiles_h200.json).
        return {"ONCE": self._once and (self.problem.world_size > 2 or self._split > 1), "SPLIT": self._split}

    def split(self) -> int:
        """Programs of a row."""
        ranks = self.problem.world_size
        parts = min(self._most_parts(self._rows), self._tile.bytes // _LEAST_PART)
        return _power_of_two(parts) if self._once and ranks in _SPLIT_RANKS else 1

    def _most_parts(self, rows: int) -> int:
        return _power_of_two(min(_MOST_PARTS, _SENDERS // (rows * self.problem.world_size)))

    def rows_of_launch(self, row_bytes: int) -> int:
        rows, whole = super().rows_of_launch(row_bytes), self.piece() // row_bytes
        measured = self.problem.world_size in _WHOLE_RANKS and self.piece() <= _WHOLE_BYTES
        alike = whole <= MOST_PROGRAMS and self._most_parts(rows) == self._most_parts(max(1, whole))
        return max(rows, whole) if measured and alike and not row_bytes % UNIT else rows

    def slot_rows(self) -> int:
        return self._rows

    def sizes(self, rows: int, eps: float, in_place: int) -> tuple[int, tuple[Any, ...]]:
        if self.turns:
            return rows * (self._split + (in_place > 0)), (rows, eps, in_place)
        return rows * self._split, (rows, eps, int(in_place > 1))


class PolledRmsNorm(OneShotRmsNorm):
    """In one step, by several programs of each row, whose threads wait for their elements one by one."""

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        self.kernel, self.turns = polled_rms_norm_kernel, True
        # Rows of 8192 in float32 would spill 96 bytes of a thread.
        self.registers = _REGISTERS_OF_TWO if self._dtype.itemsize == 2 else 0

    def split(self) -> int:
        return _power_of_two(min(_MOST_PARTS, _TWO_EACH // self._rows, self._tile.bytes // _LEAST_PART))

    def rows_of_launch(self, row_bytes: int) -> int:
        # A row is whole units: see the record. A program has one row, in place a row has two programs or more.
        return min(max(8, self.piece() // row_bytes), MOST_PROGRAMS // 2)

    def static_of_kernel(self) -> dict[str, Any]:
        return {"THREADS": 32 * self._tile.warps}


class ClusteredRmsNorm(_RmsNorm):
    """In one step, by a cluster of programs for each row, which exchange their sums of squares."""

    kernel = clustered_rms_norm_kernel
    least_part = _LEAST_OF_CLUSTER
    units = 1  # of 16 bytes of a thread

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        item = self._dtype.itemsize
        least = max(-(-problem.hidden_size // _MOST_OF_CLUSTER), self.least_part // item)
        self._part = triton.next_power_of_2(least)
        self.cluster = -(-problem.hidden_size // self._part)
        warps = min(_MOST_WARPS, self._part * item // (32 * UNIT * self.units))
        self._tile = Tile(self._part * item, warps, 1, self._rows * self.cluster)

    def piece(self) -> int:
        return piece_bytes(self.problem)

    def rows_of_launch(self, row_bytes: int) -> int:
        return min(max(1, self.piece() // row_bytes), MOST_PROGRAMS)  # a row has a counter

    def slot_rows(self) -> int:
        return self._rows

    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        static = {"H": self.problem.hidden_size, "PART": self._part, "SPLIT": self.cluster}
        static |= {"THREADS": 32 * self._tile.warps, "EARLY": self.early}
        options = {"turns": True, "cluster": self.cluster, "early": self.early, "eager": self.eager}
        connection = Connection("all_reduce_rms_norm", self.kernel, static, self._tile, workspace, **options)
        row = torch.empty(self.problem.hidden_size, dtype=self._dtype, device=workspace.device)
        weight = row.to(getattr(torch, self.problem.weight_dtype))
        connection.compile((row, row, weight, row, row), self.sizes(1, 1e-6, 0)[1])
        return self._connections.keep(group_name, connection)

    def sizes(self, rows: int, eps: float, in_place: int) -> tuple[int, tuple[Any, ...]]:
        return rows * self.cluster, (rows, eps, in_place)


class TwoShotRmsNorm(_RmsNorm):
    """In two steps: each rank adds up the rows of one part, or of few rows every W-th."""

    kernel = two_shot_rms_norm_kernel

    def __init__(self, problem: AllReduceRmsNormProblem) -> None:
        super().__init__(problem)
        if self._once:
            self.kernel = two_shot_row_norm_kernel
            self._tile = self._tile._replace(ahead=self._tile.ahead * problem.world_size)  # each goes to one rank

    def piece(self) -> int:
        return MESSAGE_BYTES.get(self.problem.message, LARGEST)

    def slot_rows(self) -> int:
        return 2 * self._part(self._rows)

    def sizes(self, rows: int, eps: float, in_place: int) -> tuple[int, tuple[Any, ...]]:
        part = self._part(rows)
        return rows if self._once else part, (rows, eps, part)

    def _part(self, rows: int) -> int:
        return -(-rows // self.problem.world_size)


def _power_of_two(most: int) -> int:
    return 1 << max(1, most).bit_length() - 1


def _in_place(x: Tensor, residual: Tensor, *results: Tensor) -> int:
    """2 if a result begins where x does, 1 if only where the residual does, which the op lets none overlap else."""
    begins = [result.data_ptr() for result in results]
    return 2 if x.data_ptr() in begins else int(residual.data_ptr() in begins)
