"""Records of the torch kernels of float8 products."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import MultipleOf, OnDevice, OneOf, Package, Rule, TorchBuilt, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel, KnownBad
from kernelhub.ops.gemm.fp8.batched.problem import SCALINGS as BATCH_SCALINGS
from kernelhub.ops.gemm.fp8.problem import BLOCK, E8M0, FLOAT, FLOATS, HALVES, ROW, SCALINGS, TENSOR, Fp8GemmProblem

_HERE = "kernelhub.backends.torch.gemm.fp8"
_FLOAT_SCALES = (dtype_in("a_scale_dtype", FLOAT), dtype_in("b_scale_dtype", FLOAT))
_SIXTEENS = tuple(MultipleOf(name, 16, why="rows must be multiples of 16 bytes") for name in ("n", "k"))


def _no_bias_in_float32(problem: Fp8GemmProblem) -> str | None:
    if problem.bias and problem.out_dtype == FLOAT:
        return "the operator adds no bias to a float32 result"
    return None


KERNELS = (
    Kernel(
        op="fp8_gemm",
        name="torch.dequantized",
        target=f"{_HERE}.dequantized:Dequantized",
        summary="weights are converted to float32 by blocks of rows and multiplied",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            OneOf("scaling", SCALINGS),
            dtype_in("out_dtype", *FLOATS),
            dtype_in("a_scale_dtype", FLOAT, E8M0),
            dtype_in("b_scale_dtype", FLOAT, E8M0),
            anything("n", "k", "rows"),
        ),
        features=frozenset({"bias", "e5m2", *(f"weight_only={dtype}" for dtype in HALVES)}),
        graph=GraphLevel.FULL,
        standings=standings.EVERYWHERE,
    ),
    Kernel(
        op="fp8_gemm",
        name="torch.scaled_mm",
        target=f"{_HERE}.scaled_mm:ScaledMm",
        summary="cuBLASLt's product scaled per tensor",
        band=Band.TUNED,
        constraints=(
            OnDevice("nvidia", only=((8, 9), (9, 0), (10, 0), (10, 3), (12, 0))),
            OneOf("scaling", (TENSOR,), why="the operator's other scalings have separate kernels"),
            dtype_in("out_dtype", *FLOATS),
            Rule(("bias", "out_dtype"), _no_bias_in_float32, "dtype", "add the bias afterwards"),
            anything("rows"),
            *_SIXTEENS,
            *_FLOAT_SCALES,
        ),
        features=frozenset({"bias"}),
        graph=GraphLevel.FULL,
        source="torch._scaled_mm",
        standings=standings.FLOAT8,
    ),
    Kernel(
        op="fp8_gemm",
        name="torch.scaled_mm_rowwise",
        target=f"{_HERE}.scaled_mm:ScaledMmRowwise",
        summary="torch's CUTLASS product scaled per row",
        band=Band.TUNED,
        constraints=(
            OnDevice("nvidia", only=((8, 9), (9, 0), (10, 0))),
            OneOf("scaling", (ROW,), why="the operator's other scalings have separate kernels"),
            dtype_in("out_dtype", "bfloat16", why="the operator scaled per row returns nothing else"),
            anything("rows"),
            *_SIXTEENS,
            *_FLOAT_SCALES,
        ),
        features=frozenset({"bias"}),
        graph=GraphLevel.FULL,
        source="torch._scaled_mm",
        standings=standings.FLOAT8_BY_ROW,
    ),
    Kernel(
        op="fp8_gemm",
        name="torch.scaled_mm_blockwise",
        target=f"{_HERE}.scaled_mm:ScaledMmBlockwise",
        summary="cuBLASLt's product scaled per block",
        band=Band.TUNED,
        constraints=(
            OnDevice("nvidia", only=((9, 0),)),
            OneOf("scaling", (BLOCK,), why="the operator's other scalings have separate kernels"),
            dtype_in("out_dtype", "bfloat16", why="the operator scaled per block returns nothing else"),
            anything("rows"),
            MultipleOf("n", 16, why="rows must be multiples of 16 bytes"),
            MultipleOf("k", 128, why="blocks must be whole"),
            *_FLOAT_SCALES,
            TorchBuilt("12.9", at_least="2.11"),
        ),
        graph=GraphLevel.FULL,
        source="torch.nn.functional.scaled_mm",
        standings=standings.ON_HOPPER,
    ),
    Kernel(
        op="bmm_fp8",
        name="torch.dequantized",
        target=f"{_HERE}.dequantized:DequantizedBatch",
        summary="matrices are converted to float32, some at a time, and multiplied",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            OneOf("a_scaling", BATCH_SCALINGS),
            OneOf("b_scaling", BATCH_SCALINGS),
            dtype_in("out_dtype", *FLOATS),
            anything("n", "k"),
        ),
        features=frozenset({"e5m2=a", "e5m2=b"}),
        graph=GraphLevel.FULL,
        standings=standings.EVERYWHERE,
    ),
)

KNOWN_BAD = (
    KnownBad(
        "torch.scaled_mm_rowwise",
        "fp8_gemm",
        (OnDevice("nvidia", only=((8, 9),)), Package("torch", "<2.12")),
        "on sm_89 the kernel does not run on the current stream: it may read operands before they are written",
        "https://github.com/pytorch/pytorch/issues/177651",
        'pip install "torch>=2.12"',
    ),
)
