"""The quantisers under torch.compile: one opaque operator each, few graphs over sizes, equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import kernelhub
from kernelhub.ops.quant.inputs import activations
from tests.conftest import DEVICE
from tests.contract.quant import same

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("fp8", {"granularity": "token"}),
    ("fp8", {"granularity": "tensor"}),
    ("fp8", {"granularity": "group", "ue8m0": True, "scale_layout": "column"}),
    ("fp8", {"granularity": "block", "scale_dtype": torch.float8_e8m0fnu}),
    ("nvfp4", {}),
    ("mxfp4", {"scale_rounding": "up"}),
    ("mxfp8", {}),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(function):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize(("format", "options"), OPTIONS, ids=str)
def test_at_most_two_graphs_over_sizes(format: str, options: dict[str, Any]) -> None:
    quantize, dequantize = (getattr(kernelhub, f"{way}_{format}") for way in ("quantize", "dequantize"))

    def both(x):
        results = quantize(x, **options)
        return results, dequantize(*results) * 2

    run, counter = compiled(both)
    for tokens in (2, 3, 9, 130):
        rows = 130 * tokens if options.get("granularity") == "block" else tokens
        x = activations(rows, 256, device=DEVICE)
        results, back = run(x)
        for got, want in zip(results, quantize(x, **options), strict=True):
            assert same(got, want)
            assert got.stride() == want.stride()
        assert torch.equal(back, dequantize(*results) * 2)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(("format", "options"), OPTIONS, ids=str)
def test_destinations_are_written(format: str, options: dict[str, Any]) -> None:
    quantize, dequantize = (getattr(kernelhub, f"{way}_{format}") for way in ("quantize", "dequantize"))
    x = activations(5, 256, device=DEVICE)
    want = quantize(x, **options)
    outs = [torch.zeros_like(tensor) for tensor in want]
    run, _ = compiled(lambda x, out, out_scale: quantize(x, **options, out=out, out_scale=out_scale))
    for got, out, other in zip(run(x, *outs[:2])[:2], outs, want, strict=False):
        assert same(got, other)
        assert same(out, other)
    back = torch.zeros(5, 256, dtype=torch.bfloat16, device=DEVICE)
    run, _ = compiled(lambda results, out: dequantize(*results, out=out))
    run(want, back)
    assert same(back, dequantize(*want))


def test_given_scales_go_through() -> None:
    x = activations(5, 256, device=DEVICE)
    scale = torch.full((5, 1), 0.05, device=DEVICE)
    one = torch.full((1,), 0.05, device=DEVICE)
    run, counter = compiled(
        lambda x, scale, one: (kernelhub.quantize_fp8(x, scale=scale)[0], kernelhub.quantize_nvfp4(x, one))
    )
    codes, nvfp4 = run(x, scale, one)
    assert same(codes, kernelhub.quantize_fp8(x, scale=scale)[0])
    assert all(same(a, b) for a, b in zip(nvfp4, kernelhub.quantize_nvfp4(x, one), strict=True))
    out = torch.zeros_like(codes)
    run, counter = compiled(lambda x, scale, out: kernelhub.quantize_fp8(x, scale=scale, out=out)[0])
    run(x, scale, out)
    assert same(out, codes)
    assert counter.frame_count == 1


def test_plans_run_inside_a_compiled_region() -> None:
    x = activations(5, 256, device=DEVICE)
    for format in ("fp8", "nvfp4", "mxfp4", "mxfp8"):
        quantize, dequantize = (getattr(kernelhub, f"{way}_{format}") for way in ("quantize", "dequantize"))
        plan = quantize.prepare(x)
        back = dequantize.prepare(*quantize(x))
        run, counter = compiled(lambda x, plan=plan, back=back: back.run(*plan.run(x)) * 2)
        assert torch.equal(run(x), dequantize(*quantize(x)) * 2)
        assert counter.frame_count == 1
