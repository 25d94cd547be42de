"""What a dispatch returns: the received tokens, and the handle by which a combine sends results back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.comm.experts.problem import FIXED, FORMATS, KEPT, ROWS, TOKENS

_DTYPES = [torch.int32, torch.int32, torch.float32, torch.int64, torch.int64, torch.int32]  # behind the header
EXPERTS, COMBINE = "experts", "combine"
_PARTS = 1 + len(_DTYPES)
_PADDED = (FIXED, KEPT)  # with a capacity
_MOST_SHARED = 256  # headers; each number of tokens has its own


class Dispatched(NamedTuple):
    """The tokens that a rank received.

    Attributes:
        x: rows in the format: ``[R, H]``, or ``[E / W, M, H]`` if masked. Rows of no expert hold anything.
        scales: float32, of the rows, with the last dimension ``ceil(H / 128)``; None where x came without.
        topk_ids: int32 ``[R, top_k]``, ids among the experts of this rank, -1 for others; None but for ``tokens``.
        topk_weights: float32 ``[R, top_k]``, 0 where the id is -1; None but for ``tokens``.
        counts: int32 ``[E / W]``, rows of each expert of this rank: `grouped_gemm` takes it as `group_sizes`.
        offsets: int32 ``[E / W]``, the end of each expert in x, as `grouped_gemm` takes it; None but for
            ``contiguous``.
        handle: what `moe_combine` takes.
    """

    x: Tensor
    scales: Tensor | None
    topk_ids: Tensor | None
    topk_weights: Tensor | None
    counts: Tensor
    offsets: Tensor | None
    handle: list[Tensor]

    @property
    def format(self) -> str:
        """The format of x."""
        if self.topk_ids is not None:
            return TOKENS
        return FORMATS[1] if self.offsets is not None else FORMATS[2]

    @property
    def weighed_by(self) -> str:
        """Who multiplies by the weights of the router: ``"experts"`` (`fused_moe`), or ``"combine"``."""
        return EXPERTS if self.topk_ids is not None else COMBINE


class Handle(NamedTuple):
    """A handle, as adapters read it. As an argument it is a list of the same tensors, in this order.

    Attributes:
        header: int64 in CPU memory, the numbers of `Header`.
        topk_ids: int32 ``[T, top_k]``, the global ids of this rank's own tokens.
        slots: int32 ``[R, top_k]``, for each received token and choice the row of x, counted through all experts if
            masked; for ``tokens`` the local id. -1: the expert is on another rank, or is an earlier choice.
        weights: float32 ``[R, top_k]``, 0 where slots are -1.
        splits: int64 in CPU memory. Of rows ``all`` the tokens of each rank; of ``needed``, and of ``kept`` without a
            capacity, how many rows this rank sent to each rank, then how many it received from each; else empty.
        sent: int64, the token of each row that this rank sent, where splits has their numbers; else empty.
        state: int32, what a combine of the library that sent the rows reads, of ``kept``; else empty.
    """

    header: Tensor
    topk_ids: Tensor
    slots: Tensor
    weights: Tensor
    splits: Tensor
    sent: Tensor
    state: Tensor


class Header(NamedTuple):
    """The numbers of a handle.

    Attributes:
        format: index in `FORMATS`.
        rows: index in `ROWS`.
        world_size: ranks.
        num_experts: experts of all ranks.
        tokens: this rank's own.
        max_tokens: the most of a rank; 0 if exact.
        num_rows: rows of x, counted through all experts if masked.
    """

    format: int
    rows: int
    world_size: int
    num_experts: int
    tokens: int
    max_tokens: int
    num_rows: int

    @property
    def y_shape(self) -> tuple[int, ...]:
        """The shape of y without its columns."""
        experts = self.num_experts // self.world_size
        return (experts, self.num_rows // experts) if FORMATS[self.format] == FORMATS[2] else (self.num_rows,)


def numbers_tensor(header: Header) -> Tensor:
    """The first tensor of a handle."""
    return torch.tensor(header, dtype=torch.int64, device="cpu")


def handle_of(header: Header, topk_ids: Tensor, slots: Tensor, weights: Tensor, *of_rows: Tensor) -> list[Tensor]:
    """A handle as an argument. `of_rows`: splits, sent, and state if there is some."""
    numbers = numbers_tensor(header)
    splits, sent, *state = of_rows or (numbers.new_empty(0), slots.new_empty(0, dtype=torch.int64))
    return [numbers, topk_ids, slots, weights, splits, sent, *(state or [slots.new_empty(0)])]


class Handles:
    """Makes the handles of one kernel with a capacity, on one device: what depends on sizes alone is made once."""

    def __init__(self) -> None:
        self._shared: dict[Header, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def of(self, header: Header, topk_ids: Tensor, slots: Tensor, weights: Tensor) -> list[Tensor]:
        """A handle, as of `handle_of`."""
        shared = self._shared.get(header)
        if shared is None:
            if len(self._shared) >= _MOST_SHARED:
                self._shared.clear()
            numbers, *_, splits, sent, state = handle_of(header, topk_ids, slots, weights)
            shared = self._shared[header] = (numbers, splits, sent, state)
        numbers, *empty = shared
        return [numbers, topk_ids, slots, weights, *empty]


def header_of(handle: Sequence[Tensor]) -> Header:
    """The numbers of a handle."""
    return Header(*handle[0].tolist())


def numbers_of(handle: Any) -> Header | None:
    """The same of a list that may be a handle; None of anything else, and of tensors of other types."""
    if type(handle) is not list or len(handle) != len(Handle._fields):
        return None
    header = handle[0]
    if type(header) is not Tensor or not header.is_cpu or header.is_nested or header.layout is not torch.strided:
        return None
    return header_of(handle) if header.dtype is torch.int64 and header.shape == (len(Header._fields),) else None


class Headers:
    """Reads the numbers of handles whose headers come again, in an eighth of the time of `numbers_of`."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor, int, Any, bytes, Header]] = {}
        self._rest: tuple[Any, Any, Any] = (None, None, None)

    def of(self, handle: Any) -> Header | None:
        """As `numbers_of`."""
        if type(handle) is not list or len(handle) != _PARTS:
            return None
        found = self._known.get(id(handle[0]))
        if found is None:
            return self._learned(handle)
        header, _, address, memory, numbers, known = found
        # A header is memory that its owner may write, or exchange.
        return known if header.data_ptr() == address and memory.raw == numbers else self._learned(handle)

    def has_rest(self, handle: Sequence[Tensor]) -> bool:
        """Whether splits, sent and state of a handle are the tensors that `keep_rest` was given last."""
        splits, sent, state = self._rest
        return handle[6] is state and handle[5] is sent and handle[4] is splits

    def keep_rest(self, handle: Sequence[Tensor]) -> None:
        """Keep those of a handle that was checked, if they are the empty ones that dispatches of one form share."""
        splits, sent, state = handle[4:]
        if not splits.numel() + sent.numel() + state.numel():
            self._rest = (splits, sent, state)

    def _learned(self, handle: list[Tensor]) -> Header | None:
        numbers = numbers_of(handle)
        if numbers is not None and handle[0].is_contiguous():
            if len(self._known) >= _MOST_SHARED:
                self._known.clear()
            header = handle[0]
            address = header.data_ptr()
            memory = (ctypes.c_char * (8 * len(numbers))).from_address(address)
            # With the header and a second tensor of its memory, so that its id and its address stay its own.
            self._known[id(header)] = (header, header.detach(), address, memory, memory.raw, numbers)
        return numbers


