"""What only a GPU shows of calls that torch traces or captures, each part in a process of its own:

    trees     layers under torch.compile with mode="reduce-overhead", their temporaries the first of their stream
    kept      the same, with memory of the graph's pool kept: what torch says of it
    traced    calls that are repeated, under make_fx and FakeTensorMode
    threads   CUDA kernels in threads that have not used CUDA

Run: python -m tests.gpu.graph_trees PART [--device cpu] [--backend triton]. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops import graph_memory
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.quant.inputs import quantize_inputs

HEADS = AttentionModel("llama-like", 16, 4, 128, 128)
WIDTH = HEADS.num_q_heads * 128
LAYERS, LONGEST = 5, 2048


class Model:
    """Layers of decode over pages, a product of float8 and experts, each with weights of its own."""

    def __init__(self, sequences: int, device: str, backend: str | None, longest: int) -> None:
        self.request = {} if backend is None else {"backend": backend}
        self.longest = longest
        self.attention = [
            paged_attention_inputs(HEADS, seq_lens=(longest,) * sequences, device=device) for _ in range(LAYERS)
        ]
        self.products = [fp8_gemm_inputs(tokens=sequences, n=WIDTH, k=WIDTH, device=device) for _ in range(LAYERS)]
        self.experts = moe_inputs(
            tokens=sequences, num_experts=4, hidden_size=WIDTH, intermediate_size=128, top_k=2, device=device
        )
        first = self.attention[0]
        for other in self.attention[1:]:
            other["block_table"], other["seq_lens"] = first["block_table"], first["seq_lens"]

    def redraw(self, generator: torch.Generator) -> Tensor:
        """Other lengths; gives other activations."""
        lengths = self.attention[0]["seq_lens"]
        drawn = torch.randint(1, self.longest + 1, lengths.shape, generator=generator, dtype=torch.int32)
        lengths.copy_(drawn)
        return torch.randn(len(lengths), WIDTH, generator=generator).to(self.attention[0]["q"])

    def __call__(self, x: Tensor) -> Tensor:
        for attention, product in zip(self.attention, self.products, strict=True):
            attended = kernelhub.paged_attention(**{**attention, "q": x.view_as(attention["q"])}, **self.request)
            codes, scale = kernelhub.quantize_fp8(attended.reshape(x.shape), granularity="group", **self.request)
            x = x + kernelhub.fp8_gemm(**{**product, "a": codes, "a_scale": scale}, **self.request)
            x = x / x.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype)
        return x + kernelhub.fused_moe(**{**self.experts, "x": x}, **self.request)


def trees(device: str, backend: str | None) -> dict[str, Any]:
    longest = LONGEST if device == "cuda" else 64
    models = [Model(sequences, device, backend, longest) for sequences in (20, 7)]
    runs = [torch.compile(model, mode="reduce-overhead", fullgraph=True) for model in models]
    generator = torch.Generator().manual_seed(7)
    differ, worst, kept = 0, 0.0, []
    for _ in range(6):
        for model, run in zip(models, runs, strict=True):
            x = model.redraw(generator)
            torch.compiler.cudagraph_mark_step_begin()
            kept.append((model, x, model.attention[0]["seq_lens"].clone(), run(x).clone()))
    for model, x, lengths, got in kept:  # eager calls come last: before, they would give their stream memory
        model.attention[0]["seq_lens"].copy_(lengths)
        want = model(x)
        differ += not torch.equal(got, want)
        worst = max(worst, float((got.float() - want.float()).abs().max() / want.float().abs().max()))
    return {"replays": len(kept), "with other bits": differ, "worst relative": worst, "passed": worst < 0.05}


def kept(device: str, backend: str | None) -> dict[str, Any]:
    graph_memory.in_tree = lambda device: False
    try:
        return trees(device, backend) | {"raised": None}
    except RuntimeError as error:
        said = str(error)
        return {"raised": said[:300], "passed": "not tracked as outputs" in said}


def calls_of(device: str) -> dict[str, dict[str, Any]]:
    small = device != "cuda"
    return {
        "paged_attention": paged_attention_inputs(HEADS, seq_lens=(40 if small else 900,) * 20, device=device),
        "mla_attention": mla_attention_inputs(num_heads=16, seq_lens=(30 if small else 700, 5), device=device),
        "fp8_gemm": fp8_gemm_inputs(tokens=7, n=256, k=512, device=device),
        "quantize_fp8": quantize_inputs(tokens=5, width=512, device=device),
    }


def under_fakes(call: Callable[[], Any]) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return call()


def first_of(made: Any) -> Tensor:
    found: Tensor = made[0] if isinstance(made, tuple) else made
    return found.float()


def traced(device: str, backend: str | None) -> dict[str, Any]:
    wrong: list[str] = []
    request = {} if backend is None else {"backend": backend}
    for name, given in calls_of(device).items():
        function = getattr(kernelhub, name)

        if (function.explain(**given, **request).selected or "torch.").startswith("torch."):  # operators are recorded
            continue
        call = functools.partial(function, **given, **request)
        want = [first_of(call()) for _ in range(12)][-1]
        for how, run in (("make_fx", make_fx(call)), ("fake", functools.partial(under_fakes, call))):
            try:
                run()
            except InvalidArgument as error:
                if "traced by make_fx" not in str(error) and "FakeTensor" not in str(error):
                    wrong.append(f"{name} {how}: {error}")
            except Exception as error:  # torch's own refusal to read values while it traces
                if "_local_scalar_dense" not in f"{type(error)} {error}":
                    wrong.append(f"{name} {how}: {type(error).__name__}: {error}"[:300])
            else:
                wrong.append(f"{name} {how}: ran")
        if not torch.equal(first_of(call()), want):
            wrong.append(f"{name}: other numbers after it was traced")
    return {"wrong": wrong, "passed": not wrong}


def threads(device: str, backend: str | None) -> dict[str, Any]:
    wrong: list[str] = []
    for name, given in calls_of(device).items():
        kernels = getattr(kernelhub, name).kernels()
        own = [kernel for kernel in kernels if kernel.startswith("cuda.")]
        for kernel in own if device == "cuda" else [None]:
            request = {} if kernel is None else {"backend": kernel}
            explained = getattr(kernelhub, name).explain(**given, **request)
            if not explained.selected:
                continue
            results: list[Any] = []

            def work(given: Any = given, name: str = name, request: Any = request, results: Any = results) -> None:
                try:
                    results.append(first_of(getattr(kernelhub, name)(**given, **request)))
                    if device == "cuda":
                        torch.cuda.synchronize()
                except Exception as error:
                    results.append(f"{type(error).__name__}: {error}"[:300])

            for _ in range(4):  # the first compiles and loads, the third is watched, the fourth repeated
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
            said = [one for one in results if isinstance(one, str)]
            wrong += [f"{name} {kernel}: {one}" for one in said]
            if not said and not all(torch.equal(one, results[0]) for one in results):
                wrong.append(f"{name} {kernel}: other numbers in another thread")
    return {"wrong": wrong, "passed": not wrong}


PARTS = {"trees": trees, "kept": kept, "traced": traced, "threads": threads}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend")
    asked = parser.parse_args()
    begun = time.perf_counter()
    found = PARTS[asked.part](asked.device, asked.backend)
    print(
        json.dumps({"part": asked.part, "backend": asked.backend, **found, "s": round(time.perf_counter() - begun, 1)})
    )
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
