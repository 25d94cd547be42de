"""Records of the CUDA kernels of `rms_norm_quant` and `silu_and_mul_quant`."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.backends.cuda.standings import standings
from kernelhub.dispatch.constraint import Constraint, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.fused_quant.problem import FP8_TOKEN, FusedProblem
from kernelhub.ops.quant.problem import FLOATS

WIDEST_BYTES = 1 << 16  # of a row that a block of 1024 threads keeps in registers, 64 bytes each
_SCALES = frozenset({"ue8m0", "column"})


def _too_wide(problem: FusedProblem) -> str | None:
    size = {"float32": 4}.get(problem.dtype, 2)
    return (
        f"rows of {problem.width} {problem.dtype} are wider than 64 KiB"
        if problem.width * size > WIDEST_BYTES
        else None
    )


def _too_wide_for_a_scale(problem: FusedProblem) -> str | None:
    return _too_wide(problem) if problem.format == FP8_TOKEN else None


def _record(
    op: str, target: str, limits: tuple[Constraint, ...], features: frozenset[str], passed: int, on_h100: int
) -> Kernel:
    return Kernel(
        op=op,
        name="cuda.rows",
        target=f"kernelhub.backends.cuda.fused_quant.rows:{target}",
        summary="a row in the registers of a block or of a part of a warp, vectors of 16 bytes",
        band=Band.PORTABLE,
        constraints=(*MACHINE, dtype_in("dtype", *FLOATS), anything("width", "format", "scale_dtype"), *limits),
        features=_SCALES | features,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        compiles_when_made=True,
        standings=standings(op, passed, on_h100),
    )


KERNELS = (
    _record(
        "rms_norm_quant",
        "Norm",
        (dtype_in("weight_dtype", *FLOATS), Rule(("width", "dtype"), _too_wide, code="range")),
        frozenset({"residual", "unit_offset"}),
        passed=96,
        on_h100=38,
    ),
    _record(
        "silu_and_mul_quant",
        "Activation",
        (Rule(("width", "dtype", "format"), _too_wide_for_a_scale, code="range"),),
        frozenset(),
        passed=84,
        on_h100=30,
    ),
)