def is_handle(handle: object) -> bool:
    """Whether an argument has the form of a handle."""
    if not isinstance(handle, list | tuple) or len(handle) != len(Handle._fields):
        return False
    if not all(isinstance(part, Tensor) and not part.is_nested and part.layout is torch.strided for part in handle):
        return False
    header = handle[0]
    if header.dtype is not torch.int64 or header.shape != (len(Header._fields),) or not header.is_cpu:
        return False
    if [part.dtype for part in handle[1:]] != _DTYPES:
        return False
    given, ids, slots, weights = header_of(handle), handle[1], handle[2], handle[3]
    return bool(
        0 <= given.format < len(FORMATS)
        and 0 <= given.rows < len(ROWS)
        and min(given.world_size, given.num_experts) > 0
        and given.num_experts % given.world_size == 0
        and min(given.max_tokens, given.num_rows) >= 0
        and ids.ndim == slots.ndim == 2
        and ids.shape[0] == given.tokens
        and slots.shape == weights.shape
        and slots.shape[1] == ids.shape[1]
        and (ROWS[given.rows] not in _PADDED or not given.max_tokens or _is_padded(given, slots.shape[0]))
        and (ROWS[given.rows] != FIXED or given.max_tokens > 0)
    )


def _is_padded(header: Header, received: int) -> bool:
    """Whether `max_tokens` rows came from every rank."""
    return received == header.world_size * header.max_tokens and header.tokens <= header.max_tokens
