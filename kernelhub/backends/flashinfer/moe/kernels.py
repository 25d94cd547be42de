"""Records of FlashInfer's mixtures of experts.

Those that quantise more than `fused_moe` does by default are asked for by a format, or are no kernels here:
`tests/backends/test_flashinfer_experts_refused.py` has what each rounds, and how far off that is. Those of sm_90 for
float8 weights with a scale for each expert sum in 14 bits throughout, which is not exact enough.
"""

from __future__ import annotations

from typing import Any

from kernelhub.backends.flashinfer import calls
from kernelhub.backends.flashinfer.requirements import (
    DATACENTRE_BLACKWELL,
    HOPPER,
    INSTALL,
    Cuda,
    Module,
    Products,
    RunsNvcc,
    requirements,
)
from kernelhub.dispatch.constraint import (
    Between,
    Constraint,
    MultipleOf,
    OnDevice,
    OneOf,
    Package,
    Rule,
    SameValue,
    anything,
    dtype_in,
)
from kernelhub.dispatch.kernel import Band, Kernel, KnownBad
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.moe.experts.problem import (
    BLOCK_FORMATS,
    FP8,
    FP8_BLOCK,
    FP8_BLOCK_GATE_UP,
    FP8_TENSOR,
    MXFP4,
    MXINT4,
    PLAIN,
    SWIGLU_OAI,
    ExpertsProblem,
)
from kernelhub.probes.signature import Call

_FOLDER = "kernelhub.backends.flashinfer.moe"
_HERE = f"{_FOLDER}.experts"
_SOURCE = "TensorRT-LLM"
_COMPILED = "compiled at first use, for an hour, unless built ahead"
_ARRANGED = "a plan keeps a copy of w13 with up before gate, a call makes one"
_ON = OnDevice("nvidia", only=((9, 0), (10, 0), (10, 3)))
_HALVES = ("float16", "bfloat16")
_UP_FIRST = "experts.up_gate.v1"
_MAPPED = frozenset({"expert_map"})
_CALLS = (calls.EXPERTS, calls.EXPERTS_SPACE)


def _names(problem: ExpertsProblem) -> tuple[str, ...]:
    major, minor = problem.device.capability
    return (f"fused_moe_{10 * major + minor}",)


_MODULE = Module(("device",), _names)
_CHOICES = (Between("num_experts", 1, 511), Between("top_k", 1, 64))


def _widths(multiple: int, why: str) -> tuple[MultipleOf, ...]:
    return tuple(MultipleOf(name, multiple, why=why) for name in ("hidden_size", "intermediate_size"))


# Before, the binaries of TensorRT-LLM read past the end of small intermediates.
_BINARIES = Package("flashinfer", ">=0.6.18,<0.7.3", distribution="flashinfer-python", install=INSTALL)
_PACKED = "weights are packed"
_BF16 = dtype_in("dtype", "bfloat16", why="the kernel takes and gives nothing else")


def _more_than_chosen(problem: ExpertsProblem) -> str | None:
    if problem.num_experts > problem.top_k:
        return None
    return f"num_experts is {problem.num_experts}, top_k {problem.top_k}; the routing wants more experts than choices"


def _trtllm(call: Call, *more: Constraint) -> tuple[Constraint, ...]:
    """What every kernel of TensorRT-LLM asks: of the machine, and of the routing, which is laid out by its kernels."""
    return (
        *requirements(DATACENTRE_BLACKWELL, calls.CHOICES, call),
        _BINARIES,
        Module((), lambda _: ("fused_moe_trtllm_sm100",)),
        Products(),
        _BF16,
        Between("num_experts", 4, 1024),
        MultipleOf("num_experts", 4, why="the routing's kernels want it"),
        Between("top_k", 1, 32),
        Rule(("num_experts", "top_k"), _more_than_chosen, "range"),
        *more,
    )


_BOTH_BIASES = SameValue("w13_bias", "w2_bias", why="the library takes both biases or neither")
_ANY_WIDTH = anything("hidden_size", "intermediate_size")  # packing fills them up
_WIDE_TOKENS = SameValue("activation_dtype", "dtype")


_BLOCKS = "experts.up_gate_blocks.v1"


def _asked(form: str, why: str) -> Constraint:
    """Loses more than is allowed unless it is asked for."""
    return OneOf(
        "activation_dtype", (form,), "dtype", why, f"ask for it, if that is near enough: activation_dtype={form!r}"
    )


def _layout(name: str) -> dict[str, Any]:
    """A kernel that reads nothing else."""
    return {"layouts": (name,), "packs_to": name}


