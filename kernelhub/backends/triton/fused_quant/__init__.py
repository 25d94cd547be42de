"""Records of the Triton kernels of `rms_norm_quant` and `silu_and_mul_quant`."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Constraint, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.quant.problem import FLOATS

_HOME = "kernelhub.backends.triton.fused_quant.adapter"
_SCALES = frozenset({"ue8m0", "column"})


def _record(op: str, target: str, limits: tuple[Constraint, ...], features: frozenset[str], passed: int) -> Kernel:
    return Kernel(
        op=op,
        name="triton.rows",
        target=f"{_HOME}:{target}",
        summary="a row per program, in registers up to 8192 elements",
        band=Band.PORTABLE,
        constraints=(*MACHINE, dtype_in("dtype", *FLOATS), anything("width", "format", "scale_dtype"), *limits),
        features=_SCALES | features,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=(
            verified(
                "cpu",
                evidence=f"interpreted: CPU, 2 cores, 2026-11-25, torch 2.13.0+cpu, {op} by Triton, interpreted: "
                f"{passed} tests passed (benchmarks/results/own_ops_cpu.json)",
            ),
            standings.STATED,
            *standings.AHEAD_ELSEWHERE,
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
