"""Lost devices: recognizes final device errors, and makes every later call on the device raise `DeviceLost`.

After an illegal access, a failed launch or an uncorrectable memory error, every call of the CUDA context fails. Running
another kernel would only hide the error. A launch that raises calls `failed`; other launches have no extra cost.
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

# Messages of the CUDA and HIP runtimes and drivers after which the context is lost, in lower case. Other errors, such
# as an invalid configuration or an operation that is not allowed during capture, end only the call.
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
# Words that libraries write beside such a message: "CUDA error:", "Triton Error [CUDA]:", "cudaErrorAssert".
_OF_DEVICES = re.compile(r"\b(?:cu(?:da|blas|dnn)|hip|rocm|nvlink|nccl|rccl)(?:_error|error)?\w*\b")
_ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", ())  # torch 2.8 and later
_NOT_OF_DEVICES = (KernelhubError, NotImplementedError, RecursionError, torch.OutOfMemoryError)
_OUT_OF_MEMORY = ("out of memory", "cudaerrormemoryallocation", "cuda_error_out_of_memory")
_MAX_PLANS = 5  # in the message of an error


def is_final(error: BaseException) -> bool:
    """Whether an exception means that a GPU is lost, by its type and its text.

    torch raises RuntimeError up to version 2.7 and `torch.AcceleratorError` since. Triton and other libraries raise
    RuntimeError that mentions CUDA or HIP. Running out of memory is not final.
    """
    if isinstance(error, _NOT_OF_DEVICES) or not isinstance(error, RuntimeError):
        return False
    try:
        text = str(error).lower()
    except Exception:  # a foreign error may have no text
        return False
    if not isinstance(error, _ACCELERATOR_ERROR) and _OF_DEVICES.search(text) is None:
        return False
    return any(phrase in text for phrase in _FINAL) and not any(phrase in text for phrase in _OUT_OF_MEMORY)


def failed(method: Any, error: Exception) -> None:
    """Handle the exception of a launch. The caller raises it again when this returns.

    Args:
        method: the adapter's method that raised.
        error: the exception.

    Raises:
        DeviceLost: the device was lost before.
        NotWarmed: the sealed process refused work inside foreign code, which raised `error` in its place.
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
    """Whether a device can be lost. A CPU cannot: a late GPU error during a call on the CPU is not its error."""
    return device >= 0


def _name_kernel(error: Exception, bound: Bound) -> None:
    """Add a note to an error: the kernel that raised it, and its plugin if it is not kernelhub's."""
    if isinstance(error, KernelhubError):
        return
    name = str(bound.selection.selected)
    registered = HUB.registry.backends.get(name.partition(".")[0])
    note = f"kernelhub: raised by kernel {name} of {bound.selection.op}"
    if registered is not None and not registered.builtin:
        where = f"{registered.distribution}, " if registered.distribution else ""
        note += f", a third-party kernel of {where}{registered.origin}; report the error there, or disable {name}"
    if hasattr(error, "add_note"):  # Python 3.11
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif error.__cause__ is None:
        error.__cause__ = KernelhubError(note)


def _lose(bound: Bound, error: Exception) -> None:
    """Store the error, and make every call on the device raise it."""
    with HUB.lock:
        first = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        selection, device = bound.selection, bound.device
        there = [other for other in HUB.ledger.alive if other.device == device]
        last = [bound, *[other for other in reversed(there) if other is not bound]][:_MAX_PLANS]
        plans = tuple(f"{one.selection.op} {one.selection.selected}, {one.calls} calls" for one in last)
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
