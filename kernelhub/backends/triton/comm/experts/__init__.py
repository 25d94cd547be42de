"""Records of `moe_dispatch` and `moe_combine` in Triton over memory of all ranks."""

from __future__ import annotations

from typing import Any

from kernelhub.backends.triton.requirements import GPU_MACHINE
from kernelhub.dispatch.constraint import Between, MultipleOf, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import untested, verified
from kernelhub.ops.comm.experts.problem import ALL, EXACT, FEW, FIXED, FP8, MANY
from kernelhub.ops.comm.problem import ACCESS, ATOMICS, FLOATS, NVLINK

_PREPARE = "call the op's prepare on every rank, and run its plan"
_WHY = "it stores in the memory of all other ranks' GPUs"
_RANKS: tuple[Any, ...] = (
    *GPU_MACHINE,
    Between("world_size", 2, 8, why="it sends to each other rank by itself"),
    anything("group_backend", "num_experts", "format"),
    MultipleOf("hidden_size", 16, why="a row is whole units of 16 bytes in every dtype"),
    Between("top_k", 1, 32, why="the ids of a token are one vector"),
    OneOf("link", (NVLINK,), "link", _WHY, _PREPARE),
    OneOf("peers", (ATOMICS, ACCESS), "peers", _WHY, _PREPARE),
)
_FIXED = OneOf("capacity", (FEW, MANY), why="its slots follow from max_tokens", remedy="give max_tokens")
_EXACTLY = OneOf("capacity", (EXACT,), why="triton.push takes max_tokens", remedy="leave max_tokens out")
_STANDINGS = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0, two ranks over NVLink: 7 tests passed, "
        "none failed, 3000 calls (benchmarks/results/expert_comm_h200.json); four ranks over NVLink: 7 tests passed, "
        "none failed, 5000 calls (benchmarks/results/expert_comm_4_ranks_h200.json); two ranks over NVLink, repeated "
        "launches: 6 tests passed, none failed, and four ranks over NVLink, repeated launches: 4 tests passed, none "
        "failed, 1000 calls each (benchmarks/results/comm_checks_h200.json); two ranks over NVLink, results made "
        "ready: 2 tests passed, none failed (benchmarks/results/comm_host_experts_h200.json); 2026-11-27, two ranks "
        "over NVLink, all scenes: 7 tests passed, none failed, and four ranks over NVLink, beside other processes: 3 "
        "tests passed, none failed, 1000 calls each (benchmarks/results/comm_runs_h200.json); 2026-11-28, four ranks "
        "over NVLink, dispatches into earlier results: 3 tests passed, none failed, 500 calls "
        "(benchmarks/results/expert_comm_formats_4_ranks_h200.json); not run with other numbers of ranks",
    ),
    untested("ampere", "ada", "blackwell", "blackwell_rtx"),
)
_EXACT_STANDINGS = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0, two ranks over NVLink, without a "
        "capacity: 5 tests passed, none failed, 500 calls (benchmarks/results/expert_comm_models_h200.json); four "
        "ranks over NVLink, without a capacity: 4 tests passed, none failed, 500 calls "
        "(benchmarks/results/comm_checks_h200.json); 2026-11-27, two ranks over NVLink, all scenes without a capacity: "
        "5 tests passed, none failed, and four ranks over NVLink, beside other processes: 3 tests passed, none failed, "
        "500 calls each (benchmarks/results/comm_runs_h200.json); 2026-11-28, four ranks over NVLink, large messages "
        "and exchanges without a capacity: 2 tests passed, none failed "
        "(benchmarks/results/expert_comm_formats_4_ranks_h200.json); not run with other numbers of ranks",
    ),
    untested("ampere", "ada", "blackwell", "blackwell_rtx"),
)

KERNELS = (
    Kernel(
        op="moe_dispatch",
        name="triton.push",
        target="kernelhub.backends.triton.comm.experts.adapter:PushRows",
        summary="each token over NVLink once to each rank that owns one of its experts, ids and weights to all; no "
        "wait; formats per expert by two more launches; a NaN of all ones may arrive as another NaN",
        band=Band.PORTABLE,
        constraints=(dtype_in("dtype", *FLOATS, FP8), *_RANKS, _FIXED),
        features=frozenset({"scales"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        gives=FIXED,
        standings=_STANDINGS,
    ),
    Kernel(
        op="moe_combine",
        name="triton.push",
        target="kernelhub.backends.triton.comm.experts.adapter:PushSums",
        summary="each rank's sums over NVLink to the ranks of their tokens, which add them in float32 in the order of "
        "ranks; sums of a rank in float32 in the order of choices, rounded once; no wait",
        band=Band.PORTABLE,
        constraints=(
            dtype_in("dtype", *FLOATS),
            *_RANKS,
            _FIXED,
            OneOf("rows", (FIXED,), why="its slots are for max_tokens rows of each rank"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=_STANDINGS,
    ),
    Kernel(
        op="moe_dispatch",
        name="triton.push_exact",
        target="kernelhub.backends.triton.comm.experts.exact:PushRowsExact",
        summary="numbers of tokens first, for which the call waits for the GPU; then as triton.push, padded to the "
        "rank with most; the result has no padding",
        band=Band.PORTABLE,
        constraints=(dtype_in("dtype", *FLOATS, FP8), *_RANKS, _EXACTLY),
        features=frozenset({"scales"}),
        graph=GraphLevel.NONE,
        deterministic=True,
        gives=ALL,
        standings=_EXACT_STANDINGS,
    ),
    Kernel(
        op="moe_combine",
        name="triton.push_exact",
        target="kernelhub.backends.triton.comm.experts.exact:PushSumsExact",
        summary="as triton.push, of the tokens that each rank has; no wait",
        band=Band.PORTABLE,
        constraints=(
            dtype_in("dtype", *FLOATS),
            *_RANKS,
            _EXACTLY,
            OneOf("rows", (ALL,), why="its slots are for the rows of each rank"),
        ),
        graph=GraphLevel.NONE,
        deterministic=True,
        standings=_EXACT_STANDINGS,
    ),
)
