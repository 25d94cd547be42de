"""Records of the Marlin kernels in vLLM's compiled library."""

from __future__ import annotations

from kernelhub.dispatch.constraint import (
    Compiled,
    Constraint,
    MultipleOf,
    OnDevice,
    OneOf,
    Package,
    Rule,
    anything,
    dtype_in,
)
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import published, verified
from kernelhub.ops.gemm.fp4.problem import MXFP4, NVFP4
from kernelhub.ops.gemm.fp8.problem import BLOCK, E8M0, FLOAT, ROW, TENSOR, Fp8GemmProblem
from kernelhub.probes.package import Library

_TABLE = "https://github.com/vllm-project/vllm/blob/main/docs/features/quantization/README.md#supported-hardware"

FP4 = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-21, torch 2.11.0+cu130, vllm 0.33.0, its library by itself: 42 tests passed "
        "(benchmarks/results/libraries_h200.json)",
    ),
    published(
        "ampere",
        "ada",
        evidence="vLLM runs float4 weights by Marlin where the GPU has no float4 products: "
        "https://github.com/vllm-project/vllm/pull/49376",
    ),
)
FP8 = (published("ampere", "ada", "hopper", evidence=f"vLLM supports Marlin's float8 weights there: {_TABLE}"),)


_HOMEPAGE = "https://github.com/vllm-project/vllm"
_TARGET = "kernelhub.backends.marlin.fp4:MarlinFp4"
_FP8 = "kernelhub.backends.marlin.fp8:MarlinFp8"

BACKEND = Backend(
    "marlin", "Marlin, float4 and float8 weights by bfloat16 and float16, compiled into vLLM", "vllm", _HOMEPAGE
)

VLLM = Library("vllm", "_C", 'pip install "vllm>=0.33"', ("_C_stable_libtorch*.so",))
# As vLLM 0.33.0 declares it (its wheel).
SCHEMA = (
    "(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales, Tensor? a_scales, "
    "Tensor? global_scale, Tensor? b_zeros_or_none, Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, "
    "SymInt size_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor"
)

# Older versions had other arguments, a global scale of 16 bits, and other scales for bfloat16.
_MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((8, 0), (8, 6), (8, 9), (9, 0))),
    Package("vllm", ">=0.33", install=VLLM.install),
    Compiled(VLLM),
    MultipleOf("k", 64, why="its tiles have 64 or 128 columns"),
    anything("n"),
)


def _marlin(variant: str, b_format: str, dtype: str, layout: str, summary: str) -> Kernel:
    return Kernel(
        op="fp4_gemm",
        name=f"marlin.{variant}",
        target=_TARGET,
        summary=summary,
        band=Band.SPECIALISED,
        constraints=(
            *_MACHINE,
            OneOf("a_format", (dtype,), why="the packed layout depends on it"),
            OneOf("b_format", (b_format,)),
            dtype_in("out_dtype", dtype, why="the result has the dtype of the activations"),
        ),
        layouts=(layout,),
        packs_to=layout,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_HOMEPAGE,
        standings=FP4,
    )


def _whole_blocks(problem: Fp8GemmProblem) -> str | None:
    if problem.scaling == BLOCK and problem.k % 128:
        return f"k is {problem.k}; a block scale covers 128 columns, and all blocks must be whole"
    return None


def _marlin_fp8(dtype: str) -> Kernel:
    layout = f"marlin.fp8.{dtype}.v1"
    return Kernel(
        op="fp8_gemm",
        name=f"marlin.fp8_{dtype}",
        target=_FP8,
        summary=f"{dtype} by packed float8 whose scales are {dtype}, in blocks powers of two",
        band=Band.SPECIALISED,
        constraints=(
            *_MACHINE,
            OneOf("weight_only", (dtype,), why="the packed layout depends on it"),
            OneOf("scaling", (TENSOR, ROW, BLOCK)),
            Rule(("scaling", "k"), _whole_blocks, "divisibility"),
            dtype_in("out_dtype", dtype, why="the result has the dtype of the activations"),
            dtype_in("a_scale_dtype", FLOAT),
            dtype_in("b_scale_dtype", FLOAT, E8M0),
            anything("rows"),
        ),
        features=frozenset({f"weight_only={dtype}"}),
        layouts=(layout,),
        packs_to=layout,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_HOMEPAGE,
        standings=FP8,
    )


KERNELS = (
    _marlin_fp8("bfloat16"),
    _marlin_fp8("float16"),
    _marlin(
        "nvfp4_bfloat16",
        NVFP4,
        "bfloat16",
        "marlin.nvfp4.bfloat16.v1",
        "bfloat16 by packed NVFP4 whose scales are not negative and span at most 16 powers of two",
    ),
    _marlin(
        "nvfp4_float16",
        NVFP4,
        "float16",
        "marlin.nvfp4.float16.v1",
        "float16 by packed NVFP4 whose scales are not negative",
    ),
    _marlin(
        "mxfp4",
        MXFP4,
        "bfloat16",
        "marlin.mxfp4.v1",
        "bfloat16 by packed MXFP4 whose scales are from 2^-125 to 2^125",
    ),
)
