"""Records of the collectives of torch.distributed and of torch's symmetric memory."""

from __future__ import annotations

from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.dispatch.standing import published, verified
from kernelhub.ops.comm.problem import FLOATS, USUAL

_CPU = verified(
    "cpu",
    evidence="CPU, 2 cores, 2026-11-25, torch 2.13.0+cpu, gloo: 109 tests passed, none failed "
    "(benchmarks/results/ranks_cpu.json)",
)
_GPU = published(
    "volta",
    "ampere",
    "ada",
    "hopper",
    "blackwell",
    "blackwell_rtx",
    "thor",
    "cdna3",
    "cdna4",
    evidence="NCCL, on AMD GPUs RCCL, is the backend of torch.distributed for GPUs: "
    "https://docs.pytorch.org/docs/stable/distributed.html#backends",
)
_ANY_GROUP = (
    ANYWHERE,
    dtype_in("dtype", *FLOATS),
    anything("world_size", "link", "peers", "message"),
    OneOf("group_backend", (USUAL,), why="the group has neither NCCL for a GPU nor gloo for a CPU"),
)
_SUMS = "adds in the dtype of x, in an order of the backend's; equal bits on all ranks"

KERNELS = (
    Kernel(
        op="all_reduce",
        name="torch.distributed",
        target="kernelhub.backends.torch.comm.distributed:AllReduce",
        summary=f"the group's backend (NCCL, gloo); {_SUMS}",
        band=Band.REFERENCE,
        constraints=_ANY_GROUP,
        standings=(_CPU, _GPU),
    ),
    Kernel(
        op="all_reduce_rms_norm",
        name="torch.distributed",
        target="kernelhub.backends.torch.comm.distributed:AllReduceRmsNorm",
        summary=f"the sum by the group's backend (NCCL, gloo), which {_SUMS}; then torch's operators in float32",
        band=Band.REFERENCE,
        constraints=(*_ANY_GROUP, anything("hidden_size"), dtype_in("weight_dtype", *FLOATS)),
        standings=(_CPU, _GPU),
    ),
)
