"""Operands and destinations of quantisers in any memory are honoured, or refused by name, first and warm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument

BACKENDS = ("torch", "triton")


def quantise(op: str, **more: Any) -> dict[str, Any]:
    return {"x": torch.randn(6, 128, generator=torch.Generator().manual_seed(1)), **more}


def dequantise(op: str) -> dict[str, Any]:
    results = getattr(kernelhub, op.removeprefix("de"))(**quantise(op))
    return dict(zip(("x", "scale", "global_scale"), results, strict=False))


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "quantize_fp8": lambda: quantise("quantize_fp8", scale=torch.rand(6, 1) + 0.5),
    "quantize_nvfp4": lambda: quantise("quantize_nvfp4", global_scale=torch.rand(1) + 0.5),
    "quantize_mxfp4": lambda: quantise("quantize_mxfp4"),
    "quantize_mxfp8": lambda: quantise("quantize_mxfp8"),
    **{
        op: (lambda op=op: dequantise(op))  # type: ignore[misc]
        for op in ("dequantize_fp8", "dequantize_nvfp4", "dequantize_mxfp4", "dequantize_mxfp8")
    },
}


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def every_third(tensor: Tensor) -> Tensor:
    memory = torch.full((*tensor.shape, 3), 0x7F if tensor.itemsize == 1 else 3, dtype=as_bytes(tensor).dtype)
    memory[..., 1] = as_bytes(tensor)
    return memory[..., 1].view(tensor.dtype)


def one_off(tensor: Tensor) -> Tensor:
    memory = torch.empty(tensor.numel() + 1, dtype=as_bytes(tensor).dtype)
    memory[1:].view(tensor.shape).copy_(as_bytes(tensor))
    return memory[1:].view(tensor.shape).view(tensor.dtype)


def run(op: str, backend: str = "torch", **call: Any) -> tuple[Tensor, ...]:
    made = getattr(kernelhub, op)(**call, backend=backend)
    return made if isinstance(made, tuple) else (made,)


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", CALLS)
def test_operands_lie_anywhere(op: str, backend: str) -> None:
    call = CALLS[op]()
    want = run(op, backend, **call)
    for lay in (every_third, one_off):
        given = {name: lay(value) for name, value in call.items()}
        assert same(run(op, backend, **given), want), lay.__name__


@pytest.mark.parametrize("op", CALLS)
def test_destinations_share_no_memory(op: str) -> None:
    call = CALLS[op]()
    made = run(op, **call)
    names = ("out", "out_scale") if op != "quantize_fp8" and op.startswith("q") else ("out",)
    outs = {name: torch.empty_like(result) for name, result in zip(names, made, strict=False)}
    assert same(run(op, **call, **outs), made)
    size = made[0].numel() * made[0].itemsize
    room = torch.empty(size + call["x"].numel() * call["x"].itemsize, dtype=torch.uint8)
    x = room[-call["x"].numel() * call["x"].itemsize :].view(call["x"].dtype).view(call["x"].shape)
    as_bytes(x).copy_(as_bytes(call["x"]))
    over = room[-size:]
    for name, words, out in (
        ("out", "overlaps x in memory", over.view(made[0].dtype).view(made[0].shape)),
        ("out", "overlaps itself", made[0][..., :1].expand(made[0].shape)),
    ):
        with pytest.raises(InvalidArgument, match=words) as caught:
            run(op, **{**call, "x": x}, **{**outs, name: out})
        assert caught.value.parameter == name
    if len(names) == 2:
        apart = torch.empty(size + 64, dtype=torch.uint8)
        out, scale = apart[:size].view(made[0].dtype).view(made[0].shape), apart[size - 8 :]
        scale = scale[: made[1].numel()].view(made[1].dtype).view(made[1].shape)
        with pytest.raises(InvalidArgument, match="overlaps out in memory") as caught:
            run(op, **call, out=out, out_scale=scale)
        assert caught.value.parameter == "out_scale"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("op", [op for op in CALLS if op.startswith("q")])
def test_what_memory_does_not_hold_is_refused(op: str) -> None:
    call = CALLS[op]()
    run(op, **call)
    lazy = torch.complex(torch.zeros(6, 128), torch.ones(6, 128)).conj().imag
    for x, words in (
        (lazy, "negative bit"),
        (call["x"].to_sparse(), "sparse"),
        (call["x"].to_sparse_csr(), "layout"),
        (torch.nested.nested_tensor([call["x"]]), "nested"),
    ):
        with pytest.raises(InvalidArgument, match=words) as caught:
            run(op, **{**call, "x": x})
        assert caught.value.parameter == "x"
    for name in ("scale", "global_scale"):
        if name in call:
            lazy = torch.complex(torch.zeros(call[name].shape), torch.ones(call[name].shape)).conj().imag
            with pytest.raises(InvalidArgument, match="negative bit") as caught:
                run(op, **{**call, name: lazy})
            assert caught.value.parameter == name


@pytest.mark.parametrize("flag", ["yes", 1, None, torch.tensor(True)])
def test_a_flag_is_true_or_false(flag: Any) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="give True or False") as caught:
            kernelhub.quantize_fp8(torch.randn(2, 128), ue8m0=flag)
        assert caught.value.parameter == "ue8m0"
        kernelhub.quantize_fp8(torch.randn(2, 128), ue8m0=True)


def negated(tensor: Tensor) -> Tensor:
    """The same numbers, held by memory that holds their opposites."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


