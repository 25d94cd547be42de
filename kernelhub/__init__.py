"""Every LLM kernel behind one stable call: the fastest right kernel on this device, and why.

>>> import torch, kernelhub
>>> q, k, v = torch.randn(3, 1, 64, 8, 64)
>>> kernelhub.attention(q, k, v, causal=True).shape
torch.Size([1, 64, 8, 64])

Every name is loaded at its first use; importing kernelhub imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelhub import errors as errors
    from kernelhub.dispatch.context import configure as configure
    from kernelhub.dispatch.context import strict as strict
    from kernelhub.dispatch.context import use as use
    from kernelhub.dispatch.explain import explain as explain
    from kernelhub.dispatch.hub import register_backend as register_backend
    from kernelhub.dispatch.hub import reload as reload
    from kernelhub.dispatch.hub import report as report
    from kernelhub.dispatch.machine import SimulatedMachine as SimulatedMachine
    from kernelhub.dispatch.select import Selection as Selection
    from kernelhub.ops.attention.attention import attention as attention
    from kernelhub.ops.attention.paged_attention import paged_attention as paged_attention
    from kernelhub.ops.gemm.fp8.batched.bmm_fp8 import bmm_fp8 as bmm_fp8
    from kernelhub.ops.gemm.fp8.fp8_gemm import fp8_gemm as fp8_gemm
    from kernelhub.ops.merge.merge_attention_states import merge_attention_states as merge_attention_states
    from kernelhub.ops.mla.concat_mla_k import concat_mla_k as concat_mla_k
    from kernelhub.probes.device import DeviceFacts as DeviceFacts

__version__ = "0.1.0"

_HOMES = {
    "attention": "kernelhub.ops.attention.attention",
    "paged_attention": "kernelhub.ops.attention.paged_attention",
    "merge_attention_states": "kernelhub.ops.merge.merge_attention_states",
    "concat_mla_k": "kernelhub.ops.mla.concat_mla_k",
    "bmm_fp8": "kernelhub.ops.gemm.fp8.batched.bmm_fp8",
    "fp8_gemm": "kernelhub.ops.gemm.fp8.fp8_gemm",
    "explain": "kernelhub.dispatch.explain",
    "report": "kernelhub.dispatch.hub",
    "use": "kernelhub.dispatch.context",
    "strict": "kernelhub.dispatch.context",
    "configure": "kernelhub.dispatch.context",
    "reload": "kernelhub.dispatch.hub",
    "register_backend": "kernelhub.dispatch.hub",
    "Selection": "kernelhub.dispatch.select",
    "DeviceFacts": "kernelhub.probes.device",
    "SimulatedMachine": "kernelhub.dispatch.machine",
}

__all__ = ["__version__", "errors", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "errors":
        value: Any = importlib.import_module("kernelhub.errors")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'kernelhub' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
