"""`fp8_gemm` and `bmm_fp8` under torch.compile, torch.export's check and fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelhub
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from tests.conftest import DEVICE
from tests.ops.test_compile import compiled


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("scaling", ["row", "block", "mx"])
def test_at_most_two_graphs_over_sizes(scaling: str) -> None:
    run, counter = compiled(lambda a: kernelhub.fp8_gemm(**a) * 2)
    for tokens in (2, 3, 9, 17, 70):
        arguments = fp8_gemm_inputs(tokens=tokens, n=96, k=160, scaling=scaling, bias=True, device=DEVICE)
        assert torch.equal(run(arguments), kernelhub.fp8_gemm(**arguments) * 2)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_weights_alone_go_through(scaling: str) -> None:
    run, counter = compiled(lambda a: kernelhub.fp8_gemm(**a) * 2)
    for tokens in (2, 3, 9, 70):
        arguments = fp8_gemm_inputs(
            tokens=tokens, n=96, k=160, scaling=scaling, weight_only=torch.bfloat16, device=DEVICE
        )
        assert torch.equal(run(arguments), kernelhub.fp8_gemm(**arguments) * 2)
    assert counter.frame_count <= 2


def test_a_destination_and_a_named_backend_go_through() -> None:
    arguments = fp8_gemm_inputs(tokens=5, n=96, k=160, out_dtype=torch.float32, device=DEVICE)
    run, counter = compiled(lambda a, out: kernelhub.fp8_gemm(**a, out=out, backend="torch.dequantized"))
    want = kernelhub.fp8_gemm(**arguments, backend="torch.dequantized")
    out = torch.full_like(want, torch.nan)
    assert run(arguments, out) is out
    assert torch.equal(out, want)
    assert counter.frame_count == 1


def test_a_plan_goes_through() -> None:
    arguments = fp8_gemm_inputs(tokens=5, n=96, k=160, device=DEVICE)
    plan = kernelhub.fp8_gemm.prepare(**arguments)
    arguments.pop("out_dtype")
    run, counter = compiled(lambda a: plan.run(**a) + 1)
    assert torch.equal(run(arguments), plan.run(**arguments) + 1)
    assert "kernelhub.fp8_gemm" in counter.graphs[0].code


def test_fake_tensors_give_shapes_dtypes_and_device() -> None:
    with FakeTensorMode():
        a, b = (torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda") for shape in ((5, 160), (96, 160)))
        scales = [torch.empty(shape, device="cuda") for shape in ((5, 2), (1, 2))]
        out = kernelhub.fp8_gemm(a, b, *scales, out_dtype=torch.float16)
        assert (tuple(out.shape), out.dtype, out.device.type) == ((5, 96), torch.float16, "cuda")


def test_the_operators_pass_torch_s_own_check() -> None:
    arguments = fp8_gemm_inputs(tokens=5, n=96, k=160)
    a, b, a_scale, b_scale = (arguments[name] for name in ("a", "b", "a_scale", "b_scale"))
    operands = (a, [b], "", a_scale, b_scale, None, torch.bfloat16, None)
    # The other checks compare operands by multiplying and adding them, which torch does not do with float8.
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.kernelhub.fp8_gemm.default, operands, test_utils=utils)
    out = torch.empty(5, 96, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.kernelhub.fp8_gemm_out.default, (*operands, out), test_utils=utils)


def test_batches_compile_at_most_two_graphs_over_sizes() -> None:
    run, counter = compiled(lambda a: kernelhub.bmm_fp8(**a) * 2)
    for tokens in (2, 3, 9, 17):
        arguments = bmm_fp8_inputs(batch=3, tokens=tokens, n=64, k=96, b_scaling="batch", device=DEVICE)
        assert torch.equal(run(arguments), kernelhub.bmm_fp8(**arguments) * 2)
    assert counter.frame_count <= 2


def test_batches_go_into_a_destination_and_through_plans() -> None:
    arguments = bmm_fp8_inputs(batch=3, tokens=5, n=64, k=96, device=DEVICE)
    want = kernelhub.bmm_fp8(**arguments)
    plan = kernelhub.bmm_fp8.prepare(**arguments)
    dtype = arguments.pop("out_dtype")
    for call in (
        lambda a, out: kernelhub.bmm_fp8(**a, out_dtype=dtype, out=out),
        lambda a, out: plan.run(**a, out=out),
    ):
        run, counter = compiled(call)
        out = torch.full_like(want, torch.nan)
        assert run(arguments, out) is out
        assert torch.equal(out, want)
        assert counter.frame_count == 1
    operands = (*(arguments[name] for name in ("a", "b", "a_scale", "b_scale")), dtype, None)
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.kernelhub.bmm_fp8.default, operands, test_utils=utils)
