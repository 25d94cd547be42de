"""Records of FlashInfer's grouped products."""

from __future__ import annotations

from typing import Any

from kernelhub.backends.flashinfer import calls
from kernelhub.backends.flashinfer.requirements import DATACENTRE_BLACKWELL, HOPPER, Cuda, Module, requirements
from kernelhub.dispatch.constraint import MultipleOf, OneOf, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.gemm.grouped.problem import BLOCKS, FP8, GROUPS

_HERE = "kernelhub.backends.flashinfer.grouped"
_HALVES = ("bfloat16", "float16")
_SOURCE = "CUTLASS, by FlashInfer (Ye et al. 2025)"


def _in_kind(problem: Any) -> str | None:
    """The kernel is compiled for results in the dtype of the rows."""
    if problem.out_dtype == problem.a_dtype:
        return None
    return f"out_dtype is {problem.out_dtype} and a_dtype {problem.a_dtype}; results are in the dtype of the rows"


KERNELS = (
    Kernel(
        op="grouped_gemm",
        name="flashinfer.segments",
        target=f"{_HERE}.segments:Segments",
        summary="CUTLASS's grouped product for sm_90, with descriptors of groups made on the device",
        # Beside torch's, which is CUTLASS's too, but takes neither float16 nor masked rows.
        band=Band.TUNED,
        constraints=(
            *requirements(HOPPER, calls.SEGMENTS),
            Cuda("12.3"),
            Module((), lambda _: ("gemm_sm90",)),
            dtype_in("a_dtype", *_HALVES, why="float8 would be summed in 14 bits, and has no scales"),
            dtype_in("b_dtype", *_HALVES),
            Rule(("a_dtype", "out_dtype"), _in_kind, "dtype"),
            MultipleOf("n", 8, why="rows begin at multiples of 16 bytes"),
            MultipleOf("k", 8, why="rows begin at multiples of 16 bytes"),
            anything("num_groups", "rows"),
        ),
        features=frozenset({"masked"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
    ),
    Kernel(
        op="grouped_gemm",
        name="flashinfer.groupwise",
        target=f"{_HERE}.groupwise:GroupwiseCutlass",
        summary="CUTLASS's grouped product in blocks for sm_100 and sm_103; rows are gathered into groups of fours",
        band=Band.SPECIALISED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.GROUPS),
            Module((), lambda _: ("gemm_sm100",)),
            dtype_in("a_dtype", FP8),
            dtype_in("b_dtype", FP8),
            dtype_in("out_dtype", *_HALVES),
            OneOf("a_scale", GROUPS, why="the kernel is scaled in blocks"),
            OneOf("b_scale", BLOCKS, why="the kernel is scaled in blocks"),
            MultipleOf("n", 128, why="a scale is for 128 columns, none cut short"),
            MultipleOf("k", 128, why="a scale is for 128 columns, none cut short"),
            anything("num_groups", "rows"),
        ),
        features=frozenset(
            {"masked", *(f"a_scale={name}" for name in GROUPS), *(f"b_scale={name}" for name in BLOCKS)}
        ),
        graph=GraphLevel.FULL,
        source=_SOURCE,
    ),
)
