"""`packing=True`: who packs weights gets the best of all kernels, those that need it packed too, under one policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.standing import published
from kernelhub.errors import ConfigurationError, InvalidArgument, NoKernel
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from tests.backends.marlin_fake import on_the_cpu
from tests.conftest import DEVICE
from tests.dispatch.backends import EVERYWHERE, register
from tests.ops.test_packed import fp4_record, weight

INSTALLED = {"flashinfer": "0.6.18", "triton": "3.7.1"}
BF16 = {"num_experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768}
FP8 = {**BF16, "weights": "fp8_tensor", "activation_dtype": "fp8", "static_scales": True}
MXFP4 = {**BF16, "weights": "mxfp4"}
LAYERS = {
    "bf16": (BF16, "flashinfer.trtllm_experts", "flashinfer.cutlass_experts"),
    "fp8": (FP8, "flashinfer.trtllm_experts_fp8", "flashinfer.cutlass_experts_fp8"),
    "mxfp4": (MXFP4, "flashinfer.trtllm_experts_mxfp4", "triton.experts"),
}
PACKED = "mirror.v1"
CLAIMED = (published("*", evidence="https://example.com/fast", figure="2.1x of torch.dequantized", seconds=9),)


def experts(
    layer: dict[str, Any], *, device: str = "B200", packing: bool = True, backend: str | None = None, **told: Any
) -> Any:
    machine = kernelhub.SimulatedMachine(INSTALLED, **told)
    return kernelhub.fused_moe.explain(device=device, machine=machine, backend=backend, packing=packing, **layer)


def faster(selection: Any) -> list[str]:
    return [decision.kernel for decision in selection.faster]


@pytest.mark.parametrize(("layer", "best", "next_best"), LAYERS.values(), ids=LAYERS)
class TestExpertsOfAB200:
    def test_without_evidence_portable_ones_run_and_the_command_that_changes_it_is_named(
        self, layer, best, next_best
    ) -> None:
        selection = experts(layer)
        assert selection.selected == "triton.experts"
        assert faster(selection)[0] == best
        assert selection.faster[0].code == "untrusted"
        assert selection.faster[0].remedy.startswith(f"kernelhub verify fused_moe --backend {best}")
        assert f"faster: {best} would be first; untested on sm_100 (published: " in str(selection)

    def test_with_evidence_the_best_is_chosen_that_needs_its_weights_packed(self, layer, best, next_best) -> None:
        selection = experts(layer, verified=["flashinfer"])
        assert selection.selected == best
        assert "is required" in selection.weights
        assert faster(selection) == []
        assert experts(layer, verified=[best]).selected == best

    def test_evidence_of_the_next_alone_makes_that_one_first(self, layer, best, next_best) -> None:
        selection = experts(layer, verified=[next_best])
        assert (selection.selected, faster(selection)[0]) == (next_best, best)

    def test_quarantine_disable_and_filters_beat_evidence(self, layer, best, next_best) -> None:
        assert experts(layer, verified=["flashinfer"], wrong=[best]).selected == next_best
        with kernelhub.use(disable=best):
            assert experts(layer, verified=["flashinfer"]).selected == next_best
        with kernelhub.use(deterministic=True):
            assert experts(layer, verified=["flashinfer"]).selected == "triton.experts"

    def test_trust_is_that_of_the_policy(self, layer, best, next_best) -> None:
        with kernelhub.use(trust="vendor"):
            assert experts(layer).selected == best
        with kernelhub.use(trust="measured"):
            assert experts(layer, verified=["flashinfer"]).selected == "triton.experts"

    def test_a_request_and_a_preference_need_no_evidence(self, layer, best, next_best) -> None:
        assert experts(layer, backend="flashinfer").selected == best
        with kernelhub.use(prefer=best):
            assert experts(layer).selected == best
        with kernelhub.use(fused_moe="triton"):
            assert experts(layer, verified=["flashinfer"]).selected == "triton.experts"

    def test_who_does_not_pack_is_given_none_of_them(self, layer, best, next_best) -> None:
        for told in ({}, {"verified": ["flashinfer"]}):
            selection = experts(layer, packing=False, **told)
            assert selection.selected != best
            assert best not in faster(selection)
            decision = next(item for item in selection.decisions if item.kernel == best)
            assert "layout" in [rejection.code for rejection in decision.rejections]

    def test_evidence_is_of_one_class(self, layer, best, next_best) -> None:
        mine = kernelhub.dispatch.problem_class.unpacked_facets(experts(layer).problem)
        assert experts(layer, verified={best: [mine]}).selected == best
        assert experts({**layer, "top_k": 4}, verified={best: [mine]}).selected == "triton.experts"


FAMILIES = ("H200", "H100", "A100", "B200", "B300", "RTX 5090", "L40S", "MI300X")
CALLS = {
    "fused_moe": [layer for layer, *_ in LAYERS.values()],
    "fp4_gemm": [{}, {"a_format": "nvfp4", "b_format": "nvfp4"}, {"b_format": "mxfp4"}],
    "fp8_gemm": [{}, {"weight_only": "bfloat16"}],
}


@pytest.mark.parametrize("device", FAMILIES)
def test_packing_adds_kernels_and_changes_nothing_else(device) -> None:
    """What is decided about a kernel that reads a checkpoint's weights does not depend on whether others pack."""
    packages = {**INSTALLED, "vllm": "0.33.0"}
    for (op, layers), told in itertools.product(CALLS.items(), ([], ["*"])):
        machine = kernelhub.SimulatedMachine(packages, verified=told)
        for layer in layers:
            plain, packing = (
                kernelhub.explain(op, device=device, machine=machine, packing=said, **layer) for said in (False, True)
            )
            able = [{item.kernel for item in selection.decisions if item.accepted} for selection in (plain, packing)]
            assert able[0] <= able[1]
            records = {record.name: record for record in HUB.registry.candidates(op).kernels}
            assert all(records[name].needs_packing for name in able[1] - able[0])
            if not records[packing.selected].needs_packing:
                assert packing.selected == plain.selected
            if not told:
                assert all(
                    records[name].standing_on(packing.problem.device.family).word == "verified"
                    for name in able[1] - able[0]
                )


