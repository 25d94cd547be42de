"""A layer of experts on several ranks, equal to the experts of one process, and in a CUDA graph on GPUs.

    python examples/expert_parallel_moe.py            # 2 ranks: as many GPUs, else CPUs
    python examples/expert_parallel_moe.py --ranks 4

Each rank has tokens of its own, in unequal numbers, and an equal part of the experts.
"""

from __future__ import annotations

import argparse
import os
import socket
from datetime import timedelta
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no kernel here needs NVLink multicast

import torch
from torch import Tensor
from torch import distributed as dist
from torch import multiprocessing as mp

import kernelhub

EXPERTS, TOP_K, HIDDEN, INNER, MAX_TOKENS = 16, 4, 256, 128, 32


def layer_of(rank: int, ranks: int, device: torch.device) -> tuple[Tensor, ...]:
    """This rank's tokens, with their routing, and its experts, after the experts of all ranks."""
    random = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=random) / INNER**0.5
    random.manual_seed(1 + rank)
    x = torch.randn(MAX_TOKENS - 5 * rank, HIDDEN, generator=random)
    logits = torch.randn(len(x), EXPERTS, generator=random)
    w13, w2, x = (part.bfloat16().to(device) for part in (w13, w2, x))
    weights, ids = kernelhub.route_experts(logits.to(device), TOP_K, renormalize=True)
    mine = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    return x, weights, ids, w13[mine], w2[mine], w13, w2


def run(rank: int, ranks: int, port: int, on_gpus: bool) -> None:
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    backends = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    dist.init_process_group(backends, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    x, weights, ids, w13, w2, all_w13, all_w2 = layer_of(rank, ranks, device)
    want = kernelhub.fused_moe(x, all_w13, all_w2, weights, ids)

    plan = kernelhub.expert_parallel_moe.prepare(x, w13, w2, weights, ids, dist.group.WORLD, max_tokens=MAX_TOKENS)
    out = plan.run(x, w13, w2, weights, ids)
    report(rank, "in one call", out, want)
    if rank == 0:
        print(*(f"    {part}" for part in plan.parts), sep="\n", flush=True)
    if on_gpus:
        report(rank, "in a CUDA graph", captured(plan, x, w13, w2, weights, ids), want)

    # The same step by step, with rows sorted by expert. Plans connect the ranks, once; a layer runs them.
    dispatch = kernelhub.moe_dispatch.prepare(x, ids, weights, dist.group.WORLD, EXPERTS, format="contiguous")
    sent = dispatch.run(x, ids, weights)
    gate, up = kernelhub.grouped_gemm(sent.x, w13, offsets=sent.offsets).chunk(2, -1)
    y = kernelhub.grouped_gemm(torch.nn.functional.silu(gate) * up, w2, offsets=sent.offsets)
    combine = kernelhub.moe_combine.prepare(y, sent.handle, dist.group.WORLD)
    report(rank, "step by step", combine.run(y, sent.handle), want)
    dist.barrier()
    dist.destroy_process_group()


def captured(plan: Any, *operands: Tensor) -> Tensor:
    """The result of a replay, after the tokens have changed and changed back."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan.run(*operands)
    torch.cuda.synchronize()
    dist.barrier()
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(operands[0])
    with torch.cuda.graph(graph, stream=stream):
        plan.run(*operands, out=out)
    tokens = operands[0].clone()
    operands[0].zero_()
    graph.replay()
    operands[0].copy_(tokens)
    graph.replay()
    torch.cuda.synchronize()
    return out.clone()


def report(rank: int, how: str, out: Tensor, want: Tensor) -> None:
    """The largest difference from the experts of one process; both round to bfloat16."""
    error = float((out.float() - want.float()).abs().max() / want.float().abs().max())
    assert error < 2.0**-6, error
    line = f"rank {rank}: {len(out)} tokens {how}: differs by {error:.1e} of the largest element\n"
    print(line, end="", flush=True)  # in one write, since the ranks print at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4))  # that share the experts equally
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    on_gpus = torch.cuda.device_count() >= options.ranks
    mp.spawn(run, (options.ranks, port, on_gpus), nprocs=options.ranks)


if __name__ == "__main__":
    main()
