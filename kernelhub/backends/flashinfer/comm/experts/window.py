"""One range of addresses in which the memory of all ranks is at equal distances, as the library's kernels expect it.

torch's symmetric memory maps the memory of each rank where there is room. The driver returns the allocations behind
those addresses, and maps them a second time, one behind the other. Nothing is allocated or exchanged, and no multicast
object is made, so that neither fabric handles nor permissions to trace a process are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kernelhub.backends.shared.operands import up_to
from kernelhub.errors import KernelUnavailable

if TYPE_CHECKING:
    from types import ModuleType


class Window:
    """The memory of each rank, mapped anew on this rank's device.

    Args:
        blocks: of each rank, the address at which its allocation begins in this process.
        num_bytes: of each allocation from its beginning on.
        device: of this rank.

    Attributes:
        address: where the memory of rank 0 begins.
        stride: bytes from one rank to the next.

    Raises:
        KernelUnavailable: the driver refuses.
    """

    def __init__(self, blocks: Sequence[int], num_bytes: int, device: torch.device) -> None:
        from cuda.bindings import driver

        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device.index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        mapped: list[int] = []
        with torch.cuda.device(device):
            (first,) = _checked(driver, "retain", driver.cuMemRetainAllocationHandle(blocks[0]))
            (form,) = _checked(driver, "describe", driver.cuMemGetAllocationPropertiesFromHandle(first))
            _checked(driver, "release", driver.cuMemRelease(first))
            (step,) = _checked(driver, "describe", driver.cuMemGetAllocationGranularity(form, least))
            self.stride = up_to(num_bytes, int(step))
            size = self.stride * len(blocks)
            (reserved,) = _checked(driver, "reserve", driver.cuMemAddressReserve(size, int(step), 0, 0))
            self.address = int(reserved)
            self._end = weakref.finalize(self, _unmapped, driver, self.address, size, mapped, self.stride, device)
            self._end.atexit = False  # the process gives back everything
            for rank, block in enumerate(blocks):
                place = self.address + rank * self.stride
                (handle,) = _checked(driver, "retain", driver.cuMemRetainAllocationHandle(block))
                _checked(driver, "map", driver.cuMemMap(place, self.stride, 0, handle, 0))
                mapped.append(place)
                _checked(driver, "release", driver.cuMemRelease(handle))
            _checked(driver, "access", driver.cuMemSetAccess(self.address, size, [access], 1))


def _checked(driver: ModuleType, what: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *results = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelUnavailable(
            f"flashinfer.moe_a2a: the CUDA driver does not {what} memory of other ranks for a second mapping: "
            f"{status!r}; select another kernel, such as triton.push"
        )
    return tuple(results)


def _unmapped(
    driver: ModuleType, address: int, size: int, mapped: list[int], stride: int, device: torch.device
) -> None:
    """Give the addresses back, after the last launch that may use them; a capture may not wait, so that they stay."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return
        torch.cuda.synchronize(device)
        for place in mapped:
            driver.cuMemUnmap(place, stride)
        driver.cuMemAddressFree(address, size)
