"""FlashInfer's mixtures of experts keep the contract of the op, with a model of the library in torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.probes.device import simulated
from tests.backends import flashinfer_experts_fake as fake
from tests.backends.flashinfer_experts_contract import Experts, check
from tests.contract.experts import PLAIN

MODEL = dataclasses.replace(PLAIN, hidden_size=256, intermediate_size=128)
KERNELS = {
    "flashinfer.cutlass_experts": {},
    "flashinfer.cutlass_experts_fp8": {"weights": "fp8_tensor"},
}


def inputs(kernel: str, **changes: Any) -> dict[str, Any]:
    arguments = moe_inputs(**{"model": MODEL, "tokens": 7, **KERNELS[kernel]} | changes)
    if kernel.endswith("_fp8"):
        scales = {"a1_scale": torch.tensor(3.0 / 448), "a2_scale": torch.tensor([1.0 / 448])}
        return arguments | scales
    return arguments


def run(kernel: str, arguments: dict[str, Any], **more: Any) -> torch.Tensor:
    return kernelhub.fused_moe(**arguments, **more, backend=kernel)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("kernel", KERNELS)
class TestExperts(Experts):
    inputs = staticmethod(inputs)
    run = staticmethod(run)

    @pytest.mark.parametrize(("experts", "top_k"), [(23, 1), (23, 22), (1, 1)])
    def test_any_number_of_experts_per_token(self, kernel, experts, top_k) -> None:
        arguments = inputs(kernel, num_experts=experts, top_k=top_k, tokens=3)
        check(run(kernel, arguments), arguments)

    def test_a_plan_arranges_its_weights_once(self, kernel, monkeypatch) -> None:
        arguments = inputs(kernel)
        plan = kernelhub.fused_moe.prepare(**arguments, backend=kernel)
        step = (arguments["x"], arguments["topk_weights"], arguments["topk_ids"])
        want = run(kernel, arguments)
        seen: list[int] = []
        module = __import__("kernelhub.backends.flashinfer.moe.experts", fromlist=["_"])

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(args[3].data_ptr())
            return fake.cutlass_fused_moe(*args, **kwargs)

        monkeypatch.setattr(module, "cutlass_fused_moe", watched)
        for _ in range(3):
            assert torch.equal(plan.run(*step), want)
        assert len(set(seen)) == 1
        assert seen[0] != arguments["w13"].data_ptr()
        assert plan.workspace_bytes(num_tokens=64) >= 64 * 2 * (256 + 128) * 2

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_autocast_changes_nothing(self, kernel, dtype) -> None:
        arguments = inputs(kernel)
        plan = kernelhub.fused_moe.prepare(**arguments, backend=kernel)
        layer = {name: arguments[name] for name in ("w13", "w2", "w13_scale", "w2_scale") if name in arguments}
        want, packed = run(kernel, arguments), plan.pack(**layer)
        with torch.autocast("cpu", dtype):
            got, again = run(kernel, arguments), plan.pack(**layer)
        assert torch.equal(got.float(), want.float())
        for one, other in zip(again, packed, strict=True):
            for name, tensor in other.tensors.items():
                assert tensor is None or torch.equal(bits_of(one.tensors[name]), bits_of(tensor))

    def test_packed_weights_give_the_same_bits_and_come_back(self, kernel) -> None:
        arguments = inputs(kernel)
        plan = kernelhub.fused_moe.prepare(**arguments, backend=kernel)
        assert (plan.layout, plan.needs_packing) == ("experts.up_gate.v1", False)
        layer = [name for name in arguments if name in ("w13", "w2", "w13_scale", "w2_scale")]
        w13, w2 = plan.pack(**{name: arguments[name] for name in layer})
        packed = {name: item for name, item in arguments.items() if name not in layer} | {"w13": w13, "w2": w2}
        assert torch.equal(run(kernel, packed), run(kernel, arguments))
        again = kernelhub.fused_moe.prepare(**packed, backend=kernel)
        step = (arguments["x"], arguments["topk_weights"], arguments["topk_ids"])
        assert torch.equal(again.run(*step), plan.run(*step))
        for side, weight in (("w13", w13), ("w2", w2)):
            got, scale, *nothing = weight.unpack()
            assert torch.equal(got.view(torch.uint8), arguments[side].view(torch.uint8))
            assert scale is arguments.get(f"{side}_scale")
            assert nothing == [None, None]


def rejections(name: str, device: str, **facets: Any) -> set[str]:
    kernel = next(kernel for kernel in records.KERNELS if kernel.name == f"flashinfer.cutlass_experts{name}")
    problem = ExpertsProblem(device=simulated(device), **facets)
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1"})
    found = (constraint.reject(problem, machine) for constraint in kernel.constraints)
    return {rejection.code for rejection in found if rejection}


WHOLE = {"weights": "fp8_tensor", "activation_dtype": "float8_e4m3fn", "static_scales": True}


@pytest.mark.parametrize(
    ("name", "device", "facets", "codes"),
    [
        ("", "H200", {}, set()),
        ("", "B200", {"dtype": "float16", "activation_dtype": "float16"}, set()),
        ("", "A100", {}, {"capability"}),
        ("", "H200", {"intermediate_size": 100}, {"divisibility"}),
        ("", "H200", {"weights": "nvfp4"}, {"value"}),
        ("_fp8", "B200", WHOLE, set()),
        ("_fp8", "H200", WHOLE, {"capability"}),
        ("_fp8", "B200", WHOLE | {"static_scales": False}, {"value"}),
    ],
)
def test_limits_are_reported(name, device, facets, codes) -> None:
    assert rejections(name, device, **facets) == codes
