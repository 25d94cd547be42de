"""Kernels that take operands for something else than the memory they are given are caught, in every op that has some.

Calls of an engine hand over parts of wider tensors, and the same buffers step after step: a kernel that is right only
in new memory of its own passes a comparison with the reference on fresh tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.evidence.test_contract_liars import SUBJECTS, is_caught


def begins_at_zero(adapter: Any, tensor: Tensor) -> Tensor:
    """As a kernel reads that is given the start of a tensor's memory, and not of the tensor."""
    return tensor.as_strided(tensor.shape, tensor.stride(), 0) if tensor.numel() else tensor


def rows_touch(adapter: Any, tensor: Tensor) -> Tensor:
    """As a kernel reads that takes a row's width for the distance between rows."""
    room = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    if tensor.ndim < 2 or tensor.stride(-1) != 1 or tensor.is_contiguous() or room < tensor.numel():
        return tensor
    dense = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, dense, tensor.storage_offset())


def as_at_first(adapter: Any, tensor: Tensor) -> Tensor:
    """As a kernel reads that keeps what it once made of the tensor at an address, such as scales in its own layout."""
    seen = adapter.__dict__.setdefault("seen", {})
    key = tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()
    _, values = seen.setdefault(key, (tensor, tensor.clone())) if tensor.numel() else (tensor, tensor)
    return values


READS = {"begins_at_zero": begins_at_zero, "rows_touch": rows_touch, "as_at_first": as_at_first}
OPS = [subject for subject in SUBJECTS if subject[0] != "write_mla_cache"]  # of which an operand is the result


def made_of(value: Any, read: Callable[[Tensor], Tensor]) -> Any:
    """An operand, or what holds operands, with every tensor read wrongly."""
    if isinstance(value, Tensor):
        return read(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(made_of(part, read) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(made_of(part, read) for part in value)
    if dataclasses.is_dataclass(value):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, made_of(getattr(value, field.name), read))
        return made
    return value


def __getattr__(name: str) -> type:
    """The lie of a target ``op__read``."""
    op, _, way = name.partition("__")
    homes = {subject: (module, base) for subject, module, base in SUBJECTS}
    if op not in homes or way not in READS:
        raise AttributeError(name)
    module, base = homes[op]
    right = getattr(importlib.import_module(f"tests.contract.{module}"), base)

    class Lie(right):
        def launch(self, *arguments: Any) -> None:
            read, results = READS[way], RESULTS.get(op, 1)
            operands = [made_of(value, lambda tensor: read(self, tensor)) for value in arguments[:-results]]
            super().launch(*operands, *arguments[-results:])

    return Lie


# How many of the last arguments of a launch are results, where it is more than one.
RESULTS = {"merge_attention_states": 2, "mla_attention": 2, "route_experts": 2, "linear_attention": 2}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("op", [op for op, _, _ in OPS])
def test_what_reads_other_memory_is_detected(op: str, read: str) -> None:
    assert is_caught(op, f"{__name__}:{op}__{read}")
