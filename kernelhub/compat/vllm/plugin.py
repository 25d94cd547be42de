"""kernelhub as a plugin of vLLM: its attention becomes the vLLM backend named CUSTOM.

vLLM calls `register`, the entry point ``vllm.general_plugins``, in each of its processes. Registration alone changes
nothing: ``--attention-backend CUSTOM`` selects the backend. If vLLM's interface, read from its source and signatures,
is not the one that kernelhub was written for, nothing is registered and a warning says what differs.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.signature import Call, takes
from kernelhub.probes.source import defines

BACKEND = "kernelhub.compat.vllm.attention.KernelhubBackend"

_REGISTRY = "vllm.v1.attention.backends.registry"
_INTERFACE = "vllm.v1.attention.backend"
_WRITER = "vllm.v1.attention.ops.triton_reshape_and_cache_flash:triton_reshape_and_cache_flash"

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
    Call(
        f"{_INTERFACE}:AttentionMetadataBuilder.__init__",
        positional=("kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    Call(
        f"{_INTERFACE}:AttentionMetadataBuilder.build",
        positional=("common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Call(f"{_INTERFACE}:AttentionMetadataBuilder.get_cudagraph_support", positional=("vllm_config", "kv_cache_spec")),
    Call(
        f"{_INTERFACE}:AttentionBackend.supports_combination",
        positional=(
            *("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse"),
            *("use_mm_prefix", "device_capability"),
        ),
    ),
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
    f"{_REGISTRY}:AttentionBackendEnum.CUSTOM",
    f"{_REGISTRY}:AttentionBackendEnum.is_overridden",
)
# Releases in which a backend defines the shape of its cache do not use ``[B, H, N, 2 * D]``.
_OLDER = f"{_INTERFACE}:AttentionBackend.get_kv_cache_shape"

logger = logging.getLogger("kernelhub.compat")


def register() -> None:
    """Register kernelhub's attention as the backend CUSTOM, unless another plugin has."""
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
    for name in _NAMES:
        finding = defines(name, root=root)
        if not finding.ok:
            return finding
    if defines(_OLDER, root=root).ok:
        return lacking("vLLM", "package_version", "the shape of its cache is not [B, H, N, 2 * D]", "update vLLM")
    return found("vLLM", None, "its attention interface matches")
