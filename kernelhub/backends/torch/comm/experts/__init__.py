"""Records of `moe_dispatch` and `moe_combine` over torch.distributed."""

from __future__ import annotations

from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import Constraint, OneOf, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.standing import published, verified
from kernelhub.ops.comm.experts.problem import ALL, EXACT, FEW, FIXED, FP8, KEPT, MANY, NEEDED
from kernelhub.ops.comm.problem import FLOATS, USUAL

_CPU = verified(
    "cpu",
    evidence="CPU, 2 cores, 2026-11-25, torch 2.13.0+cpu, gloo: 240 tests passed, none failed "
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
_USUAL = OneOf("group_backend", (USUAL,), why="the group has neither NCCL for a GPU nor gloo for a CPU")
_EXACTLY = OneOf("capacity", (EXACT,), why="max_tokens gives fixed shapes", remedy="leave max_tokens out")
_FIXED = OneOf("capacity", (FEW, MANY), why="its shapes follow from max_tokens", remedy="give max_tokens")


def _dispatch(
    name: str, target: str, summary: str, capacity: Constraint, *, fixed: bool, band: Band, gives: str = FIXED
) -> Kernel:
    return Kernel(
        op="moe_dispatch",
        name=f"torch.{name}",
        target=f"kernelhub.backends.torch.comm.experts.dispatch:{target}",
        summary=summary,
        band=band,
        constraints=(
            ANYWHERE,
            dtype_in("dtype", *FLOATS, FP8),
            anything("hidden_size", "top_k", "num_experts", "world_size", "format", "link", "peers"),
            _USUAL,
            capacity,
        ),
        features=frozenset({"scales"}),
        graph=GraphLevel.FULL if fixed else GraphLevel.NONE,
        deterministic=True,
        gives=gives,
        standings=(_CPU, _GPU),
    )


def _combine(name: str, target: str, summary: str, *rows: str, fixed: bool, deterministic: bool, band: Band) -> Kernel:
    return Kernel(
        op="moe_combine",
        name=f"torch.{name}",
        target=f"kernelhub.backends.torch.comm.experts.combine:{target}",
        summary=summary,
        band=band,
        constraints=(
            ANYWHERE,
            dtype_in("dtype", *FLOATS),
            anything("hidden_size", "top_k", "num_experts", "world_size", "format", "link", "peers"),
            _USUAL,
            _FIXED if fixed else _EXACTLY,
            OneOf("rows", rows, why="the dispatch kernel gave other rows"),
        ),
        graph=GraphLevel.FULL if fixed else GraphLevel.NONE,
        deterministic=deterministic,
        standings=(_CPU, _GPU),
    )


KERNELS = (
    _dispatch(
        "all_to_all",
        "AllToAll",
        "each token to the ranks that need it, once; numbers of rows first, for which the call waits for the GPU",
        _EXACTLY,
        fixed=False,
        band=Band.PORTABLE,
        gives=NEEDED,
    ),
    _dispatch(
        "gather",
        "Gather",
        "all tokens to all ranks, after their numbers, for which the call waits for the GPU",
        _EXACTLY,
        fixed=False,
        band=Band.REFERENCE,
        gives=ALL,
    ),
    _dispatch(
        "gather_fixed",
        "GatherFixed",
        "max_tokens rows of every rank to all ranks, padded; no wait",
        _FIXED,
        fixed=True,
        band=Band.PORTABLE,
    ),
    _dispatch(
        "all_to_all_fixed",
        "AllToAllFixed",
        "max_tokens rows from each rank to each, padded, as many bytes as gather_fixed; no wait",
        _FIXED,
        fixed=True,
        band=Band.REFERENCE,
    ),
    _combine(
        "all_to_all",
        "AllToAll",
        "each rank's sums to the ranks of their tokens, which add them in float32 in the order of ranks",
        ALL,
        NEEDED,
        KEPT,
        fixed=False,
        deterministic=True,
        band=Band.PORTABLE,
    ),
    _combine(
        "reduce_scatter",
        "ReduceScatter",
        "sums over ranks in the dtype of y, in an order of the backend's; padded to the rank with most tokens",
        ALL,
        fixed=False,
        deterministic=False,
        band=Band.REFERENCE,
    ),
    _combine(
        "reduce_scatter_fixed",
        "ReduceScatter",
        "sums over ranks in the dtype of y, in an order of the backend's; no wait",
        FIXED,
        fixed=True,
        deterministic=False,
        band=Band.REFERENCE,
    ),
    _combine(
        "all_to_all_fixed",
        "AllToAll",
        "max_tokens rows from each rank to each, added in float32 in the order of ranks; no wait",
        FIXED,
        fixed=True,
        deterministic=True,
        band=Band.PORTABLE,
    ),
)
