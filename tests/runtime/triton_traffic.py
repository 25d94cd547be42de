"""Seal and fuzz, with Triton's real compiler for a GPU that is not here; nothing is launched.

    python -m tests.runtime.triton_traffic FOLDER

The library's own Triton adapters run public calls on CPU tensors as if on an H200. Prints one JSON object. It must run
in a process without TRITON_INTERPRET, which is why the test starts it as one; `FOLDER` keeps what is compiled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
import warnings
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_CACHE_DIR"] = sys.argv[1]

import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

import kernelhub
from kernelhub.backends.triton.gemm.fp8.adapter import Fp8Gemm
from kernelhub.backends.triton.merge.adapter import Merge
from kernelhub.backends.triton.quant.adapter import QuantizeFp8
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.errors import NotWarmed
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.probes.device import simulated
from tests.backends.triton_ahead import Driver
from tests.dispatch.backends import EVERYWHERE

H200 = simulated("H200")
DECLARED = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _ahead(adapter: type) -> type:
    """The adapter, made for an H200 whatever device is asked about."""

    class Ahead(adapter):  # type: ignore[misc, valid-type]
        def __init__(self, problem: Any) -> None:
            super().__init__(dataclasses.replace(problem, device=H200))

    return Ahead


QuantizeAhead, MergeAhead, GemmAhead = map(_ahead, (QuantizeFp8, Merge, Fp8Gemm))
TARGETS = {"quantize_fp8": "QuantizeAhead", "merge_attention_states": "MergeAhead", "fp8_gemm": "GemmAhead"}


def register() -> None:
    _ = HUB.settings
    kernels = []
    for op, target in TARGETS.items():
        schema = HUB.registry.contracts[op].schema
        kernels.append(
            Kernel(
                op=op,
                name="ahead.k",
                target=f"{__name__}:{target}",
                summary="compiled, not launched",
                band=Band.PLUGIN,
                standings=EVERYWHERE,
                constraints=(anything(*schema.structural),),
                features=schema.features,
            )
        )
    kernelhub.register_backend(types.SimpleNamespace(BACKEND=Backend("ahead", "compiles"), KERNELS=tuple(kernels)))


def launch_nothing() -> None:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(self, *args, grid=grid, warmup=True, **kwargs)

    triton.runtime.driver.set_active(Driver(GPUTarget("cuda", 90, 32)))
    JITFunction.run = compile_only
    CompiledKernel.__getitem__ = lambda self, grid: lambda *arguments, **named: None


def quantize(tokens: int, width: int = 256, shift: int = 0) -> Any:
    x = torch.zeros(tokens * width + shift, dtype=torch.bfloat16)[shift:].view(tokens, width)
    return kernelhub.quantize_fp8(x, "group")


def merge(tokens: int, heads: int = 4) -> Any:
    outs, lses = [torch.zeros(tokens, heads, 64) for _ in range(2)], [torch.zeros(heads, tokens) for _ in range(2)]
    return kernelhub.merge_attention_states(outs, lses)


def gemm(tokens: int, n: int = 256) -> Any:
    return kernelhub.fp8_gemm(**fp8_gemm_inputs(tokens=tokens, n=n, k=256))


CALLS = {"quantize": quantize, "merge": merge, "gemm": gemm}
OUTSIDE = {
    "a shifted operand": lambda: quantize(16, shift=1),
    "more heads": lambda: merge(16, heads=8),
    "another N": lambda: gemm(16, n=512),
}


def main() -> None:
    launch_nothing()
    register()
    for tokens in DECLARED:
        for call in CALLS.values():
            call(tokens)
    plan = kernelhub.quantize_fp8.prepare(torch.zeros(8, 256, dtype=torch.bfloat16), "group")
    warmed = [item for item in kernelhub.report().work if item.kind == "compile"]
    told: dict[str, Any] = {"compiled": len(warmed), "ops": sorted({str(item.op) for item in warmed})}
    told["kernels"] = sorted({item.kernel for item in warmed})
    told["seconds"] = [item.seconds for item in warmed]
    told["examples"] = 0

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(sorted(CALLS)), st.integers(1, max(DECLARED)))
    def traffic(name: str, tokens: int) -> None:
        CALLS[name](tokens)
        told["examples"] += 1

    with kernelhub.seal():
        traffic()
        plan.run(torch.zeros(77, 256, dtype=torch.bfloat16))
        told["after_seal"] = len(kernelhub.report().after_seal)
        told["more"] = sum(item.kind == "compile" for item in kernelhub.report().work) - len(warmed)
    told["outside"] = {name: outside(call) for name, call in OUTSIDE.items()}
    strided = torch.zeros(16, 264, dtype=torch.bfloat16)[:, :256]
    told["outside"]["a plan's strided operand"] = outside(lambda: plan.run(strided))
    print(json.dumps(told))


def outside(call: Any) -> dict[str, Any]:
    """Refused while sealed; after its line has run, not refused any more."""
    count = len(kernelhub.report().work)
    with kernelhub.seal():
        try:
            call()
            return {"refused": False}
        except NotWarmed as error:
            refused = error
    compiled_while_sealed = len(kernelhub.report().work) - count
    exec(refused.line, {"kernelhub": kernelhub, "torch": torch})
    warmed = len(kernelhub.report().work)
    with kernelhub.seal():
        call()
    more = len(kernelhub.report().work) - warmed
    return {"refused": True, "kind": refused.kind, "line": refused.line, "work": compiled_while_sealed, "more": more}


if __name__ == "__main__":
    sys.modules["tests.runtime.triton_traffic"] = sys.modules["__main__"]
    main()
