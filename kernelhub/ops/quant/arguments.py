"""What the quantisers ask of tensors, and the shapes and memory of their results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.arguments import alike, check_wants_no_gradient, describe, dtype_name, refuse
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.operands import check_operand, check_own_memory
from kernelhub.ops.quant.problem import BLOCK, BLOCK_SIZE, FP8_SCALES, TENSOR, TOKEN

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP4_BYTES = (torch.uint8, torch.float4_e2m1fn_x2)
E8M0_BYTES = (E8M0, torch.uint8)
FP8_SCALE_DTYPES = tuple(getattr(torch, name) for name in FP8_SCALES)
_COLUMN_BYTES = 16  # the stride of column-major scales, that TMA requires


def check_tensor(op: str, parameter: str, tensor: Any, dtypes: Sequence[torch.dtype], like: Tensor | None) -> None:
    """A tensor of one of these dtypes, on the device of `like`, that requires no gradient."""
    check_operand(op, parameter, tensor)
    if tensor.dtype not in dtypes:
        refuse(op, parameter, f"has dtype {dtype_name(tensor.dtype)}", f"give {' or '.join(map(dtype_name, dtypes))}")
    if like is not None and tensor.device != like.device:
        refuse(op, parameter, f"is on {tensor.device}", f"move it to {like.device}")
    check_wants_no_gradient(op, parameter, tensor)


def check_x(op: str, x: Any, multiple: int = 1, dims: int = 1) -> None:
    """Check the operand of a quantiser."""
    check_tensor(op, "x", x, FLOAT_DTYPES, None)
    if x.ndim < dims or x.shape[-1] == 0:
        wanted = "[..., N, K]" if dims == 2 else "[..., K]"
        refuse(op, "x", f"has shape {list(x.shape)}", f"give {wanted} with at least one column")
    if x.shape[-1] % multiple:
        up = -(-x.shape[-1] // multiple) * multiple
        refuse(op, "x", f"has {x.shape[-1]} columns", f"a group is {multiple}: pad to {up} with zeros")


def check_codes(op: str, codes: Any, fp4: bool, multiple: int = 1) -> None:
    """Check the codes of a dequantiser."""
    check_tensor(op, "x", codes, FP4_BYTES if fp4 else (E4M3,), None)
    if codes.ndim < 1 or codes.shape[-1] == 0:
        refuse(op, "x", f"has shape {list(codes.shape)}", "give [..., K] with at least one column")
    if codes.shape[-1] % multiple:
        up = -(-codes.shape[-1] // multiple) * multiple
        refuse(op, "x", f"has {codes.shape[-1]} bytes a row", f"a group is {multiple} of them: the nearest is {up}")


def check_like(
    op: str, parameter: str, tensor: Any, shape: Sequence[int], dtypes: Sequence[torch.dtype], x: Any
) -> None:
    """A tensor of one shape; messages state it with its dtype."""
    check_tensor(op, parameter, tensor, dtypes, x)
    if tuple(tensor.shape) != tuple(shape):
        refuse(op, parameter, f"is {describe(tensor)}", f"give {dtype_name(dtypes[0])} {list(shape)}")


def check_one(op: str, parameter: str, tensor: Any, x: Any) -> None:
    """float32 of one element."""
    check_tensor(op, parameter, tensor, (torch.float32,), x)
    if tensor.numel() != 1:
        refuse(op, parameter, f"is {describe(tensor)}", "give float32 of one element")


def fp8_scale_shape(shape: Sequence[int], granularity: str, group_size: int) -> tuple[int, ...]:
    """Shape of the scales of a tensor."""
    *lead, width = shape
    if granularity == TENSOR:
        return (1,)
    if granularity == TOKEN:
        return (*lead, 1)
    if granularity == BLOCK:
        return (*lead[:-1], -(-lead[-1] // BLOCK_SIZE), -(-width // BLOCK_SIZE))
    return (*lead, -(-width // group_size))


# The same, looked up: for the numbers of a call, not for sizes that torch.compile has made symbols of.
scale_shape_of_call = lru_cache(1024)(fp8_scale_shape)


def new_scale(x: Tensor, shape: Sequence[int], dtype: torch.dtype, column: bool, block: bool) -> Tensor:
    """Memory for scales; column by column, columns begin 16 bytes aligned, as DeepGEMM and vLLM take them."""
    if not column or len(shape) < 2:
        return x.new_empty(*shape, dtype=dtype)
    *lead, columns = shape
    matrices, rows = (lead[:-1], lead[-1]) if block else ([], _product(lead))
    step = _COLUMN_BYTES // dtype.itemsize
    memory = x.new_empty(*matrices, columns, -(-rows // step) * step, dtype=dtype)
    scale = memory[..., :rows].transpose(-1, -2)
    return scale if block else scale.unflatten(0, lead)


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def shape_of(op: str, x: Tensor) -> tuple[int, ...]:
    """The shape of what a call is about, which a nested tensor has not."""
    try:
        return x.shape
    except RuntimeError:
        check_operand(op, "x", x)
        raise


def destination(
    op: str,
    parameter: str,
    given: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    names: Sequence[str],
    others: Sequence[Tensor | None],
) -> Tensor:
    """The caller's destination, if it fits and shares no memory with the others (x is the first); else new memory."""
    x = others[0]
    assert x is not None
    if given is None:
        return x.new_empty(*shape, dtype=dtype)
    if not alike(given, shape, dtype, device):
        check_like(op, parameter, given, shape, (dtype,), x)
    check_own_memory(op, parameter, given, names, others)
    return given


def as_rows(op: str, parameter: str, tensor: Tensor, matrices: bool) -> Tensor:
    """[..., M, K] as [rows, K], or as [B, M, K] where matrices are kept apart; memory that is written to."""
    ndim = tensor.ndim
    if ndim == (3 if matrices else 2):
        return tensor
    if ndim == (2 if matrices else 1):
        return tensor.unsqueeze(0)
    try:
        return tensor.view(-1, *tensor.shape[-2:]) if matrices else tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        refuse(op, parameter, f"has strides {list(tensor.stride())}", "give memory whose rows are evenly spaced")


def any_rows(tensor: Tensor, matrices: bool) -> Tensor:
    """As `as_rows`, of what is only read: copied if its rows are not evenly spaced."""
    if tensor.ndim == (3 if matrices else 2):
        return tensor
    return tensor.reshape(-1, *tensor.shape[-2:]) if matrices else tensor.reshape(-1, tensor.shape[-1])


def dequantized(x: Tensor, out_dtype: torch.dtype, **others: Any) -> dict[str, Tensor]:
    """Memory for what codes of a byte each become."""
    return {"out": x.new_empty(x.shape, dtype=out_dtype)}


def dequantized_fp4(x: Tensor, out_dtype: torch.dtype, **others: Any) -> dict[str, Tensor]:
    """Memory for what codes of half a byte each become."""
    return {"out": x.new_empty((*x.shape[:-1], x.shape[-1] * 2), dtype=out_dtype)}
