"""`moe_dispatch` and `moe_combine` by DeepEP's kernels for high throughput, between the GPUs of one machine.

A dispatch waits for the number of rows that come, and returns just these, in the order of ranks, then of their tokens.
With a capacity it returns as many rows as could come, and waits for nothing: the ids of those behind are -1.

A combine needs what the dispatch found out: how many rows each rank and channel sent, the tokens of the rows that came,
and where those of this rank were put. It travels in the state of the handle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.deep_ep.buffers import Exchange, connected, exchange_of
from kernelhub.backends.shared.operands import contiguous_copy, is_row_major, on_device_of
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.experts.adapter import CombineAdapter, DispatchAdapter, Outgoing
from kernelhub.ops.comm.experts.formats import arranged, gathered
from kernelhub.ops.comm.experts.problem import FORMATS, KEPT, ROWS, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched, Handle, Header, handle_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ITEM_BYTES = 2  # of a row of a combine, whatever the dtype of its dispatch


class State(NamedTuple):
    """What a combine reads of its dispatch, all int32.

    Attributes:
        ranks: ``[W, W]``, rows that ranks up to i sent to rank j.
        channels: ``[W, C]``, where the rows of each channel of each rank begin.
        sources: ``[R]``, the token of each received row on its rank.
        places: ``[T, W]``, where each own token was put for each rank, -1 where it was not sent.
    """

    ranks: Tensor
    channels: Tensor
    sources: Tensor
    places: Tensor

    def flat(self) -> Tensor:
        """One tensor, as a handle has it."""
        return torch.cat([part.reshape(-1) for part in self])


def state_of(flat: Tensor, world_size: int, rows: int, tokens: int, channels: int) -> State:
    """The parts of `State.flat`.

    Raises:
        KernelUnavailable: it was made for another number of channels.
    """
    shapes = ((world_size, world_size), (world_size, channels), (rows,), (tokens, world_size))
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if flat.numel() != sum(sizes):
        raise KernelUnavailable(
            f"deep_ep: the handle has a state of {flat.numel()} numbers, and {channels} channels make {sum(sizes)}: "
            "Buffer.set_num_sms was called between the plans; call it before the first prepare, on every rank"
        )
    return State(*(part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)))


class Dispatch(DispatchAdapter):
    """Each token to the ranks that need it, once."""

    def connect(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> None:
        connected(group, outgoing.x.device, self.problem.hidden_size * _ITEM_BYTES, timeout_s)

    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        problem = self.problem
        exchange = exchange_of(group, problem.hidden_size * _ITEM_BYTES)
        ids = outgoing.topk_ids
        ids = torch.where((ids >= 0) & (ids < problem.num_experts), ids, -1).long()
        x, scales = _rows(outgoing.x), None if outgoing.scales is None else _rows(outgoing.scales)
        with on_device_of(x):
            per_rank, _, per_expert, in_rank, _ = exchange.buffer.get_dispatch_layout(ids, problem.num_experts)
            came, came_ids, came_weights, _, kept, _ = exchange.buffer.dispatch(
                x if scales is None else (x, scales),
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=outgoing.topk_weights,
                num_worst_tokens=problem.world_size * outgoing.max_tokens,  # 0: exactly those that come
                config=exchange.dispatch,
            )
        rows, row_scales = came if isinstance(came, tuple) else (came, None)
        ranks, _, channels, sources, _, places = kept
        return self._dispatched(
            outgoing,
            group.rank(),
            (rows, row_scales, came_ids.int(), came_weights),
            (per_rank, in_rank),
            State(ranks, channels, sources, places),
        )

    def _dispatched(
        self,
        outgoing: Outgoing,
        rank: int,
        came: tuple[Tensor, Tensor | None, Tensor, Tensor],
        sent: tuple[Tensor, Tensor],
        state: State,
    ) -> Dispatched:
        problem = self.problem
        local = problem.num_experts // problem.world_size
        made = arranged(*came, local, problem.format, exact=not outgoing.max_tokens)
        header = Header(
            FORMATS.index(problem.format),
            ROWS.index(KEPT),
            problem.world_size,
            problem.num_experts,
            outgoing.x.shape[0],
            outgoing.max_tokens,
            made.x.numel() // made.x.shape[-1],
        )
        per_rank, in_rank = sent
        splits, tokens = torch.empty(0, dtype=torch.int64, device="cpu"), in_rank.new_empty(0, dtype=torch.int64)
        if not outgoing.max_tokens:  # any combine can use them
            from_each = state.ranks[:, rank].diff(prepend=per_rank.new_zeros(1))
            splits = torch.cat([per_rank, from_each]).cpu().long()
            tokens = _tokens(in_rank, int(splits[: problem.world_size].sum()))
        of_rows = (splits, tokens, state.flat())
        handle = handle_of(header, outgoing.topk_ids, made.slots, made.weights, *of_rows)
        ids, weights = (made.slots, made.weights) if problem.format == TOKENS else (None, None)
        return Dispatched(made.x, made.scales, ids, weights, made.counts, made.offsets, handle)


class Combine(CombineAdapter):
    """The sums of each rank to the ranks of their tokens, which add them in float32 in the order of ranks."""

    def connect(self, y: Tensor, handle: Handle, header: Header, group: ProcessGroup, timeout_s: float) -> None:
        connected(group, y.device, self.problem.hidden_size * _ITEM_BYTES, timeout_s)

    def launch(
        self, y: Tensor, handle: Handle, header: Header, out: Tensor, group: ProcessGroup, timeout_s: float
    ) -> None:
        exchange = exchange_of(group, self.problem.hidden_size * _ITEM_BYTES)
        state = self._state(handle, header, exchange)
        if self.problem.format == TOKENS:
            sums = _rows(y)  # each row that came has an expert here; rows behind them are not sent
        else:
            sums = gathered(y, handle.slots, handle.weights).to(y.dtype)
        with on_device_of(y):
            # The kernel writes where unsent tokens would be into `places`; the handle may be used again.
            kept = (state.ranks, None, state.channels, state.sources, None, state.places.clone())
            total, _, _ = exchange.buffer.combine(sums, kept, config=exchange.combine)
        out.copy_(total)

    def _state(self, handle: Handle, header: Header, exchange: Exchange) -> State:
        rows = handle.slots.shape[0]
        return state_of(handle.state, header.world_size, rows, header.tokens, exchange.channels)


def _rows(tensor: Tensor) -> Tensor:
    """Rows as the kernels load them: contiguous, and 16 bytes at a time."""
    return tensor if is_row_major(tensor) else contiguous_copy(tensor)


def _tokens(in_rank: Tensor, count: int) -> Tensor:
    """The token of each row that is sent, by rank, then by token; nothing waits for the device."""
    sent = in_rank.t().reshape(-1)
    return torch.argsort(~sent, stable=True)[:count] % max(len(in_rank), 1)
