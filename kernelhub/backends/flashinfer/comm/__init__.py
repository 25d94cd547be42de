"""Records of FlashInfer's sums over ranks: TensorRT-LLM's kernels, on a workspace that kernelhub makes."""

from __future__ import annotations

from typing import Any

from kernelhub.backends.flashinfer import calls
from kernelhub.backends.flashinfer.comm.requirements import whole_warps
from kernelhub.backends.flashinfer.requirements import Module, requirements
from kernelhub.dispatch.constraint import (
    Between,
    MultipleOf,
    OnDevice,
    OneOf,
    Package,
    Rule,
    SameValue,
    anything,
    dtype_in,
)
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import untested, verified
from kernelhub.ops.comm.links import ONE_NODE_SIZES, messages_to
from kernelhub.ops.comm.problem import ACCESS, ATOMICS, NVLINK
from kernelhub.ops.fused_quant.problem import NONE

_PREPARE = "call the op's prepare on every rank, and run its plan"
_STORES = "it stores in the memory of all other ranks' GPUs"
_GPUS = OnDevice("nvidia", only=((9, 0), (10, 0), (10, 3)))  # that have NVLink, of those it is compiled for
_RANKS: tuple[Any, ...] = (
    *requirements(_GPUS, calls.ALL_REDUCE),
    Package("cuda", ">=12", distribution="cuda-bindings", install="pip install cuda-bindings"),
    Module((), lambda _: ("trtllm_comm",)),
    dtype_in("dtype", "float16", "bfloat16", why="its workspace is laid out for elements of two bytes"),
    ONE_NODE_SIZES,
    OneOf("link", (NVLINK,), "link", _STORES, _PREPARE),
    OneOf("peers", (ATOMICS, ACCESS), "peers", _STORES, _PREPARE),
    anything("group_backend"),
)
_NORM: tuple[Any, ...] = (
    MultipleOf("hidden_size", 8, why="a thread loads 16 bytes of a row"),
    Between("hidden_size", 256, 16384, why="a row is that of one warp to eight blocks of 256 threads"),
    Rule(("hidden_size",), lambda problem: whole_warps(problem.hidden_size), "hidden_size"),
    SameValue("weight_dtype", "dtype", why="it reads the weight in the dtype of x"),
    OneOf(
        "format",
        (NONE,),
        why="it rounds the norm to the dtype of x and multiplies by the inverse of the scale, before it quantises; the "
        "op quantises the norm in float32",
    ),
    anything("scale_dtype"),
)
_SUM = "adds in float32 in the order of ranks, rounds once; -0 counts as 0; equal bits on all ranks"
_WAITS = "waits for other ranks without limit"
_VARIANTS = (
    ("one_shot", "OneShot", "1MB", "every rank sends all to every rank over NVLink"),
    ("two_shot", "TwoShot", "32MB", "every rank adds up some of the rows over NVLink and sends the sum to every rank"),
)

_RAN = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, FlashInfer 0.6.18.post1, two ranks over NVLink: "
        "21 tests passed, none failed, 1000 calls (benchmarks/results/comm_h200.json); not run with more ranks",
    ),
    untested("blackwell"),
)
_RAN_ON_FOUR = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, FlashInfer 0.6.18.post1, two ranks over NVLink: "
        "21 tests passed, none failed, 1000 calls (benchmarks/results/comm_h200.json); FlashInfer 0.6.18.post1, four "
        "ranks over NVLink: 7 tests passed, none failed, 2000 calls (benchmarks/results/comm_4_ranks_h200.json)",
    ),
    untested("blackwell"),
)
_RAN_WITH_NORM = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, FlashInfer 0.6.18.post1, two ranks over NVLink, two "
        "shots with the norm: 7 tests passed, none failed, 1000 calls (benchmarks/results/comm_4_ranks_h200.json); not "
        "run with more ranks",
    ),
    untested("blackwell"),
)
_STANDINGS = {("all_reduce", "one_shot"): _RAN_ON_FOUR, ("all_reduce_rms_norm", "two_shot"): _RAN_WITH_NORM}

KERNELS = tuple(
    Kernel(
        op=op,
        name=f"flashinfer.trtllm_{name}",
        target=f"kernelhub.backends.flashinfer.comm.adapter:{adapter}{suffix}",
        summary=f"TensorRT-LLM's kernel without multicast: {how}{also}; {_SUM}; {_WAITS}",
        band=Band.PORTABLE,
        constraints=(*_RANKS, messages_to(largest), *own),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=not own,  # how many threads a row is summed by depends on the number of rows
        source="TensorRT-LLM, in FlashInfer",
        standings=_STANDINGS.get((op, name), _RAN),
    )
    for op, suffix, own, also in (
        ("all_reduce", "", (), ""),
        ("all_reduce_rms_norm", "RmsNorm", _NORM, "; sum, residual and norm in one launch"),
    )
    for name, adapter, largest, how in _VARIANTS
)
