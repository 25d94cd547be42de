"""`moe_dispatch` and `moe_combine` by TensorRT-LLM's one-sided exchange in FlashInfer.

**Dispatch.** Each rank stores its tokens in the memory of the ranks that need them, then a flag, and waits for those of
all ranks. A token goes to the next free place of its sender there, so that its number travels with it: this puts rows
in the order of their tokens, ``max_tokens`` of each rank.

**Combine.** Each rank puts its sums in its own memory, and after a flag each rank reads those of its tokens from all
ranks. Where they are follows from the ids of its tokens alone, so that handles of any dispatch with a capacity fit,
also after others.

To the kernels, a rank is one expert: the choices of a token are the ranks that need it. They neither wait until a
rank has read what it got before they store again, nor keep flags that a fast rank overwrites, so that every call begins
with a barrier of all ranks. Launches are not programmatic (PDL). What is before and after the library's launches is one
launch of Triton each, of `rows.py`; formats per expert take two more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_combine, moe_a2a_dispatch
from torch import Tensor

from kernelhub.backends.flashinfer.comm.experts import rows
from kernelhub.backends.flashinfer.comm.experts.workspace import Exchange, exchange_before, exchange_for
from kernelhub.backends.shared.arrange import Arrange
from kernelhub.backends.shared.operands import is_row_major, on_device_of, row_major, up_to
from kernelhub.ops.comm.experts.adapter import CombineAdapter, DispatchAdapter, Outgoing
from kernelhub.ops.comm.experts.problem import BLOCK, FIXED, FORMATS, ROWS, TOKENS, CombineProblem, DispatchProblem
from kernelhub.ops.comm.experts.received import Dispatched, Handle, Handles, Header
from kernelhub.ops.comm.group import OfGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WORD = 4  # bytes of an id or weight
_UNIT = 4  # words that are moved at once, by which the beginning of the next rows is aligned, too
_WARPS, _LANES = 4, 128  # of a program
_MOST_COLUMNS = 2048  # that a program handles at a time


class Dispatch(DispatchAdapter):
    """Each token to the ranks that need it, once."""

    def __init__(self, problem: DispatchProblem) -> None:
        super().__init__(problem)
        top_k, self._dtype = problem.top_k, getattr(torch, problem.dtype)
        self._local = problem.num_experts // problem.world_size
        self._words = up_to(1 + 2 * top_k, _UNIT)  # number of the token, ids, weights
        self._x_words = problem.hidden_size * self._dtype.itemsize // _WORD
        self._scales = -(-problem.hidden_size // BLOCK) if problem.scales else 0
        self._row_bytes = _WORD * (self._words + self._x_words + self._scales)
        self._narrow = _block(max(self._words, self._scales))
        self._arrange = None
        if problem.format != TOKENS:
            block = min(_MOST_COLUMNS, _block(self._x_words))
            self._arrange = Arrange(problem, self._x_words, self._scales, block, self._narrow, _WARPS, _launcher)
        self._form = (FORMATS.index(problem.format), ROWS.index(FIXED), problem.world_size, problem.num_experts)
        self._handles = Handles()
        self._connected: OfGroups[Exchange] = OfGroups()

    def connect(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> None:
        device, most = outgoing.x.device, outgoing.max_tokens
        made = exchange_for("moe_dispatch", group, device, most, self._row_bytes, timeout_s)
        self._connected.keep(group, made, most)
        self.launch(outgoing, group, timeout_s)  # loads the code, which a capture cannot do
        torch.cuda.current_stream(device).synchronize()

    def launch(self, outgoing: Outgoing, group: ProcessGroup, timeout_s: float) -> Dispatched:
        most, size = outgoing.max_tokens, self.problem.world_size
        exchange = self._connected.get(group, most)
        if exchange is None:
            made = exchange_before("moe_dispatch", group, most, self._row_bytes)
            exchange = self._connected.keep(group, made, most)
        ids, weights, x = (row_major(part) for part in (outgoing.topk_ids, outgoing.topk_weights, outgoing.x))
        received, top_k = size * most, self.problem.top_k
        local_ids, local_weights = ids.new_empty((received, top_k)), weights.new_empty((received, top_k))
        selected, choices = ids.new_empty((len(ids), size)), ids.new_empty((len(ids), self._words))
        counts = ids.new_empty(self._local)
        payloads = [choices, x.view(torch.uint8)]
        if outgoing.scales is not None:
            payloads.append(row_major(outgoing.scales))
        alike: dict[str, Any] = {"TOP_K": top_k, "WORDS": self._words, "RANK": exchange.rank, "LOCAL": self._local}
        with on_device_of(x):
            rows.choices_kernel[(received,)](
                ids,
                weights,
                selected,
                choices,
                local_ids,
                local_weights,
                counts,
                len(ids),
                **alike,
                WORLD=size,
                LANES=self._narrow,
                num_warps=_WARPS,
            )
            exchange.barrier(timeout_s)
            came, *_ = moe_a2a_dispatch(
                token_selected_experts=selected,
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
            made_x, made_scales = self._placed(came, exchange, local_ids, local_weights, counts, alike)
        return self._dispatched(outgoing, made_x, made_scales, local_ids, local_weights, counts)

    def _placed(
        self,
        came: Sequence[Tensor],
        exchange: Exchange,
        local_ids: Tensor,
        local_weights: Tensor,
        counts: Tensor,
        alike: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Received rows and scales in the order of tokens."""
        choices, x, *scales = came
        received, most = len(local_ids), x.shape[1]
        made_x = x.new_empty((received, x.shape[2]))
        made_scales = scales[0].new_empty((received, self._scales)) if scales else None
        rows.places_of_rows_kernel[(received,)](
            choices,
            x,
            scales[0] if scales else local_weights,
            exchange.own("RECV_COUNTERS", (exchange.world_size,), torch.int32),
            made_x,
            local_weights if made_scales is None else made_scales,
            local_ids,
            local_weights,
            counts,
            most,
            **alike,
            X_WORDS=self._x_words,
            SCALES=self._scales,
            COUNTED=self._arrange is None,
            BLOCK=min(_MOST_COLUMNS, _block(self._x_words)),
            NARROW=self._narrow,
            num_warps=_WARPS,
        )
        return made_x, made_scales

    def _dispatched(
        self, outgoing: Outgoing, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, counts: Tensor
    ) -> Dispatched:
        """What the op returns, in its format."""
        form = (*self._form, outgoing.x.shape[0], outgoing.max_tokens)
        if self._arrange is None:
            handle = self._handles.of(Header(*form, x.shape[0]), outgoing.topk_ids, ids, weights)
            return Dispatched(x.view(self._dtype), scales, ids, weights, counts, None, handle)
        made = self._arrange(x, scales, ids, weights, counts)
        moved = made.x.view(self._dtype)
        header = Header(*form, moved.numel() // moved.shape[-1])
        handle = self._handles.of(header, outgoing.topk_ids, made.slots, made.weights)
        return Dispatched(moved, made.scales, None, None, made.counts, made.offsets, handle)


class Combine(CombineAdapter):
    """Each rank reads the sums of its tokens from the ranks that have some."""

    def __init__(self, problem: CombineProblem) -> None:
        super().__init__(problem)
        self._row_bytes: int = problem.hidden_size * getattr(torch, problem.dtype).itemsize
        self._static: dict[str, Any] = {
            "H": problem.hidden_size,
            "TOP_K": problem.top_k,
            "LOCAL": problem.num_experts // problem.world_size,
            "WORLD": problem.world_size,
            "SUMMED": problem.format == TOKENS,
            "BLOCK": min(_MOST_COLUMNS // 2, _block(problem.hidden_size)),
            "LANES": _block(problem.top_k),
            "num_warps": _WARPS,
        }
        self._connected: OfGroups[Exchange] = OfGroups()

    def connect(self, y: Tensor, handle: Handle, header: Header, group: ProcessGroup, timeout_s: float) -> None:
        device, most = y.device, header.max_tokens
        made = exchange_for("moe_combine", group, device, most, self._row_bytes, timeout_s)
        self._connected.keep(group, made, most)
        self.launch(y, handle, header, y.new_empty((header.tokens, y.shape[-1])), group, timeout_s)
        torch.cuda.current_stream(device).synchronize()

    def launch(
        self, y: Tensor, handle: Handle, header: Header, out: Tensor, group: ProcessGroup, timeout_s: float
    ) -> None:
        most, size, tokens = header.max_tokens, header.world_size, header.tokens
        exchange = self._connected.get(group, most)
        if exchange is None:
            made = exchange_before("moe_combine", group, most, self._row_bytes)
            exchange = self._connected.keep(group, made, most)
        operands = [row_major(part) for part in (y, handle.slots, handle.weights, handle.topk_ids)]
        sums = exchange.own("PAYLOAD_DATA", (size, most, y.shape[-1]), y.dtype)
        where = [exchange.own(f"TOPK_{part}", (tokens, size), torch.int32) for part in ("TARGET_RANKS", "SEND_INDICES")]
        with on_device_of(y):
            exchange.barrier(timeout_s)  # nobody reads the sums of the call before any more
            # Nobody reads sums of tokens without an expert here, which hold anything.
            rows.sums_kernel[(size * most,)](*operands, sums, *where, tokens, **self._static)
            total = moe_a2a_combine(
                payload=sums,
                local_num_tokens=tokens,
                workspace=exchange.memory,
                metainfo=exchange.metainfo,
                runtime_max_tokens_per_rank=most,
                ep_rank=exchange.rank,
                ep_size=size,
                top_k=size,
                combine_payload_offset=exchange.offset("PAYLOAD_DATA"),
                payload_in_workspace=True,
                output=out if is_row_major(out) else None,
                enable_pdl=False,
            )
        if total is not out:
            out.copy_(total)


def _block(count: int) -> int:
    """Elements of a vector with room for so many, one for each thread at least."""
    return max(_LANES, int(triton.next_power_of_2(count)))


def _launcher(kernel: Any, static: dict[str, Any], warps: int, stages: int) -> Callable[..., None]:
    """Launches a kernel of `Arrange`."""

    def launch(programs: int, variant: Any, *arguments: Any) -> None:
        kernel[(programs,)](*arguments, **static, num_warps=warps, num_stages=stages)

    return launch
