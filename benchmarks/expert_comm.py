"""Expert dispatch and combine: every kernel that can run here, eager and in CUDA graphs, against an all-to-all.

    torchrun --nproc-per-node 2 benchmarks/expert_comm.py [--quick] [--json FILE]
        [--models glm-5] [--tokens 64] [--formats contiguous masked] [--dtypes bfloat16] [--kernels triton.push]

Tokens are routed at random, each to as many experts as the model sends it to. Times are microseconds of one call, the
slowest rank's, the least of three rounds: eager by events around 20 calls, in a graph by its replay, of 10 calls. The
exact `torch.all_to_all` is the baseline: an all-to-all with the true split sizes, which waits for the GPU and is not
captured. `host` is the time that the CPU needs for a call, of kernels with a capacity and up to 64 tokens. Runs of one
kernel follow each other, so that a figure is of a warm machine. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

import torch
from torch import distributed as dist

import kernelhub
from kernelhub.errors import NoKernel
from kernelhub.ops.comm.experts.inputs import dispatch_inputs
from kernelhub.ops.comm.experts.problem import FORMATS

ROUNDS, EAGER_CALLS, GRAPH_CALLS = 3, 20, 10
MOST_BYTES = 4 << 30  # of received rows in bfloat16


class Layer(NamedTuple):
    """The experts of a model's layer."""

    model: str
    hidden_size: int
    num_experts: int
    top_k: int


LAYERS = (
    Layer("deepseek-v3.2", 7168, 256, 8),
    Layer("qwen3-30b-a3b", 2048, 128, 8),
    Layer("glm-5", 6144, 256, 8),
    Layer("gpt-oss-120b", 2880, 128, 4),
)
TOKENS = (1, 16, 64, 128, 512, 1024, 4096)
QUICK_LAYERS, QUICK_TOKENS = LAYERS[:1], (64, 1, 512)
DTYPES = ("bfloat16", "float8_e4m3fn")
PAIRS = {  # a dispatch and the combine that follows it
    "torch.all_to_all": "torch.all_to_all",
    "torch.gather": "torch.reduce_scatter",
    "torch.gather_fixed": "torch.reduce_scatter_fixed",
    "torch.all_to_all_fixed": "torch.all_to_all_fixed",
}


def cases(options: argparse.Namespace) -> Iterator[tuple[Layer, int, torch.dtype, str]]:
    named = [layer for name in options.models for layer in LAYERS if layer.model == name] if options.models else LAYERS
    for tokens in options.tokens or (QUICK_TOKENS if options.quick else TOKENS):
        for layer in QUICK_LAYERS if options.quick and not options.models else named:
            for dtype in options.dtypes:
                for format in options.formats:
                    yield layer, tokens, getattr(torch, dtype), format


def kernels(asked: list[str] | None) -> list[tuple[str, str]]:
    """Registered pairs of a dispatch and a combine; a kernel that is in no pair combines by its own name."""
    combines = kernelhub.moe_combine.kernels()
    named = [(name, PAIRS.get(name, name)) for name in asked or kernelhub.moe_dispatch.kernels()]
    return [pair for pair in named if pair[1] in combines and not pair[0].startswith("unsupported.")]


def measure(layer: Layer, tokens: int, dtype: torch.dtype, format: str, pair: tuple[str, str]) -> dict[str, Any] | None:
    """Times of one pair, with a capacity where its dispatch takes one; None where it does not take the case."""
    for most in (tokens, None):
        steps = steps_of(layer, tokens, dtype, format, pair, most)
        if steps is None:
            continue
        rows = steps.pop("rows")()
        times: dict[str, Any] = {f"{name}_us": eager(step) for name, step in steps.items()}
        if most is not None:
            times |= {f"{name}_graph_us": in_graph(step) for name, step in steps.items()}
            if tokens <= 64:
                times |= {f"{name}_host_us": on_host(step) for name, step in steps.items()}
        return {"rows": rows, "max_tokens": most} | times
    return None