def test_an_op_without_weights_to_pack_says_so() -> None:
    with pytest.raises(ConfigurationError, match="attention takes no packed weights"):
        kernelhub.explain("attention", device="B200", packing=True)


@pytest.fixture
def arguments() -> dict[str, Any]:
    return fp4_gemm_inputs(tokens=3, n=8, k=64, device=DEVICE)


def mirror(name: str = "mirror.k", layouts: tuple[str, ...] = (PACKED,), standings: Any = EVERYWHERE) -> Kernel:
    return fp4_record(name, layouts=layouts, packs_to=PACKED, standings=standings)


class TestAPlan:
    def test_is_for_the_kernel_that_is_first_and_runs_what_it_packs(self, arguments) -> None:
        register("mirror", mirror())
        plan = kernelhub.fp4_gemm.prepare(**arguments, packing=True)
        assert (plan.kernel, plan.needs_packing) == ("mirror.k", True)
        assert kernelhub.fp4_gemm.explain(**arguments, packing=True).selected == "mirror.k"
        packed = plan.pack(**weight(arguments))
        want = kernelhub.fp4_gemm.reference(**arguments).bfloat16()
        assert torch.equal(plan.run(arguments["a"], packed), want)
        assert torch.equal(kernelhub.fp4_gemm(arguments["a"], packed), want)
        assert kernelhub.fp4_gemm.prepare(**arguments).kernel != "mirror.k"
        assert kernelhub.fp4_gemm.prepare(arguments["a"], packed, packing=True).kernel == "mirror.k"

    @pytest.mark.parametrize("backend", ["torch", "triton", "mirror"])
    def test_runs_what_it_packs_whichever_is_chosen(self, arguments, backend) -> None:
        register("mirror", mirror(layouts=("checkpoint", PACKED)))
        plan = kernelhub.fp4_gemm.prepare(**arguments, packing=True, backend=backend)
        packed = plan.pack(**weight(arguments))
        want = kernelhub.fp4_gemm.reference(**arguments).bfloat16()
        torch.testing.assert_close(plan.run(arguments["a"], packed), want)

    def test_untrusted_kernels_are_not_chosen(self, arguments) -> None:
        register("mirror", mirror(standings=CLAIMED))
        plan = kernelhub.fp4_gemm.prepare(**arguments, packing=True)
        selection = kernelhub.fp4_gemm.explain(**arguments, packing=True)
        assert plan.kernel == selection.selected != "mirror.k"
        assert faster(selection) == ["mirror.k"]
        with kernelhub.use(trust="vendor"):
            assert kernelhub.fp4_gemm.prepare(**arguments, packing=True).kernel == "mirror.k"

    @pytest.mark.parametrize("packing", [False, True])
    def test_where_nothing_else_can_run_the_error_names_what_trust_keeps_back(self, arguments, packing) -> None:
        register("mirror", mirror(standings=CLAIMED))
        with kernelhub.use(disable=("torch", "triton", "cpp")):
            with pytest.raises(NoKernel, match="would be first; untested on") as refused:
                kernelhub.fp4_gemm.prepare(**arguments, packing=packing)
            assert "kernelhub verify fp4_gemm --backend mirror.k" in str(refused.value)
            assert faster(refused.value.selection) == ["mirror.k"]
            assert kernelhub.fp4_gemm.prepare(**arguments, backend="mirror").kernel == "mirror.k"

    def test_a_layout_that_several_read_is_read_by_the_one_that_is_trusted(self, arguments) -> None:
        """Packing for a trusted kernel does not hand its weights to one that nobody verified."""
        register("first", mirror("first.k", standings=CLAIMED))
        register("second", mirror("second.k"))
        plan = kernelhub.fp4_gemm.prepare(**arguments, packing=True)
        assert plan.kernel == "second.k"
        packed = plan.pack(**weight(arguments))
        selection = kernelhub.fp4_gemm.explain(arguments["a"], packed)
        assert selection.selected == "second.k"
        assert faster(selection) == ["first.k"]
        with kernelhub.use(disable="second"):
            assert kernelhub.fp4_gemm.explain(arguments["a"], packed).selected == "first.k"

    def test_one_that_cannot_be_loaded_gives_way_to_the_next(self, arguments) -> None:
        broken = Kernel(
            **{**vars(mirror("broken.k", ("broken.v1",))), "target": "nosuch:Thing", "packs_to": "broken.v1"}
        )
        register("broken", broken)
        register("mirror", mirror())
        assert kernelhub.fp4_gemm.explain(**arguments, packing=True).selected == "broken.k"
        assert kernelhub.fp4_gemm.prepare(**arguments, packing=True).kernel == "mirror.k"
        assert kernelhub.fp4_gemm.explain(**arguments, packing=True).selected == "mirror.k"

    def test_weights_of_other_ops_are_taken_as_they_are_where_nothing_packs(self) -> None:
        arguments = fp8_gemm_inputs(tokens=3, n=128, k=128, device=DEVICE)
        plan = kernelhub.fp8_gemm.prepare(**arguments, packing=True)
        assert torch.equal(
            plan.run(*(arguments[name] for name in ("a", "b", "a_scale", "b_scale"))), kernelhub.fp8_gemm(**arguments)
        )


