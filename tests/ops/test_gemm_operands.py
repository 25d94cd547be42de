"""Operands of products in any memory are read right, or refused by name: on a first call and on a warm one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs

CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp8_gemm": lambda: fp8_gemm_inputs(tokens=5, n=144, k=256, scaling="row", bias=True),
    "bmm_fp8": lambda: bmm_fp8_inputs(batch=3, tokens=5, n=48, k=64, a_scaling="batch", b_scaling="batch"),
    "fp4_gemm": lambda: fp4_gemm_inputs(tokens=5, n=80, k=128, bias=True),
    "grouped_gemm": lambda: grouped_gemm_inputs(sizes=(3, 0, 6), n=80, k=128, format="nvfp4", bias=True),
}
BACKENDS = ("torch", "triton")


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def every_third(tensor: Tensor) -> Tensor:
    """The same values, three elements apart in memory whose other elements are not of the operand."""
    raw = as_bytes(tensor)
    memory = torch.full((*raw.shape, 3), 0x7F if tensor.itemsize == 1 else 3, dtype=raw.dtype)
    memory[..., 1] = raw
    return memory[..., 1].view(tensor.dtype)


def one_off(tensor: Tensor) -> Tensor:
    """The same values from an address that is a multiple of nothing but the element."""
    memory = torch.empty(tensor.numel() + 1, dtype=as_bytes(tensor).dtype)
    view = memory[1:].view(tensor.shape)
    view.copy_(as_bytes(tensor))
    return view.view(tensor.dtype)


def run(op: str, backend: str, **call: Any) -> Tensor:
    made: Tensor = getattr(kernelhub, op)(**call, backend=backend)
    return made


def rows_of_groups(op: str, made: Tensor) -> Tensor:
    """Without those that belong to no group, which hold anything."""
    return made[:9] if op == "grouped_gemm" else made


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", CALLS)
def test_operands_lie_anywhere(op: str, backend: str) -> None:
    call = CALLS[op]()
    want = rows_of_groups(op, run(op, backend, **call))
    for lay in (every_third, one_off):
        given = {name: lay(value) if isinstance(value, Tensor) else value for name, value in call.items()}
        assert torch.equal(rows_of_groups(op, run(op, backend, **given)), want), lay.__name__


@pytest.mark.parametrize("op", CALLS)
def test_a_destination_that_shares_memory_is_refused_whether_or_not_the_form_is_known(op: str) -> None:
    call = CALLS[op]()
    made = run(op, "torch", **call)
    good = torch.empty_like(made)
    run(op, "torch", **call, out=good)
    room = torch.empty(made.numel() + call["b"].numel(), dtype=made.dtype)
    codes = room.view(torch.uint8)[: call["b"].numel()].view(call["b"].shape)
    codes.copy_(as_bytes(call["b"]))
    beside = {**call, "b": codes.view(call["b"].dtype)}
    with pytest.raises(InvalidArgument, match="overlaps b in memory") as caught:
        run(op, "torch", **beside, out=room[: made.numel()].view(made.shape))
    assert caught.value.parameter == "out"
    with pytest.raises(InvalidArgument, match="overlaps itself") as caught:
        run(op, "torch", **call, out=made[..., :1].expand(made.shape))
    assert caught.value.parameter == "out"
    apart = room[call["b"].numel() :].view(made.shape)
    assert torch.equal(rows_of_groups(op, run(op, "torch", **beside, out=apart)), rows_of_groups(op, made))


@pytest.mark.parametrize("op", CALLS)
def test_negative_bits_are_refused_whether_or_not_the_form_is_known(op: str) -> None:
    call = CALLS[op]()
    name = "b_global_scale" if op == "grouped_gemm" else "b_scale" if op != "fp4_gemm" else "bias"
    run(op, "torch", **call)
    lazy = torch.complex(torch.zeros_like(call[name]).float(), -call[name].float()).conj().imag
    if op == "fp4_gemm":
        run(op, "torch", **{**call, name: call[name].float()})
    with pytest.raises(InvalidArgument, match="negative bit") as caught:
        run(op, "torch", **{**call, name: lazy})
    assert caught.value.parameter == name


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("made", [torch.Tensor.to_sparse, lambda t: torch.nested.nested_tensor([t])])
def test_sparse_and_nested_operands_are_refused(op: str, made: Callable[[Tensor], Tensor]) -> None:
    call = CALLS[op]()
    name = next(name for name in ("b_scale", "bias") if call.get(name) is not None and call[name].itemsize > 1)
    run(op, "torch", **call)
    with pytest.raises(InvalidArgument, match=r"sparse|nested") as caught:
        run(op, "torch", **{**call, name: made(call[name])})
    assert caught.value.parameter == name


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("out", [[1], 3, "out"])
def test_a_destination_that_is_no_tensor_is_refused(op: str, out: Any) -> None:
    call = CALLS[op]()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"is (list|int|str)") as caught:
            run(op, "torch", **call, out=out)
        assert caught.value.parameter == "out"
        run(op, "torch", **call)


@pytest.mark.parametrize("backend", [*BACKENDS, "cpp"])
@pytest.mark.parametrize("per_row", [True, False])
def test_scales_come_as_vllm_and_torch_have_them(per_row: bool, backend: str) -> None:
    """[M, 1] by [1, N], and [1, 1] by [1, 1]."""
    call = fp8_gemm_inputs(tokens=5, n=144, k=256, scaling="row" if per_row else "tensor", bias=True)
    want = kernelhub.fp8_gemm(**call, backend=backend)
    transposed = {"a_scale": call["a_scale"].reshape(-1, 1), "b_scale": call["b_scale"].reshape(1, -1)}
    plan = kernelhub.fp8_gemm.prepare(**{**call, **transposed}, backend=backend)
    given = {name: value for name, value in {**call, **transposed}.items() if name != "out_dtype"}
    for made in (kernelhub.fp8_gemm(**{**call, **transposed}, backend=backend), plan.run(**given)):
        assert torch.equal(made, want)
    reference = kernelhub.fp8_gemm.reference
    assert torch.equal(reference(**{**call, **transposed}), reference(**call))


@pytest.mark.parametrize("lay", [lambda t: t.t().contiguous().t(), lambda t: every_third(t)], ids=["column", "third"])
@pytest.mark.parametrize("backend", [*BACKENDS, "cpp"])
def test_scales_of_blocks_lie_column_by_column_or_row_by_row(backend: str, lay: Callable[[Tensor], Tensor]) -> None:
    """As DeepGEMM and FlashInfer (``scale_major_mode="MN"``) have them, given as the transposed view."""
    call = fp8_gemm_inputs(tokens=5, n=300, k=512)
    want = kernelhub.fp8_gemm(**call, backend=backend)
    given = {**call, "a_scale": lay(call["a_scale"]), "b_scale": lay(call["b_scale"])}
    assert torch.equal(kernelhub.fp8_gemm(**given, backend=backend), want)


@pytest.mark.parametrize("weight_only", [torch.bfloat16, torch.float16])
def test_a_weight_beside_halves_has_scales_in_a_row(weight_only: torch.dtype) -> None:
    call = fp8_gemm_inputs(tokens=5, n=144, k=256, scaling="row", weight_only=weight_only)
    want = kernelhub.fp8_gemm(**call, backend="torch")
    assert torch.equal(kernelhub.fp8_gemm(**{**call, "b_scale": call["b_scale"].reshape(1, -1)}, backend="torch"), want)


@pytest.mark.parametrize("op", CALLS)
def test_transforms_are_refused_by_name_whether_or_not_the_form_is_known(op: str) -> None:
    call = CALLS[op]()
    name = "b_global_scale" if op in ("grouped_gemm", "fp4_gemm") else "b_scale"
    rest = {key: value for key, value in call.items() if key != name}

    def of(scale: Tensor) -> Tensor:
        return run(op, "torch", **rest, **{name: scale})

    of(call[name])
    ways: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("transform", lambda: torch.func.vmap(of)(call[name].expand(2, *call[name].shape))),
        ("forward gradient|transform", lambda: torch.func.jvp(of, (call[name],), (call[name],))),
        ("traced", lambda: torch.jit.trace(of, (call[name],), check_trace=False)),
    )
    for words, way in ways:
        with pytest.raises(InvalidArgument, match=words) as caught:
            way()
        assert caught.value.parameter is not None


def test_the_largest_mxfp4_weight_is_a_number() -> None:
    """6 x 2^127 is beyond float32, but times 0 it is 0, and times -1 minus infinity, not NaN."""
    b = torch.full((32, 16), 0x77, dtype=torch.uint8)  # 6 and 6
    scale = torch.full((32, 1), 254, dtype=torch.uint8)
    a = torch.zeros(3, 32, dtype=torch.bfloat16)
    a[1, 3], a[2, 5] = -1.0, 2.0**-20
    made = kernelhub.fp4_gemm(a, b, b_scale=scale, out_dtype=torch.float32, backend="torch")
    assert made[:, 0].tolist() == [0.0, -torch.inf, 6 * 2.0**107]


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("dtype", [[1], {}, torch.int32, "bfloat16", 16])
def test_a_dtype_of_the_result_that_is_none_is_refused(op: str, dtype: Any) -> None:
    call = CALLS[op]()
    for _ in range(2):
        with pytest.raises(InvalidArgument) as caught:
            run(op, "torch", **{**call, "out_dtype": dtype})
        assert caught.value.parameter == "out_dtype"
        run(op, "torch", **call)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", CALLS)
def test_a_destination_without_memory_of_its_own_is_refused(op: str) -> None:
    call = CALLS[op]()
    want = run(op, "torch", **call)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="layout") as caught:
            run(op, "torch", **call, out=torch.zeros(want.shape, dtype=want.dtype).to_sparse())
        assert caught.value.parameter == "out"
        run(op, "torch", **call)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("state", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", CALLS)
def test_jagged_tensors_are_refused_by_name(op: str, state: Callable[[], Any]) -> None:
    call = CALLS[op]()
    jagged = torch.nested.nested_tensor([torch.randn(2, 64), torch.randn(3, 64)], layout=torch.jagged)
    with state(), pytest.raises(InvalidArgument, match=f"{op}: a is a nested tensor") as caught:
        run(op, "torch", **{**call, "a": jagged})
    assert caught.value.parameter == "a"


ONE_NUMBER: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "a scale of a row": ("a_scale", lambda: fp8_gemm_inputs(tokens=1, n=144, k=128, scaling="block")),
    "a scale of a block": ("b_scale", lambda: fp8_gemm_inputs(tokens=5, n=128, k=128, scaling="block")),
    "a bias": (
        "bias",
        lambda: fp8_gemm_inputs(tokens=5, n=1, k=128, scaling="row", bias=True, out_dtype=torch.float32),
    ),
    "a scale of rows": ("a_scale", lambda: grouped_gemm_inputs(sizes=(1,), n=80, k=128, format="block", spare=0)),
    "a scale of weights": ("b_scale", lambda: grouped_gemm_inputs(sizes=(3,), n=80, k=128, format="block", spare=0)),
}


@pytest.mark.parametrize("what", ONE_NUMBER)
def test_one_number_with_the_negative_bit_is_refused_though_it_is_contiguous(what: str) -> None:
    name, make = ONE_NUMBER[what]
    call = make()
    op = "grouped_gemm" if "offsets" in call else "fp8_gemm"
    assert call[name].numel() == 1
    lazy = torch.complex(torch.zeros_like(call[name]), -call[name]).conj().imag
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="negative bit") as caught:
            run(op, "torch", **{**call, name: lazy})
        assert caught.value.parameter == name
        run(op, "torch", **call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_destination_of_groups_says_the_dtype_where_nothing_else_does(dtype: torch.dtype) -> None:
    call = grouped_gemm_inputs(sizes=(3, 6), n=80, k=128, format="bfloat16", spare=0)
    call.pop("out_dtype", None)
    want = run("grouped_gemm", "torch", **call, out_dtype=dtype)
    for _ in range(2):
        out = run("grouped_gemm", "torch", **call, out=torch.empty(9, 80, dtype=dtype))
        assert torch.equal(out, want)
        with pytest.raises(InvalidArgument) as caught:
            run("grouped_gemm", "torch", **call, out=torch.empty(9, 80, dtype=torch.float64))
        assert caught.value.parameter == "out"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("op", CALLS)
def test_compressed_rows_are_refused_whether_or_not_the_form_is_known(op: str) -> None:
    call = CALLS[op]()
    rows = [name for name, given in call.items() if isinstance(given, Tensor) and given.ndim > 1 and given.itemsize > 1]
    for name in rows:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="layout") as caught:
                run(op, "torch", **{**call, name: call[name].to_sparse_csr()})
            assert caught.value.parameter == name
            run(op, "torch", **call)
    weights = {"a": torch.randn(5, 64).bfloat16(), "b": torch.randn(80, 64).to(torch.float8_e4m3fn)}
    if op == "fp8_gemm":
        scale = torch.rand(80, 1)
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="layout") as caught:
                kernelhub.fp8_gemm(**weights, b_scale=scale.to_sparse_csr())
            assert caught.value.parameter == "b_scale"
            kernelhub.fp8_gemm(**weights, b_scale=scale)


def turned(tensor: Tensor) -> Tensor:
    """The same matrix, column by column in memory."""
    return as_bytes(tensor).t().contiguous().t().view(tensor.dtype)


def kernels_that_take(function: Any, arguments: dict[str, Any]) -> list[str]:
    decisions = function.explain(**arguments, backend=["torch", "cpp", "triton"]).decisions
    return [item.kernel for item in decisions if item.accepted]


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("a_format", ["bfloat16", "fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_activations_of_float4_products_lie_in_any_order(a_format: str, tokens: int) -> None:
    b_format = "nvfp4" if a_format == "nvfp4" else "mxfp4"
    arguments = fp4_gemm_inputs(tokens=tokens, n=64, k=128, a_format=a_format, b_format=b_format)
    other = arguments | {"a": turned(arguments["a"])}
    if arguments.get("a_scale") is not None and arguments["a_scale"].ndim == 2:
        other["a_scale"] = turned(arguments["a_scale"])
    kernels = kernels_that_take(kernelhub.fp4_gemm, arguments)
    assert kernels
    for kernel in kernels:
        want = kernelhub.fp4_gemm(**arguments, backend=kernel)
        assert torch.equal(kernelhub.fp4_gemm(**other, backend=kernel), want), kernel


@pytest.mark.parametrize("tokens", [1, 65])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block", "mx"])
def test_elements_of_a_bias_are_apart(scaling: str, tokens: int) -> None:
    arguments = fp8_gemm_inputs(tokens=tokens, n=40, k=128, scaling=scaling, bias=True)
    kernels = kernels_that_take(kernelhub.fp8_gemm, arguments)
    assert kernels
    for kernel in kernels:
        want = kernelhub.fp8_gemm(**arguments, backend=kernel)
        got = kernelhub.fp8_gemm(**arguments | {"bias": every_third(arguments["bias"])}, backend=kernel)
        assert torch.equal(got, want), kernel


def test_rows_below_the_least_normal_number_are_rounded_to_its_spacing() -> None:
    a, b = torch.full((64, 1), 2.0**-6), torch.linspace(1, 2, 40).unsqueeze(1)
    arguments = {"a": a.to(torch.float8_e4m3fn), "b": b.to(torch.float8_e4m3fn), "out_dtype": torch.float16}
    scale = torch.tensor(2.0**-16, dtype=torch.float32)
    arguments |= {"a_scale": scale, "b_scale": torch.tensor(1.3, dtype=torch.float32)}
    out = kernelhub.fp8_gemm(**arguments)
    assert 0 < float(out.abs().max()) < torch.finfo(torch.float16).smallest_normal
    assert compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=False).ok
    assert not compare(out + 2.0**-23, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=False).ok
