"""What every Triton kernel asks of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.backends.shared.triton_cache import WritableCache
from kernelhub.dispatch.constraint import AnyOf, OnDevice, Package, Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes.device import DeviceFacts


@dataclass(frozen=True)
class Interpreter:
    """A CPU, if Triton's interpreter is on: slow, exact, for tests and debugging."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.type != "cpu":
            return Rejection("vendor", "CPU only while TRITON_INTERPRET=1")
        if machine.variable("TRITON_INTERPRET") not in ("1", "true", "on", "yes", "y", "t"):
            return Rejection(
                "interpreter_off",
                "on a CPU Triton runs only in its interpreter",
                "to debug the kernel on this CPU, start Python with TRITON_INTERPRET=1",
            )
        return None


# What Triton 3.6 to 3.9 all compile for; a newer GPU is added once the ahead-of-time tests build for it.
_ARCHITECTURES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
_NVIDIA = OnDevice("nvidia", only=_ARCHITECTURES)
_TRITON = (Package("triton", ">=3.6,<3.10"), WritableCache())
MACHINE = (AnyOf((_NVIDIA, Interpreter())), *_TRITON)
GPU_MACHINE = (_NVIDIA, *_TRITON)  # of kernels that need more than one GPU


def has_float8(device: DeviceFacts) -> bool:
    """Whether the device converts and multiplies float8 as it is: from sm_89 on. Else kernels decode its bytes."""
    return device.vendor == "nvidia" and device.capability >= (8, 9)
