"""`moe_combine` over the collectives of torch.distributed.

Every rank first sums its experts' results of a token, in float32 by the weights where the experts did not, and rounds
the sum to the dtype of y. Then ranks exchange these rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernelhub.backends.torch.comm.experts.wire import Wire, dense
from kernelhub.ops.arguments import dtype_name
from kernelhub.ops.comm.cpu_ranks import compare
from kernelhub.ops.comm.experts.adapter import CombineAdapter
from kernelhub.ops.comm.experts.formats import gathered
from kernelhub.ops.comm.experts.problem import ALL, FIXED, ROWS, TOKENS
from kernelhub.ops.comm.experts.received import Handle, Header

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "moe_combine"


class _Sums(CombineAdapter):
    """What both ways have in common: the sums over this rank's experts."""

    def connect(self, y: Tensor, handle: Handle, header: Header, group: ProcessGroup, timeout_s: float) -> None:
        wire = Wire(NAME, group, timeout_s)
        one = torch.zeros((group.size(), 1), dtype=y.dtype, device=y.device)
        wire.all_to_all(one.view(torch.uint8), group.size())
        wire.reduce_scatter(one, one.new_empty((1, 1)))
        if one.is_cuda:
            torch.cuda.current_stream(one.device).synchronize()

    def _wire(self, header: Header, out: Tensor, group: ProcessGroup, timeout_s: float) -> Wire:
        """The exchange of a call, of whose arguments ranks of CPUs have compared all but the number of tokens."""
        if out.is_cpu:
            given = (
                f"y of {out.shape[1]} {dtype_name(out.dtype)}, {header.num_experts} experts, "
                f"format {self.problem.format}, max_tokens {header.max_tokens or None}, "
                f"rows {ROWS[header.rows]}, by {type(self).__name__}"
            )
            compare(NAME, given, group, timeout_s)
        return Wire(NAME, group, timeout_s)

    def _sums(self, y: Tensor, handle: Handle) -> Tensor:
        """``[R, H]``, contiguous; 0 for tokens without an expert here."""
        if self.problem.format == TOKENS:
            here = (handle.slots >= 0).any(1, keepdim=True)
            return dense(torch.where(here, y, 0.0))
        return gathered(y, handle.slots, handle.weights).to(y.dtype)


class ReduceScatter(_Sums):
    """By a reduce-scatter, which sums in the dtype of y, in an order of the backend's. Its operands are padded."""

    def launch(
        self, y: Tensor, handle: Handle, header: Header, out: Tensor, group: ProcessGroup, timeout_s: float
    ) -> None:
        sums = self._sums(y, handle)
        if ROWS[header.rows] == ALL:
            lengths = handle.splits.tolist()
            most = max(lengths)
            padded = sums.new_zeros((len(lengths), most, sums.shape[1]))
            for other, part in enumerate(sums.split(lengths)):
                padded[other, : part.shape[0]] = part
            sums = padded.flatten(0, 1)
        else:
            most = header.max_tokens
        whole = out if out.is_contiguous() and header.tokens == most else sums.new_empty((most, sums.shape[1]))
        self._wire(header, out, group, timeout_s).reduce_scatter(sums, whole)
        if whole is not out:
            out.copy_(whole[: header.tokens])


class AllToAll(_Sums):
    """Each rank gets the sums of its own tokens from every rank, and adds them in float32 in the order of ranks."""

    def launch(
        self, y: Tensor, handle: Handle, header: Header, out: Tensor, group: ProcessGroup, timeout_s: float
    ) -> None:
        rows = self._sums(y, handle).view(torch.uint8)
        wire, size, tokens = self._wire(header, out, group, timeout_s), group.size(), header.tokens
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        if ROWS[header.rows] == FIXED:
            parts = wire.all_to_all(rows, size * header.max_tokens).view(out.dtype).view(size, -1, out.shape[1])
            for part in parts:
                total += part[:tokens]
        elif ROWS[header.rows] == ALL:
            parts = wire.all_to_all(rows, size * tokens, handle.splits.tolist(), [tokens] * size).view(out.dtype)
            for part in parts.view(size, tokens, out.shape[1]):
                total += part
        else:
            to_each, from_each = (part.tolist() for part in handle.splits.view(2, -1))
            got = wire.all_to_all(rows, sum(to_each), from_each, to_each).view(out.dtype)
            for part, token in zip(got.split(to_each), handle.sent.split(to_each), strict=True):
                total.index_add_(0, token, part.float())  # no token twice: each has one row from a rank
        out.copy_(total)
