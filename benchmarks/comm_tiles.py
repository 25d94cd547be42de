"""Times of the sums over ranks in Triton by how they are launched, in CUDA graphs: what the tiles are chosen by.

    python benchmarks/comm_tiles.py --ranks 2 [--json FILE] [--only once] [--sizes 8192]

In microseconds, the slowest rank's, for rows of 4096 in bfloat16. `once` is a program that has one tile or row, and
loads it before it reads which set of slots is used; `loop` one that may have several; `of a row` how many programs send
parts of a row, of which the last receives it; `in parts` how many each send and normalise a part. At the end: the
fastest norm of each size, and how many of the fastest sum it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

import torch
import torch.distributed as dist
from comm import Bench, about

from kernelhub.backends.triton.comm import adapter as adapters
from kernelhub.backends.triton.comm.fused_rms_norm import all_reduce_rms_norm_kernel
from kernelhub.backends.triton.comm.split_rms_norm import split_rms_norm_kernel
from kernelhub.dispatch.hub import HUB
from kernelhub.ops.comm.problem import ATOMICS, MESSAGE_BYTES, NVLINK, AllReduceProblem, AllReduceRmsNormProblem
from kernelhub.probes.device import facts_of

HIDDEN = 4096
SIZES = (8 << 10, 64 << 10, 256 << 10, 1 << 20)
TIMEOUT_S = 60.0
IN_PLACE = ("one_shot, once, 4 of a row, in place of x", "one_shot, 4 in parts, in place of x")


def launched(base: type, once: bool, parts: int = 1, warps: int | None = None, turns: bool = False) -> type:
    """An adapter whose programs have one tile or row where they can, or that lets them have several.

    turns: each program of a row normalises its part.
    """

    class Launched(base):  # type: ignore[misc]
        def __init__(self, problem: Any) -> None:
            super().__init__(problem)
            self._tile = self._tile._replace(warps=warps or self._tile.warps)
            if base is adapters.OneShotRmsNorm:
                self.turns = turns and self._split > 1
                self.kernel = split_rms_norm_kernel if self.turns else all_reduce_rms_norm_kernel

        def split(self) -> int:
            return min(super().split(), parts)

        def static(self) -> dict[str, Any]:
            static = super().static()
            return {**static, "ONCE": once and self._once} if "ONCE" in static else static

    return Launched


def sums() -> dict[str, type]:
    one = adapters.OneShot
    return {"one_shot, once": launched(one, True), "one_shot, loop": launched(one, False), "two_shot": adapters.TwoShot}


def norms() -> dict[str, type]:
    one, two = adapters.OneShotRmsNorm, adapters.TwoShotRmsNorm
    split = {
        f"one_shot, once, {parts} of a row, {warps} warps": launched(one, True, parts, warps)
        for parts, warps in ((1, 8), (4, 8), (2, 8), (4, 16), (1, 16), (4, 4))
    }
    split |= {
        f"one_shot, {parts} in parts, {warps} warps": launched(one, True, parts, warps, turns=True)
        for parts, warps in ((4, 8), (2, 8), (4, 16), (4, 4))
    }
    split |= {name: launched(one, True, 4, turns="in parts" in name) for name in IN_PLACE}
    return {**split, "one_shot, loop": launched(one, False), "two_shot": two}


def calls(kind: type, num_bytes: int, device: torch.device, in_place: bool) -> Callable[[], None]:
    """A launch of one adapter, connected."""
    group: Any = dist.group.WORLD
    message = next(name for name, most in MESSAGE_BYTES.items() if num_bytes <= most)
    facets = {"device": facts_of(device.index), "link": NVLINK, "peers": ATOMICS, "message": message}
    facets |= {"world_size": group.size(), "dtype": "bfloat16"}
    x = torch.ones(num_bytes // 2 // HIDDEN, HIDDEN, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    if issubclass(kind, adapters.OneShot | adapters.TwoShot):
        made = kind(AllReduceProblem(**facets))
        made.connect(x, group, TIMEOUT_S)
        return lambda: made.launch(x, out, group, TIMEOUT_S)
    residual, weight, added = x.clone(), torch.ones(HIDDEN, dtype=x.dtype, device=device), torch.empty_like(x)
    made = kind(AllReduceRmsNormProblem(**facets, weight_dtype="bfloat16", hidden_size=HIDDEN))
    made.connect(x, group, TIMEOUT_S)
    place = x if in_place else out
    return lambda: made.launch(x, residual, weight, 1e-5, place, added, group, TIMEOUT_S)


def run(rank: int, size: int, port: int, options: argparse.Namespace) -> None:
    place = options.json
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    _ = HUB.settings
    bench, found = Bench(device, size, torch.bfloat16, None), about(device, size)
    found.pop("rows")
    found["graph_us"] = results = {}
    for op, variants in (("all_reduce", sums), ("all_reduce_rms_norm", norms)):
        for name, kind in variants().items():
            if not any(part in name for part in options.only):
                continue
            figures = results.setdefault(op, {})[name] = {}
            for num_bytes in options.sizes:
                figures[str(num_bytes)] = bench.graph_us(calls(kind, num_bytes, device, name in IN_PLACE))
            if rank == 0:
                print(f"{op:20} {name:34}", *(f"{figure:7.2f}" for figure in figures.values()), flush=True)
                if place is not None:
                    place.write_text(json.dumps(found, indent=1) + "\n")
    if rank == 0:
        print(*shares(results), sep="\n", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def shares(results: dict[str, Any]) -> Iterator[str]:
    """The fastest norm of each size over the fastest sum."""
    for num_bytes in next(iter(results["all_reduce"].values())):
        best = {op: min(variants, key=lambda name: variants[name][num_bytes]) for op, variants in results.items()}
        us = {op: results[op][name][num_bytes] for op, name in best.items()}
        ratio = us["all_reduce_rms_norm"] / us["all_reduce"]
        yield f"{int(num_bytes) >> 10} KB: {ratio:.2f}; " + "; ".join(f"{name} {us[op]}" for op, name in best.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--json", type=Path, help="file for the results, rewritten after each row")
    parser.add_argument("--only", nargs="+", default=[""], help="variants that have one of these in their names")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes of a rank's message")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (options.ranks, port, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
