"""Errors of a device: told from others, remembered, and final for the process.

After an illegal access, a failed launch or an uncorrectable memory error every call of the CUDA context fails, so that
trying another kernel only hides what happened. A launch that raises comes here, through `failed`; one that does not
costs nothing for it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.work import JOURNAL
from kernelhub.errors import DeviceLost, KernelhubError

# What CUDA's runtime and driver, and HIP's, say of an error after which the context is lost; lower case. Others, such
# as an invalid configuration or an operation that a capture does not allow, end a call only.
_FINAL = (
    "illegal memory access",  # 700
    "unspecified launch failure",  # 719
    "uncorrectable ecc error",  # 214
    "misaligned address",  # 716
    "illegal instruction",  # 715
    "invalid program counter",  # 718
    "hardware stack error",  # 714
    "operation not supported on global/shared address space",  # 717
    "device-side assert triggered",  # 710
    "launch timed out and was terminated",  # 702
    "invalid access of peer gpu memory over nvlink",  # 721
    "uncorrectable nvlink error",  # 220
    "tensor memory leak",  # 720
    "context is destroyed",  # 709
    *("cudaerrorillegaladdress", "cuda_error_illegal_address", "cudaerrorlaunchfailure", "cuda_error_launch_failed"),
    *("cudaerroreccuncorrectable", "cuda_error_ecc_uncorrectable", "cudaerrormisalignedaddress"),
    *("cuda_error_misaligned_address", "cudaerrorillegalinstruction", "cuda_error_illegal_instruction"),
    *("cudaerrorassert", "cuda_error_assert", "cudaerrorlaunchtimeout", "cuda_error_launch_timeout"),
)
# What those who report such an error write beside it: "CUDA error:", "Triton Error [CUDA]:", "cudaErrorAssert".
_OF_DEVICES = re.compile(r"\b(?:cu(?:da|blas|dnn)|hip|rocm|nvlink|nccl|rccl)(?:_error|error)?\w*\b")
_ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", ())  # torch 2.8 and later
_NOT_OF_DEVICES = (KernelhubError, NotImplementedError, RecursionError, torch.OutOfMemoryError)
_OUT_OF_MEMORY = ("out of memory", "cudaerrormemoryallocation", "cuda_error_out_of_memory")
_TOLD = 5  # plans in an error


def is_final(error: BaseException) -> bool:
    """Does an exception say that a GPU is lost? Told from its type, and from its text, the same in all torch versions.

    It comes as RuntimeError up to torch 2.7, as `torch.AcceleratorError` since, and as RuntimeError from Triton and
    other libraries, which name CUDA or HIP. Running out of memory is not final.
    """
    if isinstance(error, _NOT_OF_DEVICES) or not isinstance(error, RuntimeError):
        return False
    try:
        text = str(error).lower()
    except Exception:  # a foreign error need not have a text
        return False
    if not isinstance(error, _ACCELERATOR_ERROR) and _OF_DEVICES.search(text) is None:
        return False
    return any(phrase in text for phrase in _FINAL) and not any(phrase in text for phrase in _OUT_OF_MEMORY)


def failed(method: Any, error: Exception) -> None:
    """Look at what a launch raised; the caller raises it again when this returns.

    Args:
        method: the method of the adapter that raised.
        error: what it raised.

    Raises:
        DeviceLost: the device was lost before.
        NotWarmed: work was refused inside foreign code, which lost the refusal and raised this instead.
    """
    refusal = JOURNAL.swallowed()
    if refusal is not None and error is not refusal and not isinstance(error, KernelhubError):
        raise refusal from error
    bound = HUB.ledger.bound_of(getattr(method, "__self__", None))
    if bound is None:
        return
    if not _can_be_lost(bound.device) or not is_final(error):
        _name_kernel(error, bound)
        return
    if bound.device in GATE.lost:
        raise GATE.lost[bound.device].again() from error
    _lose(bound, error)


def _can_be_lost(device: int) -> bool:
    """A CPU is not: what a GPU reports late, out of a call on the CPU, is no matter of that call."""
    return device >= 0


def _name_kernel(error: Exception, bound: Bound) -> None:
    """Have the traceback of an error say which kernel raised it, and who made that where it is not ours."""
    if isinstance(error, KernelhubError):
        return
    name = str(bound.selection.selected)
    registered = HUB.registry.backends.get(name.partition(".")[0])
    note = f"kernelhub: raised by kernel {name} of {bound.selection.op}"
    if registered is not None and not registered.builtin:
        where = f"{registered.distribution}, " if registered.distribution else ""
        note += f", which is not kernelhub's but of {where}{registered.origin}; report it there, or disable {name}"
    if hasattr(error, "add_note"):  # Python 3.11
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif error.__cause__ is None:
        error.__cause__ = KernelhubError(note)


def _lose(bound: Bound, error: Exception) -> None:
    """Remember the error, and have every call on the device raise it."""
    with HUB.lock:
        first = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        selection, device = bound.selection, bound.device
        there = [other for other in HUB.ledger.alive if other.device == device]
        told = [bound, *[other for other in reversed(there) if other is not bound]][:_TOLD]
        plans = tuple(f"{one.selection.op} {one.selection.selected}, {one.calls} calls" for one in told)
        GATE.lost[device] = DeviceLost(device, selection.op, str(selection.selected), first, time.time(), plans)
        HUB.forget_device(device)
        for other in there:
            other.adapter.launch = _raising(device)
        for plan in list(HUB.ledger.plans):
            if plan.bound.device == device:
                plan.run = _raising(device)


def _raising(device: int) -> Callable[..., Any]:
    def refused(*arguments: Any, **named: Any) -> Any:
        raise GATE.lost[device].again()

    return refused
