"""What the kernels need on the machine, and the limits that several of them share."""

from __future__ import annotations

from typing import Any

from kernelhub.backends.cutlass.libraries import SGL, SGL_OLD, VLLM
from kernelhub.dispatch.constraint import AnyOf, Compiled, Constraint, OnDevice, Package, Rule

# Here the running sum is kept in the 14 bits of the tensor cores over all of K (`FastAccum` in the libraries' tables of
# tiles). Each of K / 32 instructions cuts it off by 2^-14 of itself in the mean, and it grows evenly: together K 2^-20.
# Up to 2048 that is 2^-9, half of what bfloat16 rounds off; tests/backends/test_cutlass.py adds up in this way.
_ADDS_FAST = ((8, 9), (9, 0))
MOST_ADDED_FAST = 2048


def _adds_fast(problem: Any) -> str | None:
    if problem.device.capability not in _ADDS_FAST:
        return None
    here = f"on {problem.device.arch} the library's kernel accumulates in 14 bits over all of K"
    if problem.k > MOST_ADDED_FAST:
        return f"{here}: for k of {problem.k}, over {MOST_ADDED_FAST}, that is less exact than the op allows"
    if problem.out_dtype != "bfloat16":
        return f"{here}, which is less exact than {problem.out_dtype}"
    return None


EXACT_SUMS: Constraint = Rule(("device", "k", "out_dtype"), _adds_fast, code="accuracy")

_VLLM = Package("vllm", ">=0.10.2", install=VLLM.install)
VLLM_0_33 = Package("vllm", ">=0.33", install=VLLM.install)

# The kernels for sm_120 were read in 0.33 only.
VLLM_MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((8, 9), (9, 0), (10, 0), (12, 0))),
    _VLLM,
    AnyOf((VLLM_0_33, OnDevice("nvidia", at_least=(8, 9), below=(12, 0)))),
    Compiled(VLLM),
)
# On Hopper scales of b needed the transposed layout from August 2025 until CUTLASS 4.2 (vllm-project/vllm#23280): the
# same schema, other numbers. So here are only versions that were read.
VLLM_BLOCKS: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((9, 0), (10, 0), (12, 0))),
    VLLM_0_33,
    Compiled(VLLM),
)
VLLM_FP4: tuple[Constraint, ...] = (OnDevice("nvidia", only=((10, 0), (12, 0))), VLLM_0_33, Compiled(VLLM))
# Of its kernels of experts, MXFP4's is compiled for sm_100 alone in the library of 0.33.0.
VLLM_MXFP4: tuple[Constraint, ...] = (OnDevice("nvidia", only=((10, 0),)), VLLM_0_33, Compiled(VLLM))
SGL_MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((8, 9), (9, 0), (10, 0))),
    AnyOf(
        (
            Package("sgl_kernel", ">=0.4", distribution="sglang-kernel", install=SGL.install),
            Package("sgl_kernel", ">=0.3.21,<0.4", distribution="sgl-kernel", install=SGL.install),
        )
    ),
    Compiled(SGL),
)
# Where it has an sm_100 kernel it allocates with cudaMalloc in each call; sglang-kernel 0.4 dropped it altogether.
SGL_BLOCKS: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((9, 0),)),
    Package("sgl_kernel", ">=0.3.21,<0.4", distribution="sgl-kernel", install=SGL_OLD.install),
    Compiled(SGL_OLD),
)
