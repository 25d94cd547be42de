"""Products with float4 weights by our CUDA kernel: its contract, sizes of models, graphs, bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.cuda.gemm.fp4 import Fp4Gemm
from kernelhub.evidence.cases import CASES
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.models.shapes import FP4_LAYERS
from tests.contract.fp4_gemm import Fp4GemmContract

pytestmark = pytest.mark.gpu

KERNEL = "cuda.fp4_gemm"


def agrees(got: torch.Tensor, arguments: dict[str, Any]) -> None:
    judgement = CASES["fp4_gemm"].judge({"out": got}, arguments)
    assert judgement.ok, judgement.figures


class TestFp4Gemm(Fp4GemmContract):
    kernel = KERNEL
    a_formats = ("bfloat16",)
    fewest_cases = 10


@pytest.mark.parametrize("layer", [name for name, layer in FP4_LAYERS.items() if layer.n * layer.k < 1 << 27])
def test_at_the_shapes_of_models(layer: str) -> None:
    shape = FP4_LAYERS[layer]
    most = fp4_gemm_inputs(tokens=700, n=shape.n, k=shape.k, b_format=shape.b_format, device="cuda")
    for tokens in (1, 17, 64, 100, 180, 256, 300, 700):
        arguments = most | {"a": most["a"][:tokens]}
        agrees(kernelhub.fp4_gemm(**arguments, backend=KERNEL), arguments)


@pytest.mark.parametrize(("tokens", "form"), [*itertools.product((5, 60, 129, 300), ("nvfp4", "mxfp4"))])
def test_parts_are_added_alike_in_and_out_of_graphs(tokens: int, form: str) -> None:
    """By the last part of a tile, or by a second launch: the same bits, always."""
    arguments = fp4_gemm_inputs(tokens=tokens, n=1000, k=4096, b_format=form, device="cuda")
    got = kernelhub.fp4_gemm(**arguments, backend=KERNEL)
    for _ in range(30):
        assert torch.equal(kernelhub.fp4_gemm(**arguments, backend=KERNEL), got)
    graph, out = torch.cuda.CUDAGraph(), torch.full_like(got, torch.nan)
    with torch.cuda.graph(graph):
        kernelhub.fp4_gemm(**arguments, out=out, backend=KERNEL)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, got)
    Fp4Gemm.counts = False
    try:
        assert torch.equal(kernelhub.fp4_gemm(**arguments, out=out[:], backend=KERNEL), got)
    finally:
        Fp4Gemm.counts = True
