"""Records of FlashInfer's grouped products."""

from __future__ import annotations

from typing import Any

from kernelhub.backends.flashinfer import calls, standings
from kernelhub.backends.flashinfer.requirements import (
    CONSUMER_BLACKWELL,
    DATACENTRE_BLACKWELL,
    DSL,
    HOPPER,
    INSTALL,
    CompilesForRows,
    Module,
    requirements,
)
from kernelhub.dispatch.constraint import (
    AnyOf,
    Constraint,
    MultipleOf,
    OnDevice,
    OneOf,
    Package,
    Rule,
    TorchBuilt,
    anything,
    dtype_in,
)
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.gemm.grouped.problem import BLOCKS, FLOATS, FP4, FP8, GROUPS

_HERE = "kernelhub.backends.flashinfer.grouped"
_HALVES = ("bfloat16", "float16")
_SOURCE = "CUTLASS, by FlashInfer (Ye et al. 2025)"


def _in_kind(problem: Any) -> str | None:
    """The kernel is compiled for results in the dtype of the rows."""
    if problem.out_dtype == problem.a_dtype:
        return None
    return f"out_dtype is {problem.out_dtype} and a_dtype {problem.a_dtype}; results have the dtype of the rows"


_BLACKWELL = OnDevice("nvidia", only=((10, 0), (10, 3), (12, 0), (12, 1)))
_MASKED_FORMS = ("nvfp4", "mxfp4", "mxfp8")


def _of_blackwell(problem: Any) -> tuple[str, ...]:
    return ("gemm_sm120",) if problem.device.capability[0] == 12 else ("gemm_sm100",)


def _tiled(rows: str, weights: str) -> tuple[Constraint, ...]:
    """Limits of products with tiled scales."""
    return (
        OneOf("a_scale", (rows,), why="the kernel supports one pair of formats"),
        OneOf("b_scale", (weights,), why="the kernel supports one pair of formats"),
        dtype_in("a_dtype", FP8 if rows == "mxfp8" else FP4),
        dtype_in("b_dtype", FP4),
        dtype_in("out_dtype", *_HALVES),
        MultipleOf("n", 128, why="scales are read in tiles of 128 rows"),
        MultipleOf("k", 128, why="the library requires it"),
        anything("num_groups", "rows"),
    )


def _one_format(problem: Any) -> str | None:
    if problem.a_scale == problem.b_scale:
        return None
    return f"a_scale is {problem.a_scale} and b_scale {problem.b_scale}; both operands must have one format"


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
            TorchBuilt("12.3"),
            Module((), lambda _: ("gemm_sm90",)),
            dtype_in("a_dtype", *_HALVES, why="it would sum float8 in 14 bits, and takes no scales"),
            dtype_in("b_dtype", *_HALVES),
            Rule(("a_dtype", "out_dtype"), _in_kind, "dtype"),
            MultipleOf("n", 8, why="rows must begin at multiples of 16 bytes"),
            MultipleOf("k", 8, why="rows must begin at multiples of 16 bytes"),
            anything("num_groups", "rows"),
        ),
        features=frozenset({"masked"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=standings.SEGMENTS,
    ),
    Kernel(
        op="grouped_gemm",
        name="flashinfer.groupwise",
        target=f"{_HERE}.groupwise:GroupwiseCutlass",
        summary="CUTLASS's grouped product in blocks for sm_100 and sm_103; rows are gathered into groups padded to 4",
        band=Band.SPECIALISED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.GROUPS),
            Module((), lambda _: ("gemm_sm100",)),
            dtype_in("a_dtype", FP8),
            dtype_in("b_dtype", FP8),
            dtype_in("out_dtype", *_HALVES),
            OneOf("a_scale", GROUPS, why="the kernel takes scales of blocks"),
            OneOf("b_scale", BLOCKS, why="the kernel takes scales of blocks"),
            MultipleOf("n", 128, why="a scale covers 128 columns, and all blocks must be whole"),
            MultipleOf("k", 128, why="a scale covers 128 columns, and all blocks must be whole"),
            anything("num_groups", "rows"),
        ),
        features=frozenset(
            {"masked", *(f"a_scale={name}" for name in GROUPS), *(f"b_scale={name}" for name in BLOCKS)}
        ),
        graph=GraphLevel.FULL,
        source=_SOURCE,
        standings=standings.BLACKWELL_PRODUCTS,
    ),
    Kernel(
        op="grouped_gemm",
        name="flashinfer.groups_nvfp4",
        target=f"{_HERE}.groupwise:NvFp4",
        summary="CUTLASS's grouped product of NVFP4 by NVFP4 for sm_120; rows are gathered into groups padded to 4",
        band=Band.SPECIALISED,
        constraints=(
            *requirements(CONSUMER_BLACKWELL, calls.GROUPS_NVFP4),
            Module((), lambda _: ("gemm_sm120",)),
            *_tiled("nvfp4", "nvfp4"),
        ),
        features=frozenset({"masked", "a_scale=nvfp4", "b_scale=nvfp4", "a_global_scale", "global_scale"}),
        graph=GraphLevel.FULL,
        source=_SOURCE,
        standings=standings.GROUPS_RTX,
    ),
    Kernel(
        op="grouped_gemm",
        name="flashinfer.groups_mxfp8_mxfp4",
        target=f"{_HERE}.groupwise:Mxfp8Mxfp4",
        summary="CUTLASS's grouped product of MXFP8 by MXFP4 for Blackwell; rows are gathered into groups padded to 4",
        band=Band.SPECIALISED,
        constraints=(
            *requirements(_BLACKWELL, calls.GROUPS_MXFP4),
            # On sm_120 and sm_121 the kernel is there from 0.6.12 on, of the releases that were read.
            AnyOf((DATACENTRE_BLACKWELL, Package("flashinfer", ">=0.6.12", distribution="flashinfer-python"))),
            Module(("device",), _of_blackwell),
            *_tiled("mxfp8", "mxfp4"),
        ),
        features=frozenset({"masked", "a_scale=mxfp8", "b_scale=mxfp4"}),
        graph=GraphLevel.FULL,
        source=_SOURCE,
        standings=standings.GROUPS_BOTH,
    ),
    Kernel(
        op="grouped_gemm",
        name="flashinfer.masked_cute_dsl",
        target=f"{_HERE}.masked:MaskedCuteDsl",
        summary="CuTe DSL's product of masked rows, both operands of one format, compiled for each M_max",
        band=Band.SPECIALISED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.MASKED_GROUPS),
            Package("flashinfer", ">=0.6.18", distribution="flashinfer-python", install=INSTALL),
            DSL,
            CompilesForRows(),
            OneOf("masked", (True,), why="the kernel is for padded groups, [G, M_max, K]"),
            OneOf("a_scale", _MASKED_FORMS, why="the kernel is for operands with scales of 16 or 32 columns"),
            OneOf("b_scale", _MASKED_FORMS),
            Rule(("a_scale", "b_scale"), _one_format, "value"),
            dtype_in("a_dtype", FP8, FP4),
            dtype_in("b_dtype", FP8, FP4),
            dtype_in("out_dtype", *FLOATS),
            MultipleOf("n", 128, why="scales are read in tiles of 128 rows"),
            MultipleOf("k", 128, why="scales are read in tiles of 4 columns"),
            anything("num_groups", "rows"),
        ),
        features=frozenset(
            {"masked", "a_global_scale", "global_scale"}
            | {f"{side}_scale={form}" for side in "ab" for form in _MASKED_FORMS}
        ),
        source=_SOURCE,
        standings=standings.BLACKWELL_PRODUCTS,
    ),
)
