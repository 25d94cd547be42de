"""Few calls of each Triton kernel between GPUs, for a run under compute-sanitizer; each result is compared.

    compute-sanitizer --tool memcheck --target-processes all python -m tests.gpu.comm_sanitized --ranks 2

It starts the ranks and prints one JSON object: for each kernel how many calls were made and what was wrong, by rank.
Launches of a sanitised program are many times slower, so messages are small.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
os.environ.setdefault("KERNELHUB_COMM_TIMEOUT_S", "60")

import torch
import torch.distributed as dist

from kernelhub.dispatch.hub import HUB
from kernelhub.ops.comm.experts.problem import FORMATS
from tests.gpu.comm_conformance import Scenes
from tests.gpu.expert_conformance import ROUTINGS, Layer
from tests.runtime.world import _free_port

MOST_ROWS = 72  # of 4 KB: past the bucket of 256 KB
COLLECTIVES = (
    ("all_reduce", "triton.one_shot", None),
    ("all_reduce", "triton.two_shot", None),
    ("all_gather", "triton.one_shot", None),
    ("reduce_scatter", "triton.one_shot", None),
    ("all_reduce_rms_norm", "triton.one_shot", None),
    ("all_reduce_rms_norm", "triton.two_shot", None),
    ("all_reduce_rms_norm", "triton.one_shot_quant", "fp8_group"),
)


def collective(rank: int, size: int, op: str, kernel: str, form: str | None, calls: int) -> list[str]:
    """What was wrong in calls of a collective, of several sizes in turn."""
    scenes, dtype = Scenes(op, kernel, rank, size, calls, MOST_ROWS, form), torch.bfloat16
    if scenes.plan(dtype) is None:
        return ["not supported"]
    sizes = scenes.sizes(dtype)
    wrong = []
    for turn in range(calls):
        rows = sizes[turn % len(sizes)]
        given = scenes.operands(rows, dtype, turn)
        if scenes.wrong(scenes.run(dtype, *given), rows, dtype, turn):
            wrong.append(f"{rows} rows, call {turn}")
    return wrong


def exchange(kernel: str, format: str, exact: bool, calls: int) -> list[str]:
    """What was wrong in dispatches and combines, of several routings in turn."""
    layer = Layer((kernel, kernel), torch.bfloat16, format, 17, 2880, exact)
    wrong = []
    for turn in range(calls):
        given = layer.tokens(turn, ROUTINGS[turn % len(ROUTINGS)])
        if not torch.equal(layer.run(given), layer.wanted(given)):
            wrong.append(f"call {turn}")
    return wrong


def parts(rank: int, size: int, calls: int) -> dict[str, Callable[[], list[str]]]:
    """What finds out what is wrong with each kernel."""
    found = {f"triton.push {format}": partial(exchange, "triton.push", format, False, calls) for format in FORMATS}
    for op, kernel, form in COLLECTIVES:
        found[f"{op} {kernel}"] = partial(collective, rank, size, op, kernel, form, calls)
    found[f"triton.push_exact {FORMATS[1]}"] = partial(exchange, "triton.push_exact", FORMATS[1], True, calls)
    return found


def live(rank: int, size: int, port: int, folder: str, calls: int, only: Sequence[str]) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    _ = HUB.settings
    answers: dict[str, Any] = {}
    began, place = time.monotonic(), Path(folder) / str(rank)
    for name, part in parts(rank, size, calls).items():
        if only and not any(one in name for one in only):
            continue
        wrong = part()
        torch.cuda.synchronize()
        answers[name] = {"calls": calls, "wrong": wrong, "ended_s": round(time.monotonic() - began, 1)}
        place.with_suffix(".new").write_text(json.dumps(answers))
        place.with_suffix(".new").replace(place)
    store.set(f"ended/{rank}", "")
    store.wait([f"ended/{other}" for other in range(size)], timedelta(seconds=120))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--calls", type=int, default=21, help="of each kernel and format")
    parser.add_argument("--only", nargs="+", default=[], help="kernels whose op, name and format have one of these")
    parser.add_argument("--limit-s", type=float, default=120.0)
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (options.ranks, _free_port(), folder, options.calls, options.only)
        ranks = [context.Process(target=live, args=(rank, *given)) for rank in range(options.ranks)]
        for rank in ranks:
            rank.start()
        until = time.monotonic() + options.limit_s
        for rank in ranks:
            rank.join(max(0.0, until - time.monotonic()))
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()
        files = [Path(folder) / str(rank) for rank in range(options.ranks)]
        answers = [json.loads(file.read_text()) if file.exists() else None for file in files]
        print(json.dumps({"ended": [rank.exitcode for rank in ranks], "ranks": answers}), flush=True)


if __name__ == "__main__":
    main()
