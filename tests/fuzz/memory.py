"""Tensors in odd memory: any strides, any offset, with bytes around them that nobody may read or write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AROUND_BYTES = 512  # before and after; a multiple of every alignment that kernels ask for
_NO_NUMBER = 0xFF  # NaN as the bytes of any float, -1 as those of an integer
_HUGE = 0x7F  # NaN of float8 and bfloat16, 2,139,062,143 as int32
_WILD = (0, 1, 3, 7, 1 << 20)  # strides of a dimension of size 1, of which nobody may make anything


@dataclass(frozen=True)
class Placed:
    """A tensor within memory that is watched.

    Attributes:
        tensor: the view.
        memory: all bytes, on the same device.
        before: what they were when the tensor was placed.
    """

    tensor: Tensor
    memory: Tensor
    before: Tensor

    def changed(self) -> int:
        """How many bytes are not as they were: none may be, of an operand."""
        return int((self.memory != self.before).sum())

    def trespassed(self) -> int:
        """How many bytes outside of the tensor are not as they were: none may be, of a destination."""
        inside = torch.zeros_like(self.memory)
        _raw_view(inside, self.tensor).fill_(-1 if self.tensor.itemsize > 1 else 0xFF)
        return int(((self.memory != self.before) & (inside == 0)).sum())


def place(tensor: Tensor, strides: Sequence[int] | None = None, offset: int = 0, fill: int = _NO_NUMBER) -> Placed:
    """A copy of a tensor with these strides, its first element `offset` elements past an aligned address."""
    strides = dense(tensor.shape) if strides is None else tuple(strides)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True) if size > 1)
    num_bytes = 2 * _AROUND_BYTES + (offset + max(reach, 0) + 1) * tensor.itemsize
    memory = torch.full((-(-num_bytes // 16) * 16,), fill, dtype=torch.uint8, device=tensor.device)
    start = _AROUND_BYTES // tensor.itemsize + offset
    view = memory.view(tensor.dtype).as_strided(tensor.shape, strides, start)
    if tensor.numel():
        view.view(_RAW[tensor.itemsize]).copy_(tensor.view(_RAW[tensor.itemsize]))
    return Placed(view, memory, memory.clone())


def _raw_view(memory: Tensor, like: Tensor) -> Tensor:
    return memory.view(_RAW[like.itemsize]).as_strided(like.shape, like.stride(), like.storage_offset())


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod([max(size, 1) for size in shape[at + 1 :]]) for at in range(len(shape)))


def gapped(tensor: Tensor, random: Random) -> Placed | None:
    """Non-unit strides: some dimensions step 2 or 3 times as far as they need to."""
    several = [at for at, size in enumerate(tensor.shape) if size > 1]
    if not several:
        return None
    chosen = random.choice(([random.choice(several)], [several[-1]], several))
    strides, step = [0] * tensor.ndim, 1
    for at in reversed(range(tensor.ndim)):
        strides[at] = step * (random.choice((2, 3)) if at in chosen else 1)
        step = strides[at] * max(tensor.shape[at], 1)
    return place(tensor, strides, 0, _fill(random))


def shifted(tensor: Tensor, random: Random) -> Placed | None:
    """Contiguous, but that it starts 1 to 15 elements past an aligned address."""
    return place(tensor, None, random.randint(1, 15), _fill(random)) if tensor.numel() else None


def within(tensor: Tensor, random: Random) -> Placed | None:
    """Rows within wider ones, whose length is a multiple of 16 bytes or not."""
    if not tensor.ndim or not tensor.numel():
        return None
    more = random.choice((1, 2, 3, 5, 8, 16, 64))
    wide = (*tensor.shape[:-1], tensor.shape[-1] + more)
    return place(tensor, dense(wide), random.choice((0, 0, 1, 8, 16)), _fill(random))


def permuted(tensor: Tensor, random: Random) -> Placed | None:
    """Dimensions in another order in memory."""
    if sum(size > 1 for size in tensor.shape) < 2:
        return None
    order = list(range(tensor.ndim))
    while True:
        random.shuffle(order)
        several = [at for at in order if tensor.shape[at] > 1]
        if several != sorted(several):
            break
    strides, step = [0] * tensor.ndim, 1
    for at in reversed(order):
        strides[at] = step
        step *= max(tensor.shape[at], 1)
    return place(tensor, strides, 0, _fill(random))


def wild(tensor: Tensor, random: Random) -> Placed | None:
    """Dimensions of size 1 with strides that mean nothing."""
    single = [at for at, size in enumerate(tensor.shape) if size == 1]
    if not single or not tensor.numel():
        return None
    strides = list(dense(tensor.shape))
    for at in single:
        strides[at] = random.choice(_WILD)
    return place(tensor, strides, 0, _fill(random))


def spread(tensor: Tensor, random: Random, columns: bool = True) -> Placed | None:
    """Strides of zero: the tensor's first slice along a dimension stands for all of them; its values change.

    Args:
        tensor: to lay out so.
        random: what draws the dimension.
        columns: whether it may be the last one.
    """
    several = [at for at, size in enumerate(tensor.shape) if size > 1 and (columns or at < tensor.ndim - 1)]
    if not several:
        return None
    at = random.choice(several)
    slim = _as_raw(tensor).narrow(at, 0, 1).view(tensor.dtype)
    placed = place(slim, None, 0, _fill(random))
    return Placed(placed.tensor.expand(tensor.shape), placed.memory, placed.before)


def _as_raw(tensor: Tensor) -> Tensor:
    return tensor.view(_RAW[tensor.itemsize])


def _fill(random: Random) -> int:
    return random.choice((_NO_NUMBER, _HUGE))


# By the name of its kind, how an operand is placed.
LAYOUTS = {
    "strides": gapped,
    "offset": shifted,
    "wider": within,
    "transposed": permuted,
    "size1": wild,
}
