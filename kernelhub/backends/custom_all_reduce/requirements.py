"""What the kernels need on the machine."""

from __future__ import annotations

from kernelhub.backends.custom_all_reduce.libraries import SGL, VLLM
from kernelhub.dispatch.constraint import Compiled, Constraint, OnDevice, Package

# The versions whose libraries were read; a later one may lay out its table of addresses otherwise (`adapter`).
VLLM_MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((8, 0), (9, 0), (10, 0))),
    Package("vllm", ">=0.26,<0.34", install=VLLM.install),
    Compiled(VLLM),
)
SGL_MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((9, 0), (10, 0))),
    Package("sgl_kernel", ">=0.4.5,<0.4.11", distribution="sglang-kernel", install=SGL.install),
    Compiled(SGL),
)
