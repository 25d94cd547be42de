"""`grouped_gemm`: contiguous rows, padded to the library's blocks on the device, and masked ones.

In the contiguous form the library takes a group's index per row, and every group must start at a multiple of its
alignment (128). Only the device has the offsets, so rows are gathered into as many blocks as there can be at
most, those without a row marked by -1, which the library skips; and rows of the result are gathered back. Nothing waits
for the device.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.deep_gemm.layouts import scales_of_blocks, scales_of_rows
from kernelhub.backends.deep_gemm.loaded import function
from kernelhub.backends.shared.operands import on_device_of, row_major
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter, GroupedOperands
from kernelhub.ops.gemm.grouped.problem import GroupedGemmProblem

_HOPPER_TILE = 128  # rows of the masked form's largest tile; of Blackwell's it is not known to be below 256


class _Contiguous(GroupedGemmAdapter):
    """Rows sorted by group."""

    call: str

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._gemm = function(self.call)
        self._alignment = function("alignment")

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        result, there = self._product(operands)
        torch.where(there.unsqueeze(1), result, out, out=out)

    def compute(self, operands: GroupedOperands) -> Tensor:
        return self._product(operands)[0]

    def _product(self, operands: GroupedOperands) -> tuple[Tensor, Tensor]:
        """The result [M, N], and which of its rows belong to a group."""
        a = operands.a
        assert operands.offsets is not None
        places = _padded(operands.offsets, a.shape[0], _number(self._alignment()))
        rows, weights = self._operands(operands, places.sources)
        made = torch.empty(places.sources.shape[0], self.problem.n, dtype=torch.bfloat16, device=a.device)
        with on_device_of(a):
            self._gemm(rows, weights, made, places.groups)
        return made.index_select(0, places.destinations), places.there

    @abc.abstractmethod
    def _operands(self, operands: GroupedOperands, sources: Tensor) -> tuple[Any, Any]:
        """Rows, copied from there, and weights as the library takes them."""


class Bf16Contiguous(_Contiguous):
    """bfloat16 without scales."""

    call = "bf16_contiguous"

    def _operands(self, operands: GroupedOperands, sources: Tensor) -> tuple[Any, Any]:
        return operands.a.index_select(0, sources), row_major(operands.b)


class Fp8Contiguous(_Contiguous):
    """Scales in blocks, in float32, as Hopper's kernel requires."""

    call = "fp8_contiguous"
    exponents = False

    def _operands(self, operands: GroupedOperands, sources: Tensor) -> tuple[Any, Any]:
        a, b, _, _, a_scale, b_scale, *_ = operands
        assert a_scale is not None
        assert b_scale is not None
        rows = row_major(a).view(torch.int64).index_select(0, sources).view(a.dtype)
        byte = a_scale.element_size() == 1
        scales = (a_scale.view(torch.uint8) if byte else a_scale).index_select(0, sources)
        of_blocks = scales_of_blocks(b_scale, self.problem.n, self.exponents)
        return (rows, scales_of_rows(scales, self.exponents)), (row_major(b), of_blocks)


class Fp8ContiguousUe8m0(Fp8Contiguous):
    """Scales are exponents, as Blackwell's kernel requires."""

    exponents = True


