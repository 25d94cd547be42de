"""From calls of `moe_dispatch` and `moe_combine` to their Triton launches over memory of all ranks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.arrange import Arrange
from kernelhub.backends.shared.connected import Connections, aligned, fresh, is_aligned
from kernelhub.backends.shared.operands import up_to
from kernelhub.backends.shared.repeat import identified
from kernelhub.backends.shared.slot_memory import UNIT, Workspace, workspace_before, workspace_for
from kernelhub.backends.triton.comm.connection import Connection
from kernelhub.backends.triton.comm.experts.push_rows import push_rows_kernel
from kernelhub.backends.triton.comm.experts.push_sums import push_sums_kernel
from kernelhub.backends.triton.comm.tiles import Tile
from kernelhub.backends.triton.launch import Launcher
from kernelhub.ops.comm.experts.adapter import CombineAdapter, DispatchAdapter, Outgoing
from kernelhub.ops.comm.experts.formats import Arranged
from kernelhub.ops.comm.experts.problem import (
    BLOCK,
    CONTIGUOUS,
    FIXED,
    FORMATS,
    ROWS,
    TOKENS,
    CombineProblem,
    DispatchProblem,
)
from kernelhub.ops.comm.experts.received import Dispatched, Handle, Header
from kernelhub.ops.comm.experts.results import Fresh, Results, header_of_capacity, outputs_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SET = 64 << 20  # most bytes of a set of slots; more rows are sent by several launches
_MOST_CAPACITIES = 16  # for each of which at most 8 MB are ready
_MOST_RESULTS = 256  # pairs of a number of tokens and a capacity
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
        self._results: dict[tuple[int, int], Results] = {}
        self._fresh: dict[int, Fresh] = {}
        self._connections = Connections[Connection]()

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
        words = self._local + 1 if problem.format == TOKENS else 0
        connection = Connection("moe_dispatch", push_rows_kernel, static, self._tile, workspace, words)
        dtypes = (torch.uint8 if self._as_bytes else self._dtype, *_OF_CHOICES)
        x, ids, floats = (torch.empty(UNIT, dtype=dtype, device=device) for dtype in dtypes)
        connection.compile((x, floats, ids, floats, x, floats, ids, floats, ids, ids), (1, 0, 1, 1, 0))
        if self._arrange is not None:
            self._arrange.compile(x, ids, floats)
        return self._connections.keep(group_name, connection)

    def _rows(self, most: int) -> int:
        return rows_at_once(self.record_bytes, self.problem.world_size, most)

    def results(self, outgoing: Outgoing) -> Results:
        tokens, most = outgoing.x.shape[0], outgoing.max_tokens
        found = self._results.get((tokens, most))
        if found is None:
            header = self._header(tokens, most)
            fresh = self._fresh.get(most)
            if fresh is None:
                if len(self._fresh) >= _MOST_CAPACITIES:
                    self._fresh.clear()
                sizes = outgoing.x.shape[1], self.problem.top_k, self._scales
                fresh = self._fresh[most] = Fresh(header, *sizes, self._dtype, outgoing.x.device)
                self._results.clear()
            if len(self._results) >= _MOST_RESULTS:
                self._results.clear()
            found = self._results[tokens, most] = Results(header, fresh)
        return found

    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        connection = self._connection(group, self._rows(outgoing.max_tokens))
        results, out = self.results(outgoing), outgoing.out
        outputs = results.take() if out is None else outputs_of(out)
        key, tensors = self._identified(outgoing, outputs, timeout_s)
        connection.repeated.run(key, tensors, self._launch_anew, connection, outgoing, outputs, timeout_s)
        if out is not None:
            return results.renewed(out, outgoing.topk_ids)
        return results.dispatched(outputs, outgoing.topk_ids)

    def repeated(self, outgoing: Outgoing, outputs: tuple[Tensor, ...], group: ProcessGroup, timeout_s: float) -> Any:
        connection = self._connections.get(group)
        return connection and connection.repeated.sequence_of(*self._identified(outgoing, outputs, timeout_s))

    def _identified(
        self, outgoing: Outgoing, outputs: tuple[Tensor, ...], timeout_s: float
    ) -> tuple[Hashable, tuple[Tensor, ...]]:
        """The key and the tensors of a call."""
        operands = (outgoing.x, outgoing.scales, outgoing.topk_ids, outgoing.topk_weights)
        values = (outgoing.x.shape, outgoing.max_tokens, outgoing.out is None, timeout_s)
        return identified(values, *operands, *outputs)

    def _launch_anew(
        self, connection: Connection, outgoing: Outgoing, outputs: tuple[Tensor, ...], timeout_s: float
    ) -> None:
        targets = [one if is_aligned(one) else fresh(one) for one in outputs]
        x, *others, slots, weights = (self._readable(one) for one in targets)
        scales, most = others.pop(0) if self._scales else None, outgoing.max_tokens
        if self._arrange is None:
            self._exchange(connection, outgoing, Received(x, scales, slots, weights, others[0]), most, timeout_s)
        else:
            offsets = others[1] if self.problem.format == CONTIGUOUS else None
            came = self._room(outgoing, most, weights, offsets)
            self._exchange(connection, outgoing, came, most, timeout_s)
            made = Arranged(x, scales, others[0], offsets, slots, weights)
            self._arrange.into(made, came.x, came.scales, came.ids, came.counts)
        for one, target in zip(outputs, targets, strict=True):
            if target is not one:
                one.copy_(target)

    def _readable(self, rows: Tensor) -> Tensor:
        """Rows of float8 as bytes."""
        return rows.view(torch.uint8) if self._as_bytes and rows.dtype is self._dtype else rows

    def _header(self, tokens: int, most: int) -> Header:
        problem = self.problem
        form = (problem.format, FIXED, problem.world_size, problem.num_experts, problem.top_k)
        return header_of_capacity(*form, tokens, most)

    def _connection(self, group: ProcessGroup, rows: int) -> Connection:
        """The connection of a group, with room for so many rows of each rank."""
        connection = self._connections.get(group)
        if connection is None or connection.slot_bytes < rows * self.record_bytes:
            connection = self.attach(group.group_name, workspace_before(group, rows * self.record_bytes))
        return connection

    def _room(
        self, outgoing: Outgoing, most: int, weights: Tensor | None = None, counts: Tensor | None = None
    ) -> Received:
        """Room for `most` rows of each rank, beside what the result has."""
        x, ids, problem = outgoing.x, outgoing.topk_ids, self.problem
        received = problem.world_size * most
        if counts is None:
            counts = ids.new_zeros(self._local) if self._arrange is None or not most else ids.new_empty(self._local)
        if weights is None:
            weights = outgoing.topk_weights.new_empty((received, problem.top_k))
        return Received(
            x.new_empty((received, x.shape[1]), dtype=torch.uint8 if self._as_bytes else None),
            None if outgoing.scales is None else weights.new_empty((received, self._scales)),
            ids.new_empty((received, problem.top_k)),
            weights,
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
        apart = outgoing.out is not None and self._arrange is None  # counts begin as anything
        added = connection.words if apart else came.counts
        operands = (x, scales, ids, weights, came.x, into_scales, came.ids, came.weights, came.counts, added)
        for begin in range(0, most, max(rows, 1)):
            count = min(rows, most - begin)
            connection(count, operands, (tokens, begin, count, most, int(apart)), timeout_s)


class PushSums(CombineAdapter):
    """`moe_combine` of a dispatch with a capacity: the sums of each rank to the ranks of the tokens."""

    def __init__(self, problem: CombineProblem) -> None:
        super().__init__(problem)
        self._dtype = getattr(torch, problem.dtype)
        self._row_bytes: int = problem.hidden_size * self._dtype.itemsize
        self._tile = row_tile(self._row_bytes, self._dtype.itemsize, _OF_SUMS)
        self._parts = -(-self._row_bytes // self._tile.bytes)  # of a row
        self._connections = Connections[Connection]()

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
        connection = self._connections.get(group)
        return connection and connection.repeated.sequence_of(*_identified_sums(y, handle, header, out, timeout_s))

    def _connection(self, group: ProcessGroup, most: int) -> Connection:
        """The connection of a group, with room for what one launch sends."""
        connection = self._connections.get(group)
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
