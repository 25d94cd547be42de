"""Constraints of kernels that access the memory of other GPUs."""

from __future__ import annotations

from kernelhub.dispatch.constraint import OneOf
from kernelhub.ops.comm.problem import ATOMICS, BUCKETS, MORE, NVLINK, PCIE

_PREPARE = "call the op's prepare on every rank, and run its plan"
# Every pair of GPUs was proved to read, write and update each other's memory.
PROVED_PEERS = (
    OneOf("link", (NVLINK, PCIE), "link", "it accesses the memory of all other ranks' GPUs", _PREPARE),
    OneOf("peers", (ATOMICS,), "peers", "its signals are atomics in the memory of other GPUs", "use NCCL here"),
)
ONE_NODE_SIZES = OneOf("world_size", (2, 4, 8), "world_size", "it has kernels for these numbers of ranks")


def messages_to(largest: str) -> OneOf:
    """Messages up to this bucket, which a workspace holds."""
    fitting = BUCKETS[: BUCKETS.index(largest) + 1]
    assert MORE not in fitting
    return OneOf("message", fitting, "message", "a workspace of this size is the largest that it makes")
