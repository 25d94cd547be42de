"""What a call of `grouped_gemm` is decided by: formats and widths, never how many rows there are."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.ops.gemm.grouped.inputs import PAIRS, grouped_gemm_inputs

OP = kernelhub.grouped_gemm.op


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("format", ["bfloat16", "float32", "tensor", "channel", "block", "nvfp4", "mxfp4", *PAIRS])
def test_calls_of_any_number_of_rows_have_one_key(format: str, masked: bool) -> None:
    keys = set()
    for sizes in ((0, 1, 0), (5, 0, 9), (0, 0, 0), (40, 50, 60)):
        arguments = grouped_gemm_inputs(sizes=sizes, format=format, n=40, k=96, masked=masked, spare=2)
        keys.add(OP.parse(None, (), arguments).key)
    assert len(keys) == 1
    problem = OP.contract.problem_of(keys.pop(), -1)
    assert (problem.num_groups, problem.n, problem.k, problem.masked) == (3, 40, 96, masked)
    assert OP.contract.contradiction(problem) is None


def test_a_scale_of_one_row_is_recognised_by_its_shape_where_that_is_unique() -> None:
    arguments = grouped_gemm_inputs(sizes=(1, 0), format="channel", spare=0)
    arguments["a_scale"] = arguments["a_scale"].unsqueeze(1)
    assert OP.contract.problem_of(OP.parse(None, (), arguments).key, -1).a_scale == "token"


@pytest.mark.parametrize(
    ("format", "facets"),
    [
        ("tensor", {"a_scale": "tensor", "b_scale": "tensor"}),
        ("channel", {"a_scale": "token", "b_scale": "channel"}),
        ("block", {"a_scale": "group", "b_scale": "block"}),
        ("nvfp4", {"b_scale": "nvfp4", "global_scale": True}),
        ("mxfp4", {"b_scale": "mxfp4"}),
        ("nvfp4 x nvfp4", {"a_scale": "nvfp4", "a_global_scale": True, "global_scale": True}),
        ("nvfp4 x nvfp4", {"a_global_scale": True, "global_scale": True}),
        ("mxfp4 x mxfp4", {"a_dtype": "float4_e2m1fn_x2", "b_scale": "mxfp4"}),
        ("mxfp8 x mxfp4", {"a_dtype": "float8_e4m3fn", "b_scale": "mxfp4"}),
        ("mxfp8 x mxfp8", {"b_scale": "mxfp8"}),
    ],
)
def test_facets_written_out_are_those_of_a_call(format: str, facets: dict[str, object]) -> None:
    arguments = grouped_gemm_inputs(sizes=(2, 3), n=40, k=96, format=format)
    sizes = {"num_groups": 2, "n": 40, "k": 96}
    written = kernelhub.explain("grouped_gemm", device="H200", **sizes, **facets).problem
    assert written == kernelhub.explain(kernelhub.grouped_gemm, device="H200", **arguments).problem


def test_scales_that_are_powers_of_two_are_a_geometry_of_their_own() -> None:
    arguments = grouped_gemm_inputs(sizes=(2, 3), format="block", powers_of_two=True)
    assert arguments["a_scale"].dtype is torch.float8_e8m0fnu
    problem = kernelhub.grouped_gemm.explain(**arguments).problem
    assert (problem.a_scale, problem.b_scale) == ("group_e8m0", "block_e8m0")