class TestAWeightThatAFormatDoesNotHold:
    """Marlin holds no scale below zero, and says so when it packs."""

    @pytest.fixture(autouse=True)
    def marlin(self, clean_hub: None) -> Iterator[None]:
        with on_the_cpu(), kernelhub.use(prefer="fake"):
            yield

    @staticmethod
    def unfit() -> dict[str, Any]:
        arguments = fp4_gemm_inputs(tokens=3, n=64, k=128)
        return {**arguments, "b_scale": (-arguments["b_scale"].float()).to(arguments["b_scale"].dtype)}

    def test_goes_to_the_next_kernel_which_is_said_once(self, caplog) -> None:
        fits, unfit = fp4_gemm_inputs(tokens=3, n=64, k=128), self.unfit()
        assert kernelhub.fp4_gemm.prepare(**fits, packing=True).kernel.startswith("fake.")
        for _ in range(2):
            plan = kernelhub.fp4_gemm.prepare(**unfit, packing=True)
            assert not plan.kernel.startswith("fake.")
        packed = plan.pack(**weight(unfit))
        assert torch.isfinite(plan.run(unfit["a"], packed)).all()
        assert sum("cannot pack this weight" in line for line in caplog.messages) == 1

    def test_is_refused_where_the_kernel_is_requested_and_where_strict_is_on(self) -> None:
        with pytest.raises(InvalidArgument, match="b_scale"):
            kernelhub.fp4_gemm.prepare(**self.unfit(), packing=True, backend="fake").pack(**weight(self.unfit()))
        with kernelhub.use(strict=True), pytest.raises(InvalidArgument, match="b_scale"):
            kernelhub.fp4_gemm.prepare(**self.unfit(), packing=True)
