"""Records of the CUDA collectives over memory of all ranks."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, OnDevice, OneOf, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import opt_in, verified
from kernelhub.ops.comm.problem import ACCESS, ATOMICS, FLOATS, NVLINK, CollectiveProblem

_PREPARE = "call the op's prepare on every rank, and run its plan"


def _more_than_slots(problem: CollectiveProblem) -> str | None:
    small = problem.world_size == 2 or problem.message in ("32KB", "256KB")
    return None if small else "slots of more than two ranks that take turns have 256 KB"


KERNELS = (
    Kernel(
        op="all_reduce",
        name="cuda.one_shot",
        target="kernelhub.backends.cuda.comm.total:OneShot",
        summary="every rank sends all to every rank over NVLink, and two looks at each unit are under way; adds in "
        "float32 in the order of ranks, rounds once; equal bits on all ranks",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            OnDevice("nvidia", only=((9, 0), (10, 0), (10, 3))),
            dtype_in("dtype", *FLOATS),
            Between("world_size", 2, 8, why="it sends to each other rank by itself"),
            anything("group_backend"),
            OneOf("link", (NVLINK,), "link", "it stores in the memory of all other ranks' GPUs", _PREPARE),
            OneOf("peers", (ATOMICS, ACCESS), "peers", "it stores in the memory of all other ranks' GPUs", _PREPARE),
            OneOf(
                "message",
                ("32KB", "256KB", "1MB"),
                "message",
                "each block has a counter, of which there are 512",
                _PREPARE,
            ),
            Rule(("world_size", "message"), _more_than_slots, code="message"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=(
            verified(
                "hopper",
                evidence="NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, two ranks over NVLink, sums by CUDA: 20 tests "
                "passed, none failed, 2000 calls (benchmarks/results/comm_cuda_h200.json); Triton 3.6.0, four ranks "
                "over NVLink, sums by CUDA: 11 tests passed, none failed, 1000 calls "
                "(benchmarks/results/comm_sums_4_ranks_h200.json); not run with other numbers of ranks",
            ),
            opt_in("blackwell", evidence="it has not run on a GPU"),
        ),
    ),
)
