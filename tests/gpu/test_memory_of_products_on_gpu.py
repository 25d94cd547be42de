"""Products of every kernel that a GPU runs, with operands and results anywhere in memory.

What is selected runs, whatever the shapes, strides, addresses, dtypes and bias, and agrees with the reference.
cuBLASLt, CUTLASS and Triton specialise on addresses and strides that are multiples of 16 bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import NoKernel
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES = ((256, 512), (16, 256))
# Rows, N, K: each of them was met where a library said no, or is odd.
SHAPES = ((1, 256, 512), (3, 272, 528), (16, 64, 256), (100, 256, 512), (129, 16, 256))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def one_off(tensor: Tensor) -> Tensor:
    memory = raw(tensor).new_empty(tensor.numel() + 1)
    memory[1:].view(tensor.shape).copy_(raw(tensor))
    return memory[1:].view(tensor.shape).view(tensor.dtype)


def wider(tensor: Tensor) -> Tensor:
    """Rows three elements longer, from the second element on, as 515 for 512."""
    if not tensor.ndim:
        return one_off(tensor)
    memory = raw(tensor).new_empty((*tensor.shape[:-1], tensor.shape[-1] + 3))
    memory[..., 1:-2] = raw(tensor)
    return memory[..., 1:-2].view(tensor.dtype)


def every_third(tensor: Tensor) -> Tensor:
    memory = raw(tensor).new_empty((*tensor.shape, 3))
    memory[..., 1] = raw(tensor)
    return memory[..., 1].view(tensor.dtype)


def transposed(tensor: Tensor) -> Tensor:
    return (
        raw(tensor).transpose(-1, -2).contiguous().transpose(-1, -2).view(tensor.dtype) if tensor.ndim > 1 else tensor
    )


LAYOUTS = (one_off, wider, every_third, transposed)


def kernels_of(op: str, call: dict[str, Any]) -> Iterator[str | None]:
    """The kernel that is chosen, and every other of a library that says it can run this here.

    Ours are compiled for each layout; `tests.fuzz` draws theirs.
    """
    function = getattr(kernelhub, op)
    if not str(function.explain(**call).selected).startswith("triton."):
        yield None
    for kernel in function.kernels():
        if not kernel.startswith("triton.") and function.explain(**call, backend=kernel).selected is not None:
            yield kernel


def check_layouts(op: str, call: dict[str, Any], right: Callable[[Tensor], bool]) -> None:
    """Every kernel gives the right numbers for every layout of each operand alone, of all, and of the result."""
    function = getattr(kernelhub, op)
    for kernel in kernels_of(op, call):
        try:
            want = function(**call, backend=kernel)
        except NoKernel:
            continue
        assert right(want), kernel
        tensors = [name for name, value in call.items() if isinstance(value, Tensor)]
        for lay, names in itertools.product(LAYOUTS, [*([name] for name in tensors), tensors]):
            given = {**call, **{name: lay(call[name]) for name in names}}
            made = function(**given, backend=kernel)
            assert right(made), f"{kernel}: {', '.join(names)} {lay.__name__}"
        for lay in LAYOUTS:
            out = lay(torch.zeros_like(want))
            function(**call, out=out, backend=kernel)
            assert right(out), f"{kernel}: out {lay.__name__}"


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_fp8_gemm(scaling: str, dtype: torch.dtype, bias: bool) -> None:
    for tokens, n, k in SHAPES:
        how = {"tokens": tokens, "n": n, "k": k, "scaling": scaling, "bias": bias, "out_dtype": dtype}
        call = fp8_gemm_inputs(**how, device=DEVICE)
        check_layouts("fp8_gemm", call, lambda out, of=call: agrees(out, of))


@pytest.mark.parametrize("each", [False, True], ids=["all", "each"])
def test_bmm_fp8(each: bool) -> None:
    scaling = "batch" if each else "tensor"
    for tokens, (n, k) in itertools.product((1, 100), SIZES):
        how = {"batch": 3, "tokens": tokens, "n": n, "k": k, "a_scaling": scaling, "b_scaling": scaling}
        call = bmm_fp8_inputs(**how, device=DEVICE)
        reference = kernelhub.bmm_fp8.reference(**call)
        check_layouts("bmm_fp8", call, lambda out, of=reference: close(out, of))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("b_format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("a_format", ["bfloat16", "float16", "fp8"])
def test_fp4_gemm(a_format: str, b_format: str, dtype: torch.dtype) -> None:
    for tokens in (1, 100):
        how = {"tokens": tokens, "n": 96, "k": 256, "a_format": a_format, "b_format": b_format, "bias": True}
        call = fp4_gemm_inputs(**how, out_dtype=dtype, device=DEVICE)
        reference = kernelhub.fp4_gemm.reference(**call)
        check_layouts("fp4_gemm", call, lambda out, of=reference: close(out, of))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("format", ["bfloat16", "float16", "tensor", "channel", "block", "nvfp4", "mxfp4"])
def test_grouped_gemm(format: str, bias: bool) -> None:
    for sizes in ((1, 0, 3), (5, 130, 64)):
        call = grouped_gemm_inputs(sizes=sizes, n=128, k=256, format=format, bias=bias, device=DEVICE)
        rows = slice(0, sum(sizes))
        reference = kernelhub.grouped_gemm.reference(**call)[rows]
        check_layouts("grouped_gemm", call, lambda out, of=reference, some=rows: close(out[some], of))


def agrees(out: Tensor, call: dict[str, Any]) -> bool:
    return bool(compare(out, kernelhub.fp8_gemm.reference, call, matrix_instructions=True).ok)


def close(out: Tensor, reference: Tensor) -> bool:
    """Within a hundredth of the largest: what is looked for here is memory, not the last bits."""
    return bool((out.float() - reference).abs().max() <= 0.01 * reference.abs().max() + 1e-6)
