"""Records of FlashInfer's products of float8 and of float4.

`mm_fp8` runs the same kernels as `fp8_gemm_sm100`, and only in the newest releases; its own kernel, for few rows on
Blackwell, needs rearranged weights, which `fp8_gemm` has no layouts for.
"""

from __future__ import annotations

from typing import Any

from kernelhub.backends.flashinfer import calls, standings
from kernelhub.backends.flashinfer.requirements import (
    DATACENTRE_BLACKWELL,
    HOPPER,
    INSTALL,
    Cubins,
    Module,
    RunsNvcc,
    requirements,
)
from kernelhub.dispatch.constraint import (
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
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel, KnownBad
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.gemm.fp4.problem import MXFP4, NVFP4, Fp4GemmProblem
from kernelhub.ops.gemm.fp8.batched.problem import TENSOR as WHOLE
from kernelhub.ops.gemm.fp8.problem import BLOCK, E8M0, FEW, FLOAT, MX, SOME, TENSOR

_HERE = "kernelhub.backends.flashinfer.gemm"
_COMPILED = "compiled at first use unless built ahead"
_SOURCE = "FlashInfer (Ye et al. 2025)"
_LONGEST = 512  # see `_sums_of_hopper`

_SM89_ON = OnDevice("nvidia", only=((8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)))
_NO_SM12 = OnDevice("nvidia", only=((8, 9), (9, 0), (10, 0), (10, 3)))
_CUDNN = Package("cudnn", ">=1.13", distribution="nvidia-cudnn-frontend", install='pip install "kernelhub[cudnn]"')
_ROWS_OF_16 = tuple(MultipleOf(name, 16, why="rows must be multiples of 16 bytes") for name in ("n", "k"))
_HALVES = dtype_in("out_dtype", "bfloat16", "float16")
_FLOATS = (dtype_in("a_scale_dtype", FLOAT), dtype_in("b_scale_dtype", FLOAT))
_EXACT = (dtype_in("a_scale_dtype", FLOAT, E8M0), dtype_in("b_scale_dtype", FLOAT, E8M0))
_BLOCKS = MultipleOf("k", 128, why="a scale covers 128 columns, and all blocks must be whole")
_WHOLE_BLOCKS = (_BLOCKS, MultipleOf("n", 128, why="a scale covers 128 columns, and all blocks must be whole"))
_MX = (
    OneOf("scaling", (MX,)),
    _HALVES,
    dtype_in("a_scale_dtype", E8M0),
    dtype_in("b_scale_dtype", E8M0),
    MultipleOf("n", 128, why="scales are read in tiles of 128 rows"),
    MultipleOf("k", 128, why="scales are read in tiles of 4 groups"),
    anything("rows"),
)
_BF16 = dtype_in("out_dtype", "bfloat16", why="the kernel returns nothing else")


def _sums_of_hopper(problem: Any) -> str | None:
    """K products, each cut at 2^-13 of the sum, lose 2^-14 sqrt(K) of it; 2^-9 is allowed, of which this is 0.7."""
    if problem.device.capability < (10, 0) and problem.k > _LONGEST:
        return (
            f"k is {problem.k}; before sm_100 the library sums in the 14 bits of the float8 instructions throughout, "
            f"which is exact enough up to {_LONGEST}"
        )
    return None


_SUMS = Rule(("device", "k"), _sums_of_hopper, "accuracy", "use a kernel that moves sums to float32")


def _tensorwise(runner: str) -> tuple[Constraint, ...]:
    """The constraints on machine and sizes of a runner of tensorwise products."""
    if runner == "cublas":
        return (*requirements(_SM89_ON, calls.FP8_GEMM), _SUMS, *_ROWS_OF_16, Module((), lambda _: ("gemm",)))
    if runner == "cudnn":
        return (*requirements(_NO_SM12, calls.FP8_GEMM), _CUDNN, _SUMS, *_ROWS_OF_16)
    compiled = Module((), lambda _: ("fp8_gemm_cutlass",))
    return (*requirements(DATACENTRE_BLACKWELL, calls.FP8_GEMM), *_ROWS_OF_16, compiled)


_RUNNERS = (
    ("cublas", "Cublas", f"cuBLASLt's product; {_COMPILED}", GraphLevel.FULL, standings.CUBLAS),
    (
        "cudnn",
        "Cudnn",
        "cuDNN's product, one plan per number of rows",
        GraphLevel.NONE,
        standings.CUDNN_PRODUCTS,
    ),
    (
        "cutlass",
        "Cutlass",
        f"CUTLASS's product for sm_100 and sm_103; {_COMPILED}",
        GraphLevel.FULL,
        standings.BLACKWELL_PRODUCTS,
    ),
)


def _fp4_module(problem: Fp4GemmProblem) -> tuple[str, ...]:
    """From 0.6.12 on sm_103 has a module of its own."""
    names = ("fp4_gemm_cutlass_sm103", "fp4_gemm_cutlass")
    return names if problem.device.capability == (10, 3) else names[1:]


_SCALES_IN_TILES = "fp4.scales128x4.v1"
_SHUFFLED = "fp4.shuffled32.scales128x4.v1"  # rows in TensorRT-LLM's order besides
_TILES = tuple(
    MultipleOf(name, 128, why=why)
    for name, why in (
        ("n", "scales are read in tiles of 128 rows"),
        ("k", "scales are read in tiles of 4 groups, codes in multiples of 128"),
    )
)
_BOTH_NVFP4 = (OneOf("a_format", (NVFP4,), why="both operands must have one format"), OneOf("b_format", (NVFP4,)))


def _one_format(problem: Fp4GemmProblem) -> str | None:
    if problem.a_format == problem.b_format:
        return None
    return f"a_format is {problem.a_format} and b_format {problem.b_format}; both operands must have one format"


KERNELS = (
    Kernel(
        op="fp4_gemm",
        name="flashinfer.fp4_cutlass",
        target=f"{_HERE}.fp4:Fp4Cutlass",
        summary=f"CUTLASS's product of NVFP4 by NVFP4 for sm_100 and sm_103; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.FP4_GEMM),
            Module(("device",), _fp4_module),
            *_BOTH_NVFP4,
            _HALVES,
            *_TILES,
        ),
        layouts=(CHECKPOINT, _SCALES_IN_TILES),
        packs_to=_SCALES_IN_TILES,
        graph=GraphLevel.FULL,
        source=_SOURCE,
        standings=standings.FP4_CUTLASS,
    ),
    Kernel(
        op="fp4_gemm",
        name="flashinfer.fp4_trtllm",
        target=f"{_HERE}.fp4:Fp4Trtllm",
        summary="TensorRT-LLM's product of NVFP4 by NVFP4 for sm_100 and sm_103, distributed as binaries",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.FP4_GEMM),
            Module((), lambda _: ("trtllm_gemm",)),
            Cubins(),
            *_BOTH_NVFP4,
            _BF16,
            MultipleOf("n", 128, why="rows are in the order of tiles of 128"),
            MultipleOf("k", 256, why="a tile has 256 elements of a row"),
        ),
        layouts=(CHECKPOINT, _SHUFFLED),
        packs_to=_SHUFFLED,
        source="TensorRT-LLM",
        standings=standings.FP4_TRTLLM,
    ),
    Kernel(
        op="fp4_gemm",
        name="flashinfer.fp4_cudnn",
        target=f"{_HERE}.fp4:Fp4Cudnn",
        summary="cuDNN's product of NVFP4 by NVFP4 or MXFP4 by MXFP4, one plan per number of rows",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.FP4_GEMM),
            _CUDNN,
            OneOf("a_format", (NVFP4, MXFP4), why="both operands must have one format"),
            OneOf("b_format", (NVFP4, MXFP4)),
            Rule(("a_format", "b_format"), _one_format, "value"),
            _HALVES,
            *_TILES,
        ),
        layouts=(CHECKPOINT, _SCALES_IN_TILES),
        packs_to=_SCALES_IN_TILES,
        source="cuDNN",
        standings=standings.FP4_CUDNN,
    ),
    Kernel(
        op="fp8_gemm",
        name="flashinfer.fp8_blocks",
        target=f"{_HERE}.blocks:BlocksHopper",
        summary=f"TensorRT-LLM's DeepGEMM for sm_90; {_COMPILED}, then by nvcc at the first call of a class of shapes",
        band=Band.SPECIALISED,
        constraints=(
            *requirements(HOPPER, calls.BLOCKS_HOPPER),
            TorchBuilt("12.8"),
            Module((), lambda _: ("fp8_blockscale_gemm_90",)),
            RunsNvcc(),
            OneOf("scaling", (BLOCK,)),
            _BF16,
            *_EXACT,
            _BLOCKS,
            MultipleOf("n", 64, why="tiles of columns must be whole"),
            anything("rows"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        source="TensorRT-LLM, from DeepGEMM",
        standings=standings.BLOCKS_HOPPER,
    ),
    Kernel(
        op="fp8_gemm",
        name="flashinfer.groupwise_cutlass",
        target=f"{_HERE}.blocks:GroupwiseCutlass",
        summary=f"CUTLASS's product in blocks for sm_100 and sm_103; {_COMPILED}",
        band=Band.SPECIALISED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.GROUPWISE),
            Module((), lambda _: ("gemm_sm100",)),
            OneOf("scaling", (BLOCK,)),
            _HALVES,
            *_EXACT,
            *_WHOLE_BLOCKS,
            anything("rows"),
        ),
        graph=GraphLevel.FULL,
        source=_SOURCE,
        standings=standings.BLACKWELL_PRODUCTS,
    ),
    Kernel(
        op="fp8_gemm",
        name="flashinfer.groupwise_trtllm",
        target=f"{_HERE}.blocks:GroupwiseTrtllm",
        summary="TensorRT-LLM's product in blocks for sm_100 and sm_103, distributed as binaries",
        band=Band.SPECIALISED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.GROUPWISE),
            Module((), lambda _: ("trtllm_gemm",)),
            Cubins(),
            OneOf("scaling", (BLOCK,)),
            _BF16,
            *_EXACT,
            *_WHOLE_BLOCKS,
            Rule(("k",), lambda problem: None if problem.k >= 256 else f"k is {problem.k}, below 256", "range"),
            anything("rows"),
        ),
        source="TensorRT-LLM",
        standings=standings.BLACKWELL_PRODUCTS,
    ),
    Kernel(
        op="fp8_gemm",
        name="flashinfer.mx_cutlass",
        target=f"{_HERE}.mx:MxCutlass",
        summary=f"CUTLASS's product of MXFP8 for sm_100 and sm_103; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.MX_GEMM),
            Module((), lambda _: ("mxfp8_gemm_cutlass",)),
            *_MX,
        ),
        graph=GraphLevel.FULL,
        source=_SOURCE,
        standings=standings.BLACKWELL_PRODUCTS,
    ),
    Kernel(
        op="fp8_gemm",
        name="flashinfer.mx_cudnn",
        target=f"{_HERE}.mx:MxCudnn",
        summary="cuDNN's product of MXFP8, one plan per number of rows",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, calls.MX_GEMM),
            Package("flashinfer", ">=0.6.18", distribution="flashinfer-python", install=INSTALL),
            _CUDNN,
            *_MX,
        ),
        source="cuDNN",
        standings=standings.BLACKWELL_PRODUCTS,
    ),
    *(
        Kernel(
            op="fp8_gemm",
            name=f"flashinfer.fp8_{runner}",
            target=f"{_HERE}.tensorwise:{adapter}",
            summary=summary,
            band=Band.TUNED,
            constraints=(*_tensorwise(runner), OneOf("scaling", (TENSOR,)), _HALVES, *_FLOATS, anything("rows")),
            graph=graph,
            source=_SOURCE,
            standings=stands,
        )
        for runner, adapter, summary, graph, stands in _RUNNERS
    ),
    *(
        Kernel(
            op="bmm_fp8",
            name=f"flashinfer.bmm_{runner}",
            target=f"{_HERE}.tensorwise:{adapter}Batch",
            summary=summary,
            band=Band.TUNED,
            constraints=(
                *_tensorwise(runner),
                OneOf("a_scaling", (WHOLE,), why="the library has one scale for the whole batch"),
                OneOf("b_scaling", (WHOLE,), why="the library has one scale for the whole batch"),
                _HALVES,
            ),
            graph=graph,
            source=_SOURCE,
            standings=stands,
        )
        for runner, adapter, summary, graph, stands in _RUNNERS
    ),
)

KNOWN_BAD = (
    # 0.6.2 is the first with a kernel for up to 32 rows; 0.7.2 still has it.
    KnownBad(
        "flashinfer.groupwise_cutlass",
        "fp8_gemm",
        (OneOf("rows", (FEW, SOME)), Package("flashinfer", ">=0.6.2", distribution="flashinfer-python")),
        "the kernel for up to 32 rows may use a scale before it is loaded, so that a row is sometimes wrong",
        "https://github.com/flashinfer-ai/flashinfer/issues/4396",
    ),
)
