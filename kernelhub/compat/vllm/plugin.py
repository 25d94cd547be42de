"""kernelhub as a plugin of vLLM: its attention becomes the vLLM backend named CUSTOM.

vLLM calls `register`, the entry point ``vllm.general_plugins``, in each of its processes. Registration alone changes
nothing: ``--attention-backend CUSTOM`` selects the backend, and KERNELHUB_VLLM_HOOKS installs the hooks of
`kernelhub.compat.vllm.hooks`. If vLLM's interface, read from its source and signatures,
is not the one that kernelhub was written for, nothing is registered and a warning says what differs.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

from kernelhub.compat.vllm.hooks import install
from kernelhub.probes.finding import Finding, found
from kernelhub.probes.signature import Call, takes
from kernelhub.probes.source import defines

BACKEND = "kernelhub.compat.vllm.backend.KernelhubBackend"

_REGISTRY = "vllm.v1.attention.backends.registry"
_INTERFACE = "vllm.v1.attention.backend"
_LATENT = "vllm.model_executor.layers.attention.mla_attention"
_WRITER = "vllm._custom_ops:reshape_and_cache_flash"

# vLLM's functions that kernelhub calls, and kernelhub's that vLLM calls with the parameters of its base class.
CALLS = (
    Call(f"{_REGISTRY}:register_backend", positional=("backend", "class_path")),
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
    f"{_REGISTRY}:AttentionBackendEnum.CUSTOM",
    f"{_REGISTRY}:AttentionBackendEnum.is_overridden",
)
# Up to 0.28 a backend states the form of its cache; kernelhub's is that of vLLM's Triton backend.
_FORM = "get_kv_cache_shape"
_TRITON = "vllm.v1.attention.backends.triton_attn:TritonAttentionBackend"

logger = logging.getLogger("kernelhub.compat")


def register() -> None:
    """Register kernelhub's attention as the backend CUSTOM, unless another plugin has that name; install the hooks."""
    install()
    fits = interface()
    if not fits.ok:
        logger.warning("kernelhub is not registered as an attention backend of vLLM: %s", fits.reason)
        return
    registry = importlib.import_module(_REGISTRY)
    custom = registry.AttentionBackendEnum.CUSTOM
    if custom.is_overridden():
        if custom.get_path() != BACKEND:
            logger.warning("kernelhub is not registered with vLLM: CUSTOM is already %s", custom.get_path())
        return
    registry.register_backend(custom, BACKEND)


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
