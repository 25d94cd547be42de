"""`grouped_gemm` under torch.compile and fake tensors: one opaque operator, never a frozen choice."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelhub
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from tests.conftest import DEVICE


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(function):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("format", ["float32", "block", "channel", "nvfp4", "nvfp4 x nvfp4", "mxfp8 x mxfp4"])
@pytest.mark.parametrize("masked", [False, True])
def test_at_most_two_graphs_over_sizes(format: str, masked: bool) -> None:
    run, counter = compiled(lambda arguments: kernelhub.grouped_gemm(**arguments) * 2)
    for sizes in ((3, 4), (2, 3), (9, 0), (17, 16)):
        arguments = grouped_gemm_inputs(sizes=sizes, format=format, n=64, spare=0, masked=masked, device=DEVICE)
        got, want = run(arguments), kernelhub.grouped_gemm(**arguments) * 2
        live = ~kernelhub.grouped_gemm.reference(**arguments).isnan()
        assert torch.equal(got[live], want[live])
    assert counter.frame_count <= 2


def test_out_and_its_dtype_go_through() -> None:
    arguments = grouped_gemm_inputs(sizes=(3, 4), n=64, spare=2, bias=True, device=DEVICE)
    want = kernelhub.grouped_gemm(**arguments, out_dtype=torch.float32)
    run, counter = compiled(lambda a, out: kernelhub.grouped_gemm(**a, out=out) + 0)
    made, _ = compiled(lambda a: kernelhub.grouped_gemm(**a, out_dtype=torch.float32) + 0)
    out = torch.full_like(want, torch.nan)
    assert torch.equal(run(arguments, out)[:7], want[:7])
    assert torch.equal(out[:7], want[:7])
    assert out[7:].isnan().all()
    assert torch.equal(made(arguments)[:7], want[:7])
    assert counter.frame_count == 1


def test_a_plan_is_traced() -> None:
    arguments = grouped_gemm_inputs(sizes=(3, 4), n=64, spare=0, device=DEVICE)
    plan = kernelhub.grouped_gemm.prepare(**arguments)
    run, counter = compiled(lambda a: plan.run(**a) + 1)
    assert torch.equal(run(arguments), kernelhub.grouped_gemm(**arguments) + 1)
    assert counter.frame_count == 1


def test_fake_tensors_give_shapes_and_launch_nothing() -> None:
    with FakeTensorMode() as mode:
        arguments = {
            name: mode.from_tensor(value)
            for name, value in grouped_gemm_inputs(sizes=(3, 4), n=64, format="block", masked=True).items()
        }
        out = kernelhub.grouped_gemm(**arguments)
    assert (out.shape, out.dtype) == ((2, 7, 64), torch.bfloat16)


def test_the_operators_pass_torch_s_own_check() -> None:
    arguments = grouped_gemm_inputs(sizes=(3, 4), n=16, k=32, format="float32", spare=0)
    operands = (arguments["a"], arguments["b"], arguments["offsets"], *[None] * 6, torch.float32, None)
    torch.library.opcheck(torch.ops.kernelhub.grouped_gemm.default, operands)
    torch.library.opcheck(torch.ops.kernelhub.grouped_gemm_out.default, (*operands, torch.zeros(7, 16)))
