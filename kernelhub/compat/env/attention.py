"""vLLM's variables that choose attention: names of backends of vLLM 0.11.1 to 0.33.0, its switches up to 0.14.0."""

from __future__ import annotations

from kernelhub.compat.env.variable import VLLM, EngineVariable, Meaning, backend_switch, gpu_only, one_of, override
from kernelhub.dispatch.constraint import OneOf

_BATCHED, _PAGED, _LATENT = "attention", "paged_attention", "mla_attention"

# FlashInfer's kernels that vLLM means by "TRTLLM": trtllm-gen on Blackwell, XQA elsewhere.
_TRTLLM = ("flashinfer.*trtllm*", "flashinfer.*xqa*")
# FlashInfer contains cuDNN's attention; a separate cuDNN backend is equivalent.
_CUDNN = ("cudnn", "flashinfer.*cudnn*")

# Prefill of latent attention in kernelhub: plain attention with keys wider than values.
_LATENT_PREFILL = (OneOf("head_dim_qk", (192, 256)), OneOf("head_dim_vo", (128, 256)))

# vLLM's name of a backend -> our backends. vLLM selects with it the kernel that reads the paged cache.
_DENSE = {
    "FLASH_ATTN": ("flash_attn",),
    "FLASHINFER": ("flashinfer",),
    "TRITON_ATTN": ("triton",),
    "TORCH_SDPA": ("torch",),
    "CPU_ATTN": ("torch", "cpp"),
    "TRITON_FLASH_ATTN": ("flash_attn", "triton"),
    "TRITON_FLASHINFER": ("flashinfer", "triton"),
}
_OLDER_DENSE = {
    "FLASH_ATTN_VLLM_V1": ("flash_attn",),
    "FLASHINFER_VLLM_V1": ("flashinfer",),
    "TRITON_ATTN_VLLM_V1": ("triton",),
}
_MLA = {
    "FLASH_ATTN_MLA": ("flash_attn",),
    "FLASH_ATTN_MLA_SPARSE": ("flash_attn",),
    "FLASH_ATTN_MLA_SPARSE_FA4": ("flash_attn",),
    "FLASHINFER_MLA": ("flashinfer",),
    "FLASHINFER_MLA_SPARSE": ("flashinfer",),
    "FLASHINFER_MLA_SPARSE_SM90": ("flashinfer",),
    "FLASHINFER_MLA_SPARSE_SM120": ("flashinfer",),
    "FLASHMLA": ("flash_mla",),
    "FLASHMLA_SPARSE": ("flash_mla",),
    "CUTLASS_MLA": ("cutlass",),
    "TRITON_MLA": ("triton",),
    "TOKENSPEED_MLA": ("tokenspeed",),
    "CPU_MLA": ("torch", "cpp"),
}
# Backends of an engine, a model or a vendor whose kernels are not in kernelhub.
_ELSEWHERE = (
    "AMX_MLA", "B12X", "CUSTOM", "CUTLASS_MSA", "FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV41",
    "FLASHMLA_MEGA_ATTN_DSV41", "FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41", "FLASH_ATTN_DIFFKV", "FLEX_ATTENTION",
    "HPC_ATTN", "IPEX", "MINIMAX_M3_SPARSE", "NO_ATTENTION", "PALLAS", "ROCM_AITER_FA", "ROCM_AITER_MLA",
    "ROCM_AITER_MLA_SPARSE", "ROCM_AITER_TRITON_MLA", "ROCM_AITER_UNIFIED_ATTN", "ROCM_ATTN",
    "ROCM_FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV41", "ROCM_OCTAVE", "ROCM_SEGMENTED_ATTN", "STEP5_DSA",
    "TREE_ATTN", "TRITON_ATTN_DIFFKV", "TRITON_MSA", "TURBOQUANT", "ULTRAQUANT", "XFORMERS", "XPU_MLA_SPARSE",
)  # fmt: skip


def _dense(names: tuple[str, ...]) -> Meaning:
    """A request for the op that reads the paged cache, as in vLLM; a preference for attention without a cache."""
    who = " or ".join(names)
    return Meaning(
        f"{_PAGED} runs on {who} or fails; {_BATCHED} prefers it",
        requests=(override(_PAGED, *names, where=gpu_only(names)),),
        prefers=(override(_BATCHED, *names),),
    )


def _latent(names: tuple[str, ...]) -> Meaning:
    return Meaning(
        f"{_LATENT} runs on {' or '.join(names)} or fails", requests=(override(_LATENT, *names, where=gpu_only(names)),)
    )


_BACKENDS = {
    "auto": Meaning("kernelhub selects"),
    **{name: _dense(names) for name, names in (_DENSE | _OLDER_DENSE).items()},
    **{name: _latent(names) for name, names in _MLA.items()},
    **{name: Meaning("kernelhub has no kernel of that backend, and selects by itself") for name in _ELSEWHERE},
}


def _version(number: str) -> Meaning:
    others = tuple(f"flash_attn.*fa{other}*" for other in "234" if other != number)
    return Meaning(f"of flash_attn only FlashAttention {number} runs", disables=(override("*", *others),))


def _splits(text: str) -> Meaning:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is not a positive number of splits")
    return Meaning(
        f"{_LATENT} prefers kernels with a fixed split; the kernel sets the number of parts, not {int(text)}",
        prefers=(override(_LATENT, "*.split_kv_fixed*", "*.fixed*"),),
    )


_MLA_PREFILL = "--attention-config.mla_prefill_backend"

ATTENTION = (
    EngineVariable(
        "VLLM_ATTENTION_BACKEND", VLLM, "a backend of vLLM's", one_of(_BACKENDS), "--attention-backend NAME"
    ),
    EngineVariable(
        "VLLM_FLASH_ATTN_VERSION",
        VLLM,
        "2, 3 or 4",
        one_of({number: _version(number) for number in "234"}),
        "--attention-config.flash_attn_version",
    ),
    EngineVariable(
        "VLLM_USE_TRTLLM_ATTENTION",
        VLLM,
        "0 or 1",
        backend_switch((_PAGED,), *_TRTLLM),
        "--attention-config.use_trtllm_attention",
    ),
    EngineVariable(
        "VLLM_DISABLE_FLASHINFER_PREFILL",
        VLLM,
        "0 or 1",
        lambda text: _prefill_of_mla(text, "flashinfer"),
        f"{_MLA_PREFILL} FLASH_ATTN",
    ),
    EngineVariable(
        "VLLM_USE_CUDNN_PREFILL",
        VLLM,
        "0 or 1",
        backend_switch((_BATCHED,), *_CUDNN, where=_LATENT_PREFILL),
        _MLA_PREFILL,
    ),
    EngineVariable(
        "VLLM_USE_TRTLLM_RAGGED_DEEPSEEK_PREFILL",
        VLLM,
        "0 or 1",
        backend_switch((_BATCHED,), *_TRTLLM, where=_LATENT_PREFILL),
        f"{_MLA_PREFILL} TRTLLM_RAGGED",
    ),
    EngineVariable("FORCE_NUM_KV_SPLITS", VLLM, "a number of splits", _splits),
)


def _prefill_of_mla(text: str, name: str) -> Meaning:
    """The switch is inverted: 1 removes kernels; 0, its default, leaves the selection to kernelhub."""
    removed = backend_switch((_BATCHED,), name, where=_LATENT_PREFILL)("0")
    return one_of({"1": removed, "0": Meaning("kernelhub selects the prefill of latent attention")})(text)
