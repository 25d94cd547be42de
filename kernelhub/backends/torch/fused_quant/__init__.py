"""Records of the torch kernels of `rms_norm_quant` and `silu_and_mul_quant`."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import Constraint, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.quant.problem import FLOATS

_HOME = "kernelhub.backends.torch.fused_quant.steps"
_SCALES = frozenset({"ue8m0", "column"})


def _record(op: str, target: str, limits: tuple[Constraint, ...], features: frozenset[str], passed: int) -> Kernel:
    return Kernel(
        op=op,
        name="torch.steps",
        target=f"{_HOME}:{target}",
        summary="one step after the other, in float32",
        band=Band.REFERENCE,
        constraints=(ANYWHERE, dtype_in("dtype", *FLOATS), anything("width", "format", "scale_dtype"), *limits),
        features=_SCALES | features,
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=(
            verified(
                "cpu",
                evidence=f"CPU, 2 cores, 2026-11-25, torch 2.13.0+cpu, {op} by torch: {passed} tests passed "
                "(benchmarks/results/own_ops_cpu.json)",
            ),
            verified(
                "hopper",
                evidence=f"NVIDIA H100 80GB HBM3, 2026-11-25, torch 2.11.0+cu130, {op} by torch on a GPU: {passed} "
                "tests passed (benchmarks/results/cuda_h100.json)",
            ),
            *standings.STATED,
        ),
    )


KERNELS = (
    _record(
        "rms_norm_quant",
        "Norm",
        (dtype_in("weight_dtype", *FLOATS),),
        frozenset({"residual", "unit_offset"}),
        passed=38,
    ),
    _record("silu_and_mul_quant", "Activation", (), frozenset(), passed=30),
)
