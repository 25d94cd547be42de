"""Layers of experts on several GPUs by each pair of `expert_parallel_moe`: the result of one GPU, and times.

    torchrun --nproc-per-node 2 benchmarks/expert_pairs.py [--json FILE] [--tokens 1 64] [--pairs moe_pairs.tokens]

The layer is that of Qwen3-30B-A3B, in bfloat16 and with float8 blocks, and a rank has an equal part of its experts and
as many tokens as any. `error` is the largest difference from `fused_moe` with all experts on one GPU, as a share of its
largest element. `one_gpu_us` is what that takes for a rank's own tokens. Times are microseconds of a call, the slowest
rank's, eager and in a CUDA graph, where it can be captured. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from expert_comm import eager, in_graph, slowest  # first: it turns multicast off
from torch import distributed as dist

import kernelhub
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import FP8_BLOCK, PLAIN

MODEL = "qwen3-30b-a3b"
TOKENS = (1, 64, 512)
PAIRS = {
    PLAIN: ("moe_pairs.tokens", "moe_pairs.contiguous", "moe_pairs.masked"),
    FP8_BLOCK: ("moe_pairs.tokens", "moe_pairs.contiguous_fp8", "moe_pairs.masked_fp8"),
}
OF_TOKENS, OF_EXPERTS = ("x", "topk_ids", "topk_weights"), ("w13", "w2", "w13_scale", "w2_scale")
Given = dict[str, Any]


def part(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Of rows that the ranks have in equal numbers those of one."""
    return tensor.view(size, -1, *tensor.shape[1:])[rank].contiguous()


def shared(layer: Given) -> tuple[Given, Given]:
    """A layer with this rank's tokens and all experts, and with this rank's experts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = layer | {name: part(layer[name], rank, size) for name in OF_TOKENS}
    return whole, whole | {name: part(layer[name], rank, size) for name in OF_EXPERTS if name in layer}


def measure(pair: str, whole: Given, mine: Given, want: torch.Tensor) -> dict[str, Any]:
    tokens = len(want)
    plan = kernelhub.expert_parallel_moe.prepare(**mine, group=dist.group.WORLD, max_tokens=tokens, backend=pair)
    operands = [mine[name] for name in ("x", "w13", "w2", "topk_weights", "topk_ids")]
    scales = {name: mine[name] for name in OF_EXPERTS[2:] if name in mine}

    def call() -> Any:
        return plan.run(*operands, **scales)

    error = slowest(float((call().float() - want.float()).abs().max() / want.float().abs().max()))
    found = {"steps": [str(one) for one in plan.parts], "error": float(f"{error:.2g}"), "us": round(eager(call), 1)}
    try:
        found["graph_us"] = round(in_graph(call), 1)
    except (RuntimeError, kernelhub.KernelhubError) as refused:
        found["not_captured"] = str(refused).splitlines()[0][:200]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results, rewritten after each row")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a rank")
    parser.add_argument("--weights", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--pairs", nargs="+", help="all by default")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120))
    size, device = dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    results: list[Given] = []
    about = {"device": torch.cuda.get_device_name(), "ranks": size, "torch": str(torch.__version__)}
    about |= {"python": platform.python_version(), "model": MODEL, "results": results}

    for weights in options.weights:
        form = None if weights == PLAIN else FP8_BLOCK
        experts = moe_inputs(MODEL, tokens=1, weights=weights, device=device, activation_dtype=form)
        for tokens in options.tokens:
            layer = experts | tokens_of(size * tokens, experts, device)
            whole, mine = shared(layer)
            want = kernelhub.fused_moe(**whole)
            one_gpu = one(lambda whole=whole: kernelhub.fused_moe(**whole))
            for pair in PAIRS[weights]:
                if options.pairs and pair not in options.pairs:
                    continue
                case = {"weights": weights, "tokens": tokens, "pair": pair, "one_gpu_us": one_gpu}
                results.append(case | measure(pair, whole, mine, want))
                if rank == 0:
                    print(*results[-1].values(), flush=True)
                    if options.json:
                        options.json.write_text(json.dumps(about, indent=1) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # graphs outlive their communicators otherwise


def tokens_of(count: int, experts: Given, device: torch.device) -> Given:
    """Tokens of all ranks, routed at random."""
    random = torch.Generator(device).manual_seed(1)
    num_experts, hidden_size, top_k = len(experts["w13"]), experts["x"].shape[1], experts["topk_ids"].shape[1]
    best = torch.rand(count, num_experts, generator=random, device=device).topk(top_k, 1)
    x = torch.randn(count, hidden_size, generator=random, device=device).to(experts["x"].dtype)
    return {
        "x": x,
        "topk_ids": best.indices.int(),
        "topk_weights": best.values / best.values.sum(1, keepdim=True),
    }


def one(call: Callable[[], Any]) -> float:
    return round(in_graph(call), 1)


if __name__ == "__main__":
    main()
