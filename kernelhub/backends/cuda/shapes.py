"""What adapters ask of operands and say to kernels: dtypes, vectors of 16 bytes, and the sizes of grids."""

from __future__ import annotations

import torch
from torch import Tensor

VECTOR_BYTES = 16
WARP = 32
C_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "float"}
BITS = {1: "u8", 2: "u16", 4: "u32"}
KINDS_OF_SINKS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as kernels take their dtype


def in_vectors(tensor: Tensor, elements: int) -> bool:
    """Whether strides and address of a tensor let aligned vectors of so many elements of its rows be moved."""
    size = elements * tensor.element_size()
    *strides, last = tensor.stride()
    if (last != 1 and tensor.shape[-1] != 1) or tensor.data_ptr() % size:
        return False
    return all(stride % elements == 0 for stride, count in zip(strides, tensor.shape[:-1], strict=True) if count != 1)


def blocks_for(threads: int, block: int) -> int:
    """Blocks of this many threads that so many threads need."""
    return -(-threads // block)


def times_of(vectors: int, num_sms: int) -> int:
    """Vectors that a thread moves: two where there are enough for all multiprocessors."""
    return 2 if vectors >= 2048 * num_sms else 1


def block_of(threads: int, num_sms: int) -> int:
    """Threads of a block: fewer where there are so few that blocks would leave multiprocessors idle."""
    return 256 if threads >= 1024 * num_sms else 128
