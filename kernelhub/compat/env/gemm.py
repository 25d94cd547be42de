"""vLLM's variables that choose kernels for matrix products, and those that affect every op."""

from __future__ import annotations

from kernelhub.compat.env.variable import (
    VLLM,
    EngineVariable,
    Meaning,
    backend_switch,
    gpu_only,
    one_of,
    override,
    overrides,
    switch,
)
from kernelhub.dispatch.constraint import OneOf

_PRODUCTS = ("fp8_gemm", "bmm_fp8", "grouped_gemm", "fused_moe")
_NVFP4 = (OneOf("b_format", ("nvfp4",)),)
_BLOCKS = (OneOf("scaling", ("block",)),)

# DeepGEMM means the whole library: 0 disables it for all ops, also for the indexer's logits.
_DEEP_GEMM = switch(
    Meaning(f"deep_gemm ranks first in {', '.join(_PRODUCTS)}", prefers=overrides(_PRODUCTS, "deep_gemm")),
    Meaning("no kernel of deep_gemm runs", disables=(override("*", "deep_gemm"),)),
)

# Scales that are powers of two lose nothing if they are read as such; only float32 scales could be rounded.
_E8M0 = switch(
    Meaning("no effect: the scales' dtype gives their format, and kernels that do not support it are rejected"),
    Meaning(
        "given float32 scales, kernels of deep_gemm that round them to powers of two do not run",
        disables=(
            override("fp8_gemm", "deep_gemm.*e8m0*", where=(OneOf("a_scale_dtype", ("float32",)),)),
            override("fused_moe", "deep_gemm.*e8m0*", where=(OneOf("weights", ("fp8_block",)),)),
        ),
    ),
)


def _nvfp4(*names: str) -> Meaning:
    return Meaning(
        f"fp4_gemm with NVFP4 weights runs on {' or '.join(names)} or fails",
        requests=(override("fp4_gemm", *names, where=(*_NVFP4, *gpu_only(names))),),
    )


# Prefix of a class name of vLLM's linear kernels -> our backend or kernel; longer prefixes first.
_CLASSES = (
    ("FlashInferCudnn", "flashinfer.*cudnn*"),
    ("FlashInferTrtllm", "flashinfer.*trtllm*"),
    ("FlashInferCutlass", "flashinfer.*cutlass*"),
    ("FlashInferCuteDsl", "flashinfer.*cute*dsl*"),
    ("FlashInferCutedsl", "flashinfer.*cute*dsl*"),
    ("FlashInfer", "flashinfer"),
    ("DeepGemm", "deep_gemm"),
    ("Cutlass", "cutlass"),
    ("Triton", "triton"),
    ("BlockWiseTorch", "torch"),
    ("ChannelWiseTorch", "torch"),
    ("PerTensorTorch", "torch"),
    ("RowWiseTorch", "torch"),
    ("Torch", "torch"),
)


def _ops_of(kernel: str) -> tuple[str, ...]:
    """The ops that a class of vLLM computes, by its name."""
    name = kernel.lower()
    if "fp4" in name:
        return ("fp4_gemm",)
    return ("fp8_gemm",) if "fp8" in name else ()


def _disabled(text: str) -> Meaning:
    removed, unknown = [], []
    for kernel in filter(None, (word.strip() for word in text.split(","))):
        ours = next((ours for start, ours in _CLASSES if kernel.startswith(start)), None)
        ops = _ops_of(kernel) if ours else ()
        removed += [override(op, ours) for op in ops if ours]
        if not ops:
            unknown.append(kernel)
    says = [f"{' '.join(item.names)} does not run in {item.ops}" for item in removed]
    says += [f"kernelhub has no kernel like {kernel}" for kernel in unknown]
    return Meaning("; ".join(says) or "nothing is removed", disables=tuple(removed))


GEMM = (
    EngineVariable("VLLM_USE_DEEP_GEMM", VLLM, "0 or 1", _DEEP_GEMM),
    EngineVariable("VLLM_USE_DEEP_GEMM_E8M0", VLLM, "0 or 1", _E8M0),
    EngineVariable(
        "VLLM_NVFP4_GEMM_BACKEND",
        VLLM,
        "flashinfer-cudnn, flashinfer-trtllm, flashinfer-cutlass or cutlass",
        one_of(
            {
                "flashinfer-cudnn": _nvfp4("flashinfer.*cudnn*"),
                "flashinfer-trtllm": _nvfp4("flashinfer.*trtllm*"),
                "flashinfer-cutlass": _nvfp4("flashinfer.*cutlass*"),
                "cutlass": _nvfp4("cutlass"),
            }
        ),
        "--linear-backend",
    ),
    EngineVariable(
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
        VLLM,
        "0 or 1",
        # vLLM's own 1 means "may": FlashInfer below 32 rows, DeepGEMM from there on, where FlashInfer costs accuracy.
        switch(
            Meaning("no effect: kernelhub selects by number of rows"),
            backend_switch(("fp8_gemm",), "flashinfer", where=_BLOCKS)("0"),
        ),
    ),
    EngineVariable("VLLM_DISABLED_KERNELS", VLLM, "classes of vLLM's linear kernels, with commas", _disabled),
    EngineVariable(
        "VLLM_BATCH_INVARIANT",
        VLLM,
        "0 or 1",
        switch(
            Meaning("only batch-invariant kernels run", batch_invariant=True),
            Meaning("results may depend on the batch", batch_invariant=False),
        ),
    ),
)
