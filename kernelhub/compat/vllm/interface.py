"""vLLM's attention interface as kernelhub's plugin uses it, compared with the installed vLLM by its source."""

from __future__ import annotations

from pathlib import Path

from kernelhub.probes.finding import Finding, found
from kernelhub.probes.signature import Call, takes
from kernelhub.probes.source import defines

REGISTRY = "vllm.v1.attention.backends.registry"
_INTERFACE = "vllm.v1.attention.backend"
_LATENT = "vllm.model_executor.layers.attention.mla_attention"
_WRITER = "vllm._custom_ops:reshape_and_cache_flash"

# vLLM's functions that kernelhub calls, and kernelhub's that vLLM calls with the parameters of its base class.
CALLS = (
    Call(f"{REGISTRY}:register_backend", positional=("backend", "class_path")),
    Call(
        _WRITER,
        positional=(
            *("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale"),
        ),
    ),
    Call(
        f"{_INTERFACE}:AttentionImpl.__init__",
        positional=(
            *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"),
            *("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
        ),
    ),
    Call(
        f"{_INTERFACE}:AttentionImpl.forward",
        positional=(
            *("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale"),
            "output_block_scale",
        ),
    ),
    Call(f"{_LATENT}:MLACommonImpl.forward_mqa", positional=("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")),
    Call(
        f"{_INTERFACE}:AttentionMetadataBuilder.__init__",
        positional=("kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    Call(
        f"{_INTERFACE}:AttentionMetadataBuilder.build",
        positional=("common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Call(f"{_INTERFACE}:AttentionMetadataBuilder.get_cudagraph_support", positional=("vllm_config", "kv_cache_spec")),
)
# Since 0.24 with use_mm_prefix.
_COMBINATION = ("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse")
_COMBINATIONS = tuple(
    Call(f"{_INTERFACE}:AttentionBackend.supports_combination", positional=(*_COMBINATION, *more, "device_capability"))
    for more in (("use_mm_prefix",), ())
)
_NAMES = (
    *(f"{_INTERFACE}:{name}" for name in ("AttentionType", "MultipleOf", "AttentionCGSupport")),
    *(
        f"{_INTERFACE}:CommonAttentionMetadata.{name}"
        for name in (
            *("query_start_loc", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len", "block_table_tensor"),
            *("slot_mapping", "causal"),
        )
    ),
    *(f"{_LATENT}:{name}" for name in ("MLACommonBackend", "MLACommonMetadataBuilder", "QueryLenSupport.UNIFORM")),
    *(f"{_LATENT}:MLACommonDecodeMetadata.{name}" for name in ("block_table", "seq_lens")),
    "vllm.config:get_current_vllm_config_or_none",
    f"{REGISTRY}:AttentionBackendEnum.CUSTOM",
    f"{REGISTRY}:AttentionBackendEnum.is_overridden",
)
# Up to 0.28 a backend states the form of its cache; kernelhub's is that of vLLM's Triton backend.
_FORM = "get_kv_cache_shape"
_TRITON = "vllm.v1.attention.backends.triton_attn:TritonAttentionBackend"


def interface(root: Path | None = None) -> Finding:
    """Whether vLLM's attention interface matches, by the source of the installed vLLM or of the one in `root`."""
    for call in CALLS:
        finding = takes(call, root=root)
        if not finding.ok:
            return finding
    combinations = [takes(call, root=root) for call in _COMBINATIONS]
    if not any(finding.ok for finding in combinations):
        return combinations[0]
    older = defines(f"{_INTERFACE}:AttentionBackend.{_FORM}", root=root).ok
    forms = (f"{_TRITON}.{_FORM}", f"{_TRITON}.get_kv_cache_stride_order") if older else ()
    for name in (*_NAMES, *forms):
        finding = defines(name, root=root)
        if not finding.ok:
            return finding
    return found("vLLM", None, "its attention interface matches")


def registers() -> bool:
    """Whether vLLM's registry of backends matches."""
    return takes(CALLS[0]).ok and all(defines(name).ok for name in _NAMES if name.startswith(REGISTRY))
