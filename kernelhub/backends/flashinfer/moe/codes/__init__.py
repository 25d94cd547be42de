"""Records of FlashInfer's mixtures of experts by activations in small groups, NVFP4 and MXFP8, which are opt-in."""

from __future__ import annotations

from kernelhub.backends.flashinfer import calls, standings
from kernelhub.backends.flashinfer.moe.requirements import (
    ANY_WIDTH,
    BF16,
    BOTH_BIASES,
    CHOICES,
    COMPILED,
    FOLDER,
    HALVES,
    MAPPED,
    MODULE,
    PACKED,
    SOURCE,
    UsualScales,
    asked,
    layout,
    trtllm,
    widths,
)
from kernelhub.backends.flashinfer.requirements import requirements
from kernelhub.dispatch.constraint import OnDevice, OneOf, dtype_in
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.moe.experts.problem import FP8_BLOCK_UE8M0, MXFP4, MXFP8, NVFP4, SWIGLU_OAI

_BLACKWELL = OnDevice("nvidia", only=((10, 0), (10, 3), (12, 0), (12, 1)))
_W4A4 = (
    OneOf("weights", (NVFP4,)),
    asked(NVFP4, "tokens and the results of the activation are quantised to float4"),
    OneOf("static_scales", (True,), why="second scales of activations are required"),
    *widths(128, "scales must fill whole tiles"),
)
_MXFP8 = asked(MXFP8, "tokens and the results of the activation are quantised to float8 with power-of-two scales")
_W4A8 = (
    OneOf("weights", (MXFP4,)),
    _MXFP8,
    BOTH_BIASES,
    ANY_WIDTH,
)
_GPT_OSS = MAPPED | {"w13_bias", "w2_bias", f"activation={SWIGLU_OAI}"}
_SECOND_SCALES = MAPPED | {"static_scales"}

KERNELS = (
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_nvfp4",
        target=f"{FOLDER}.codes.trtllm_nvfp4:TrtllmNvfp4",
        summary=f"TensorRT-LLM's products of NVFP4 by NVFP4, opt-in by nvfp4, distributed as binaries; {PACKED}",
        band=Band.TUNED,
        constraints=trtllm(calls.TRTLLM_FP4, *_W4A4),
        features=_SECOND_SCALES,
        **layout("experts.nvfp4.trtllm.v1"),
        source=SOURCE,
        standings=standings.TRTLLM_EXPERTS,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts_nvfp4",
        target=f"{FOLDER}.codes.experts_nvfp4:ExpertsNvfp4",
        summary=f"CUTLASS's grouped products of NVFP4 by NVFP4, opt-in by nvfp4; {PACKED}; {COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(_BLACKWELL, calls.EXPERTS_CODES, calls.EXPERTS_SPACE),
            MODULE,
            UsualScales(),
            dtype_in("dtype", *HALVES),
            *_W4A4,
            *CHOICES,
        ),
        features=_SECOND_SCALES,
        **layout("experts.nvfp4.cutlass.v1"),
        source=SOURCE,
        standings=standings.CUTLASS_EXPERTS_BOTH,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_mxfp8",
        target=f"{FOLDER}.codes.trtllm_mxfp8:TrtllmMxfp8",
        summary=f"TensorRT-LLM's products of MXFP4 by MXFP8, opt-in by mxfp8, distributed as binaries; {PACKED}",
        band=Band.TUNED,
        constraints=trtllm(calls.TRTLLM_FP4, *_W4A8),
        features=_GPT_OSS,
        **layout("experts.mxfp4.trtllm.v1"),
        source=SOURCE,
        standings=standings.TRTLLM_EXPERTS,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts_mxfp8",
        target=f"{FOLDER}.codes.experts_mxfp8:ExpertsMxfp8",
        summary=f"CUTLASS's grouped products of MXFP4 by MXFP8, opt-in by mxfp8; {PACKED}; {COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(_BLACKWELL, calls.EXPERTS_MXFP8, calls.EXPERTS_MXFP8_SPACE),
            MODULE,
            BF16,
            *_W4A8,
            *CHOICES,
        ),
        features=_GPT_OSS,
        **layout("experts.mxfp4.cutlass.v1"),
        source=SOURCE,
        standings=standings.CUTLASS_EXPERTS_BOTH,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_mxfp8_blocks",
        target=f"{FOLDER}.codes.trtllm_mxfp8_blocks:TrtllmMxfp8Blocks",
        summary=f"TensorRT-LLM's MXFP8 products of blocks with UE8M0 scales, opt-in by mxfp8; {PACKED}",
        band=Band.TUNED,
        constraints=trtllm(
            calls.TRTLLM_FP8_BLOCKS,
            OneOf("weights", (FP8_BLOCK_UE8M0,)),
            _MXFP8,
            *widths(128, "blocks must be whole"),
        ),
        features=MAPPED,
        **layout("experts.mxfp8_blocks.trtllm.v1"),
        source=SOURCE,
        standings=standings.TRTLLM_EXPERTS,
    ),
)
