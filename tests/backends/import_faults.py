"""Every kernel of an external library is asked for where the library is there and cannot be loaded.

    python -m tests.backends.import_faults      # prints what became of each call, as JSON

Records are those of the libraries without their limits, so that each kernel is chosen on this CPU and its adapter
loaded. Run as a process of its own: what is imported here is made to fail in several ways, one after the other.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import kernelhub
from kernelhub.dispatch.constraint import Anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.comm.experts.inputs import combine_inputs, dispatch_inputs
from kernelhub.ops.comm.inputs import alone
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.ops.indexer.inputs import logits_inputs, paged_logits_inputs
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.ops.moe.experts.inputs import moe_inputs
from tests.backends.fake import flash_mla
from tests.dispatch.backends import EVERYWHERE

BACKENDS = (
    *("cudnn", "custom_all_reduce", "cutlass", "deep_ep", "deep_gemm", "flash_attn", "flash_mla", "flashinfer"),
    *("marlin", "xformers"),
)
PACKAGES = (
    *("cudnn", "cutlass", "deep_ep", "deep_gemm", "flash_attn", "flash_attn_3", "flash_attn_interface", "flash_mla"),
    *("flashinfer", "quack", "sgl_kernel", "tvm_ffi", "vllm", "xformers"),
)
_SYMBOL = "undefined symbol: _ZN3c105ErrorC1"
_ATTRIBUTE = "has no attribute 'float2'"
# How the import of a library fails: what it raises, what is then said, and its code.
FAULTS: dict[str, tuple[BaseException | None, str, str]] = {
    "undefined symbol": (ImportError(f"x.so: {_SYMBOL}"), _SYMBOL, "load_symbol"),
    "missing library": (OSError("libcudart.so.12: cannot open shared object file"), "libcudart.so.12", "load_library"),
    "missing attribute": (AttributeError(f"module 'torch' {_ATTRIBUTE}"), _ATTRIBUTE, "load_failed"),
    "exit": (SystemExit("this build wants a GPU"), "this build wants a GPU", "load_failed"),
    "nothing in it": (None, "", "load_failed"),
}
_SMALL = AttentionModel("small", 4, 2, 64, 64)
_LIGHT = ("kernels", "requirements", "calls", "copies", "libraries")


def _quantised() -> dict[str, Any]:
    x, scale, global_scale = kernelhub.quantize_nvfp4(torch.ones(2, 64))
    return {"x": x, "scale": scale, "global_scale": global_scale, "out_dtype": torch.float16}


_SUM = {"x": torch.ones(2, 128), "group": alone(torch.device("cpu"))}
_SENT = dispatch_inputs(tokens=2, hidden_size=64, num_experts=4, top_k=2)
INPUTS: dict[str, dict[str, Any]] = {
    "all_reduce": _SUM,
    "all_reduce_rms_norm": {**_SUM, "residual": torch.ones(2, 128), "weight": torch.ones(128), "eps": 1e-6},
    "attention": attention_inputs(_SMALL, q_tokens=3),
    "paged_attention": paged_attention_inputs(_SMALL, seq_lens=(5, 9)),
    "mla_attention": mla_attention_inputs(num_heads=4, seq_lens=(5, 9)),
    "concat_mla_k": concat_inputs(tokens=2, num_heads=2),
    "fp8_gemm": fp8_gemm_inputs(tokens=2, n=128, k=128),
    "bmm_fp8": bmm_fp8_inputs(batch=2, tokens=2, n=32, k=32),
    "fp4_gemm": fp4_gemm_inputs(tokens=2, n=128, k=128),
    "merge_attention_states": merge_inputs(tokens=3),
    "dequantize_nvfp4": _quantised(),
    **{f"quantize_{form}": {"x": torch.ones(2, 128)} for form in ("fp8", "mxfp4", "mxfp8", "nvfp4")},
    "grouped_gemm": grouped_gemm_inputs(),
    "mqa_logits": logits_inputs(tokens=2, keys=16),
    "paged_mqa_logits": paged_logits_inputs(seq_lens=(20, 6)),
    "moe_dispatch": _SENT,
    "moe_combine": combine_inputs(tokens=2, hidden_size=64, num_experts=4, top_k=2),
    "fused_moe": moe_inputs(num_experts=4, hidden_size=32, intermediate_size=32, top_k=2),
}


def records() -> list[Kernel]:
    """Every record of an external library, in the order of backends."""
    modules = (importlib.import_module(f"kernelhub.backends.{name}.kernels") for name in BACKENDS)
    return [kernel for module in modules for kernel in module.KERNELS]


def label(kernel: Kernel) -> str:
    """How a record is named here: by op, backend and variant."""
    return f"{kernel.op} {kernel.name}"


def _anywhere(kernel: Kernel) -> Kernel:
    """The record without limits, of a third party."""
    schema = HUB.function(kernel.op).op.contract.schema
    return dataclasses.replace(
        kernel,
        name="fake." + kernel.name.replace(".", "_"),
        band=Band.PLUGIN,
        standings=EVERYWHERE,
        constraints=(Anything(tuple(schema.structural)),),
        features=frozenset(schema.features),
        layouts=(CHECKPOINT,),  # a weight is packed once an adapter is there
        packs_to="",
    )


def _install(root: Path, fault: BaseException | None) -> None:
    """Packages whose import raises, with the files that are looked for beforehand."""
    text = "" if fault is None else f"raise {fault!r}\n"
    for name in PACKAGES:
        (root / name).mkdir()
        (root / name / "__init__.py").write_text(text)
    if text:  # its functions are read before it is imported
        (root / "flash_mla" / "flash_mla_interface.py").write_text(flash_mla.source("legacy"))
    (root / "deep_gemm" / "include" / "deep_gemm").mkdir(parents=True)
    for file in (
        "deep_gemm/_C.cpython-312.so",
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        "sgl_kernel/sm90/common_ops.abi3.so",
        "sgl_kernel/sm100/common_ops.abi3.so",
    ):
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).touch()


def _forget() -> None:
    """Adapters and libraries are imported anew."""
    for name in list(sys.modules):
        parts = name.split(".")
        ours = parts[:2] == ["kernelhub", "backends"] and len(parts) > 3 and parts[2] in BACKENDS
        if parts[0] in PACKAGES or (ours and parts[-1] not in _LIGHT):
            del sys.modules[name]
    importlib.invalidate_caches()
    HUB.restore()


def _call(kernel: Kernel, fault: BaseException | None) -> dict[str, Any]:
    """What becomes of a call that prefers a kernel."""

    def load_library(path: str) -> None:
        if fault is not None:
            raise fault

    setattr(torch.ops, "load_library", load_library)  # noqa: B010
    function = HUB.function(kernel.op)
    name = "fake." + kernel.name.replace(".", "_")
    try:
        override: dict[str, Any] = {kernel.op: (name, "torch")}
        with kernelhub.use(**override):
            function(**INPUTS[kernel.op])
            selection = function.explain(**INPUTS[kernel.op])
    except BaseException as error:
        return {"raised": repr(error)}
    decision = next(decision for decision in selection.decisions if decision.kernel == name)
    return {"selected": selection.selected, "code": decision.code, "reason": decision.reason}


def main(asked: dict[str, list[str]]) -> None:
    """Print what became of these kernels, by fault."""
    kernels = records()
    told: dict[str, dict[str, Any]] = {}
    for title in asked:
        fault, *_ = FAULTS[title]
        root = Path(tempfile.mkdtemp())
        _install(root, fault)
        sys.path.insert(0, str(root))
        _forget()
        own = tuple(map(_anywhere, kernels))
        handle = kernelhub.register_backend(
            SimpleNamespace(__name__="fake", BACKEND=Backend("fake", "libraries that cannot be loaded"), KERNELS=own)
        )
        told[title] = {label(kernel): _call(kernel, fault) for kernel in kernels if label(kernel) in asked[title]}
        handle.remove()
        sys.path.remove(str(root))
        shutil.rmtree(root)
    print(json.dumps(told))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
