"""Records of vLLM's all-reduce over peer memory."""

from __future__ import annotations

from typing import Any

from kernelhub.backends.custom_all_reduce.requirements import SGL_MACHINE, VLLM_MACHINE
from kernelhub.dispatch.constraint import Constraint, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import Standing, untested, verified
from kernelhub.ops.comm.links import messages_to
from kernelhub.ops.comm.problem import ACCESS, ATOMICS, FLOATS, NVLINK

BACKEND = Backend(
    "custom_all_reduce",
    "vLLM's all-reduce over peer memory, compiled into vLLM and into SGLang's kernel package",
    "vllm",
    "https://github.com/vllm-project/vllm",
)

_PREPARE = "call the op's prepare on every rank, and run its plan"
_LOADS = "it loads from the memory of all other ranks' GPUs"
_LIMITS: tuple[Any, ...] = (
    dtype_in("dtype", *FLOATS),
    OneOf("world_size", (2, 4, 6, 8), "world_size", "it has kernels for these numbers of ranks"),
    OneOf("link", (NVLINK,), "link", _LOADS, _PREPARE),
    OneOf("peers", (ATOMICS, ACCESS), "peers", _LOADS, _PREPARE),
    messages_to("8MB"),
    anything("group_backend"),
)


_OF_VLLM = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, library of vLLM 0.33.0, two ranks over NVLink: 7 tests "
        "passed, none failed, 2000 calls (benchmarks/results/comm_h200.json); not run with more ranks",
    ),
    untested("ampere", "blackwell"),
)
_OF_SGL = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-28, torch 2.11.0+cu130, sglang-kernel 0.4.5, four ranks over NVLink: 11 tests "
        "passed, none failed, 1000 calls (benchmarks/results/comm_sums_4_ranks_h200.json); with two ranks it was timed "
        "only (benchmarks/results/sgl_kernel_h200.json)",
    ),
    untested("blackwell"),
)


def _kernel(name: str, adapter: str, origin: str, standings: tuple[Standing, ...], *machine: Constraint) -> Kernel:
    return Kernel(
        op="all_reduce",
        name=f"custom_all_reduce.{name}",
        target=f"kernelhub.backends.custom_all_reduce.adapter:{adapter}",
        summary=f"{origin}: small messages are added up by every rank, others in parts; adds in float32, rounds once; "
        "equal bits on all ranks; waits for other ranks without limit",
        band=Band.PORTABLE,
        constraints=(*machine, *_LIMITS),
        graph=GraphLevel.FULL,
        deterministic=True,  # not batch invariant: the part that an element is in decides which rank's value is first
        source="vLLM's custom all-reduce",
        standings=standings,
    )


KERNELS = (
    _kernel(
        "vllm",
        "OfVllm",
        "the operators of vLLM's library",
        _OF_VLLM,
        *VLLM_MACHINE,
    ),
    _kernel(
        "sgl_kernel",
        "OfSgl",
        "the operators of SGLang's library",
        _OF_SGL,
        *SGL_MACHINE,
    ),
)
