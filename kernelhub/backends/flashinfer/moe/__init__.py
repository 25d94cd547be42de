"""Records of FlashInfer's mixtures of experts.

Those that quantise more than `fused_moe` does by default are opt-in by a format, or have no record here:
`tests/backends/test_flashinfer_experts_refused.py` has what each rounds, and how far off that is. Those of sm_90 for
float8 weights with a scale for each expert sum in 14 bits throughout, which is not exact enough.
"""

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
from kernelhub.backends.flashinfer.requirements import DATACENTRE_BLACKWELL, HOPPER, RunsNvcc, requirements
from kernelhub.dispatch.constraint import OnDevice, OneOf, Package, SameValue, TorchBuilt, dtype_in
from kernelhub.dispatch.kernel import Band, Kernel, KnownBad
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.moe.experts.problem import (
    BLOCK_FORMATS,
    FP8,
    FP8_BLOCK,
    FP8_BLOCK_GATE_UP,
    FP8_BLOCK_UE8M0,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    MXINT4,
    NVFP4,
    PLAIN,
    SWIGLU_OAI,
)

_HERE = f"{FOLDER}.experts"
_ARRANGED = "w13 is copied with up before gate, once per plan or in each call"
_ON = OnDevice("nvidia", only=((9, 0), (10, 0), (10, 3)))
_UP_FIRST = "experts.up_gate.v1"
_BLOCKS = "experts.up_gate_blocks.v1"
_CALLS = (calls.EXPERTS, calls.EXPERTS_SPACE)
_WIDE_TOKENS = SameValue("activation_dtype", "dtype")
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
_WITH_BIASES = MAPPED | {"w13_bias", "w2_bias", f"activation={SWIGLU_OAI}"}
_STATIC_SCALES = MAPPED | {"static_scales"}

