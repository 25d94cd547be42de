"""`moe_dispatch` over torch.distributed: all tokens to all ranks, or each token to the ranks that need it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.torch.comm.experts.wire import Wire, packed, unpacked
from kernelhub.ops.arguments import dtype_name
from kernelhub.ops.comm.cpu_ranks import compare
from kernelhub.ops.comm.experts.adapter import DispatchAdapter, Outgoing
from kernelhub.ops.comm.experts.formats import arranged
from kernelhub.ops.comm.experts.problem import ALL, FIXED, FORMATS, NEEDED, ROWS, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched, Header, handle_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "moe_dispatch"


class _Received(NamedTuple):
    """Rows as they came: bytes ``[R, width]``, and what a handle says of them."""

    rows: Tensor
    splits: Tensor
    sent: Tensor


class _Exchange(DispatchAdapter):
    """What both ways have in common: from bytes to the format."""

    rows: str

    def connect(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> None:
        wire = Wire(NAME, group, timeout_s)
        one = torch.zeros((group.size(), 1), dtype=torch.uint8, device=outgoing.x.device)
        wire.all_gather(one[0])
        wire.all_to_all(one, group.size())
        if one.is_cuda:
            torch.cuda.current_stream(one.device).synchronize()

    def _wire(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Wire:
        """The exchange of a call, of whose arguments ranks of CPUs have compared all but the number of tokens."""
        if outgoing.x.is_cpu:
            x, problem = outgoing.x, self.problem
            given = (
                f"x of {x.shape[1]} {dtype_name(x.dtype)}, {outgoing.topk_ids.shape[1]} of "
                f"{problem.num_experts} experts, format {problem.format}, "
                f"max_tokens {outgoing.max_tokens or None}, by {type(self).__name__}"
            )
            compare(NAME, given, group, timeout_s)
        return Wire(NAME, group, timeout_s)

    def _dispatched(self, outgoing: Outgoing, received: _Received, rank: int) -> Dispatched:
        problem, exact = self.problem, self.rows != FIXED
        local = problem.num_experts // problem.world_size
        like = (outgoing.x, outgoing.topk_ids, outgoing.topk_weights, outgoing.scales)
        x, ids, weights, scales = unpacked(received.rows, like)
        assert x is not None
        assert ids is not None
        assert weights is not None
        ids = ids - rank * local
        ids = torch.where((ids >= 0) & (ids < local), ids, -1)
        made = arranged(x, scales, ids, weights, local, problem.format, exact)
        num_rows = made.x.numel() // made.x.shape[-1]
        header = Header(
            FORMATS.index(problem.format),
            ROWS.index(self.rows),
            problem.world_size,
            problem.num_experts,
            outgoing.x.shape[0],
            outgoing.max_tokens,
            num_rows,
        )
        handle = handle_of(header, outgoing.topk_ids, made.slots, made.weights, received.splits, received.sent)
        tokens = problem.format == TOKENS
        ids_of_rows, weights_of_rows = (made.slots, made.weights) if tokens else (None, None)
        return Dispatched(made.x, made.scales, ids_of_rows, weights_of_rows, made.counts, made.offsets, handle)

    def _empty(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """No splits, nothing sent."""
        return torch.empty(0, dtype=torch.int64, device="cpu"), like.new_empty(0, dtype=torch.int64)

    def _ids(self, outgoing: Outgoing) -> Tensor:
        """Global ids; -1 for those of no expert."""
        ids = outgoing.topk_ids
        return torch.where((ids >= 0) & (ids < self.problem.num_experts), ids, -1)

    def _row(self, outgoing: Outgoing, ids: Tensor) -> tuple[Tensor | None, ...]:
        return outgoing.x, ids, outgoing.topk_weights, outgoing.scales


class Gather(_Exchange):
    """Every rank gets all tokens of all ranks, and skips ids of other ranks' experts."""

    rows = ALL

    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        wire, tokens = self._wire(outgoing, group, timeout_s), outgoing.x.shape[0]
        own = torch.tensor([tokens], dtype=torch.int64, device=outgoing.x.device)
        splits = wire.all_gather(own).flatten().cpu()
        lengths = splits.tolist()
        part = packed(self._row(outgoing, self._ids(outgoing)), max(lengths))
        whole = wire.all_gather(part)
        rows = torch.cat([whole[other, :length] for other, length in enumerate(lengths)])
        return self._dispatched(outgoing, _Received(rows, splits, self._empty(part)[1]), group.rank())


class GatherFixed(_Exchange):
    """The same with `max_tokens` rows of each rank, the last of which are padding with ids of -1."""

    rows = FIXED

    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        ids = _padded(self._ids(outgoing), outgoing.max_tokens)
        part = packed(self._row(outgoing, ids), outgoing.max_tokens)
        whole = self._wire(outgoing, group, timeout_s).all_gather(part).flatten(0, 1)
        return self._dispatched(outgoing, _Received(whole, *self._empty(part)), group.rank())


class AllToAll(_Exchange):
    """Each rank gets the tokens that need its experts, once each; numbers of rows are exchanged first."""

    rows = NEEDED

    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        wire, ids = self._wire(outgoing, group, timeout_s), self._ids(outgoing)
        needs = _needs(ids, self.problem.num_experts, self.problem.world_size)
        splits = torch.cat([needs.sum(1), wire.all_to_all(needs.sum(1), group.size())]).cpu()
        to_each, from_each = (part.tolist() for part in splits.view(2, -1))
        sent = needs.nonzero()[:, 1]  # by rank, then by token
        rows = packed(self._row(outgoing, ids), outgoing.x.shape[0]).index_select(0, sent)
        received = wire.all_to_all(rows, sum(from_each), to_each, from_each)
        return self._dispatched(outgoing, _Received(received, splits, sent), group.rank())


class AllToAllFixed(_Exchange):
    """The same with `max_tokens` rows from each rank to each; tokens that a rank does not need have ids of -1 there."""

    rows = FIXED

    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        size, most = group.size(), outgoing.max_tokens
        part = packed(self._row(outgoing, _padded(self._ids(outgoing), most)), most)
        rows = part.expand(size, *part.shape).reshape(size * most, -1)
        received = self._wire(outgoing, group, timeout_s).all_to_all(rows, size * most)
        return self._dispatched(outgoing, _Received(received, *self._empty(part)), group.rank())


def _needs(ids: Tensor, num_experts: int, world_size: int) -> Tensor:
    """Whether a rank needs a token: bool ``[W, T]``."""
    owner = torch.where(ids >= 0, ids // (num_experts // world_size), -1)
    ranks = torch.arange(world_size, device=ids.device, dtype=ids.dtype)
    return (owner == ranks.view(-1, 1, 1)).any(2)


def _padded(ids: Tensor, rows: int) -> Tensor:
    made = torch.full((rows, ids.shape[1]), -1, dtype=ids.dtype, device=ids.device)
    made[: ids.shape[0]] = ids
    return made
