"""Ranks that give unlike arguments, on GPUs, with KERNELHUB_CHECK=1; `test_comm_on_gpu.py` and a person run it.

    python -m tests.gpu.unlike_ranks --ranks 2

It starts the ranks and prints a JSON object: for each scene, the message that each rank raised, and the sum that all
ranks computed after it; the scene `costs` has microseconds of a call with and without the comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

import torch
import torch.distributed as dist

import kernelhub
from kernelhub.errors import KernelhubError, RanksDisagree
from tests.gpu.comm_conformance import wait_for, write
from tests.runtime.world import _free_port, variables

EXPERTS, MOST, HIDDEN = 8, 16, 1024


def live(rank: int, ranks: int, port: int, device: str, folder: str, after: Path | None) -> None:
    """One rank; it writes its answers and ends."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    wait_for(after)
    answers: dict[str, Any] = {}
    costs: dict[str, float] = {}
    with variables(KERNELHUB_CHECK="1", KERNELHUB_COMM_TIMEOUT_S="20"):
        kernelhub.reload()
        for name, answer in scenes(rank, device):
            answers[name] = answer
            write(Path(folder, str(rank)), answers)  # what is printed if a later scene waits
        costs["compared"] = cost(device)
    with variables(KERNELHUB_CHECK="0"):
        kernelhub.reload()
        costs["plain"] = cost(device)
    write(Path(folder, str(rank)), {**answers, "costs": costs})
    dist.barrier()
    os._exit(0)


def scenes(rank: int, device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rank 1 gives something else to each call; after each, all ranks sum the same."""
    group, other = dist.group.WORLD, rank == 1

    def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype, device=device)

    plan = kernelhub.all_reduce.prepare(ones(4, HIDDEN), group)
    norm = {"weight": ones(HIDDEN), "group": group}
    ids = torch.zeros(MOST, 2, dtype=torch.int32, device=device)
    tokens = {"x": ones(MOST, HIDDEN), "topk_ids": ids, "topk_weights": ids.float(), "group": group}
    first_kernel = "torch.distributed" if other else None
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: kernelhub.all_reduce(ones(4 + other, HIDDEN), group),
        "run": lambda: plan.run(ones(4 + other, HIDDEN)),
        "none": lambda: plan.run(ones(0 if other else 4, HIDDEN)),
        "dtype": lambda: kernelhub.all_reduce(ones(4, dtype=torch.float16 if other else torch.bfloat16), group),
        "op": lambda: (kernelhub.all_gather if other else kernelhub.all_reduce)(ones(4, HIDDEN), group),
        "eps": lambda: kernelhub.all_reduce_rms_norm(*[ones(2, HIDDEN)] * 2, eps=1e-5 * (1 + other), **norm),
        "kernel": lambda: kernelhub.all_reduce(ones(4, HIDDEN), group, backend=first_kernel),
        "room": lambda: kernelhub.moe_dispatch(**tokens, num_experts=EXPERTS, max_tokens=MOST + other),
        # What rank 1 gives is refused on it alone, before it compares anything.
        "refused": lambda: kernelhub.all_reduce(ones(4, HIDDEN), group, out=ones(3, HIDDEN) if other else None),
        "refused run": lambda: plan.run(ones(4, HIDDEN), out=ones(3, HIDDEN) if other else None),
        "refused kernel": lambda: kernelhub.all_gather(ones(4, HIDDEN), group, backend="no such" if other else None),
        "refused tokens": lambda: kernelhub.moe_dispatch(**tokens, num_experts=EXPERTS, max_tokens=MOST - other),
    }
    for name, call in calls.items():
        began = time.monotonic()
        try:
            answer = {"raised": "", "gave": str(call())[:80]}
        except RanksDisagree as error:
            answer = {"raised": f"{error.code} {error}"}
        except KernelhubError as error:  # of the rank that is refused
            answer = {"raised": f"{type(error).__name__} {error}", "refused": True}
        answer["s"] = round(time.monotonic() - began, 2)
        yield name, {**answer, "after": plan.run(ones(1, HIDDEN)).float().mean().item()}


def cost(device: str) -> float:
    """Median microseconds of a call of 8 KB that waits for its end."""
    x, taken = torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=device), []
    kernelhub.all_reduce.prepare(x, dist.group.WORLD)  # both times the kernel that is selected for a connected group
    for _ in range(60):
        began = time.perf_counter()
        kernelhub.all_reduce(x, dist.group.WORLD).sum().item()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=150.0)
    parser.add_argument("--after", type=Path, help="begin once there is this file; the limit counts from then")
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (options.ranks, _free_port(), options.device, folder, options.after)
        ranks = [context.Process(target=live, args=(rank, *given)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # of `timeout`: what was found until then is printed
        try:
            wait_for(options.after)
            until = time.monotonic() + options.limit_s
            for process in ranks:
                process.join(max(0.0, until - time.monotonic()))
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
            files = [Path(folder, str(rank)) for rank in range(options.ranks)]
            answers = [json.loads(file.read_text()) if file.exists() else None for file in files]
            print(json.dumps({"ended": [process.exitcode for process in ranks], "ranks": answers}), flush=True)


if __name__ == "__main__":
    main()
