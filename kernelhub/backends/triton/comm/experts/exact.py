"""`moe_dispatch` and `moe_combine` without a capacity: lengths first, then as with the largest as the capacity.

The ranks exchange the numbers of their tokens, for which the call waits for the device. What comes is padded to the
rank with most tokens, and the padding left out of what is returned: rows of all tokens of all ranks, in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernelhub.backends.shared.slot_memory import UNIT, Workspace
from kernelhub.backends.triton.comm.connection import Connection
from kernelhub.backends.triton.comm.experts.adapter import PushRows, PushSums, Received
from kernelhub.backends.triton.comm.experts.push_lengths import push_lengths_kernel
from kernelhub.backends.triton.comm.tiles import Tile
from kernelhub.ops.comm.experts.adapter import Outgoing
from kernelhub.ops.comm.experts.problem import ALL, ROWS, TOKENS, CombineProblem, DispatchProblem
from kernelhub.ops.comm.experts.received import Dispatched, Handle, Header, handle_of
from kernelhub.ops.known_calls import Repeatable
from kernelhub.ops.precision import without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SET = 16 << 20  # most bytes of a set of slots: the longest batch is not known when the ranks are connected
_LANES = 32
_LENGTHS_TILE = Tile(_LANES * 4, 1, 0, 1)


def _set_rows(row_bytes: int, world_size: int) -> int:
    """Rows of each rank that one launch sends at most: the same on all ranks."""
    return max(1, _SET // ((world_size - 1) * row_bytes))


class PushRowsExact(PushRows):
    """All ranks' tokens, each row once to each rank that owns one of its experts."""

    def __init__(self, problem: DispatchProblem) -> None:
        super().__init__(problem)
        self._most_rows = _set_rows(self.record_bytes, problem.world_size)
        self._lengths: dict[str, Connection] = {}

    def connect(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> None:
        super().connect(outgoing._replace(max_tokens=self._most_rows), group, timeout_s)

    def attach(self, group_name: str, workspace: Workspace) -> Connection:
        lengths = Connection("moe_dispatch", push_lengths_kernel, {"NARROW": _LANES}, _LENGTHS_TILE, workspace)
        lengths.compile((torch.empty(UNIT, dtype=torch.int32, device=workspace.device),), (1,))
        self._lengths[group_name] = lengths
        return super().attach(group_name, workspace)

    def _rows(self, most: int) -> int:
        return min(most, self._most_rows)

    repeated = Repeatable.repeated  # what it launches depends on the numbers of tokens

    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        connection = self._connection(group, self._most_rows)
        lengths = self._lengths_of_ranks(outgoing, group, timeout_s)
        most = max(lengths)
        came = self._room(outgoing, most)
        self._exchange(connection, outgoing, came, most, timeout_s)
        if min(lengths) < most:
            x, scales, ids, weights = (_without_padding(part, lengths) for part in came[:4])
            assert x is not None
            assert ids is not None
            assert weights is not None
            came = Received(x, scales, ids, weights, came.counts)
        return self._exactly(outgoing, came, lengths)

    def _lengths_of_ranks(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> list[int]:
        """Tokens of each rank; waits for the device.

        Raises:
            RanksDisagree: a rank did not come within the time-out.
        """
        connection, tokens = self._lengths[group.group_name], outgoing.x.shape[0]
        lengths = outgoing.topk_ids.new_empty(self.problem.world_size)
        connection(1, (lengths,), (tokens,), timeout_s)
        found: list[int] = lengths.tolist()
        connection.check_ranks()
        return found

    def _exactly(self, outgoing: Outgoing, came: Received, lengths: list[int]) -> Dispatched:
        tokens, received = outgoing.x.shape[0], sum(lengths)
        splits = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        sent = outgoing.topk_ids.new_empty(0, dtype=torch.int64)
        form = (self._form[0], ROWS.index(ALL), *self._form[2:], tokens, 0)
        x, scales, ids, weights, counts = came
        if self._arrange is None:
            handle = handle_of(Header(*form, received), outgoing.topk_ids, ids, weights, splits, sent)
            return Dispatched(x.view(self._dtype), scales, ids, weights, counts, None, handle)
        made = self._arrange(x, scales, ids, weights, counts, exact=True)
        header = Header(*form, made.x.shape[:-1].numel())
        handle = handle_of(header, outgoing.topk_ids, made.slots, made.weights, splits, sent)
        return Dispatched(made.x.view(self._dtype), made.scales, None, None, made.counts, made.offsets, handle)


class PushSumsExact(PushSums):
    """The sums of each rank of all tokens to the ranks of the tokens."""

    def __init__(self, problem: CombineProblem) -> None:
        super().__init__(problem)
        self._most_rows = _set_rows(self._row_bytes, problem.world_size)

    def connect(self, y: Tensor, handle: Handle, header: Header, group: ProcessGroup, timeout_s: float) -> None:
        super().connect(y, handle, header._replace(max_tokens=self._most_rows), group, timeout_s)

    repeated = Repeatable.repeated  # what it launches depends on the numbers of tokens

    def _rows(self, most: int) -> int:
        return min(most, self._most_rows)

    def launch(
        self, y: Tensor, handle: Handle, header: Header, out: Tensor, group: ProcessGroup, timeout_s: float
    ) -> None:
        lengths: list[int] = handle.splits.tolist()
        most = max(lengths)
        if min(lengths) < most:
            slots, weights = handle.slots, handle.weights
            if self.problem.format == TOKENS:  # the kernel reads the row of y of the same number
                y = _padded(y, lengths, most)
            handle = handle._replace(slots=_padded(slots, lengths, most, -1), weights=_padded(weights, lengths, most))
        connection = self._connection(group, self._most_rows)
        self._send(connection, y, handle, header._replace(max_tokens=most), out, timeout_s)


@without_autocast  # which joins no rows in float8, or of another half precision than its own
def _without_padding(rows: Tensor | None, lengths: list[int]) -> Tensor | None:
    """The first rows of each rank."""
    if rows is None:
        return None
    parts = rows.view(len(lengths), -1, *rows.shape[1:])
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _padded(rows: Tensor, lengths: list[int], most: int, fill: int | None = None) -> Tensor:
    """Rows of all ranks with room for `most` of each, where nothing is read, or `fill`."""
    shape = (len(lengths), most, *rows.shape[1:])
    made = rows.new_empty(shape) if fill is None else rows.new_full(shape, fill)
    for place, part in zip(made, rows.split(lengths), strict=True):
        place[: part.shape[0]] = part
    return made.flatten(0, 1)
