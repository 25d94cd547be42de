"""Records of the Triton collectives over memory of all ranks."""

from __future__ import annotations

from typing import Any

from kernelhub.backends.triton.comm import experts
from kernelhub.backends.triton.requirements import GPU_MACHINE
from kernelhub.backends.triton.standings import AHEAD
from kernelhub.dispatch.constraint import Between, MultipleOf, OnDevice, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import opt_in, untested, verified
from kernelhub.ops.comm.problem import ACCESS, ATOMICS, BUCKETS, FLOATS, NVLINK
from kernelhub.ops.fused_quant.problem import FORMATS, NONE

_PREPARE = "call the op's prepare on every rank, and run its plan"
_RANKS: tuple[Any, ...] = (
    *GPU_MACHINE,
    dtype_in("dtype", *FLOATS),
    Between("world_size", 2, 8, why="it sends to each other rank by itself"),
    anything("group_backend"),
    OneOf("link", (NVLINK,), "link", "it stores in the memory of all other ranks' GPUs", _PREPARE),
    OneOf("peers", (ATOMICS, ACCESS), "peers", "it stores in the memory of all other ranks' GPUs", _PREPARE),
)
_MESSAGE = OneOf("message", BUCKETS, "message", "its tiles are chosen by the size of the message", _PREPARE)
_NORM = (Between("hidden_size", 1, 8192, why="a program holds a whole row"), dtype_in("weight_dtype", *FLOATS))
_STANDINGS = (
    verified(
        "hopper",
        evidence="NVIDIA H100, 2026-11-25, torch 2.11.0+cu130, Triton 3.6.0, two ranks over NVLink: 234 tests passed, "
        "none failed (benchmarks/results/nvlink_h100.json); NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0, "
        "four ranks over NVLink: 21 tests passed, none failed, 20,000 calls and more "
        "(benchmarks/results/comm_4_ranks_h200.json); two ranks over NVLink, one row of a program: 21 tests passed, "
        "none failed, and four ranks over NVLink, one row of a program: 21 tests passed, none failed, 500 calls each "
        "(benchmarks/results/comm_tiles_h200.json); 2026-11-27, two ranks over NVLink, rows sent by several programs: "
        "7 tests passed, none failed, and four ranks over NVLink, rows sent by several programs: 7 tests passed, none "
        "failed, 2000 calls of the norm each (benchmarks/results/comm_split_h200.json); two ranks over NVLink, rows "
        "normalised in parts: 8 tests passed, none failed, 3000 calls (benchmarks/results/comm_norm_parts_h200.json); "
        "2026-11-28, four ranks over NVLink, runs into other places: 3 tests passed, none failed, 2000 calls of the "
        "norm (benchmarks/results/comm_sums_4_ranks_h200.json); "
        "not run with other numbers of ranks",
    ),
    untested("ampere", "ada", "blackwell", "blackwell_rtx"),
)
_NORM_STANDINGS = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0, two ranks over NVLink, the norm in two "
        "shots: 7 tests passed, none failed, 10,000 calls and more (benchmarks/results/comm_norm_h200.json); four "
        "ranks over NVLink, the norm in two shots: 7 tests passed, none failed, 1000 calls "
        "(benchmarks/results/comm_parts_4_ranks_h200.json); two ranks over NVLink, one row of a program: 21 tests "
        "passed, none failed, and four ranks over NVLink, one row of a program: 21 tests passed, none failed, 500 "
        "calls each (benchmarks/results/comm_tiles_h200.json); 2026-11-27, two ranks over NVLink, the end of a row "
        "shared: 7 tests passed, none failed, 2000 calls (benchmarks/results/comm_split_h200.json); not run with other "
        "numbers of ranks",
    ),
    untested("ampere", "ada", "blackwell", "blackwell_rtx"),
)
_POLLED_STANDINGS = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, Triton 3.6.0, two ranks over NVLink, threads that wait "
        "for their elements: 8 tests passed, none failed, 2000 calls, rows of 2880 to 8192 "
        "(benchmarks/results/comm_norm_polled_h200.json)",
    ),
    untested("ampere", "ada", "blackwell", "blackwell_rtx"),
)
_CLUSTERED_STANDINGS = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, Triton 3.6.0, two ranks over NVLink, rows normalised by "
        "clusters, all scenes: 8 tests passed, none failed, 1000 calls, rows of 2880 to 8192 "
        "(benchmarks/results/comm_norm_early_h200.json), and two ranks over NVLink, rows normalised by clusters: 5 "
        "tests passed, none failed, 400 calls, rows of 7168 (benchmarks/results/comm_norm_clustered_h200.json); its "
        "bits differ from those of the other kernels, by up to two bytes of 73 rows of 7168",
    ),
    opt_in("blackwell", evidence=f"it has not run on a GPU; {AHEAD}"),
)
_TWO_QUANT_STANDINGS = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, Triton 3.6.0, two ranks over NVLink, quantised norms in "
        "two steps: 50 tests passed, none failed, 300 calls of each form "
        "(benchmarks/results/comm_quant_steps_h200.json), and two ranks over NVLink, fp8_group in two steps: 8 tests "
        "passed, none failed (benchmarks/results/comm_norm_polled_h200.json); four ranks over NVLink, quantised norms "
        "in two steps: 55 tests passed, none failed, 300 calls of each form "
        "(benchmarks/results/comm_quant_steps_4_ranks_h200.json); not run with other numbers of ranks",
    ),
    opt_in("ampere", "ada", "blackwell", "blackwell_rtx", evidence=f"it has not run on a GPU; {AHEAD}"),
)
_QUANT_STANDINGS = (
    verified(
        "hopper",
        evidence="NVIDIA H100 80GB HBM3, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0, two ranks over NVLink, "
        "quantised norms: 28 tests passed, none failed, 500 calls of each of nvfp4, mxfp8, fp8_token and fp8_tensor "
        "(benchmarks/results/comm_quant_h100.json); fp8_group on 2 NVIDIA H200, 2026-11-26, 1000 calls; "
        "NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, two ranks over NVLink, known calls: 14 tests passed, none "
        "failed, 400 calls of fp8_group and of nvfp4 (benchmarks/results/comm_checks_h200.json); 2026-11-27, two ranks "
        "over NVLink, quantised norms by known calls: 21 tests passed, none failed, 1000 calls of each of mxfp8, "
        "fp8_token and fp8_tensor (benchmarks/results/comm_runs_h200.json); NVIDIA H200, 2026-11-28, torch "
        "2.11.0+cu130, two ranks over NVLink, quantised norms of large messages: 50 tests passed, none failed, 300 "
        "calls of each form (benchmarks/results/comm_quant_steps_h200.json); four ranks over NVLink, quantised norms "
        "in one step: 55 tests passed, none failed, 300 calls of each form "
        "(benchmarks/results/comm_quant_steps_4_ranks_h200.json); not run with other numbers of ranks",
    ),
    untested("ampere", "ada", "blackwell", "blackwell_rtx"),
)
_PART_STANDINGS = (
    verified(
        "hopper",
        evidence="NVIDIA H100 80GB HBM3, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0, two ranks over NVLink, gather "
        "and reduce-scatter: 14 tests passed, none failed, 2000 calls of each (benchmarks/results/comm_h100.json); "
        "NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0, four ranks over NVLink, gather and reduce-scatter: "
        "14 tests passed, none failed, 1000 calls of each (benchmarks/results/comm_parts_4_ranks_h200.json); not run "
        "with other numbers of ranks",
    ),
    untested("ampere", "ada", "blackwell", "blackwell_rtx"),
)
_SUM = "adds in float32 in the order of ranks, rounds once; equal bits on all ranks"


