"""Records of the Triton kernels of grouped products."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.gemm.grouped.problem import A_SCALES, B_SCALES, FLOATS, FP4, FP8

KERNELS = (
    Kernel(
        op="grouped_gemm",
        name="triton.grouped",
        target="kernelhub.backends.triton.gemm.grouped.adapter:Grouped",
        summary="tiles of all groups in one launch; each program computes its tiles from the lengths on the device",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("a_dtype", *FLOATS, FP8, FP4),
            dtype_in("b_dtype", *FLOATS, FP8, FP4),
            dtype_in("out_dtype", *FLOATS),
            Between("num_groups", 1, 4096, why="a program reads all lengths at once"),
            anything("n", "k", "rows"),
        ),
        features=frozenset(
            {"masked", "a_global_scale", "global_scale", "bias"}
            | {f"a_scale={value}" for value in A_SCALES}
            | {f"b_scale={value}" for value in B_SCALES}
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=standings.STANDINGS,
    ),
)
