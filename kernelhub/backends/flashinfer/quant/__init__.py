"""Records of FlashInfer's quantisation.

Its dequantiser returns the bits of the op. Its quantisers do not, for reasons that each record states: they require
`unsafe=True`, for callers that need the library's bits.
"""

from __future__ import annotations

from kernelhub.backends.flashinfer import calls, standings
from kernelhub.backends.flashinfer.moe.requirements import UsualScales
from kernelhub.backends.flashinfer.quant.requirements import CompilesTiles, fp4_modules
from kernelhub.backends.flashinfer.requirements import SM80_ON, Module, requirements
from kernelhub.dispatch.constraint import Between, OnDevice, OneOf, Package, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel, KnownBad
from kernelhub.ops.quant.problem import FP8_SCALES, GROUP

_HERE = "kernelhub.backends.flashinfer.quant"
# Older devices get kernels without a body, which write nothing; the first compilers of cuTile did not support them.
_BLACKWELL = OnDevice("nvidia", only=((10, 0), (10, 3), (12, 0), (12, 1)))
_HALVES = dtype_in("dtype", "float16", "bfloat16", why="the library compiles it for these")
_COMPILED = "compiled at first use unless built ahead"
_UP = OneOf(
    "round_up",
    (True,),
    why="the library only rounds scales up",
    remedy='use scale_rounding="up", if those scales are acceptable',
)
_TENSORRT = "TensorRT-LLM, as FlashInfer compiles it"

