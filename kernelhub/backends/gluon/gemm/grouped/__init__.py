"""Records of the Gluon kernels of grouped products."""

from __future__ import annotations

from kernelhub.backends.gluon.requirements import MACHINE
from kernelhub.backends.gluon.standings import standings
from kernelhub.dispatch.constraint import MultipleOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.gemm.grouped.problem import BLOCKS, FLOATS, FP8, GROUPS

_HALVES = ("bfloat16", "float16")

_HERE = "kernelhub.backends.gluon.gemm.grouped"
_SCALES = frozenset(f"a_scale={value}" for value in ("tensor", "token", *GROUPS)) | frozenset(
    f"b_scale={value}" for value in ("tensor", "channel", *BLOCKS)
)

KERNELS = (
    Kernel(
        op="grouped_gemm",
        name="gluon.grouped_fp8",
        target=f"{_HERE}.adapter:GroupedFp8",
        summary="tiles of 256 or 128 rows loaded by TMA from the rows as they are; lengths are read on the device",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("a_dtype", FP8),
            dtype_in("b_dtype", FP8),
            dtype_in("out_dtype", *FLOATS),
            MultipleOf("k", 16, why="TMA reads rows of whole 16 bytes"),
            anything("n", "rows", "num_groups"),
        ),
        features=frozenset({"masked", "bias"}) | _SCALES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source="DeepSeek-V3 (2024), section 3.3; the tiles are those of DeepGEMM on Hopper",
        standings=standings(186),
    ),
    Kernel(
        op="grouped_gemm",
        name="gluon.grouped_halves",
        target=f"{_HERE}.adapter:GroupedHalves",
        summary="bfloat16 or float16: tiles of 64 or 128 x 256 loaded by TMA from the rows as they are",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("a_dtype", *_HALVES),
            dtype_in("b_dtype", *_HALVES),
            dtype_in("out_dtype", *FLOATS),
            MultipleOf("k", 8, why="TMA reads rows of whole 16 bytes"),
            anything("n", "rows", "num_groups"),
        ),
        features=frozenset({"masked", "bias"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=standings(97, "gluon_tests_h200.json"),
    ),
)
