"""`rms_norm_quant` and `silu_and_mul_quant` inside of torch.compile: one opaque operator each."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.ops.fused_quant.inputs import activation_inputs, norm_inputs
from tests.conftest import DEVICE
from tests.ops.test_compile import compiled


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def same(one, other) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def test_compiles_at_most_two_graphs_over_sizes() -> None:
    run, counter = compiled(lambda a: kernelhub.rms_norm_quant(**a))
    for tokens in (2, 3, 9):
        arguments = norm_inputs(tokens=tokens, width=64, device=DEVICE)
        assert same(run(arguments), kernelhub.rms_norm_quant(**arguments))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("form", [None, "fp8_tensor", "nvfp4"])
def test_every_number_of_results_goes_through(form) -> None:
    arguments = activation_inputs(tokens=3, width=32, format=form, device=DEVICE)
    want = kernelhub.silu_and_mul_quant(**arguments)
    run, counter = compiled(lambda a: kernelhub.silu_and_mul_quant(**a))
    got = run(arguments)
    assert same((got,), (want,)) if form is None else same(got, want)
    assert counter.frame_count == 1


def test_a_residual_is_updated_in_place() -> None:
    arguments = norm_inputs(tokens=3, width=64, device=DEVICE)
    want = kernelhub.rms_norm_quant(**arguments)
    run, _ = compiled(lambda a: kernelhub.rms_norm_quant(**a, out_residual=a["residual"]))
    assert same(run(arguments), want)
    assert torch.equal(arguments["residual"], want[2])
