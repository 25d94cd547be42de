"""The records of collectives that are made of two ops, and the problems of these ops.

A pair names no kernels: each of its ops selects its own.
"""

from __future__ import annotations

from typing import Any

from kernelhub.dispatch.constraint import AnyOf, OnDevice, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import untested, verified
from kernelhub.ops.comm.problem import FLOATS, AllReduceProblem, AllReduceRmsNormProblem
from kernelhub.ops.fused_quant.problem import FORMATS, NONE, NormProblem

BACKEND = Backend("comm_pairs", "collectives by the selected kernels of two ops, one after the other", portable=True)


def parts_of(problem: AllReduceRmsNormProblem) -> tuple[tuple[str, Any], ...]:
    """The sum, then the norm with quantisation; nothing for a norm in floats, which is not of this kernel."""
    if problem.format == NONE:
        return ()
    total = AllReduceProblem(
        device=problem.device,
        dtype=problem.dtype,
        world_size=problem.world_size,
        group_backend=problem.group_backend,
        link=problem.link,
        peers=problem.peers,
        message=problem.message,
    )
    norm = NormProblem(
        device=problem.device,
        dtype=problem.dtype,
        width=problem.hidden_size,
        format=problem.format,
        scale_dtype=problem.scale_dtype,
        ue8m0=problem.ue8m0,
        column=problem.column,
        weight_dtype=problem.weight_dtype,
        residual=True,
    )
    return (("all_reduce", total), ("rms_norm_quant", norm))


KERNELS = (
    Kernel(
        op="all_reduce_rms_norm",
        name="comm_pairs.sum_then_quant",
        target="kernelhub.backends.comm_pairs.norm:SumThenQuant",
        summary="the selected all_reduce, which rounds the sum to the dtype of x, then the selected rms_norm_quant: "
        "residual, norm and quantisation in one launch; equal bits on all ranks",
        band=Band.REFERENCE,
        constraints=(
            AnyOf((OnDevice("nvidia"), OnDevice("amd"), OnDevice("cpu"))),
            dtype_in("dtype", *FLOATS),
            dtype_in("weight_dtype", *FLOATS),
            anything("world_size", "group_backend", "link", "peers", "message", "hidden_size", "scale_dtype"),
            OneOf("format", FORMATS[1:], why="rms_norm_quant quantises"),
        ),
        features=frozenset({"ue8m0", "column"}),
        graph=GraphLevel.FULL,
        parts=parts_of,
        standings=(
            verified(
                "cpu",
                evidence="CPU, 2 cores, 2026-11-28, torch 2.13.0+cpu, gloo, pairs of a sum and a norm: 180 tests "
                "passed, none failed, 1 to 4 ranks (benchmarks/results/ranks_cpu.json)",
            ),
            verified(
                "hopper",
                evidence="NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, Triton 3.6.0, two ranks over NVLink, quantised "
                "norms by a sum and a norm: 45 tests passed, none failed, 500 calls of each form "
                "(benchmarks/results/comm_quant_pair_h200.json); two ranks over NVLink, a sum and a norm in one entry "
                "into the launcher: 50 tests passed, none failed, 500 calls of each form "
                "(benchmarks/results/comm_quant_steps_h200.json); four ranks over NVLink, quantised norms by a sum and "
                "a norm: 20 tests passed, none failed, 300 calls of each of fp8_group and nvfp4 "
                "(benchmarks/results/comm_quant_pair_4_ranks_h200.json); four ranks over NVLink, the other three "
                "forms: 33 tests passed, none failed, 300 calls of each "
                "(benchmarks/results/comm_quant_steps_4_ranks_h200.json); not run with other numbers of ranks",
            ),
            untested("volta", "ampere", "ada", "blackwell", "blackwell_rtx", "thor", "cdna3", "cdna4"),
        ),
    ),
)
