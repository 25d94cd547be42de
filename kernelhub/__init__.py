"""Every LLM kernel behind one stable call: the fastest right kernel on this device, and why.

>>> import torch, kernelhub
>>> q, k, v = torch.randn(3, 1, 64, 8, 64)
>>> kernelhub.attention(q, k, v, causal=True).shape
torch.Size([1, 64, 8, 64])

Every name is loaded at its first use; importing kernelhub imports nothing else.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

# Every op and the module of its public function; the module `problem` beside that has its record.
_OPS = {
    "attention": "kernelhub.ops.attention.attention",
    "paged_attention": "kernelhub.ops.attention.paged_attention",
    "merge_attention_states": "kernelhub.ops.merge.op",
    "mla_attention": "kernelhub.ops.mla.attention.op",
    "write_mla_cache": "kernelhub.ops.mla.cache.op",
    "concat_mla_k": "kernelhub.ops.mla.concat.op",
    "mqa_logits": "kernelhub.ops.indexer.mqa_logits",
    "paged_mqa_logits": "kernelhub.ops.indexer.paged_mqa_logits",
    "topk_indices": "kernelhub.ops.indexer.topk_indices",
    "linear_attention": "kernelhub.ops.linear_attention.op",
    "quantize_fp8": "kernelhub.ops.quant.fp8",
    "dequantize_fp8": "kernelhub.ops.quant.fp8",
    "quantize_mxfp4": "kernelhub.ops.quant.mx",
    "dequantize_mxfp4": "kernelhub.ops.quant.mx",
    "quantize_mxfp8": "kernelhub.ops.quant.mx",
    "dequantize_mxfp8": "kernelhub.ops.quant.mx",
    "quantize_nvfp4": "kernelhub.ops.quant.nvfp4",
    "dequantize_nvfp4": "kernelhub.ops.quant.nvfp4",
    "fp4_gemm": "kernelhub.ops.gemm.fp4.op",
    "bmm_fp8": "kernelhub.ops.gemm.fp8.batched.op",
    "fp8_gemm": "kernelhub.ops.gemm.fp8.op",
    "grouped_gemm": "kernelhub.ops.gemm.grouped.op",
    "fused_moe": "kernelhub.ops.moe.experts.op",
    "route_experts": "kernelhub.ops.moe.routing.op",
}
_HOMES = {
    **_OPS,
    "explain": "kernelhub.dispatch.explain",
    "report": "kernelhub.dispatch.process",
    "use": "kernelhub.dispatch.context",
    "strict": "kernelhub.dispatch.context",
    "configure": "kernelhub.dispatch.context",
    "reload": "kernelhub.dispatch.process",
    "register_backend": "kernelhub.dispatch.process",
    "verify": "kernelhub.evidence.verify",
    "tune": "kernelhub.evidence.tuning.tune",
    "PackedWeight": "kernelhub.ops.packed",
    "Selection": "kernelhub.dispatch.selection",
    "DeviceFacts": "kernelhub.probes.device",
    "SimulatedMachine": "kernelhub.dispatch.machine",
    "cache_notices": "kernelhub.runtime.caches.notices",
    "set_cache_variables": "kernelhub.runtime.caches.variables",
    "health": "kernelhub.runtime.health",
    "seal": "kernelhub.runtime.seal",
    "unseal": "kernelhub.runtime.seal",
    "warm": "kernelhub.runtime.warm",
    "warmup": "kernelhub.warming.warmup",
    "problems_of": "kernelhub.ops.models.problems",
    "agree": "kernelhub.runtime.ranks.agree",
}

__all__ = ["__version__", "errors", *_HOMES]


def __getattr__(name: str) -> Any:
    if name != "errors" and name not in _HOMES:
        from difflib import get_close_matches

        close = [] if name.startswith("_") else get_close_matches(name, __all__, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise AttributeError(f"module 'kernelhub' has no attribute {name!r}{meant}")
    try:
        if name == "errors":
            value: Any = importlib.import_module("kernelhub.errors")
        else:
            value = getattr(importlib.import_module(_HOMES[name]), name)
    except (ImportError, AttributeError) as error:
        raise _still_loading(name) or error from error
    globals()[name] = value
    return value


def _still_loading(name: str) -> Exception | None:
    """The error of a name that is asked for from inside its own first use: half of what it needs is imported."""
    half = [
        other
        for other, module in list(sys.modules.items())
        if other.startswith("kernelhub.") and getattr(getattr(module, "__spec__", None), "_initializing", False)
    ]
    if not half:
        return None
    said = (
        f"kernelhub.{name} is asked for while {half[-1]} is still being imported, from inside of that: from a signal "
        "handler, a logging handler or a finaliser; call it once that is done, or use the name once before such code "
        "may run"
    )
    try:
        from kernelhub.errors import KernelhubError
    except ImportError:  # it is the very module that is being imported
        return ImportError(said)
    return KernelhubError(said)


def __dir__() -> list[str]:
    return sorted(__all__)