@pytest.mark.parametrize("op", ["quantize_fp8", "quantize_mxfp8"])
def test_one_number_with_the_negative_bit_is_refused_though_it_is_contiguous(op: str) -> None:
    one = torch.full((1, 1), 3.0)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="negative bit") as caught:
            run(op, x=negated(one))
        assert caught.value.parameter == "x"
        run(op, x=one)


@pytest.mark.parametrize("size", [b"no", 1.5, 128.0, True, 0, -128, "128", torch.tensor(128)])
def test_a_group_size_is_an_int_whether_or_not_it_is_used(size: Any) -> None:
    codes = torch.randn(4, 256).to(torch.float8_e4m3fn)
    calls: list[Callable[..., Any]] = [
        lambda size, how=how: kernelhub.quantize_fp8(torch.randn(4, 256), how, size)  # type: ignore[misc]
        for how in ("tensor", "token", "group", "block")
    ]
    calls += [
        lambda size, shape=shape: kernelhub.dequantize_fp8(codes, torch.ones(shape), size)  # type: ignore[misc]
        for shape in ((1,), (4, 1), (4, 2), (1, 2))
    ]
    for call in calls:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="give a positive int") as caught:
                call(size)
            assert caught.value.parameter == "group_size"
            call(128)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", CALLS)
def test_a_destination_without_memory_of_its_own_is_refused(op: str) -> None:
    call = CALLS[op]()
    want = run(op, **call)[0]
    for _ in range(2):
        made = [
            torch.zeros(want.shape).to_sparse().to(want.dtype),
            torch.zeros(want.shape).to_sparse_csr().to(want.dtype),
        ]
        for out in made if want.dtype not in (torch.uint8, torch.float8_e4m3fn) else made[:1]:
            with pytest.raises(InvalidArgument, match="layout") as caught:
                run(op, **call, out=out)
            assert caught.value.parameter == "out"
        run(op, **call)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("state", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("op", [op for op in CALLS if op.startswith("q")])
def test_jagged_tensors_are_refused_by_name(op: str, state: Callable[[], Any]) -> None:
    call = CALLS[op]()
    jagged = torch.nested.nested_tensor([call["x"][:2], call["x"][2:]], layout=torch.jagged)
    for _ in range(2):
        for more in ({}, {"out": run(op, **call)[0]}):
            with state(), pytest.raises(InvalidArgument, match=f"{op}: x is a nested tensor") as caught:
                run(op, **{**call, "x": jagged}, **more)
            assert caught.value.parameter == "x"
        run(op, **call)


def test_a_destination_of_a_global_scale_has_one_dimension_at_most() -> None:
    x = torch.randn(6, 128)
    plan = kernelhub.quantize_nvfp4.prepare(x)
    for place in (torch.empty(1), torch.empty(())):
        assert plan.run(x, out_global_scale=place)[2] is place
    for call in (plan.run, kernelhub.quantize_nvfp4):
        with pytest.raises(InvalidArgument, match=r"give float32 \[1\]") as caught:
            call(x, out_global_scale=torch.empty(1, 1))
        assert caught.value.parameter == "out_global_scale"


ONE = torch.ones(1)
NO_MEMORY_OF_THEIR_OWN = {
    "sparse": ONE.to_sparse(),
    "compressed": torch.ones(1, 1).to_sparse_csr(),
    "nested": torch.nested.nested_tensor([torch.ones(1)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NO_MEMORY_OF_THEIR_OWN)
def test_a_global_scale_is_dense_after_a_right_call_too(kind: str) -> None:
    codes, scale, factor = kernelhub.quantize_nvfp4(torch.randn(3, 32), ONE)
    for function, arguments in (
        (kernelhub.quantize_nvfp4, (torch.randn(3, 32),)),
        (kernelhub.dequantize_nvfp4, (codes, scale)),
    ):
        function(*arguments, ONE if len(arguments) == 1 else factor)
        with pytest.raises(InvalidArgument, match="global_scale"):
            function(*arguments, NO_MEMORY_OF_THEIR_OWN[kind])
    plain = kernelhub.quantize_fp8(torch.randn(3, 32), granularity="token")
    kernelhub.dequantize_fp8(*plain)
    with pytest.raises(InvalidArgument, match="scale"):
        kernelhub.dequantize_fp8(plain[0], plain[1].reshape(3, 1).to_sparse_csr())
