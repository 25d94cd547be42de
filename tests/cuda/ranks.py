"""Kernels that pass values between ranks, emulated: all ranks in this process, in an order that is drawn by lot."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernelhub.backends.cuda.library import addresses_in, packing_of
from kernelhub.backends.cuda.nvrtc import SOURCES, Constants
from kernelhub.backends.shared.slot_memory import UNIT, Workspace, slots_bytes
from tests.cuda.emulated import built

FAULTS = {
    1: "threads diverge at a barrier",
    2: "threads that are no whole warps",
    3: "no memory",
    4: "ranks wait for ever",
}
PATIENCE = 400_000  # draws without anything that arrives or ends


class Launch(NamedTuple):
    """One launch of a rank.

    Attributes:
        rank: whose.
        blocks: of the grid.
        values: the fields of the parameters.
    """

    rank: int
    blocks: int
    values: tuple[Any, ...]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("parameters", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("rank", "blocks", "threads")),
    ]


class Kernel:
    """A kernel of a source, launched by several ranks."""

    def __init__(
        self,
        source: str,
        name: str,
        constants: Constants,
        packing: str,
        threads: int,
        sources: Path = SOURCES,
    ) -> None:
        library = built(source, tuple(sorted(constants.items())), sources, "ranks")
        self._all, self._body = library.run_ranks, getattr(library, f"run_{name}")
        self._size, self._pack = getattr(library, f"size_of_{name}")(), packing_of(packing)
        assert self._pack.size <= self._size < self._pack.size + 8
        self._threads, self._element = threads, int(constants["SIZE"])

    def run(
        self, launches: Sequence[Launch], world_size: int, resident: int, lots: int, patience: int = PATIENCE
    ) -> str:
        """Make the launches, each rank's in order; what went wrong, if anything."""
        packed = [self._pack.pack(*addresses_in(one.values)).ljust(self._size, b"\0") for one in launches]
        kept = [ctypes.create_string_buffer(one, self._size) for one in packed]
        given = (_Launch * len(launches))(
            *(
                _Launch(ctypes.addressof(place), one.rank, one.blocks, self._threads)
                for place, one in zip(kept, launches, strict=True)
            )
        )
        arguments = (
            len(launches),
            world_size,
            resident,
            self._element,
            ctypes.c_uint64(lots),
            ctypes.c_uint64(patience),
        )
        fault = self._all(self._body, given, *arguments)
        return FAULTS[fault] if fault else ""


class Ranks:
    """Workspaces of ranks of this process."""

    def __init__(self, world_size: int) -> None:
        size = slots_bytes(world_size, 1)
        self.memories = [torch.zeros(size + UNIT, dtype=torch.uint8) for _ in range(world_size)]
        self.memories = [memory[-memory.data_ptr() % UNIT :][:size] for memory in self.memories]
        addresses = [memory.data_ptr() for memory in self.memories]
        self.workspaces = [Workspace(rank, memory, addresses, 1) for rank, memory in enumerate(self.memories)]
