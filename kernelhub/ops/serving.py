"""What calls of serving are made from: the sequences of one engine step, and tensors to put in.

Each op has a module `serving` with a function from its problem to calls of it. Weights and scales that all layers of a
kind share are made once; what belongs to one step's tokens is made per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.models.batches import Batch as Batch

Arguments = dict[str, Any]
Sizes = Mapping[str, int]

_DRAWN = (1 << 20) - 3  # numbers drawn of a large tensor, odd so that rows differ; the rest repeats them
_CODES = 64.0  # size of the numbers that float8 codes hold
# Significant bits of scales: all, those of bfloat16, none but the power of two. Layouts that kernels pack weights in
# hold no others, some of them; every kernel is called with the most bits that it supports.
SCALE_BITS = (None, 8, 1)


Calls = Callable[[Batch], Arguments]


class Values:
    """Tensors on one device with values of a sensible size; large ones repeat what was drawn for their beginning.

    Args:
        device: where tensors are made.
        seed: equal seeds give equal tensors on devices of one kind.
        filled: otherwise floats and codes are left as memory came, for callers that only ask about forms; lengths,
            indices and tables are always valid.
        cache_bytes: most memory for one paged cache; beyond it sequences share pages.
        scale_bits: significant bits of positive factors, one of `SCALE_BITS`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        seed: int = 0,
        filled: bool = True,
        cache_bytes: int = 1 << 30,
        scale_bits: int | None = None,
    ) -> None:
        self.device = device
        self._scale_bits = scale_bits
        self.filled = filled
        self.cache_bytes = cache_bytes
        self._random = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | str, size: float = 1.0) -> Tensor:
        """Normal numbers; of float8 their codes, about 64 times `size`."""
        kind: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        spread = size * _CODES if kind is E4M3 else size

        def draw(count: int) -> Tensor:
            drawn = torch.randn(count, generator=self._random, device=self.device, dtype=torch.float32) * spread
            return (drawn.clamp(-448, 448) if kind is E4M3 else drawn).to(kind)

        return self._made(shape, kind, draw)

    def near(self, *shape: int, size: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Positive factors from half of `size` to one and a half of it; of float8_e8m0fnu powers of two."""

        def draw(count: int) -> Tensor:
            drawn = torch.rand(count, generator=self._random, device=self.device, dtype=torch.float32)
            if dtype is E8M0:
                exponent = torch.tensor(size, dtype=torch.float32, device="cpu").log2().round() + 127
                return (drawn * 3 + float(exponent) - 1).to(torch.uint8).view(E8M0)
            return self._rounded((drawn + 0.5) * size).to(dtype)

        return self._made(shape, dtype, draw)

    def _rounded(self, factors: Tensor) -> Tensor:
        """Factors with as many significant bits as they may have."""
        if self._scale_bits is None:
            return factors
        mantissa, exponent = torch.frexp(factors)
        steps = float(1 << self._scale_bits)
        return torch.ldexp((mantissa * steps).round() / steps, exponent)

    def codes(self, *shape: int) -> Tensor:
        """Bytes that each hold two float4 numbers."""

        def draw(count: int) -> Tensor:
            return torch.randint(0, 256, (count,), generator=self._random, device=self.device, dtype=torch.uint8)

        return self._made(shape, torch.uint8, draw)

    def integers(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """These integers."""
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def offsets(self, lengths: Sequence[int]) -> Tensor:
        """Where sequences of these lengths begin and end: int32 ``[len(lengths) + 1]``."""
        return self.integers([0, *accumulate(lengths)])

    def order(self, count: int) -> Tensor:
        """The numbers below `count` in random order: int64."""
        return torch.randperm(count, generator=self._random, device=self.device)

    def picks(self, rows: int, among: int, count: int) -> Tensor:
        """int32 ``[rows, count]``: numbers below `among`, no two of a row alike."""
        first = torch.randint(0, max(among, 1), (rows, 1), generator=self._random, device=self.device)
        apart = max(1, among // max(count, 1))
        step = torch.arange(count, device=self.device) * apart
        return ((first + step) % max(among, 1)).int()

    def pages(self, batch: Batch, page_size: int, page_bytes: int) -> tuple[int, Tensor]:
        """How many pages a cache has, and the table of each sequence's: int32 ``[num_seqs, max_pages]``.

        Every sequence has the pages that its tokens need, in random order; more of them than `cache_bytes` has room
        for are handed out again. Places past a sequence's pages hold page 0.
        """
        used = [-(-length // page_size) for length in batch.kv_lens]
        room = max(self.cache_bytes // max(page_bytes, 1), max(used, default=1), 1)
        num_pages = max(1, min(sum(used), room))
        columns = max(-(-batch.max_kv_len // page_size), max(used, default=1), 1)
        begins = torch.tensor([0, *accumulate(used)][: len(used)], device=self.device, dtype=torch.int64).reshape(-1, 1)
        places = torch.arange(columns, device=self.device)
        taken = self.order(num_pages)[(begins + places) % num_pages]
        return num_pages, torch.where(
            places < torch.tensor(used, device=self.device, dtype=torch.int64).reshape(-1, 1), taken, 0
        ).int()

    def _made(self, shape: Sequence[int], dtype: torch.dtype, draw: Callable[[int], Tensor]) -> Tensor:
        made = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        count = made.numel()
        if not self.filled or not count:
            return made
        flat = made.reshape(-1).view(torch.uint8)
        drawn = draw(min(count, _DRAWN)).view(torch.uint8)
        done = drawn.numel()
        flat[:done] = drawn
        while done < flat.numel():
            more = min(done, flat.numel() - done)
            flat[done : done + more] = flat[:more]
            done += more
        return made


def kv_scales(values: Values, kind: str | None, num_kv_heads: int, size: float) -> float | Tensor | None:
    """The scale of a float8 cache in the form that a problem says; None if it has none."""
    if kind is None:
        return None
    if kind == "value":
        return size
    return values.near(num_kv_heads if kind == "head" else 1, size=size)
