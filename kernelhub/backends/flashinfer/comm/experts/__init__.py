"""Records of FlashInfer's one-sided exchange of tokens (`moe_a2a_*`), on a workspace that kernelhub makes."""

from __future__ import annotations

from typing import Any

from kernelhub.backends.flashinfer import calls
from kernelhub.backends.flashinfer.requirements import TRITON, Module, requirements
from kernelhub.dispatch.constraint import Between, MultipleOf, OnDevice, OneOf, Package, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import untested, verified
from kernelhub.ops.comm.experts.problem import FEW, FIXED, FP8, MANY
from kernelhub.ops.comm.links import ONE_NODE_SIZES
from kernelhub.ops.comm.problem import ACCESS, ATOMICS, FLOATS, NVLINK

_PREPARE = "call the op's prepare on every rank, and run its plan"
_STORES = "it accesses the memory of all other ranks' GPUs"
_RANKS: tuple[Any, ...] = (
    Package("cuda", ">=12.8", distribution="cuda-bindings", install="pip install cuda-bindings"),
    Module((), lambda _: ("mnnvl_moe_alltoall",)),
    ONE_NODE_SIZES,
    OneOf("link", (NVLINK,), "link", _STORES, _PREPARE),
    OneOf("peers", (ATOMICS, ACCESS), "peers", _STORES, _PREPARE),
    OneOf("capacity", (FEW, MANY), why="its shapes follow from max_tokens", remedy="give max_tokens"),
    MultipleOf("hidden_size", 16, why="rows of float8 are moved in units of 16 bytes"),
    Between("top_k", 1, 32, why="the ids of a token are one vector"),
    anything("group_backend", "num_experts", "format"),
    *TRITON,
)
_GPUS = OnDevice("nvidia", only=((9, 0), (10, 0), (10, 3)))  # that have NVLink, of those it is compiled for
_COMMON = (calls.EXCHANGE_MODULE, calls.EXCHANGE_INITIALIZE, calls.PACK_STRIDED)
_ON_HOPPER = verified(
    "hopper",
    evidence="NVIDIA H100 80GB HBM3, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0, FlashInfer 0.6.18.post1, two ranks "
    "over NVLink, launches of torch around the exchange: 6 tests passed, none failed, 1000 calls; FlashInfer "
    "0.6.18.post1, two ranks over NVLink, launches of Triton around the exchange: 5 tests passed, none failed, one "
    "was cut off (benchmarks/results/expert_comm_h100.json); NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, FlashInfer "
    "0.6.18.post1, two ranks over NVLink, launches of Triton, calls in a row: 1 tests passed, none failed, 200 calls "
    "(benchmarks/results/expert_comm_models_h200.json); not run with other numbers of ranks",
)
_ENDS = "ends the process if another rank does not come within KERNELHUB_COMM_TIMEOUT_S"


def _kernel(op: str, target: str, summary: str, limits: tuple[Any, ...], features: Any = frozenset()) -> Kernel:
    return Kernel(
        op=op,
        name="flashinfer.moe_a2a",
        target=f"kernelhub.backends.flashinfer.comm.experts.adapter:{target}",
        summary=f"{summary}; no wait for the host; {_ENDS}",
        band=Band.PORTABLE,
        constraints=(*limits, *_RANKS),
        features=features,
        graph=GraphLevel.FULL,
        deterministic=True,
        gives=FIXED if op == "moe_dispatch" else "",
        source="TensorRT-LLM, in FlashInfer",
        standings=(_ON_HOPPER, untested("blackwell")),
    )


KERNELS = (
    _kernel(
        "moe_dispatch",
        "Dispatch",
        "TensorRT-LLM's one-sided exchange without multicast: each token to the ranks that need it, once, over NVLink",
        (*requirements(_GPUS, *_COMMON, calls.EXCHANGE_DISPATCH), dtype_in("dtype", *FLOATS, FP8)),
        frozenset({"scales"}),
    ),
    _kernel(
        "moe_combine",
        "Combine",
        "TensorRT-LLM's one-sided exchange without multicast: each rank reads the sums of all ranks over NVLink, adds "
        "neighbours, then neighbours of those, in float32, and rounds once",
        (
            *requirements(_GPUS, *_COMMON, calls.EXCHANGE_COMBINE),
            dtype_in("dtype", *FLOATS),
            OneOf("rows", (FIXED,), why="the dispatch kernel gave other rows"),
        ),
    ),
)
