"""Records of FlashInfer's mixtures of experts.

Its NVFP4 kernels quantise tokens to NVFP4 too, which is not what `fused_moe` says of such weights. Those of sm_90 for
float8 weights with a scale for each expert sum in 14 bits throughout, which is not exact enough. Those for float8
weights in blocks round gate and up to bfloat16 before they quantise what comes of them: in a model of that, results
were off by up to 1.8 times what `fused_moe` allows.
"""

from __future__ import annotations

from kernelhub.backends.flashinfer import calls
from kernelhub.backends.flashinfer.requirements import DATACENTRE_BLACKWELL, Module, requirements
from kernelhub.dispatch.constraint import Between, MultipleOf, OnDevice, OneOf, SameValue, dtype_in
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.moe.experts.problem import FP8, FP8_TENSOR, PLAIN, ExpertsProblem

_HERE = "kernelhub.backends.flashinfer.moe.experts"
_SOURCE = "TensorRT-LLM"
_COMPILED = "compiled at first use, for an hour, unless built ahead"
_ARRANGED = "a plan keeps a copy of w13 with up before gate, a call makes one"
_ON = OnDevice("nvidia", only=((9, 0), (10, 0), (10, 3)))
_HALVES = ("float16", "bfloat16")
_CALLS = (calls.EXPERTS, calls.EXPERTS_SPACE)


def _names(problem: ExpertsProblem) -> tuple[str, ...]:
    major, minor = problem.device.capability
    return (f"fused_moe_{10 * major + minor}",)


_MODULE = Module(("device",), _names)
_CHOICES = (Between("num_experts", 1, 511), Between("top_k", 1, 64))


def _widths(multiple: int, why: str) -> tuple[MultipleOf, ...]:
    return tuple(MultipleOf(name, multiple, why=why) for name in ("hidden_size", "intermediate_size"))


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
        features=frozenset({"static_scales"}),
        source=_SOURCE,
    ),
)