class _Masked(GroupedGemmAdapter):
    """Rows of a group in a place of its own.

    Tiles are stored whole, so a group's place must end where a tile does, or rows of the next group are overwritten.
    """

    tile = 256
    call: str

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._gemm = function(self.call)

    def launch(self, operands: GroupedOperands, out: Tensor) -> None:
        assert operands.group_sizes is not None
        room = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
        there = room < operands.group_sizes.unsqueeze(1)
        torch.where(there.unsqueeze(2), self._product(operands), out, out=out)

    def compute(self, operands: GroupedOperands) -> Tensor:
        return self._product(operands).contiguous()

    def _product(self, operands: GroupedOperands) -> Tensor:
        a = operands.a
        assert operands.group_sizes is not None
        room = a.shape[1]
        wide = -(-room // self.tile) * self.tile
        sizes = row_major(operands.group_sizes.clamp(0, room))
        made = torch.empty(a.shape[0], wide, self.problem.n, dtype=torch.bfloat16, device=a.device)
        rows, weights = self._operands(operands, wide)
        with on_device_of(a):
            self._gemm(rows, weights, made, sizes, room)
        return made[:, :room]

    @abc.abstractmethod
    def _operands(self, operands: GroupedOperands, wide: int) -> tuple[Any, Any]:
        """Rows, in places of that many, and weights as the library takes them."""


class Bf16Masked(_Masked):
    """bfloat16 without scales."""

    call = "bf16_masked"

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self.tile = _HOPPER_TILE if problem.device.capability[0] == 9 else self.tile

    def _operands(self, operands: GroupedOperands, wide: int) -> tuple[Any, Any]:
        return row_major(_with_room(operands.a, wide)), row_major(operands.b)


class Fp8Masked(_Masked):
    """Scales in blocks, in float32, as Hopper's kernel requires."""

    call = "fp8_masked"
    tile = _HOPPER_TILE
    exponents = False

    def _operands(self, operands: GroupedOperands, wide: int) -> tuple[Any, Any]:
        a, b, _, _, a_scale, b_scale, *_ = operands
        assert a_scale is not None
        assert b_scale is not None
        of_rows = scales_of_rows(_with_room(a_scale, wide), self.exponents)
        of_blocks = scales_of_blocks(b_scale, self.problem.n, self.exponents)
        return (row_major(_with_room(a, wide)), of_rows), (row_major(b), of_blocks)


class Fp8MaskedUe8m0(Fp8Masked):
    """Scales are exponents, as Blackwell's kernel requires."""

    tile = _Masked.tile
    exponents = True


class _Places(NamedTuple):
    """Where rows go.

    Attributes:
        groups: of each padded row, int32, -1 where the library shall skip.
        sources: of each padded row, the row that is copied there.
        destinations: of each row, the padded one with its result.
        there: of each row, whether it belongs to a group.
    """

    groups: Tensor
    sources: Tensor
    destinations: Tensor
    there: Tensor


def _padded(offsets: Tensor, rows: int, alignment: int) -> _Places:
    """Places of rows whose groups end at `offsets`, every group padded to the alignment; whatever the offsets are."""
    count, device = offsets.shape[0], offsets.device
    ends = offsets.long().clamp(0, rows).cummax(0).values
    starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
    blocks_of = (ends - starts + alignment - 1) // alignment
    last = blocks_of.cumsum(0)  # the block after a group's last
    shift = starts - (last - blocks_of) * alignment  # from a padded row to its source
    most = (rows + min(rows, count) * (alignment - 1)) // alignment
    of_block = torch.searchsorted(last, torch.arange(most, device=device), right=True)
    groups = torch.where(of_block < count, of_block, -1).int()
    row = torch.arange(rows, device=device)
    padded = torch.arange(most * alignment, device=device).view(most, alignment)
    sources = (padded + shift[of_block.clamp(max=count - 1)].unsqueeze(1)).clamp_(0, max(rows - 1, 0))
    of_row = torch.searchsorted(ends, row, right=True)
    there = of_row < count
    destinations = (row - shift[of_row.clamp(max=count - 1)]).clamp_(0, most * alignment - 1)
    return _Places(
        groups.unsqueeze(1).expand(most, alignment).contiguous().view(-1), sources.view(-1), destinations, there
    )


def _with_room(rows: Tensor, wide: int) -> Tensor:
    """Rows [G, M, ...] in places [G, wide, ...]; values past M are not read."""
    if rows.shape[1] == wide:
        return rows
    raw = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    made = torch.zeros(raw.shape[0], wide, raw.shape[2], dtype=raw.dtype, device=raw.device)
    made[:, : rows.shape[1]] = raw
    return made.view(rows.dtype)


def _number(alignment: int | tuple[int, ...]) -> int:
    """Some copies give one for M and one for K."""
    return int(alignment if isinstance(alignment, int) else alignment[0])