KERNELS = (
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts",
        target=f"{_HERE}:Experts",
        summary=f"CUTLASS's grouped products; {_ARRANGED}; {COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(_ON, *_CALLS),
            MODULE,
            dtype_in("dtype", *HALVES),
            OneOf("weights", (PLAIN,)),
            SameValue("activation_dtype", "dtype"),
            *CHOICES,
            *widths(8, "rows must be multiples of 16 bytes"),
        ),
        features=MAPPED,
        layouts=(CHECKPOINT, _UP_FIRST),
        packs_to=_UP_FIRST,
        source=SOURCE,
        standings=standings.CUTLASS_EXPERTS,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts_fp8",
        target=f"{_HERE}:ExpertsFp8",
        summary=f"CUTLASS's grouped float8 products with static scales; {_ARRANGED}; {COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, *_CALLS),
            MODULE,
            dtype_in("dtype", *HALVES),
            OneOf("weights", (FP8_TENSOR,)),
            dtype_in("activation_dtype", FP8),
            OneOf("static_scales", (True,), why="all tokens are quantised with one scale"),
            *CHOICES,
            *widths(16, "rows must be multiples of 16 bytes"),
        ),
        features=_STATIC_SCALES,
        layouts=(CHECKPOINT, _UP_FIRST),
        packs_to=_UP_FIRST,
        source=SOURCE,
        standings=standings.CUTLASS_EXPERTS_BLACKWELL,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts_mxfp4",
        target=f"{FOLDER}.experts_fp4:ExpertsMxfp4",
        summary=f"CUTLASS's grouped products of MXFP4 by bfloat16 on sm_90; {PACKED}; {COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(HOPPER, calls.EXPERTS_FP4, calls.EXPERTS_FP4_SPACE),
            MODULE,
            BF16,
            OneOf("weights", (MXFP4,)),
            _WIDE_TOKENS,
            BOTH_BIASES,
            *CHOICES,
            ANY_WIDTH,
        ),
        features=_WITH_BIASES,
        **layout("experts.mxfp4.cutlass_sm90.v1"),
        source=SOURCE,
        standings=standings.CUTLASS_EXPERTS_HOPPER,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts_blocks",
        target=f"{FOLDER}.blocks:ExpertsBlocks",
        summary=f"CUTLASS's float8 products in blocks on sm_90, opt-in by fp8_block; {PACKED}; {COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(HOPPER, calls.EXPERTS_BLOCKS, calls.EXPERTS_BLOCKS_SPACE),
            TorchBuilt("12.8"),
            MODULE,
            RunsNvcc(),
            BF16,
            OneOf("weights", BLOCK_FORMATS),
            asked(FP8_BLOCK, "gate and up are rounded, and division uses reciprocals"),
            *CHOICES,
            *widths(128, "blocks must be whole"),
        ),
        features=MAPPED,
        **layout(_BLOCKS),
        source=SOURCE,
        standings=standings.CUTLASS_EXPERTS_HOPPER,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_blocks",
        target=f"{FOLDER}.blocks:TrtllmBlocks",
        summary=f"TensorRT-LLM's float8 products in blocks, opt-in by fp8_block_gate_up; {PACKED}",
        band=Band.TUNED,
        constraints=trtllm(
            calls.TRTLLM_FP8_BLOCKS,
            OneOf("weights", BLOCK_FORMATS),
            asked(FP8_BLOCK_GATE_UP, "gate and up are quantised before the activation"),
            *widths(128, "blocks must be whole"),
        ),
        features=MAPPED,
        **layout(_BLOCKS),
        source=SOURCE,
        standings=standings.TRTLLM_EXPERTS,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts",
        target=f"{FOLDER}.trtllm:TrtllmBf16",
        summary=f"TensorRT-LLM's products for sm_100 and sm_103, distributed as binaries; {PACKED}",
        band=Band.TUNED,
        constraints=trtllm(
            calls.TRTLLM_BF16,
            OneOf("weights", (PLAIN,)),
            _WIDE_TOKENS,
            *widths(128, "K must be a multiple of the block"),
        ),
        features=MAPPED,
        **layout("experts.bf16.trtllm.v1"),
        source=SOURCE,
        standings=standings.TRTLLM_EXPERTS,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_fp8",
        target=f"{FOLDER}.trtllm:TrtllmFp8",
        summary=f"TensorRT-LLM's float8 products with static scales, distributed as binaries; {PACKED}",
        band=Band.TUNED,
        constraints=trtllm(
            calls.TRTLLM_FP8,
            OneOf("weights", (FP8_TENSOR,)),
            dtype_in("activation_dtype", FP8),
            OneOf("static_scales", (True,), why="all tokens are quantised with one scale"),
            *widths(128, "scratch memory is sized in multiples of 128"),
        ),
        features=_STATIC_SCALES,
        **layout("experts.fp8.trtllm.v1"),
        source=SOURCE,
        standings=standings.TRTLLM_EXPERTS,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_mxfp4",
        target=f"{FOLDER}.trtllm_fp4:TrtllmMxfp4",
        summary=f"TensorRT-LLM's products of MXFP4 by bfloat16, distributed as binaries; {PACKED}",
        band=Band.TUNED,
        constraints=trtllm(calls.TRTLLM_FP4, OneOf("weights", (MXFP4,)), _WIDE_TOKENS, BOTH_BIASES, ANY_WIDTH),
        features=_WITH_BIASES,
        **layout("experts.mxfp4.trtllm.v1"),
        source=SOURCE,
        standings=standings.TRTLLM_EXPERTS,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_mxint4",
        target=f"{FOLDER}.trtllm:TrtllmMxint4",
        summary=f"TensorRT-LLM's products of MXINT4 by bfloat16, distributed as binaries; {PACKED}",
        band=Band.TUNED,
        constraints=trtllm(
            calls.TRTLLM_MXINT4,
            OneOf("weights", (MXINT4,)),
            _WIDE_TOKENS,
            *widths(256, "the library prepares only these"),
        ),
        features=MAPPED,
        **layout("experts.mxint4.trtllm.v1"),
        source=SOURCE,
        standings=standings.TRTLLM_EXPERTS,
    ),
    # Activations in small groups, which are opt-in.
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_nvfp4",
        target=f"{FOLDER}.trtllm_fp4:TrtllmNvfp4",
        summary=f"TensorRT-LLM's products of NVFP4 by NVFP4, opt-in by nvfp4, distributed as binaries; {PACKED}",
        band=Band.TUNED,
        constraints=trtllm(calls.TRTLLM_FP4, *_W4A4),
        features=_STATIC_SCALES,
        **layout("experts.nvfp4.trtllm.v1"),
        source=SOURCE,
        standings=standings.TRTLLM_EXPERTS,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts_nvfp4",
        target=f"{FOLDER}.experts_fp4:ExpertsNvfp4",
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
        features=_STATIC_SCALES,
        **layout("experts.nvfp4.cutlass.v1"),
        source=SOURCE,
        standings=standings.CUTLASS_EXPERTS_BOTH,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_mxfp8",
        target=f"{FOLDER}.trtllm_fp4:TrtllmMxfp8",
        summary=f"TensorRT-LLM's products of MXFP4 by MXFP8, opt-in by mxfp8, distributed as binaries; {PACKED}",
        band=Band.TUNED,
        constraints=trtllm(calls.TRTLLM_FP4, *_W4A8),
        features=_WITH_BIASES,
        **layout("experts.mxfp4.trtllm.v1"),
        source=SOURCE,
        standings=standings.TRTLLM_EXPERTS,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts_mxfp8",
        target=f"{FOLDER}.experts_fp4:ExpertsMxfp8",
        summary=f"CUTLASS's grouped products of MXFP4 by MXFP8, opt-in by mxfp8; {PACKED}; {COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(_BLACKWELL, calls.EXPERTS_MXFP8, calls.EXPERTS_MXFP8_SPACE),
            MODULE,
            BF16,
            *_W4A8,
            *CHOICES,
        ),
        features=_WITH_BIASES,
        **layout("experts.mxfp4.cutlass.v1"),
        source=SOURCE,
        standings=standings.CUTLASS_EXPERTS_BOTH,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_mxfp8_blocks",
        target=f"{FOLDER}.blocks:TrtllmMxfp8Blocks",
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

KNOWN_BAD = (
    KnownBad(
        "flashinfer.cutlass_experts_mxfp4",
        "fused_moe",
        (Package("flashinfer", ">=0.6.10,<0.6.16", distribution="flashinfer-python"),),
        "sometimes a tile of one expert is off by up to a third: descriptors change during loads",
        "https://github.com/flashinfer-ai/flashinfer/issues/5438",
        'pip install "flashinfer-python>=0.6.18,<0.7.3"',
    ),
)