KERNELS = (
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts",
        target=f"{_HERE}:Experts",
        summary=f"CUTLASS's grouped products; {_ARRANGED}; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(_ON, *_CALLS),
            _MODULE,
            dtype_in("dtype", *_HALVES),
            OneOf("weights", (PLAIN,)),
            SameValue("activation_dtype", "dtype"),
            *_CHOICES,
            *_widths(8, "rows of whole 16 bytes are taken"),
        ),
        features=_MAPPED,
        layouts=(CHECKPOINT, _UP_FIRST),
        packs_to=_UP_FIRST,
        source=_SOURCE,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts_fp8",
        target=f"{_HERE}:ExpertsFp8",
        summary=f"CUTLASS's grouped float8 products, scales known beforehand; {_ARRANGED}; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(DATACENTRE_BLACKWELL, *_CALLS),
            _MODULE,
            dtype_in("dtype", *_HALVES),
            OneOf("weights", (FP8_TENSOR,)),
            dtype_in("activation_dtype", FP8),
            OneOf("static_scales", (True,), why="tokens are quantised with one scale"),
            *_CHOICES,
            *_widths(16, "rows of whole 16 bytes are taken"),
        ),
        features=_MAPPED | {"static_scales"},
        layouts=(CHECKPOINT, _UP_FIRST),
        packs_to=_UP_FIRST,
        source=_SOURCE,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts_mxfp4",
        target=f"{_FOLDER}.experts_mxfp4:ExpertsMxfp4",
        summary=f"CUTLASS's grouped products of MXFP4 by bfloat16 on sm_90; {_PACKED}; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(HOPPER, calls.EXPERTS_FP4, calls.EXPERTS_FP4_SPACE),
            _MODULE,
            _BF16,
            OneOf("weights", (MXFP4,)),
            _WIDE_TOKENS,
            _BOTH_BIASES,
            *_CHOICES,
            _ANY_WIDTH,
        ),
        features=_MAPPED | {"w13_bias", "w2_bias", f"activation={SWIGLU_OAI}"},
        **_layout("experts.mxfp4.cutlass_sm90.v1"),
        source=_SOURCE,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.cutlass_experts_blocks",
        target=f"{_FOLDER}.blocks:ExpertsBlocks",
        summary=f"CUTLASS's float8 products in blocks on sm_90, asked for by fp8_block; {_PACKED}; {_COMPILED}",
        band=Band.TUNED,
        constraints=(
            *requirements(HOPPER, calls.EXPERTS_BLOCKS, calls.EXPERTS_BLOCKS_SPACE),
            Cuda("12.8"),
            _MODULE,
            RunsNvcc(),
            _BF16,
            OneOf("weights", BLOCK_FORMATS),
            _asked(FP8_BLOCK, "gate and up are rounded, and quotients found by reciprocals"),
            *_CHOICES,
            *_widths(128, "blocks are whole"),
        ),
        features=_MAPPED,
        **_layout(_BLOCKS),
        source=_SOURCE,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_blocks",
        target=f"{_FOLDER}.blocks:TrtllmBlocks",
        summary=f"TensorRT-LLM's float8 products in blocks, asked for by fp8_block_gate_up; {_PACKED}",
        band=Band.TUNED,
        constraints=_trtllm(
            calls.TRTLLM_FP8_BLOCKS,
            OneOf("weights", BLOCK_FORMATS),
            _asked(FP8_BLOCK_GATE_UP, "gate and up are quantised before they are joined"),
            *_widths(128, "blocks are whole"),
        ),
        features=_MAPPED,
        **_layout(_BLOCKS),
        source=_SOURCE,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts",
        target=f"{_FOLDER}.trtllm_bf16:TrtllmBf16",
        summary=f"TensorRT-LLM's products for sm_100 and sm_103, which come as binaries; {_PACKED}",
        band=Band.TUNED,
        constraints=_trtllm(
            calls.TRTLLM_BF16, OneOf("weights", (PLAIN,)), _WIDE_TOKENS, *_widths(128, "K lies in whole blocks")
        ),
        features=_MAPPED,
        **_layout("experts.bf16.trtllm.v1"),
        source=_SOURCE,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_fp8",
        target=f"{_FOLDER}.trtllm_fp8:TrtllmFp8",
        summary=f"TensorRT-LLM's float8 products, scales known beforehand, which come as binaries; {_PACKED}",
        band=Band.TUNED,
        constraints=_trtllm(
            calls.TRTLLM_FP8,
            OneOf("weights", (FP8_TENSOR,)),
            dtype_in("activation_dtype", FP8),
            OneOf("static_scales", (True,), why="tokens are quantised with one scale"),
            *_widths(128, "scratch is counted in whole 128"),
        ),
        features=_MAPPED | {"static_scales"},
        **_layout("experts.fp8.trtllm.v1"),
        source=_SOURCE,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_mxfp4",
        target=f"{_FOLDER}.trtllm_mxfp4:TrtllmMxfp4",
        summary=f"TensorRT-LLM's products of MXFP4 by bfloat16, which come as binaries; {_PACKED}",
        band=Band.TUNED,
        constraints=_trtllm(calls.TRTLLM_FP4, OneOf("weights", (MXFP4,)), _WIDE_TOKENS, _BOTH_BIASES, _ANY_WIDTH),
        features=_MAPPED | {"w13_bias", "w2_bias", f"activation={SWIGLU_OAI}"},
        **_layout("experts.mxfp4.trtllm.v1"),
        source=_SOURCE,
    ),
    Kernel(
        op="fused_moe",
        name="flashinfer.trtllm_experts_mxint4",
        target=f"{_FOLDER}.trtllm_mxint4:TrtllmMxint4",
        summary=f"TensorRT-LLM's products of MXINT4 by bfloat16, which come as binaries; {_PACKED}",
        band=Band.TUNED,
        constraints=_trtllm(
            calls.TRTLLM_MXINT4,
            OneOf("weights", (MXINT4,)),
            _WIDE_TOKENS,
            *_widths(256, "the library prepares no others"),
        ),
        features=_MAPPED,
        **_layout("experts.mxint4.trtllm.v1"),
        source=_SOURCE,
    ),
)

KNOWN_BAD = (
    KnownBad(
        "flashinfer.cutlass_experts_mxfp4",
        "fused_moe",
        (Package("flashinfer", ">=0.6.10,<0.6.16", distribution="flashinfer-python"),),
        "now and then a tile of one expert is off by up to a third: descriptors change under loads that still run",
        "https://github.com/flashinfer-ai/flashinfer/issues/5438",
        'pip install "flashinfer-python>=0.6.18,<0.7.3"',
    ),
)
