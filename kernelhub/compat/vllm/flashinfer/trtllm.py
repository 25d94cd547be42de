"""When attention runs on FlashInfer's TensorRT-LLM kernels: trtllm-gen on Blackwell, XQA for decode elsewhere."""

from __future__ import annotations

import logging

import torch

from kernelhub.compat.env import flag
from kernelhub.compat.vllm.answer import answer
from kernelhub.compat.vllm.flashinfer.presence import has_flashinfer, has_nvidia_artifactory
from kernelhub.compat.vllm.here import allowed, capability, on_device, vllm_config
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.settings import parse_bool
from kernelhub.probes.finding import Finding, found, lacking

_SUBJECT = "TRTLLM attention"
_OP = "paged_attention"
_MOST_DECODE_TOKENS = 256  # from here on vLLM expects FlashInfer's own decode to be faster

logger = logging.getLogger("kernelhub.compat")
_warned: set[str] = set()


@answer
def supports_trtllm_attention(is_prefill: bool = False) -> Finding:
    """The device has these kernels for the phase, cubins are available, and batch invariance is not required."""
    if HUB.policy(_OP).batch_invariant or flag("VLLM_BATCH_INVARIANT", False):
        return lacking(_SUBJECT, "batch_variant", "its results may depend on the batch", "unset VLLM_BATCH_INVARIANT")
    not_disabled = allowed("flashinfer", _OP)
    if not not_disabled.ok:
        return not_disabled
    for question in (has_flashinfer, has_nvidia_artifactory):
        finding = question.why()
        if not finding.ok:
            return finding
    if not is_prefill:
        return on_device(_SUBJECT, exactly=((9, 0),), families=(10, 12))
    return on_device(f"{_SUBJECT} of prefill", families=(10,))


def force_use_trtllm_attention() -> bool | None:
    """The setting in vLLM's configuration, or VLLM_USE_TRTLLM_ATTENTION of older releases; None if neither is set."""
    configured = getattr(getattr(vllm_config(), "attention_config", None), "use_trtllm_attention", None)
    if configured is not None or HUB.settings["KERNELHUB_IGNORE_VLLM_ENV"]:
        return configured
    text = HUB.machine.variable("VLLM_USE_TRTLLM_ATTENTION")
    try:
        return parse_bool(text) if text.strip() else None
    except ValueError:
        return None


@answer
def can_use_trtllm_attention(num_qo_heads: int, num_kv_heads: int, is_prefill: bool = False) -> Finding:
    """Whether it can be requested with these heads."""
    if force_use_trtllm_attention() is False:
        return lacking(_SUBJECT, "disabled", "use_trtllm_attention is off", "leave it unset")
    supported = supports_trtllm_attention.why(is_prefill)
    return supported if not supported.ok else _heads(num_qo_heads, num_kv_heads)


@answer
def use_trtllm_attention(
    num_qo_heads: int,
    num_kv_heads: int,
    num_tokens: int,
    max_seq_len: int,
    dcp_world_size: int,
    kv_cache_dtype: str,
    q_dtype: torch.dtype,
    is_prefill: bool,
    force_use_trtllm: bool | None = None,
    has_sinks: bool = False,
    has_spec: bool = False,
) -> Finding:
    """Whether this batch runs on TRTLLM attention.

    Args:
        num_qo_heads: heads of q on this rank.
        num_kv_heads: heads of KV on this rank.
        num_tokens: query tokens of the batch.
        max_seq_len: longest sequence; vLLM's rules no longer read it.
        dcp_world_size: ranks that share a sequence's KV.
        kv_cache_dtype: as vLLM names it; ``"auto"`` is that of the model.
        q_dtype: dtype of q as the kernel gets it.
        is_prefill: prefill, else decode.
        force_use_trtllm: on, off, or None for the rules below.
        has_sinks: the model has attention sinks, which FlashInfer's other kernels do not support.
        has_spec: decode verifies drafted tokens.
    """
    if force_use_trtllm is False:
        return lacking(_SUBJECT, "disabled", "use_trtllm_attention is off", "leave it unset")
    impossible = _impossible(num_qo_heads, num_kv_heads, dcp_world_size, is_prefill)
    if impossible is not None:
        if force_use_trtllm or dcp_world_size > 1:
            _warn(f"TRTLLM attention is not used for {'prefill' if is_prefill else 'decode'}: {impossible.reason}")
        return impossible
    needed = _needed(q_dtype, is_prefill, has_sinks, has_spec)
    if needed:
        return found(_SUBJECT, None, needed)
    if force_use_trtllm:
        return found(_SUBJECT, None, "use_trtllm_attention is on")
    return _expected_faster(num_tokens, kv_cache_dtype, is_prefill)


def flashinfer_disable_q_quantization() -> bool:
    """Whether queries keep their dtype with an fp8 cache: vLLM's configuration, or its variable in older releases."""
    configured = getattr(getattr(vllm_config(), "attention_config", None), "disable_flashinfer_q_quantization", False)
    return bool(configured) or flag("VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION", False)


def _impossible(num_qo_heads: int, num_kv_heads: int, dcp_world_size: int, is_prefill: bool) -> Finding | None:
    """Why it cannot run, or None. Its prefill reads only the KV of its own rank and does not merge states."""
    if dcp_world_size > 1:
        return lacking(_SUBJECT, "rule", f"{dcp_world_size} ranks share the KV, and it cannot merge their states", "")
    supported = supports_trtllm_attention.why(is_prefill)
    if not supported.ok:
        return supported
    heads = _heads(num_qo_heads, num_kv_heads)
    return None if heads.ok else heads


def _needed(q_dtype: torch.dtype, is_prefill: bool, has_sinks: bool, has_spec: bool) -> str | None:
    """The feature that only these kernels support, regardless of speed."""
    if has_spec and not is_prefill:
        return "speculative decode needs it"
    if q_dtype == torch.float8_e4m3fn:
        return "q is quantised"
    return "attention sinks need it" if has_sinks else None


def _expected_faster(num_tokens: int, kv_cache_dtype: str, is_prefill: bool) -> Finding:
    own_dtype = kv_cache_dtype == "auto"
    sm = capability()
    if is_prefill:
        fast, why = own_dtype, f"prefill with a {kv_cache_dtype} cache"
    elif sm is not None and (sm == (9, 0) or sm[0] == 12) and kv_cache_dtype.startswith("fp8"):
        fast, why = True, f"decode with a {kv_cache_dtype} cache on sm_{sm[0]}{sm[1]}"
    else:
        fast = own_dtype and num_tokens <= _MOST_DECODE_TOKENS
        why = f"decode of {num_tokens} tokens with a {kv_cache_dtype} cache"
    if fast:
        return found(_SUBJECT, None, f"expected faster: {why}")
    return lacking(_SUBJECT, "not_faster", f"not expected faster: {why}", "turn use_trtllm_attention on")


def _heads(num_qo_heads: int, num_kv_heads: int) -> Finding:
    if num_qo_heads % num_kv_heads:
        return lacking(
            _SUBJECT, "divisibility", f"{num_qo_heads} heads of q are not a multiple of {num_kv_heads} of KV", ""
        )
    return found(_SUBJECT, None, f"{num_qo_heads} heads of q over {num_kv_heads} of KV")


def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)