def steps_of(
    layer: Layer, tokens: int, dtype: torch.dtype, format: str, pair: tuple[str, str], most: int | None
) -> dict[str, Callable[[], Any]] | None:
    """What is timed, by plans; None where a kernel does not take it, or there is no room for the padding."""
    group = dist.group.WORLD
    given = dispatch_inputs(
        tokens=tokens,
        hidden_size=layer.hidden_size,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        dtype=dtype,
        format=format,
        max_tokens=most,
        device=torch.device("cuda", torch.cuda.current_device()),
        group=group,
        seed=dist.get_rank(),
    )
    if padded_rows(layer, tokens, format, most) * layer.hidden_size * 2 > MOST_BYTES:
        return None
    try:
        plan = kernelhub.moe_dispatch.prepare(**given, backend=pair[0])
        operands = [given[name] for name in ("x", "topk_ids", "topk_weights")] + [given.get("scales")]
        sent = plan.run(*operands)
        y = sent.x.to(torch.bfloat16)
        combine = kernelhub.moe_combine.prepare(y, sent.handle, group, backend=pair[1])
    except NoKernel:
        return None
    return {
        "rows": lambda: sent.x.shape[:-1].numel(),
        "dispatch": lambda: plan.run(*operands),
        "combine": lambda: combine.run(y, sent.handle),
        "both": lambda: combine.run(y, plan.run(*operands).handle),
    }


def padded_rows(layer: Layer, tokens: int, format: str, most: int | None) -> int:
    """Rows that a rank has room for, at most."""
    size = dist.get_world_size()
    per_rank = {"tokens": 1, "contiguous": layer.top_k, "masked": layer.num_experts // size}[format]
    return size * tokens * (per_rank if most is not None else 1)


def eager(step: Callable[[], Any]) -> float:
    return min(slowest(timed(step, EAGER_CALLS)) for _ in range(ROUNDS))


def in_graph(step: Callable[[], Any]) -> float:
    """A call inside of a graph of several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(GRAPH_CALLS):
            step()
    return min(slowest(timed(graph.replay, 5)) for _ in range(ROUNDS)) / GRAPH_CALLS


def on_host(step: Callable[[], Any]) -> float:
    """What the CPU needs for a call, the GPU being behind."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(EAGER_CALLS):
            step()
        rounds.append(slowest((time.perf_counter() - begun) * 1e6 / EAGER_CALLS))
    return min(rounds)


def timed(step: Callable[[], Any], calls: int) -> float:
    """Microseconds of a call on this rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    torch.cuda.synchronize()
    dist.barrier()
    begin.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / calls


def slowest(microseconds: float) -> float:
    """The most of all ranks."""
    most = torch.tensor([microseconds], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few models and numbers of tokens")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--models", nargs="+", choices=[layer.model for layer in LAYERS], help="all by default")
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens of a rank")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    dispatches = kernelhub.moe_dispatch.kernels()
    parser.add_argument(
        "--kernels", nargs="+", metavar="KERNEL", choices=dispatches, help="of the dispatch; all by default"
    )
    parser.add_argument("--after", type=Path, help="measure only once there is this file, whatever wrote it")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120))
    while options.after is not None and not options.after.exists():
        time.sleep(0.05)
    results: list[dict[str, Any]] = []
    about = {
        "device": torch.cuda.get_device_name(),
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "results": results,
    }
    for layer, tokens, dtype, format in cases(options):
        for pair in kernels(options.kernels):
            found = measure(layer, tokens, dtype, format, pair)
            if found is None:
                continue
            case = {"model": layer.model, "tokens": tokens, "dtype": str(dtype)[6:], "format": format}
            results.append({**case, "dispatch": pair[0], "combine": pair[1], **rounded(found)})
            if rank == 0:
                print(*(f"{value}" for value in results[-1].values()), sep="  ", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(about, indent=1) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # graphs outlive their communicators otherwise


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in found.items()}


if __name__ == "__main__":
    main()
