"""Several copies of a call's operands, so that they are not in a cache; as many as memory allows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.op import OpFunction
from kernelhub.evidence.poison import copied
from kernelhub.evidence.timing import TimedCall
from kernelhub.ops.case import Arguments, OpCases

_MOST_COPIES = 16  # operands below a sixteenth of the cache need no more: an engine's layers find them in the cache
# Size of a CPU's last cache, if it is unknown: the largest of a server's core complexes.
_CPU_CACHE_BYTES = 32 << 20
_BEYOND_CACHE = 2  # size of all copies relative to the cache
# Memory of a check relative to the operands: operands, a copy, and results with their reference in wider numbers.
_OF_A_CHECK = 3
_SHARE = 0.5  # of free memory may be used: the rest is the engine's


class NoRoom(Exception):
    """A call does not fit into the memory that may be used."""


@dataclass(frozen=True)
class Room:
    """Memory that may be used on a device.

    Attributes:
        device: the device.
        limit: bytes; None for half of the free memory.
    """

    device: torch.device
    limit: int | None = None

    def bytes_free(self) -> int:
        """Bytes that may be used now."""
        free = _free_bytes(self.device)
        return int(free * _SHARE) if self.limit is None else min(self.limit, free)

    def check(self, num_bytes: int) -> None:
        """Refuse operands that leave no room to check their call.

        Raises:
            NoRoom: states their size.
        """
        room = self.bytes_free()
        if num_bytes * _OF_A_CHECK > room:
            raise NoRoom(
                f"its operands take {num_bytes >> 20} MiB, checking it {_OF_A_CHECK} times that, and "
                f"{room >> 20} MiB may be used on {self.device}; give memory_bytes, or free memory"
            )

    def copies(self, num_bytes: int) -> int:
        """The number of copies of operands, at least one."""
        wanted = -(-_BEYOND_CACHE * _cache_bytes(self.device) // max(num_bytes, 1)) + 1
        return max(1, min(_MOST_COPIES, wanted, self.bytes_free() // max(_OF_A_CHECK * num_bytes, 1)))


@dataclass(frozen=True)
class Operands:
    """One copy of a call's arguments, its destinations, and the cases of its op, which pack weights."""

    arguments: Arguments
    destinations: Mapping[str, Tensor]
    cases: OpCases

    def call_of(self, function: OpFunction[Any, Any, Any], kernel: str) -> tuple[Any, TimedCall]:
        """A plan of a kernel for these, and its launch as an engine repeats it: begun, with arranged weights."""
        plan: Any = function.prepare(**self.arguments, backend=kernel)
        arguments = self.arguments
        if plan.selection.kernel.needs_packing and (made := self.cases.pack(plan, arguments)) is not None:
            arguments = made[0]
            plan = function.prepare(**arguments, backend=kernel)
        given = {name: value for name, value in arguments.items() if name not in plan.weights} | dict(self.destinations)
        step = plan if not hasattr(plan, "begin") else plan.begin(**_taken(plan.begin, given))
        return plan, functools.partial(step.run, **_taken(step.run, given))


def rotated(cases: OpCases, arguments: Arguments, count: int, device: torch.device) -> list[Operands]:
    """Copies of a call's operands, each with its own destinations."""
    places = cases.destinations(arguments)
    made = []
    for _ in range(count):
        destinations = {
            name: torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
            if dtype.itemsize == 1
            else torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in places.items()
        }
        made.append(Operands(copied(arguments), destinations, cases))
    return made


def bytes_of(arguments: Mapping[str, Any]) -> int:
    """Memory of all tensors among arguments, each counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(arguments)
    }
    return sum(storages.values())


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports exhausted memory; torch's CPU allocator raises a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        phrase in str(error).lower() for phrase in ("out of memory", "can't allocate memory", "not enough memory")
    )


def _tensors(arguments: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in arguments.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                yield item
            elif isinstance(getattr(item, "tensors", None), Mapping):  # a packed weight
                yield from (tensor for tensor in item.tensors.values() if isinstance(tensor, Tensor))


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for which a function has parameters."""
    return {name: given[name] for name in inspect.signature(function).parameters if name in given}


def _cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_CACHE_BYTES
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 128 << 20)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable"))
        return int(found.split()[1]) << 10
    except (OSError, StopIteration, ValueError, IndexError):  # not on Linux
        return 4 << 30
