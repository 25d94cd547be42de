"""From calls of `moe_dispatch` and `moe_combine` to their Triton launches over memory of all ranks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.arrange import Arrange
from kernelhub.backends.shared.operands import up_to
from kernelhub.backends.triton.comm.connection import Connection, Connections, aligned, fresh, identified, is_aligned
from kernelhub.backends.triton.comm.experts.push_rows import push_rows_kernel
from kernelhub.backends.triton.comm.experts.push_sums import push_sums_kernel
from kernelhub.backends.triton.comm.tiles import Tile
from kernelhub.backends.triton.comm.workspace import UNIT, Workspace, workspace_before, workspace_for
from kernelhub.backends.triton.launch import Launcher
from kernelhub.ops.comm.experts.adapter import CombineAdapter, DispatchAdapter, Outgoing
from kernelhub.ops.comm.experts.formats import Arranged
from kernelhub.ops.comm.experts.problem import (
    BLOCK,
    FIXED,
    FORMATS,
    ROWS,
    TOKENS,
    CombineProblem,
    DispatchProblem,
)
from kernelhub.ops.comm.experts.received import Dispatched, Handle, Handles, Header

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SET = 64 << 20  # most bytes of a set of slots; more rows are sent by several launches
_LANES = 32  # of a warp
_WORD = 4  # bytes
_OF_CHOICES = (torch.int32, torch.float32)  # ids and weights
# Bytes of a row that a program handles at a time, and of them in each warp. Other sizes spill registers on sm_90; with
# these nothing is spilled there, and on sm_100 8 bytes with 32 choices of 8 ranks. Speed was not measured.
_OF_ROWS, _OF_SUMS = (16 << 10, 2048), (4 << 10, 512)


def rows_at_once(record_bytes: int, world_size: int, most: int) -> int:
    """Rows of each rank that one launch sends, of at most `most`: the same on all ranks."""
    return min(most, max(1, _SET // ((world_size - 1) * record_bytes)))


def row_tile(row_bytes: int, item_bytes: int, most: tuple[int, int]) -> Tile:
    """For rows of a size. A program has an element for each thread at least."""
    size = min(int(triton.next_power_of_2(row_bytes)), most[0])
    warps = min(8, max(1, size // most[1]))
    return Tile(max(size, warps * _LANES * item_bytes), warps, 2, 512)


def _lanes(tile: Tile, count: int) -> int:
    """A block for so many elements, with one for each thread at least."""
    return max(_LANES * tile.warps, int(triton.next_power_of_2(count)))


class Received(NamedTuple):
    """What came, or room for it, in the order of ranks, with ids as those of this rank; and their counts.

    Rows of float8 are bytes.
    """

    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor
    counts: Tensor


class PushRows(DispatchAdapter):
    """`moe_dispatch` with a capacity: each token once to each rank that owns one of its experts."""

    def __init__(self, problem: DispatchProblem) -> None:
        super().__init__(problem)
        self._dtype = dtype = getattr(torch, problem.dtype)
        self._as_bytes = dtype.itemsize == 1  # Triton compiles e4m3 from sm_89 on, and rows are moved as words anyway
        self._local = problem.num_experts // problem.world_size
        self._words = problem.hidden_size * dtype.itemsize // _WORD
        self._scales = -(-problem.hidden_size // BLOCK) if problem.scales else 0
        self.record_bytes = sum(up_to(count * _WORD, UNIT) for count in (2 * problem.top_k, self._words, self._scales))
        self._tile = row_tile(self._words * _WORD, _WORD, _OF_ROWS)
        self._narrow = _lanes(self._tile, max(problem.top_k, self._scales))
        self._arrange = None
        if problem.format != TOKENS:
            block, warps = self._tile.bytes // _WORD, self._tile.warps
            self._arrange = Arrange(problem, self._words, self._scales, block, self._narrow, warps, Launcher)
        self._form = (FORMATS.index(problem.format), ROWS.index(FIXED), problem.world_size, problem.num_experts)
        self._handles = Handles()
        self._connections = Connections()

    def connect(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> None:
        slot_bytes = self._rows(outgoing.max_tokens) * self.record_bytes
        self.attach(group.group_name, workspace_for(group, outgoing.x.device, slot_bytes, timeout_s))

    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        """Serve a group that has a workspace. This communicates with no rank."""
        problem, device = self.problem, workspace.device
        static = {
            "X_WORDS": self._words,
            "SCALES": self._scales,
            "TOP_K": problem.top_k,
            "LOCAL": self._local,
            "COUNTED": problem.format == TOKENS,
            "BLOCK": self._tile.bytes // _WORD,
            "NARROW": self._narrow,
        }
        connection = Connection("moe_dispatch", push_rows_kernel, static, self._tile, workspace)
        dtypes = (torch.uint8 if self._as_bytes else self._dtype, *_OF_CHOICES)
        x, ids, floats = (torch.empty(UNIT, dtype=dtype, device=device) for dtype in dtypes)
        connection.compile((x, floats, ids, floats, x, floats, ids, floats, ids), (1, 0, 1, 1))
        if self._arrange is not None:
            self._arrange.compile(x, ids, floats)
        return self._connections.keep(group_name, connection)

    def _rows(self, most: int) -> int:
        return rows_at_once(self.record_bytes, self.problem.world_size, most)

    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        most = outgoing.max_tokens
        connection = self._connection(group, self._rows(most))
        came = self._room(outgoing, most)
        x, scales, ids, weights, counts = came
        made = None if self._arrange is None else self._arrange.memory(x, scales, ids, weights, counts)
        shared = outgoing.scales is outgoing.topk_weights  # which a form has once
        tensors = [outgoing.x, outgoing.topk_ids, outgoing.topk_weights, x, ids, weights, counts]
        if scales is not None and outgoing.scales is not None:
            tensors += [scales] if shared else [scales, outgoing.scales]
        if made is not None:
            tensors += [made.x, made.slots, made.counts]
            if made.scales is not None:
                tensors.append(made.scales)
        key = (outgoing.x.shape, most, timeout_s, shared)
        connection.repeated.run(key, tensors, self._launch_anew, connection, outgoing, came, made, timeout_s)
        form = (*self._form, outgoing.x.shape[0], most)
        if made is None:
            handle = self._handles.of(Header(*form, x.shape[0]), outgoing.topk_ids, ids, weights)
            x = x.view(self._dtype) if self._as_bytes else x
            return Dispatched(x, scales, ids, weights, counts, None, handle)
        header = Header(*form, made.x.numel() // made.x.shape[-1])
        handle = self._handles.of(header, outgoing.topk_ids, made.slots, made.weights)
        x = made.x.view(self._dtype) if self._as_bytes else made.x
        return Dispatched(x, made.scales, None, None, made.counts, made.offsets, handle)

    def _launch_anew(
        self, connection: Connection, outgoing: Outgoing, came: Received, made: Arranged | None, timeout_s: float
    ) -> None:
        self._exchange(connection, outgoing, came, outgoing.max_tokens, timeout_s)
        if made is not None and self._arrange is not None:
            self._arrange.into(made, came.x, came.scales, came.ids, came.counts)

    def _connection(self, group: ProcessGroup, rows: int) -> Connection:
        """The connection of a group, with room for so many rows of each rank."""
        connection = self._connections.get(group.group_name)
        if connection is None or connection.slot_bytes < rows * self.record_bytes:
            connection = self.attach(group.group_name, workspace_before(group, rows * self.record_bytes))
        return connection

    def _room(self, outgoing: Outgoing, most: int) -> Received:
        """Room for `most` rows of each rank."""
        x, ids, weights, problem = outgoing.x, outgoing.topk_ids, outgoing.topk_weights, self.problem
        received = problem.world_size * most
        counts = ids.new_zeros(self._local) if self._arrange is None or not most else ids.new_empty(self._local)
        return Received(
            x.new_empty((received, x.shape[1]), dtype=torch.uint8 if self._as_bytes else None),
            None if outgoing.scales is None else weights.new_empty((received, self._scales)),
            ids.new_empty((received, problem.top_k)),
            weights.new_empty((received, problem.top_k)),
            counts,
        )

    def _exchange(
        self, connection: Connection, outgoing: Outgoing, came: Received, most: int, timeout_s: float
    ) -> None:
        """Send, and receive into `came`, `most` rows of each rank."""
        rows = self._rows(most)
        x, tokens = aligned(outgoing.x), outgoing.x.shape[0]
        if self._as_bytes:
            x = x.view(torch.uint8)
        ids, weights = aligned(outgoing.topk_ids), aligned(outgoing.topk_weights)
        scales = weights if outgoing.scales is None else aligned(outgoing.scales)
        into_scales = came.weights if came.scales is None else came.scales
        operands = (x, scales, ids, weights, came.x, into_scales, came.ids, came.weights, came.counts)
        for begin in range(0, most, max(rows, 1)):
            count = min(rows, most - begin)
            connection(count, operands, (tokens, begin, count, most), timeout_s)


class PushSums(CombineAdapter):
    """`moe_combine` of a dispatch with a capacity: the sums of each rank to the ranks of the tokens."""

    def __init__(self, problem: CombineProblem) -> None:
        super().__init__(problem)
        self._dtype = getattr(torch, problem.dtype)
        self._row_bytes: int = problem.hidden_size * self._dtype.itemsize
        self._tile = row_tile(self._row_bytes, self._dtype.itemsize, _OF_SUMS)
        self._parts = -(-self._row_bytes // self._tile.bytes)  # of a row
        self._connections = Connections()

    def connect(self, y: Tensor, handle: Handle, header: Header, group: ProcessGroup, timeout_s: float) -> None:
        slot_bytes = self.slot_bytes(header.max_tokens)
        self.attach(group.group_name, workspace_for(group, y.device, slot_bytes, timeout_s))

    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        """Serve a group that has a workspace. This communicates with no rank."""
        problem, device = self.problem, workspace.device
        static = {
            "H": problem.hidden_size,
            "TOP_K": problem.top_k,
            "LOCAL": problem.num_experts // problem.world_size,
            "SUMMED": problem.format == TOKENS,
            "BLOCK": self._tile.bytes // self._dtype.itemsize,
            "NARROW": _lanes(self._tile, problem.top_k),
        }
        connection = Connection("moe_combine", push_sums_kernel, static, self._tile, workspace)
        y, ids, floats = (torch.empty(UNIT, dtype=dtype, device=device) for dtype in (self._dtype, *_OF_CHOICES))
        connection.compile((y, ids, floats, ids, y), (1, 0, 1, 1))
        return self._connections.keep(group_name, connection)

    def slot_bytes(self, most: int) -> int:
        """What the slot of a sender must hold: a unit by which it says that it is here, and rows."""
        return UNIT + self._rows(most) * self._row_bytes

    def _rows(self, most: int) -> int:
        return rows_at_once(self._row_bytes, self.problem.world_size, most)

    def launch(
        self, y: Tensor, handle: Handle, header: Header, out: Tensor, group: ProcessGroup, timeout_s: float
    ) -> None:
        connection = self._connection(group, header.max_tokens)
        key, tensors = _identified_sums(y, handle, header, out, timeout_s)
        connection.repeated.run(key, tensors, self._send, connection, y, handle, header, out, timeout_s)

    def repeated(
        self, y: Tensor, handle: Handle, header: Header, out: Tensor, group: ProcessGroup, timeout_s: float
    ) -> Any:
        connection = self._connections.get(group.group_name)
        return connection and connection.repeated.sequence_of(*_identified_sums(y, handle, header, out, timeout_s))

    def _connection(self, group: ProcessGroup, most: int) -> Connection:
        """The connection of a group, with room for what one launch sends."""
        connection = self._connections.get(group.group_name)
        if connection is None or connection.slot_bytes < self.slot_bytes(most):
            connection = self.attach(group.group_name, workspace_before(group, self.slot_bytes(most)))
        return connection

    def _send(
        self, connection: Connection, y: Tensor, handle: Handle, header: Header, out: Tensor, timeout_s: float
    ) -> None:
        """Send sums of `max_tokens` rows of each rank, and add up those of own tokens."""
        most, rows = header.max_tokens, self._rows(header.max_tokens)
        target = out if is_aligned(out) else fresh(out)
        operands = (aligned(y), aligned(handle.slots), aligned(handle.weights), aligned(handle.topk_ids), target)
        for begin in range(0, most, max(rows, 1)):
            count = min(rows, most - begin)
            connection(count * self._parts, operands, (header.tokens, begin, count, most), timeout_s)
        if target is not out:
            out.copy_(target)


def _identified_sums(
    y: Tensor, handle: Handle, header: Header, out: Tensor, timeout_s: float
) -> tuple[Hashable, tuple[Tensor, ...]]:
    """The key and the tensors of a combine."""
    return identified((y.shape, header, timeout_s), y, handle.slots, handle.weights, handle.topk_ids, out)
