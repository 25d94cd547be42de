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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelhub import errors as errors
    from kernelhub.dispatch.context import configure as configure
    from kernelhub.dispatch.context import strict as strict
    from kernelhub.dispatch.context import use as use
    from kernelhub.dispatch.explain import explain as explain
    from kernelhub.dispatch.machine import SimulatedMachine as SimulatedMachine
    from kernelhub.dispatch.process import register_backend as register_backend
    from kernelhub.dispatch.process import reload as reload
    from kernelhub.dispatch.process import report as report
    from kernelhub.dispatch.selection import Selection as Selection
    from kernelhub.evidence.tuning.tune import tune as tune
    from kernelhub.evidence.verify import verify as verify
    from kernelhub.ops.attention.attention import attention as attention
    from kernelhub.ops.attention.paged_attention import paged_attention as paged_attention
    from kernelhub.ops.gemm.fp4.fp4_gemm import fp4_gemm as fp4_gemm
    from kernelhub.ops.gemm.fp8.batched.bmm_fp8 import bmm_fp8 as bmm_fp8
    from kernelhub.ops.gemm.fp8.fp8_gemm import fp8_gemm as fp8_gemm
    from kernelhub.ops.gemm.grouped.grouped_gemm import grouped_gemm as grouped_gemm
    from kernelhub.ops.indexer.mqa_logits import mqa_logits as mqa_logits
    from kernelhub.ops.indexer.paged_mqa_logits import paged_mqa_logits as paged_mqa_logits
    from kernelhub.ops.indexer.topk_indices import topk_indices as topk_indices
    from kernelhub.ops.linear_attention.linear_attention import linear_attention as linear_attention
    from kernelhub.ops.merge.merge_attention_states import merge_attention_states as merge_attention_states
    from kernelhub.ops.mla.attention.mla_attention import mla_attention as mla_attention
    from kernelhub.ops.mla.cache.write_mla_cache import write_mla_cache as write_mla_cache
    from kernelhub.ops.mla.concat.concat_mla_k import concat_mla_k as concat_mla_k
    from kernelhub.ops.models.problems import problems_of as problems_of
    from kernelhub.ops.moe.experts.fused_moe import fused_moe as fused_moe
    from kernelhub.ops.moe.routing.route_experts import route_experts as route_experts
    from kernelhub.ops.packed import PackedWeight as PackedWeight
    from kernelhub.ops.quant.fp8 import dequantize_fp8 as dequantize_fp8
    from kernelhub.ops.quant.fp8 import quantize_fp8 as quantize_fp8
    from kernelhub.ops.quant.mxfp4 import dequantize_mxfp4 as dequantize_mxfp4
    from kernelhub.ops.quant.mxfp4 import quantize_mxfp4 as quantize_mxfp4
    from kernelhub.ops.quant.mxfp8 import dequantize_mxfp8 as dequantize_mxfp8
    from kernelhub.ops.quant.mxfp8 import quantize_mxfp8 as quantize_mxfp8
    from kernelhub.ops.quant.nvfp4 import dequantize_nvfp4 as dequantize_nvfp4
    from kernelhub.ops.quant.nvfp4 import quantize_nvfp4 as quantize_nvfp4
    from kernelhub.probes.device import DeviceFacts as DeviceFacts
    from kernelhub.runtime.caches.notices import cache_notices as cache_notices
    from kernelhub.runtime.caches.variables import set_cache_variables as set_cache_variables
    from kernelhub.runtime.health import health as health
    from kernelhub.runtime.ranks.agree import agree as agree
    from kernelhub.runtime.seal import seal as seal
    from kernelhub.runtime.seal import unseal as unseal
    from kernelhub.runtime.warm import warm as warm
    from kernelhub.warming.warmup import warmup as warmup

__version__ = "0.1.0"

_HOMES = {
    "attention": "kernelhub.ops.attention.attention",
    "paged_attention": "kernelhub.ops.attention.paged_attention",
    "merge_attention_states": "kernelhub.ops.merge.merge_attention_states",
    "grouped_gemm": "kernelhub.ops.gemm.grouped.grouped_gemm",
    "quantize_fp8": "kernelhub.ops.quant.fp8",
    "dequantize_fp8": "kernelhub.ops.quant.fp8",
    "quantize_nvfp4": "kernelhub.ops.quant.nvfp4",
    "dequantize_nvfp4": "kernelhub.ops.quant.nvfp4",
    "quantize_mxfp4": "kernelhub.ops.quant.mxfp4",
    "dequantize_mxfp4": "kernelhub.ops.quant.mxfp4",
    "quantize_mxfp8": "kernelhub.ops.quant.mxfp8",
    "dequantize_mxfp8": "kernelhub.ops.quant.mxfp8",
    "concat_mla_k": "kernelhub.ops.mla.concat.concat_mla_k",
    "mla_attention": "kernelhub.ops.mla.attention.mla_attention",
    "mqa_logits": "kernelhub.ops.indexer.mqa_logits",
    "paged_mqa_logits": "kernelhub.ops.indexer.paged_mqa_logits",
    "topk_indices": "kernelhub.ops.indexer.topk_indices",
    "fused_moe": "kernelhub.ops.moe.experts.fused_moe",
    "route_experts": "kernelhub.ops.moe.routing.route_experts",
    "linear_attention": "kernelhub.ops.linear_attention.linear_attention",
    "write_mla_cache": "kernelhub.ops.mla.cache.write_mla_cache",
    "bmm_fp8": "kernelhub.ops.gemm.fp8.batched.bmm_fp8",
    "fp8_gemm": "kernelhub.ops.gemm.fp8.fp8_gemm",
    "explain": "kernelhub.dispatch.explain",
    "report": "kernelhub.dispatch.process",
    "use": "kernelhub.dispatch.context",
    "strict": "kernelhub.dispatch.context",
    "configure": "kernelhub.dispatch.context",
    "reload": "kernelhub.dispatch.process",
    "register_backend": "kernelhub.dispatch.process",
    "verify": "kernelhub.evidence.verify",
    "tune": "kernelhub.evidence.tuning.tune",
    "fp4_gemm": "kernelhub.ops.gemm.fp4.fp4_gemm",
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


if not TYPE_CHECKING:  # a type checker knows the names above, and flags every other one

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
