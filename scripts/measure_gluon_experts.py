"""Time experts: Gluon's, `triton.experts` and, in bfloat16, torch's grouped product, on one Hopper GPU.

    python scripts/measure_gluon_experts.py [--weights plain|fp8_block] [--layers NAME...] [--tokens N...]
        [--launches] [--out FILE] [--compile] [--part I/N]

Whole calls of the public function in CUDA graphs of two, medians of samples that alternate, the cache not flushed.
Results are compared with torch's, or with Triton's where there are biases or float8. `--launches` also times each
launch of Gluon's, repeated in a graph with the same operands, its counters cleared by a launch that is timed too.
`--compile` only calls each kernel once, so that a later run finds everything in Triton's cache. The file is written
after every case.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from alternating import facts, launches_us, medians, off_from_last

import kernelhub
from kernelhub.ops.models.shapes import MoeModel
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.reference import joined

LAYERS = {
    "qwen3-30b-a3b": MoeModel("qwen3-30b-a3b", num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768),
    "mixtral-8x7b": MoeModel("mixtral-8x7b", num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336),
    "gpt-oss-20b": MoeModel(
        "gpt-oss-20b", num_experts=32, top_k=4, hidden_size=2880, intermediate_size=2880, activation="swiglu_oai",
        bias=True,
    ),
    "deepseek-v3.2/8": MoeModel(
        "deepseek-v3.2/8", num_experts=256, top_k=8, hidden_size=7168, intermediate_size=256,
    ),
    "minimax-m2.5/4": MoeModel(
        "minimax-m2.5/4", num_experts=256, top_k=8, hidden_size=3072, intermediate_size=384,
    ),
    "glm-5/8": MoeModel("glm-5/8", num_experts=256, top_k=8, hidden_size=6144, intermediate_size=256),
    "deepseek-v3.2": MoeModel("deepseek-v3.2", num_experts=256, top_k=8, hidden_size=7168, intermediate_size=2048),
}  # fmt: skip
TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 4096)
KERNELS = {"plain": "gluon.experts_halves", "fp8_block": "gluon.experts"}
CALLS, _SAMPLE_MS = 2, 8.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", choices=KERNELS, default="plain")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=[*LAYERS][:3])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--part", default="0/1")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    rows: list[dict[str, Any]] = []
    about = facts(__doc__)
    for name in options.layers:
        whole = moe_inputs(LAYERS[name], tokens=max(options.tokens), weights=options.weights, device="cuda")
        for tokens in options.tokens[part::parts]:
            arguments = whole | {name: whole[name][:tokens] for name in ("x", "topk_weights", "topk_ids")}
            row = {"layer": name, "tokens": tokens, **case(arguments, KERNELS[options.weights], options.compile)}
            if options.launches and not options.compile:
                call = functools.partial(kernelhub.fused_moe, **arguments, backend=KERNELS[options.weights])
                row["launches_us"] = launches_us(call)
            rows.append(row)
            print(json.dumps(rows[-1]), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        whole = arguments = {}
    return 0


def case(arguments: dict[str, Any], ours: str, only_compile: bool) -> dict[str, Any]:
    """Times in ms, and how far the kernels are from the last's result."""
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(kernelhub.fused_moe, **arguments, backend=name) for name in (ours, "triton.experts")
    }
    made = {name: call() for name, call in calls.items()}
    torch.cuda.synchronize()
    if only_compile:
        return {}
    if "w13_bias" not in arguments and "w13_scale" not in arguments:
        calls["torch._grouped_mm"] = lambda: _grouped(arguments)
        made["torch._grouped_mm"] = calls["torch._grouped_mm"]()
    off = off_from_last(made)
    off.popitem()
    again = {name: lambda _, call=call: call() for name, call in calls.items()}
    return {"kernels_ms": medians(again, CALLS, _SAMPLE_MS), "off": off}


def _grouped(arguments: dict[str, Any]) -> torch.Tensor:
    """torch's way: rows sorted and gathered, two grouped products, rows added up."""
    x, ids, weights, w13, w2 = (arguments[name] for name in ("x", "topk_ids", "topk_weights", "w13", "w2"))
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(w13), dtype=torch.int32, device=x.device)
    ends = counts.scatter_add_(0, flat.long(), torch.ones_like(flat)).cumsum(0).int()
    tokens = order // ids.shape[1]
    both = torch._grouped_mm(x[tokens], w13.transpose(1, 2), offs=ends)
    inner = joined(both, arguments.get("activation", "silu"), 1.702, 7.0)
    given = torch._grouped_mm(inner, w2.transpose(1, 2), offs=ends)
    weighed = (given * weights.flatten()[order].unsqueeze(1)).to(x.dtype)
    return torch.zeros_like(x).index_add_(0, tokens, weighed)


if __name__ == "__main__":
    sys.exit(main())
