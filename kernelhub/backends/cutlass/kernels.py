"""Records of the CUTLASS kernels in vLLM's and SGLang's compiled libraries."""

from __future__ import annotations

from kernelhub.backends.cutlass import standings
from kernelhub.backends.cutlass.requirements import (
    EXACT_SUMS,
    SGL_BLOCKS,
    SGL_MACHINE,
    VLLM_BLOCKS,
    VLLM_FP4,
    VLLM_MACHINE,
    VLLM_MXFP4,
)
from kernelhub.dispatch.constraint import Between, Constraint, MultipleOf, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.gemm.fp4.problem import NVFP4
from kernelhub.ops.gemm.fp8.problem import BLOCK, E8M0, FLOAT, ROW, TENSOR
from kernelhub.ops.gemm.grouped.problem import FP4

_HERE = "kernelhub.backends.cutlass"
_VLLM = "https://github.com/vllm-project/vllm"
_SGLANG = "https://github.com/sgl-project/sglang"
SWIZZLED = "nvfp4.scales128x4.v1"

BACKEND = Backend("cutlass", "CUTLASS kernels compiled into vLLM and into SGLang's kernel package", "vllm", _VLLM)

_HALVES = dtype_in("out_dtype", "bfloat16", "float16", why="other values are not compiled")
_FLOAT_SCALES = (dtype_in("a_scale_dtype", FLOAT), dtype_in("b_scale_dtype", FLOAT))
_SIXTEENS = tuple(MultipleOf(name, 16, why="rows must be multiples of 16 bytes") for name in ("n", "k"))
_BLOCKS: tuple[Constraint, ...] = (
    OneOf("scaling", (BLOCK,), why="other scalings have separate kernels"),
    _HALVES,
    dtype_in("a_scale_dtype", FLOAT, E8M0),
    dtype_in("b_scale_dtype", FLOAT, E8M0),
    MultipleOf("n", 128, why="some devices reject tiles that cover part of a block, vllm-project/vllm#47990"),
    MultipleOf("k", 128, why="whole blocks"),
    anything("rows"),
)
_ROWS: tuple[Constraint, ...] = (
    OneOf("scaling", (TENSOR, ROW), why="other scalings have separate kernels"),
    _HALVES,
    *_FLOAT_SCALES,
    *_SIXTEENS,
    EXACT_SUMS,
    anything("rows"),
)


def _of_experts(form: str, columns: int) -> tuple[Constraint, ...]:
    """Limits of products of groups in one float4 format."""
    return (
        dtype_in("a_dtype", FP4),
        dtype_in("b_dtype", FP4),
        OneOf("a_scale", (form,), why="both operands must have one format"),
        OneOf("b_scale", (form,)),
        _HALVES,
        Between("num_groups", 1, 1024, why="one thread block prepares all groups"),
        MultipleOf("n", 128, why="scales of a group's weights are whole tiles of 128 rows"),
        MultipleOf("k", columns, why="scales of a group's weights are whole tiles of 4 columns"),
        anything("rows"),
    )


KERNELS = (
    Kernel(
        op="fp8_gemm",
        name="cutlass.vllm_scaled_mm",
        target=f"{_HERE}.fp8:VllmScaledMm",
        summary="vLLM's product scaled per tensor or row, one tile per range of rows",
        band=Band.SPECIALISED,
        constraints=(*VLLM_MACHINE, *_ROWS),
        features=frozenset({"bias"}),
        graph=GraphLevel.FULL,
        source=_VLLM,
        standings=standings.SCALED_MM,
    ),
    Kernel(
        op="fp8_gemm",
        name="cutlass.vllm_blockwise",
        target=f"{_HERE}.fp8:VllmBlockwise",
        summary="vLLM's product scaled per block, float32 scales applied every 128 columns",
        band=Band.SPECIALISED,
        constraints=(*VLLM_BLOCKS, *_BLOCKS),
        graph=GraphLevel.FULL,
        source=_VLLM,
        standings=standings.BLOCKWISE,
    ),
    Kernel(
        op="fp8_gemm",
        name="cutlass.sgl_fp8_scaled_mm",
        target=f"{_HERE}.fp8:SglScaledMm",
        summary="SGLang's product scaled per row, copied into the result",
        band=Band.SPECIALISED,
        constraints=(*SGL_MACHINE, *_ROWS),
        features=frozenset({"bias"}),
        source=_SGLANG,
        standings=standings.SGL_SCALED_MM,
    ),
    Kernel(
        op="fp8_gemm",
        name="cutlass.sgl_fp8_blockwise",
        target=f"{_HERE}.fp8:SglBlockwise",
        summary="SGLang's product scaled per block, copied into the result; removed in sglang-kernel 0.4",
        band=Band.SPECIALISED,
        constraints=(*SGL_BLOCKS, *_BLOCKS),
        source=_SGLANG,
        standings=standings.SGL_BLOCKWISE,
    ),
    Kernel(
        op="fp4_gemm",
        name="cutlass.vllm_fp4",
        target=f"{_HERE}.fp4:VllmFp4",
        summary="vLLM's product of NVFP4 by NVFP4 in Blackwell's tensor cores; packing orders the scales once",
        band=Band.SPECIALISED,
        constraints=(
            *VLLM_FP4,
            OneOf("a_format", (NVFP4,), why="a and b must have one format"),
            OneOf("b_format", (NVFP4,), why="its MXFP4 kernel is for experts"),
            _HALVES,
            MultipleOf("n", 32, why="the operator requires it"),
            MultipleOf(
                "k", 64, why="columns of scales padded to multiples of 4 gave wrong results, vllm-project/vllm#48898"
            ),
        ),
        layouts=(CHECKPOINT, SWIZZLED),
        packs_to=SWIZZLED,
        graph=GraphLevel.FULL,
        source=_VLLM,
        standings=standings.FP4,
    ),
    Kernel(
        op="grouped_gemm",
        name="cutlass.vllm_groups_nvfp4",
        target=f"{_HERE}.grouped:VllmNvFp4",
        summary="vLLM's grouped product of NVFP4 by NVFP4 in Blackwell's tensor cores; rows are read in place",
        band=Band.SPECIALISED,
        constraints=(*VLLM_FP4, *_of_experts("nvfp4", 64)),
        features=frozenset({"masked", "a_scale=nvfp4", "b_scale=nvfp4", "a_global_scale", "global_scale"}),
        graph=GraphLevel.FULL,
        source=_VLLM,
        standings=standings.GROUPS_NVFP4,
    ),
    Kernel(
        op="grouped_gemm",
        name="cutlass.vllm_groups_mxfp4",
        target=f"{_HERE}.grouped:VllmMxFp4",
        summary="vLLM's grouped product of MXFP4 by MXFP4 in Blackwell's tensor cores",
        band=Band.SPECIALISED,
        constraints=(*VLLM_MXFP4, *_of_experts("mxfp4", 128)),
        features=frozenset({"masked", "a_scale=mxfp4", "b_scale=mxfp4"}),
        graph=GraphLevel.FULL,
        source=_VLLM,
        standings=standings.GROUPS_MXFP4,
    ),
)
