"""`prepare` and `explain` take meta tensors: shapes and dtypes in place of example tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import InvalidArgument
from kernelhub.evidence.cases import CASES
from tests.conftest import DEVICE

# What a plan keeps, and so must be given: see its class.
KEPT = {
    "attention": ("sinks", "k_scale", "v_scale"),
    "paged_attention": ("sinks", "k_scale", "v_scale"),
    "mla_attention": ("sinks", "kv_scale"),
    "merge_attention_states": ("out_scale",),
    "route_experts": ("scaling_factor",),
    "fused_moe": ("a1_scale", "a2_scale", "expert_map"),
    "moe_combine": ("handle",),
}
# One for each feature of an op.
CALLS = {(op, case.feature): case for op, cases in CASES.items() for case in cases.cases() if case.quick}


def shape_of(value: Any) -> Any:
    if isinstance(value, list):
        return [shape_of(item) for item in value]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and bool(value) and isinstance(value[0], Tensor))


@pytest.mark.device
@pytest.mark.parametrize(("op", "feature"), CALLS)
def test_a_plan_is_the_same_for_shapes(op: str, feature: str) -> None:
    function = HUB.function(op)
    arguments = CALLS[op, feature].make(torch.device(DEVICE))
    shapes = {
        name: shape_of(value) if is_tensor(value) and name not in KEPT.get(op, ()) else value
        for name, value in arguments.items()
    }
    with torch.device(DEVICE):
        plan, other = function.prepare(**arguments), function.prepare(**shapes)
        assert other.bound is plan.bound
        assert function.explain(**shapes).problem == plan.selection.problem


@pytest.mark.parametrize("op", KEPT)
def test_what_a_plan_keeps_must_be_given(op: str) -> None:
    for case in CASES[op].cases():
        arguments = case.make(torch.device("cpu"))
        kept = [name for name in KEPT[op] if isinstance(arguments.get(name), Tensor)]
        for name in kept:
            with pytest.raises(InvalidArgument, match=f"{name} is on meta") as raised:
                HUB.function(op).prepare(**arguments | {name: shape_of(arguments[name])})
            assert raised.value.parameter == name
        if kept:
            return
    assert op in ("route_experts", "moe_combine")  # what they keep is a float, and a list with the numbers of a call


def test_the_device_is_that_of_the_tensors_with_memory() -> None:
    a, b = torch.empty(3, 64, dtype=torch.float8_e4m3fn, device="meta"), torch.zeros(8, 64).to(torch.float8_e4m3fn)
    plan = kernelhub.fp8_gemm.prepare(a, b, torch.empty((), device="meta"), torch.ones(()))
    assert plan.selection.problem.device.type == "cpu"


def test_a_call_still_refuses_them() -> None:
    with pytest.raises(InvalidArgument, match="is on meta"):
        kernelhub.quantize_fp8(torch.empty(3, 64, device="meta"))
    with torch.device("meta"), pytest.raises(InvalidArgument, match="is on meta"):
        kernelhub.quantize_fp8.prepare(torch.empty(3, 64))


def test_what_shapes_contradict_is_refused() -> None:
    x = torch.empty(3, 40, device="meta")
    with pytest.raises(InvalidArgument, match="a group is 16"):
        kernelhub.quantize_nvfp4.prepare(x)
    with pytest.raises(TypeError, match="missing"):
        kernelhub.dequantize_fp8.prepare(x)
