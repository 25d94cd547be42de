"""kernelhub as a plugin of SGLang: its attention becomes the SGLang backend named kernelhub.

SGLang calls `register`, the entry point ``sglang.srt.plugins``, in each of its processes. Registration alone changes
nothing: ``--attention-backend kernelhub`` selects the backend. If SGLang's interface, read from its source and
signatures, is not the one that kernelhub was written for, nothing is registered and a warning says what differs; SGLang
then has no backend of that name.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

from kernelhub.compat.sglang.refusal import of_release
from kernelhub.probes.finding import Finding, found
from kernelhub.probes.signature import Call, takes
from kernelhub.probes.source import defines

NAME = "kernelhub"

_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_CHOICES = ("sglang.srt.arg_groups.choices", "sglang.srt.server_args")  # since 0.5.20, and before
_BASE = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend"
_POOL = "sglang.srt.mem_cache.memory_pool"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_LAYER = "sglang.srt.layers.radix_attention"
_BACKEND = "kernelhub.compat.sglang.attention"
_FORWARD = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")

# SGLang's functions that kernelhub calls, and kernelhub's that SGLang calls with the parameters of its base class.
CALLS = (
    Call(f"{_REGISTRY}:register_attention_backend", positional=("name",)),
    Call(f"{_BASE}.init_forward_metadata", positional=("forward_batch",)),
    Call(f"{_BASE}.init_forward_metadata_out_graph", positional=("forward_batch", "in_capture")),
    Call(f"{_BASE}.init_forward_metadata_in_graph", positional=("forward_batch",)),
    Call(f"{_BASE}.init_cuda_graph_state", positional=("max_bs", "max_num_tokens")),
    Call(f"{_BASE}.get_cuda_graph_seq_len_fill_value"),
    Call(f"{_BASE}.forward_decode", positional=_FORWARD),
    Call(f"{_BASE}.forward_extend", positional=_FORWARD),
    Call(
        f"{_POOL}:MHATokenToKVPool.set_kv_buffer",
        positional=("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"),
    ),
    Call(f"{_POOL}:MHATokenToKVPool.get_key_buffer", positional=("layer_id",)),
    Call(f"{_POOL}:MHATokenToKVPool.get_value_buffer", positional=("layer_id",)),
    *(Call(f"sglang.srt.runtime_context:{name}") for name in ("get_parallel", "get_exec", "get_schedule")),
    Call(f"{_RUNNER}.init_cuda_graphs"),
)
# Since 0.5.22 a location is made for a batch, before of its slots.
_LOCATION = f"{_POOL}:KVWriteLoc"
_FOR_BATCH = Call(f"{_LOCATION}.for_batch", positional=("forward_batch",))
_NAMES = (
    f"{_REGISTRY}:ATTENTION_BACKENDS",
    f"{_BASE}.needs_cpu_seq_lens",
    f"{_POOL}:MHATokenToKVPool.is_quantized_kv_cache",
    *(
        f"{_BATCH}:ForwardMode.{name}"
        for name in ("is_decode", "is_idle", "is_extend", "is_target_verify", "is_draft_extend_v2", "is_dllm_extend")
    ),
    *(
        f"{_BATCH}:ForwardBatch.{name}"
        for name in (
            *("forward_mode", "req_pool_indices", "seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_seq_lens_cpu"),
            "attn_cp_metadata",
        )
    ),
    *(f"{_RUNNER}.self.{name}" for name in ("max_running_requests", "model_config")),
    f"{_LAYER}:AttentionType.DECODER",
    *(
        f"{_LAYER}:RadixAttention.self.{name}"
        for name in (
            *("tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim", "scaling", "layer_id", "logit_cap"),
            *("logit_capping_method", "sliding_window_size", "is_cross_attention", "attn_type", "k_scale", "v_scale"),
            *("use_irope", "pos_encoding_mode", "xai_temperature_len"),
        )
    ),
)

logger = logging.getLogger("kernelhub.compat")


def register() -> None:
    """Register kernelhub's attention as an SGLang backend, unless another backend already has the name."""
    fits = interface()
    if not fits.ok:
        logger.warning("%s", of_release(fits))
        return
    registry = importlib.import_module(_REGISTRY)
    there = registry.ATTENTION_BACKENDS.get(NAME)
    if there is not None and there is not create:
        logger.warning("kernelhub is not registered with SGLang: another backend is already named %s", NAME)
        return
    registry.register_attention_backend(NAME)(create)
    choices = importlib.import_module(_choices_module(None)).ATTENTION_BACKEND_CHOICES
    if NAME not in choices:
        choices.append(NAME)


def create(runner: Any) -> Any:
    """Create the backend for SGLang."""
    return importlib.import_module(_BACKEND).KernelhubAttnBackend(runner)


def interface(root: Path | None = None) -> Finding:
    """Whether SGLang's attention interface matches, by the source of the installed SGLang or of the one in `root`."""
    for call in CALLS:
        finding = takes(call, root=root)
        if not finding.ok:
            return finding
    older = not defines(f"{_LOCATION}.for_batch", root=root).ok
    if not older and not (finding := takes(_FOR_BATCH, root=root)).ok:
        return finding
    names = (*_NAMES, f"{_choices_module(root)}:ATTENTION_BACKEND_CHOICES")
    for name in (*names, *((f"{_LOCATION}.loc", f"{_BATCH}:ForwardBatch.out_cache_loc") if older else ())):
        finding = defines(name, root=root)
        if not finding.ok:
            return finding
    return found("SGLang", None, "its attention interface matches")


def _choices_module(root: Path | None) -> str:
    """The module whose list holds the names that ``--attention-backend`` takes."""
    there = (module for module in _CHOICES if defines(f"{module}:ATTENTION_BACKEND_CHOICES", root=root).ok)
    return next(there, _CHOICES[0])
