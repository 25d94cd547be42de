"""Memory that is kept for later calls must be no CUDA graph's.

A graph's memory holds what a replay last wrote there, and goes to other tensors of the graph. torch.compile's graph
trees (mode="reduce-overhead") let the run before a capture allocate from the graph's pool, too. They raise an error
where a tensor in it is still there at the next call and is no result: "not tracked as outputs".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def may_keep(tensor: Tensor) -> bool:
    """Whether a tensor that was made just now may be kept for later calls: it has memory, and that is no graph's."""
    return type(tensor) is Tensor and not (tensor.is_cuda and of_graph(tensor.get_device()))


def of_graph(device: int) -> bool:
    """Whether what torch allocates now, in this thread on the current stream of a GPU, is memory of a CUDA graph."""
    return captures() or in_tree(device)


def captures() -> bool:
    """Whether the launches of this thread go into a CUDA graph."""
    return _captures is not None and _captures()


def in_tree(device: int) -> bool:
    """Whether torch.compile's graph trees run or capture a graph of this thread on a GPU."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not (hasattr(trees.local, _OF_THREAD) or torch._C._is_key_in_tls(_OF_THREAD)):
        return False  # before torch 2.13 an assertion fails in a thread without trees
    manager = trees.get_manager(device, create_if_none_exists=False)
    return manager is not None and (manager.in_warmup or manager.in_recording)


_captures: Callable[[], Any] | None = (
    torch.cuda.is_current_stream_capturing if torch.version.cuda or torch.version.hip else None
)
_OF_THREAD = "tree_manager_containers"