KERNELS = (
    Kernel(
        op="dequantize_nvfp4",
        name="flashinfer.dequantize",
        target=f"{_HERE}.nvfp4_kv:DequantizeNvfp4",
        summary="a row per block of threads, to float16; compiled at first use unless built ahead",
        band=Band.TUNED,
        constraints=(
            *requirements(SM80_ON, calls.DEQUANTIZE_NVFP4, calls.DEQUANTIZE_MODULE),
            Module((), lambda _: ("fp4_kv_dequant",)),
            dtype_in("out_dtype", "float16", why="products below 2^-126 become 0, which differs in bfloat16"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="FlashInfer (Ye et al. 2025)",
        standings=standings.DEQUANTIZE,
    ),
    Kernel(
        op="quantize_nvfp4",
        name="flashinfer.quantize_nvfp4",
        target=f"{_HERE}.fp4:QuantizeNvfp4",
        summary=f"its bits differ from those of the op, so it requires unsafe=True; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(_BLACKWELL, calls.QUANTIZE_FP4),
            Module(("device",), fp4_modules),
            UsualScales(),
            _HALVES,
        ),
        features=frozenset({"static"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_TENSORRT,
        standings=standings.OTHER_BITS,
    ),
    Kernel(
        op="quantize_nvfp4",
        name="flashinfer.quantize_nvfp4_kv",
        target=f"{_HERE}.nvfp4_kv:QuantizeNvfp4Kv",
        summary=f"the library's kernel for caches; other bits than the op's, so it requires unsafe=True; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(_BLACKWELL, calls.QUANTIZE_NVFP4_KV, calls.QUANTIZE_MODULE),
            Module((), lambda _: ("fp4_kv_quant",)),
            _HALVES,
        ),
        features=frozenset({"static"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        source="FlashInfer (Ye et al. 2025)",
        standings=standings.OTHER_BITS,
    ),
    Kernel(
        op="quantize_mxfp4",
        name="flashinfer.quantize_mxfp4",
        target=f"{_HERE}.fp4:QuantizeMxfp4",
        summary=f"its bits differ from those of the op, so it requires unsafe=True; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(_BLACKWELL, calls.QUANTIZE_FP4),
            Module(("device",), fp4_modules),
            _HALVES,
            _UP,
        ),
        features=frozenset({"round_up"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_TENSORRT,
        standings=standings.OTHER_BITS,
    ),
    Kernel(
        op="quantize_mxfp8",
        name="flashinfer.quantize_mxfp8",
        target=f"{_HERE}.fp8:QuantizeMxfp8",
        summary=f"its bits differ from those of the op, so it requires unsafe=True; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(_BLACKWELL, calls.QUANTIZE_MXFP8),
            Module((), lambda _: ("mxfp8_quantization_sm100",)),
            _HALVES,
            _UP,
        ),
        features=frozenset({"round_up"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_TENSORRT,
        standings=standings.OTHER_BITS,
    ),
    Kernel(
        op="quantize_fp8",
        name="flashinfer.quantize_fp8",
        target=f"{_HERE}.fp8:QuantizeGroups",
        summary="groups by cuTile; its bits differ from those of the op, so it requires unsafe=True; "
        "compiled in the process",
        band=Band.TUNED,
        constraints=(
            *requirements(_BLACKWELL, calls.QUANTIZE_GROUPS),
            CompilesTiles(),
            anything("dtype"),
            OneOf("granularity", (GROUP,), why="the library has a kernel for groups only"),
            Between("group_size", 1, 1024, why="a tile holds one group, and wider ones are untested"),
            OneOf("scale_dtype", FP8_SCALES),
        ),
        features=frozenset({"ue8m0", "column"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="FlashInfer (Ye et al. 2025)",
        standings=standings.OTHER_BITS,
    ),
)

_FLASHINFER = "https://github.com/flashinfer-ai/flashinfer"
# Nobody reported what follows from reading it.
_SOURCE = f"{_FLASHINFER}/blob/v0.6.18.post1/csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh"
_BFLOAT16 = (OneOf("dtype", ("bfloat16",)),)

KNOWN_BAD = (
    KnownBad(
        "flashinfer.quantize_nvfp4",
        "quantize_nvfp4",
        (),
        "multiplies by reciprocals of 6 and of scales, which rcp.approx.ftz makes unless "
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1: about one byte of codes in 800 differs from an exact division; "
        "zeros and tiny groups get the scale 0; NaN becomes 6, not a NaN of its group",
        f"{_FLASHINFER}/pull/3387",
    ),
    KnownBad(
        "flashinfer.quantize_nvfp4_kv",
        "quantize_nvfp4",
        (),
        "multiplies by reciprocals of 6 and of scales, which rcp.approx.ftz makes: were they exact, about one byte of "
        "codes in 800 would be another; zeros and tiny groups get the scale 0; NaN becomes 6, not a NaN of its group",
        f"{_FLASHINFER}/blob/v0.6.18.post1/csrc/fp4_kv_quantization.cu",
    ),
    KnownBad(
        "flashinfer.quantize_nvfp4_kv",
        "quantize_nvfp4",
        _BFLOAT16,
        "NaN may hide larger numbers of its group, which then also become 6",
        f"{_FLASHINFER}/blob/v0.6.18.post1/csrc/fp4_kv_quantization.cu",
    ),
    KnownBad(
        "flashinfer.quantize_mxfp4",
        "quantize_mxfp4",
        (),
        "NaN becomes 6, not a NaN of its group; a group with infinity gets the scale 2^127, its finite numbers 0 and "
        "either infinity 6",
        _SOURCE,
    ),
    KnownBad(
        "flashinfer.quantize_mxfp4",
        "quantize_mxfp4",
        _BFLOAT16,
        "groups below 6 * 2^-126 become zeros",
        f"{_FLASHINFER}/issues/2440",
    ),
    KnownBad(
        "flashinfer.quantize_mxfp8",
        "quantize_mxfp8",
        (),
        "a group with infinity gets the scale 2^127, its finite numbers 0 and either infinity 448, in 0.6.12 NaN; "
        "a group of NaN alone gets the scale NaN",
        _SOURCE,
    ),
    KnownBad(
        "flashinfer.quantize_mxfp8",
        "quantize_mxfp8",
        (Package("flashinfer", ">=0.6.13", distribution="flashinfer-python"),),
        "NaN becomes 448, as read in 0.6.18",
        _SOURCE,
    ),
    KnownBad(
        "flashinfer.quantize_mxfp8",
        "quantize_mxfp8",
        _BFLOAT16,
        "groups below 448 * 2^-126 become zeros",
        f"{_FLASHINFER}/issues/2440",
    ),
    KnownBad(
        "flashinfer.quantize_fp8",
        "quantize_fp8",
        (),
        "infinity gives its group an infinite scale, and its finite numbers 0; infinity and NaN become -448",
        f"{_FLASHINFER}/pull/4019",
    ),
    KnownBad(
        "flashinfer.quantize_fp8",
        "quantize_fp8",
        (OneOf("column", (False,)), OneOf("ue8m0", (False,))),
        "multiplies by rounded reciprocals of scales, so that some codes differ",
        f"{_FLASHINFER}/pull/4019",
    ),
    KnownBad(
        "flashinfer.quantize_fp8",
        "quantize_fp8",
        (OneOf("ue8m0", (True,)),),
        "powers of two are the exponentials of approximate logarithms, and never below 2^-33",
        f"{_FLASHINFER}/pull/4019",
    ),
)
