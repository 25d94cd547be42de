"""Records of the CUDA kernels of quantisation."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.backends.cuda.standings import standings
from kernelhub.dispatch.constraint import Between, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.quant.problem import FLOATS, GROUP, TOKEN

KERNELS = (
    Kernel(
        op="quantize_fp8",
        name="cuda.quantize",
        target="kernelhub.backends.cuda.quant.fp8:QuantizeFp8",
        summary="a row by a block, or a group by a part of a warp, bit-identical to the reference",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            OneOf("granularity", (TOKEN, GROUP), why="scales of other areas are triton.quantize's"),
            Between("group_size", 128, 128, why="lanes of a warp share a group"),
            anything("scale_dtype"),
        ),
        features=frozenset({"ue8m0", "column"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        compiles_when_made=True,
        standings=standings("quantize_fp8", 126),
    ),
)
