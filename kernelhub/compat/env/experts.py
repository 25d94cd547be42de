"""vLLM's variables that choose kernels for mixture of experts."""

from __future__ import annotations

from kernelhub.compat.env.variable import VLLM, EngineVariable, Meaning, backend_switch, one_of, override
from kernelhub.dispatch.constraint import Constraint, OnDevice, OneOf
from kernelhub.dispatch.policy import Override

_MOE = ("fused_moe",)
_SUCCESSOR = "--moe-backend"

# trtllm-gen, which vLLM's "latency" means, exists for Blackwell only; elsewhere vLLM uses CUTLASS.
_BLACKWELL = OnDevice("nvidia", at_least=(10, 0), below=(11, 0))
_TRTLLM, _CUTLASS, _CUTE_DSL = "flashinfer.*trtllm*", "flashinfer.*cutlass*", "flashinfer.*cute*dsl*"


def _weights(*formats: str) -> tuple[Constraint, ...]:
    return (OneOf("weights", formats),)


_FP8 = _weights("fp8_tensor", "fp8_channel", "fp8_block", "fp8_block_ue8m0")


def _only(kept: str) -> Meaning:
    """Keep only these of FlashInfer's experts; this does not request FlashInfer."""
    removed: tuple[Override, ...] = tuple(
        override("fused_moe", other, where=(_BLACKWELL,)) for other in (_TRTLLM, _CUTLASS, _CUTE_DSL) if other != kept
    )
    return Meaning(f"of FlashInfer's experts only {kept} run, on Blackwell", disables=removed)


EXPERTS = (
    EngineVariable(
        "VLLM_MOE_USE_DEEP_GEMM", VLLM, "0 or 1", backend_switch(("fused_moe", "grouped_gemm"), "deep_gemm")
    ),
    EngineVariable(
        "VLLM_USE_FLASHINFER_MOE_FP16",
        VLLM,
        "0 or 1",
        backend_switch(_MOE, "flashinfer", where=_weights("plain")),
        _SUCCESSOR,
    ),
    EngineVariable(
        "VLLM_USE_FLASHINFER_MOE_FP8", VLLM, "0 or 1", backend_switch(_MOE, "flashinfer", where=_FP8), _SUCCESSOR
    ),
    EngineVariable(
        "VLLM_USE_FLASHINFER_MOE_FP4",
        VLLM,
        "0 or 1",
        backend_switch(_MOE, "flashinfer", where=_weights("nvfp4")),
        _SUCCESSOR,
    ),
    EngineVariable(
        "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
        VLLM,
        "0 or 1",
        backend_switch(_MOE, "flashinfer", where=(*_weights("mxfp4"), OneOf("activation_dtype", ("bfloat16",)))),
        _SUCCESSOR,
    ),
    EngineVariable(
        "VLLM_FLASHINFER_MOE_BACKEND",
        VLLM,
        "latency, throughput or masked_gemm",
        one_of({"latency": _only(_TRTLLM), "throughput": _only(_CUTLASS), "masked_gemm": _only(_CUTE_DSL)}),
        _SUCCESSOR,
    ),
)
