"""`moe_dispatch` and `moe_combine` by TensorRT-LLM's one-sided exchange in FlashInfer.

**Dispatch.** Each rank stores its tokens in the memory of the ranks that need them, then a flag, and waits for those of
all ranks. A token goes to the next free place of its sender there, so that its number travels with it: this puts rows
in the order of their tokens, ``max_tokens`` of each rank.

**Combine.** Each rank puts its sums in its own memory, and after a flag each rank reads those of its tokens from all
ranks. Where they are follows from the ids of its tokens alone, so that handles of any dispatch with a capacity fit,
also after others.

To the kernels, a rank is one expert: the choices of a token are the ranks that need it. They neither wait until a
rank has read what it got before they store again, nor keep flags that a fast rank overwrites, so that every call begins
with a barrier of all ranks. Launches are not programmatic (PDL).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_combine, moe_a2a_dispatch
from torch import Tensor

from kernelhub.backends.flashinfer.comm.experts.workspace import Exchange, exchange_before, exchange_for
from kernelhub.backends.shared.operands import on_device_of, row_major, up_to
from kernelhub.ops.comm.experts.adapter import CombineAdapter, DispatchAdapter, Outgoing
from kernelhub.ops.comm.experts.formats import arranged, gathered
from kernelhub.ops.comm.experts.problem import BLOCK, FIXED, FORMATS, ROWS, TOKENS, CombineProblem, DispatchProblem
from kernelhub.ops.comm.experts.received import Dispatched, Handle, Handles, Header

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WORD = 4  # bytes of an id or weight
_UNIT = 4  # words that are moved at once, by which the beginning of the next rows is aligned, too


class Dispatch(DispatchAdapter):
    """Each token to the ranks that need it, once."""

    def __init__(self, problem: DispatchProblem) -> None:
        super().__init__(problem)
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        self._words = up_to(1 + 2 * problem.top_k, _UNIT)  # number of the token, ids, weights
        self._scales = -(-problem.hidden_size // BLOCK) if problem.scales else 0
        self._row_bytes = problem.hidden_size * self._dtype.itemsize + _WORD * (self._words + self._scales)
        self._form = (FORMATS.index(problem.format), ROWS.index(FIXED), problem.world_size, problem.num_experts)
        self._handles = Handles()
        self._connected: dict[tuple[str, int], Exchange] = {}

    def connect(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> None:
        device, most = outgoing.x.device, outgoing.max_tokens
        self._connected[group.group_name, most] = exchange_for(
            "moe_dispatch", group, device, most, self._row_bytes, timeout_s
        )
        self.launch(outgoing, group, timeout_s)  # loads the code, which a capture cannot do
        torch.cuda.current_stream(device).synchronize()

    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        problem, most, size = self.problem, outgoing.max_tokens, self.problem.world_size
        exchange = self._connected.get((group.group_name, most))
        if exchange is None:
            exchange = exchange_before("moe_dispatch", group, most, self._row_bytes)
            self._connected[group.group_name, most] = exchange
        needed = needed_by(outgoing.topk_ids, problem.num_experts, exchange)
        # A token that no rank needs goes to its own, which finds no expert in its ids.
        some = (needed + exchange.preference).argmax(1, keepdim=True)
        payloads = [self._choices(outgoing, exchange), row_major(outgoing.x).view(torch.uint8)]
        if outgoing.scales is not None:
            payloads.append(row_major(outgoing.scales))
        with on_device_of(outgoing.x):
            exchange.barrier(timeout_s)
            came, *_ = moe_a2a_dispatch(
                token_selected_experts=torch.where(needed, exchange.ranks, some).int(),
                input_payloads=payloads,
                workspace=exchange.memory,
                metainfo=exchange.metainfo,
                runtime_max_tokens_per_rank=most,
                ep_rank=exchange.rank,
                ep_size=size,
                top_k=size,
                num_experts=size,
                enable_pdl=False,
            )
            return self._dispatched(outgoing, exchange, came)

    def _choices(self, outgoing: Outgoing, exchange: Exchange) -> Tensor:
        """int32 ``[T, words]``: the number of the token, its ids and the bits of its weights; the rest is any."""
        ids = outgoing.topk_ids
        number = exchange.numbers[: ids.shape[0], None]
        rest = number.expand(-1, self._words - 1 - 2 * ids.shape[1])
        return torch.cat([number, ids, outgoing.topk_weights.view(torch.int32), rest], 1)

    def _dispatched(self, outgoing: Outgoing, exchange: Exchange, came: Sequence[Tensor]) -> Dispatched:
        problem, most, top_k = self.problem, outgoing.max_tokens, self.problem.top_k
        choices, x, *scales = came
        size, local = exchange.world_size, problem.num_experts // problem.world_size
        count = size * most
        counters = exchange.own("RECV_COUNTERS", (size, 1), torch.int32)
        filled = exchange.numbers[:most] < counters  # the others hold rows of earlier calls
        place = torch.add(choices[..., 0], exchange.ranks[:, None], alpha=most)
        place = torch.where(filled, place, count).flatten()  # of each slot; one more row takes what is not filled
        choices = _put(choices, place, -1)
        ids = choices[:, 1 : 1 + top_k] - exchange.rank * local
        ids = torch.where(ids.div(local, rounding_mode="floor") == 0, ids, -1)
        weights = choices[:, 1 + top_k : 1 + 2 * top_k].contiguous().view(torch.float32)
        if problem.format == TOKENS:
            moved, of_scales = _put(x.view(torch.int64), place), _put(scales[0], place) if scales else None
            moved = moved.view(self._dtype)
            made = arranged(moved, of_scales, ids, weights, local, TOKENS, exact=False)
        else:  # moves the rows once
            slot = _put(exchange.places[:count, None], place, 0)
            made = arranged(slot, None, ids, weights, local, problem.format, exact=False)
            shape = made.x.shape[:-1]
            slots = made.x.flatten().clamp(0, count - 1)  # of rows without an expert as memory came
            moved = x.view(torch.int64).flatten(0, 1).index_select(0, slots).view(self._dtype).unflatten(0, shape)
            of_scales = scales[0].flatten(0, 1).index_select(0, slots).unflatten(0, shape) if scales else None
        header = Header(*self._form, outgoing.x.shape[0], most, moved.numel() // moved.shape[-1])
        handle = self._handles.of(header, outgoing.topk_ids, made.slots, made.weights)
        ids_of_rows, weights_of_rows = (made.slots, made.weights) if problem.format == TOKENS else (None, None)
        return Dispatched(moved, of_scales, ids_of_rows, weights_of_rows, made.counts, made.offsets, handle)


class Combine(CombineAdapter):
    """Each rank reads the sums of its tokens from the ranks that have some."""

    def __init__(self, problem: CombineProblem) -> None:
        super().__init__(problem)
        self._row_bytes: int = problem.hidden_size * getattr(torch, problem.dtype).itemsize
        self._connected: dict[tuple[str, int], Exchange] = {}

    def connect(self, y: Tensor, handle: Handle, header: Header, group: ProcessGroup, timeout_s: float) -> None:
        device, most = y.device, header.max_tokens
        self._connected[group.group_name, most] = exchange_for(
            "moe_combine", group, device, most, self._row_bytes, timeout_s
        )
        self.launch(y, handle, header, y.new_empty((header.tokens, y.shape[-1])), group, timeout_s)
        torch.cuda.current_stream(device).synchronize()

    def launch(
        self, y: Tensor, handle: Handle, header: Header, out: Tensor, group: ProcessGroup, timeout_s: float
    ) -> None:
        most, size, tokens = header.max_tokens, header.world_size, header.tokens
        exchange = self._connected.get((group.group_name, most))
        if exchange is None:
            exchange = exchange_before("moe_combine", group, most, self._row_bytes)
            self._connected[group.group_name, most] = exchange
        needed = needed_by(handle.topk_ids, header.num_experts, exchange)
        # Nobody reads sums of tokens without an expert here, which hold anything.
        sums = y if self.problem.format == TOKENS else gathered(y, handle.slots, handle.weights)
        number = exchange.numbers[:tokens, None]
        with on_device_of(y):
            exchange.barrier(timeout_s)
            for part, values in (("TOPK_TARGET_RANKS", exchange.ranks), ("TOPK_SEND_INDICES", number)):
                exchange.own(part, (tokens, size), torch.int32).copy_(torch.where(needed, values, -1))
            own = exchange.own("PAYLOAD_DATA", (size, most, y.shape[-1]), y.dtype)
            own.view(size * most, -1).copy_(sums)
            total = moe_a2a_combine(
                payload=own,
                local_num_tokens=tokens,
                workspace=exchange.memory,
                metainfo=exchange.metainfo,
                runtime_max_tokens_per_rank=most,
                ep_rank=exchange.rank,
                ep_size=size,
                top_k=size,
                combine_payload_offset=exchange.offset("PAYLOAD_DATA"),
                payload_in_workspace=True,
                enable_pdl=False,
            )
        out.copy_(total)


def needed_by(ids: Tensor, num_experts: int, exchange: Exchange) -> Tensor:
    """Whether each rank has an expert of each token, bool ``[T, W]``."""
    owner = ids.div(num_experts // exchange.world_size, rounding_mode="floor")  # of no expert, no rank
    return (owner[:, :, None] == exchange.ranks).any(1)


def _put(rows: Tensor, place: Tensor, fill: int | None = None) -> Tensor:
    """Rows ``[..., columns]`` at their places, those of no row filled or as memory came; the place behind the last is
    for the rest.
    """
    rows = rows.reshape(place.shape[0], rows.shape[-1])
    shape = (place.shape[0] + 1, rows.shape[1])
    made = rows.new_empty(shape) if fill is None else rows.new_full(shape, fill)
    return made.index_copy_(0, place, rows)[:-1]