def _kernel(
    op: str, name: str, adapter: str, summary: str, *constraints: Any, batch_invariant: bool = True, **others: Any
) -> Kernel:
    return Kernel(
        op=op,
        name=name,
        target=adapter if ":" in adapter else f"kernelhub.backends.triton.comm.adapter:{adapter}",
        summary=f"{summary}; {_SUM}",
        band=Band.PORTABLE,
        constraints=(*_RANKS, *constraints),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=batch_invariant,
        **{"standings": _STANDINGS} | others,
    )


KERNELS = (
    _kernel(
        "all_reduce",
        "triton.one_shot",
        "OneShot",
        "every rank sends all to every rank over NVLink",
        _MESSAGE,
    ),
    _kernel(
        "all_reduce",
        "triton.two_shot",
        "TwoShot",
        "every rank adds up one part over NVLink and sends the sum to every rank",
        _MESSAGE,
    ),
    _kernel(
        "all_reduce_rms_norm",
        "triton.one_shot",
        "OneShotRmsNorm",
        "every rank sends all to every rank over NVLink; sum, residual and norm in one launch",
        _MESSAGE,
        *_NORM,
        anything("scale_dtype"),
        OneOf("format", (NONE,), why="triton.one_shot_quant quantises"),
    ),
    _kernel(
        "all_reduce_rms_norm",
        "triton.one_shot_polled",
        "PolledRmsNorm",
        "every rank sends all to every rank over NVLink, and each thread waits for its elements; sum, residual and "
        "norm in one launch",
        Between("world_size", 2, 2, why="its slots and registers are those of one other rank"),
        OneOf("message", ("32KB", "256KB", "1MB"), "message", "several programs have a row", _PREPARE),
        *_NORM,
        MultipleOf("hidden_size", 8, why="a row is whole units of 16 bytes"),
        anything("scale_dtype"),
        OneOf("format", (NONE,), why="triton.one_shot_quant quantises"),
        standings=_POLLED_STANDINGS,
    ),
    _kernel(
        "all_reduce_rms_norm",
        "triton.one_shot_clustered",
        "ClusteredRmsNorm",
        "every rank sends all to every rank over NVLink, and the programs of a row are a cluster; sum, residual and "
        "norm in one launch",
        OnDevice("nvidia", only=((9, 0), (10, 0), (10, 3))),
        Between("world_size", 2, 2, why="its slots and registers are those of one other rank"),
        OneOf("message", ("32KB", "256KB", "1MB"), "message", "several programs have a row", _PREPARE),
        Between("hidden_size", 2048, 8192, why="a cluster of programs has a row"),
        dtype_in("weight_dtype", *FLOATS),
        MultipleOf("hidden_size", 8, why="a row is whole units of 16 bytes"),
        anything("scale_dtype"),
        OneOf("format", (NONE,), why="triton.one_shot_quant quantises"),
        batch_invariant=False,  # other kernels, with other bits, are selected for the other sizes of a message
        standings=_CLUSTERED_STANDINGS,
    ),
    _kernel(
        "all_reduce_rms_norm",
        "triton.two_shot",
        "TwoShotRmsNorm",
        "every rank adds up some of the rows over NVLink and sends the rounded sum to every rank; sum, residual and "
        "norm in one launch",
        _MESSAGE,
        *_NORM,
        MultipleOf("hidden_size", 8, why="a row is whole units of 16 bytes"),
        anything("scale_dtype"),
        OneOf("format", (NONE,), why="triton.one_shot_quant quantises"),
        standings=_NORM_STANDINGS,
    ),
    _kernel(
        "all_reduce_rms_norm",
        "triton.one_shot_quant",
        "kernelhub.backends.triton.comm.quantised:OneShotRmsNormQuant",
        "every rank sends all to every rank over NVLink; sum, residual, norm and quantisation in one launch",
        _MESSAGE,
        *_NORM,
        anything("scale_dtype"),
        OneOf("format", FORMATS[1:], why="triton.one_shot writes floats"),
        features=frozenset({"ue8m0", "column"}),
        standings=_QUANT_STANDINGS,
    ),
    _kernel(
        "all_reduce_rms_norm",
        "triton.two_shot_quant",
        "kernelhub.backends.triton.comm.quantised:TwoShotRmsNormQuant",
        "every rank adds up some of the rows over NVLink and sends the rounded sum to every rank; sum, residual, norm "
        "and quantisation in one launch",
        _MESSAGE,
        *_NORM,
        MultipleOf("hidden_size", 8, why="a row is whole units of 16 bytes"),
        anything("scale_dtype"),
        OneOf("format", FORMATS[1:], why="triton.two_shot writes floats"),
        features=frozenset({"ue8m0", "column"}),
        batch_invariant=False,  # other kernels, with other bits, are selected for the other sizes of a message
        standings=_TWO_QUANT_STANDINGS,
    ),
    Kernel(
        op="all_gather",
        name="triton.one_shot",
        target="kernelhub.backends.triton.comm.parts:AllGather",
        summary="every rank sends its rows to every rank over NVLink; a NaN of all ones may arrive as another NaN",
        band=Band.PORTABLE,
        constraints=(
            *_RANKS,
            OneOf("message", ("32KB", "256KB", "1MB", "8MB"), "message", "each rank has slots for all rows", _PREPARE),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=_PART_STANDINGS,
    ),
    _kernel(
        "reduce_scatter",
        "triton.one_shot",
        "kernelhub.backends.triton.comm.parts:ReduceScatter",
        "every rank sends each rank its part over NVLink",
        OneOf("message", BUCKETS[:-1], "message", "each rank has slots for a whole part", _PREPARE),
        standings=_PART_STANDINGS,
    ),
    *experts.KERNELS,
)
