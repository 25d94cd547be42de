"""Records of the collectives of torch.distributed and of torch's symmetric memory."""

from __future__ import annotations

from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import OnDevice, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import published, verified
from kernelhub.ops.comm.links import ONE_NODE_SIZES, PROVED_PEERS, messages_to
from kernelhub.ops.comm.problem import FLOATS, MOVED, USUAL

_CPU = verified(
    "cpu",
    evidence="CPU, 2 cores, 2026-11-25, torch 2.13.0+cpu, gloo: 150 tests passed, none failed "
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
_SYMMETRIC = published(
    "ampere",
    "ada",
    "hopper",
    "blackwell",
    "blackwell_rtx",
    "thor",
    evidence="torch's documentation of symmetric memory: https://docs.pytorch.org/docs/stable/symmetric_memory.html",
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
        graph=GraphLevel.FULL,
        standings=(_CPU, _GPU),
    ),
    Kernel(
        op="all_reduce_rms_norm",
        name="torch.distributed",
        target="kernelhub.backends.torch.comm.distributed:AllReduceRmsNorm",
        summary=f"the sum by the group's backend (NCCL, gloo), which {_SUMS}; then torch's operators in float32",
        band=Band.REFERENCE,
        constraints=(
            *_ANY_GROUP,
            anything("hidden_size", "format", "scale_dtype"),
            dtype_in("weight_dtype", *FLOATS),
        ),
        features=frozenset({"ue8m0", "column"}),
        graph=GraphLevel.FULL,
        standings=(_CPU, _GPU),
    ),
    Kernel(
        op="reduce_scatter",
        name="torch.distributed",
        target="kernelhub.backends.torch.comm.distributed:ReduceScatter",
        summary="the group's backend: NCCL, or gloo's sum of all rows; adds in the dtype of x, in an order of the "
        "backend's",
        band=Band.REFERENCE,
        constraints=_ANY_GROUP,
        graph=GraphLevel.FULL,
        standings=(_CPU, _GPU),
    ),
    Kernel(
        op="all_gather",
        name="torch.distributed",
        target="kernelhub.backends.torch.comm.distributed:AllGather",
        summary="the group's backend (NCCL, gloo); ranks with fewer rows than others send padding",
        band=Band.REFERENCE,
        constraints=(_ANY_GROUP[0], dtype_in("dtype", *MOVED), *_ANY_GROUP[2:]),
        features=frozenset({"unequal"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=(_CPU, _GPU),
    ),
    *(
        Kernel(
            op="all_reduce",
            name=f"torch.symm_mem_{name}",
            target=f"kernelhub.backends.torch.comm.symmetric:{target}",
            summary=f"symmetric memory without multicast, {how}; adds in the dtype of x, in the order of ranks; equal "
            "bits on all ranks; waits for other ranks without limit",
            band=Band.PORTABLE,
            constraints=(
                OnDevice("nvidia", at_least=(8, 0)),
                dtype_in("dtype", "float32", "bfloat16", why="torch's kernels have no float16"),
                ONE_NODE_SIZES,
                *PROVED_PEERS,
                messages_to(largest),
                _ANY_GROUP[-1],
            ),
            graph=GraphLevel.FULL,
            deterministic=True,
            standings=(_SYMMETRIC,),
        )
        for name, target, how, largest in (
            ("one_shot", "OneShot", "each rank adds all elements", "1MB"),
            ("two_shot", "TwoShot", "each rank adds its share", "32MB"),
        )
    ),
)
