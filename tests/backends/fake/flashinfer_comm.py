"""TensorRT-LLM's sums over ranks on a CPU, by the protocol of their kernels; ranks are threads that share memory.

All is done by the addresses of the workspace's table, which must be in memory that a test has named.
"""

from __future__ import annotations

import ctypes
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MEMORY: list[Tensor] = []  # of all ranks, where slots, flags and messages are
LONGEST_S = 20.0
BLOCKS = 256
EMPTY = -(1 << 15)


def at(address: int, count: int, dtype: torch.dtype, shared: bool = True) -> Tensor:
    """Elements at an address, which must be in the memory of a rank if ranks share it."""
    size = count * dtype.itemsize
    if shared:
        spans = [(memory.data_ptr(), memory.data_ptr() + memory.numel()) for memory in MEMORY]
        assert any(begin <= address and address + size <= end for begin, end in spans), "outside of the workspace"
    assert address % 16 == 0 or not shared
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


def wait(what: Callable[[], bool]) -> None:
    until = time.monotonic() + LONGEST_S
    while not what():
        assert time.monotonic() < until, "a rank waits for another"
        time.sleep(3e-4)


def summed(parts: list[Tensor]) -> Tensor:
    """In float32, in the order of ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def one_shot(x: Tensor, world_size: int, rank: int, places: list[int]) -> Tensor:
    state = at(places[-1], 5, torch.int32, shared=False)
    turn, set_bytes, clear = (int(state[place]) for place in (2, 3, 4))
    count = x.numel()
    assert world_size * x.nbytes <= set_bytes, "the slots are too small"
    assert 2 * set_bytes < 2**31, "an offset is counted in 32 bits"
    sets = [
        [at(places[2 * world_size + other] + part * set_bytes, set_bytes // 2, torch.int16) for part in range(3)]
        for other in range(world_size)
    ]
    sent = x.view(torch.int16).flatten().clone()
    sent[sent == EMPTY] = 0
    for other in range(world_size):
        sets[other][turn][rank * count : (rank + 1) * count] = sent
    sets[rank][(turn + 2) % 3][:clear] = EMPTY
    mine = sets[rank][turn][: world_size * count]
    wait(lambda: not bool((mine == EMPTY).any()))
    total = summed(list(mine.clone().view(x.dtype).view(world_size, count)))
    state[2], state[4] = (turn + 1) % 3, count * world_size
    return total


def two_shot(x: Tensor, world_size: int, rank: int, places: list[int]) -> Tensor:
    state = at(places[-1], 5, torch.int32, shared=False)
    count, rows = x.numel(), x.shape[0]
    messages = [at(places[other], 2 * count, x.dtype) for other in range(world_size)]
    flags = [at(places[world_size + other], BLOCKS * world_size, torch.int32) for other in range(world_size)]
    flag = int(state[1])

    def barrier() -> None:
        nonlocal flag
        before, flag = flag, (flag + 1) % 3
        for other in range(world_size):
            flags[other][rank::world_size] = flag
        wait(lambda: not bool((flags[rank][:world_size] == before).any()))

    messages[rank][:count] = x.flatten()
    barrier()
    begin, end = (part * rows // world_size * x.shape[1] for part in (rank, rank + 1))
    part = summed([message[begin:end] for message in messages])
    for message in messages:
        message[count + begin : count + end] = part
    barrier()
    state[1] = flag
    return messages[rank][count:].clone()


def deprecated(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `typing_extensions.deprecated` marks the library's function."""

    @functools.wraps(function)
    def warns(*args: Any, **kwargs: Any) -> Any:
        warnings.warn("use the unified API", DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return warns


@deprecated
def trtllm_allreduce_fusion(
    allreduce_in: Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: Tensor | None,
    residual_in: Tensor | None,
    residual_out: Tensor | None,
    norm_out: Tensor | None,
    quant_out: Tensor | None,
    scale_out: Tensor | None,
    rms_gamma: Tensor | None,
    rms_eps: float | None,
    scale_factor: Tensor | None,
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
) -> None:
    given = [
        tensor for tensor in (allreduce_in, allreduce_out, residual_in, residual_out, norm_out) if tensor is not None
    ]
    for tensor in given:
        assert tensor.shape == (token_num, hidden_dim)
    for tensor in (*given, *([] if rms_gamma is None else [rms_gamma])):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        assert tensor.dtype is allreduce_in.dtype
    assert allreduce_in.dtype in (torch.float16, torch.bfloat16)
    assert world_size in (2, 4, 8, 16)
    assert hidden_dim % 8 == 0
    assert hidden_dim // 8 <= 1024 or hidden_dim % 64 == 0
    assert use_oneshot is not None, "the library would choose"
    assert use_oneshot or token_num > world_size, "sequence length should be larger than tp_size"
    assert trigger_completion_at_end
    assert not launch_with_pdl
    assert fp32_acc
    assert all(value is None for value in (quant_out, scale_out, scale_factor, layout_code, metadata))
    assert workspace_ptrs.dtype is torch.int64
    places = workspace_ptrs.tolist()
    assert len(places) == 3 * world_size + 1
    total = (one_shot if use_oneshot else two_shot)(allreduce_in, world_size, world_rank, places)
    total = total.view(token_num, hidden_dim)
    if pattern_code == 0:
        assert allreduce_out is not None
        allreduce_out.copy_(total)
        return
    assert pattern_code == 1
    assert allreduce_out is None
    assert residual_in is not None
    assert residual_out is not None
    assert norm_out is not None
    assert rms_gamma is not None
    total = (total.float() + residual_in.float()).to(total.dtype)
    scale = (total.float().square().mean(-1, keepdim=True) + rms_eps).rsqrt()
    residual_out.copy_(total)
    norm_out.copy_(total.float() * scale * rms_gamma.float())


def get_trtllm_comm_module() -> None:
    """Compiles, or loads."""


FUNCTIONS = (trtllm_allreduce_fusion, get_trtllm_comm_module)
