"""vLLM's all-reduce on a CPU, by the addresses that its kernels read; ranks are threads that share memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SIGNAL_BYTES = 1000  # not a multiple of what signals are aligned to
LONGEST_S = 20.0
SMALL = 4096  # bytes that each rank adds up as a whole


class Library:
    """The operators of one library.

    Args:
        row: addresses of a row of the table.
        memories: of the ranks, outside of which nothing may be read or written.
    """

    def __init__(self, row: int, memories: list[Tensor]) -> None:
        self.row, self.memories = row, memories
        self.states: dict[int, Any] = {}
        self.disposed: list[int] = []
        self.capturing = False

    def meta_size(self) -> int:
        return SIGNAL_BYTES

    def init_custom_ar(self, ipc_tensors: list[int], rank_data: Tensor, rank: int, connected: bool) -> int:
        assert connected
        assert len(ipc_tensors) in (2, 4, 6, 8)
        assert rank_data.dtype is torch.uint8
        assert all(address % 128 == 0 for address in ipc_tensors)
        rows = rank_data.view(torch.int64).view(-1, self.row)
        number = len(self.states) + 1
        state = SimpleNamespace(signals=ipc_tensors, rows=rows, rank=rank, next=0, captured=0, buffers={})
        self.states[number] = state
        return number

    def register_buffer(self, fa: int, addresses: list[int]) -> None:
        state = self.states[fa]
        state.rows[state.next, : len(addresses)] = torch.tensor(addresses)
        state.buffers[addresses[state.rank]] = state.next
        state.next += 1

    def dispose(self, fa: int) -> None:
        self.disposed.append(fa)

    def all_reduce(self, fa: int, inp: Tensor, out: Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None:
        state, size = self.states[fa], inp.nbytes
        assert inp.dtype is out.dtype
        assert inp.numel() == out.numel()
        assert inp.is_contiguous()
        assert out.is_contiguous()
        assert size % 16 == 0
        assert inp.data_ptr() % 16 == 0
        assert out.data_ptr() % 16 == 0
        assert size <= reg_buffer_sz_bytes
        self.at(reg_buffer, inp.numel(), inp.dtype).copy_(inp.view(-1))
        place = state.buffers[reg_buffer]
        if self.capturing:
            place, state.captured = state.next + state.captured, state.captured + 1
        addresses = state.rows[place, : len(state.signals)].tolist()
        out.view(-1).copy_(self.summed(state, addresses, inp.numel(), inp.dtype))

    def summed(self, state: Any, addresses: list[int], count: int, dtype: torch.dtype) -> Tensor:
        world_size, rank = len(addresses), state.rank
        self.barrier(state, 0)
        inputs = [self.at(address, count, dtype) for address in addresses]
        if world_size == 2 or count * dtype.itemsize < SMALL:
            total = added(inputs)
            self.barrier(state, 1)
            return total
        part = count * dtype.itemsize // 16 // world_size * 16 // dtype.itemsize
        ends = [part * other for other in range(world_size)] + [count]
        own = added([inputs[(rank + step) % world_size][ends[rank] : ends[rank + 1]] for step in range(world_size)])
        signals = [address + 1024 for address in state.signals]
        self.at(signals[rank], len(own), dtype).copy_(own)
        self.barrier(state, 1)
        found = [self.at(signals[other], ends[other + 1] - ends[other], dtype) for other in range(world_size)]
        total = torch.cat(found)
        self.barrier(state, 2)
        return total

    def barrier(self, state: Any, which: int) -> None:
        counters = [self.at(address + 64 * which, 8, torch.int64) for address in state.signals]
        mine = counters[state.rank]
        turn = int(mine[state.rank]) + 1
        for counter in counters:
            counter[state.rank] = turn
        wait(lambda: bool((mine[: len(counters)] >= turn).all()))

    def at(self, address: int, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        spans = [(memory.data_ptr(), memory.data_ptr() + memory.numel()) for memory in self.memories]
        assert any(begin <= address and address + size <= end for begin, end in spans), "outside of the workspace"
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


def added(parts: list[Tensor]) -> Tensor:
    """In float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def wait(what: Callable[[], bool]) -> None:
    until = time.monotonic() + LONGEST_S
    while not what():
        assert time.monotonic() < until, "a rank waits for another"
        time.sleep(1e-5)
