"""FlashInfer's merging of states keeps the contract of the op, with one of torch that knows no part without keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.merge.problem import MergeProblem
from kernelhub.probes.device import simulated
from tests.backends import flashinfer_cascade_fake as fake
from tests.backends.test_flashinfer import OnFake
from tests.contract.merge import MergeOfHalves

NAME = "flashinfer.merge"
WIDTHS = (64, 128, 256, 512)


class TestMerge(OnFake, MergeOfHalves):
    kernel = NAME

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("parts", [2, 3])
    def test_many_heads_are_several_blocks(self, width, parts) -> None:
        """More than the library starts by itself: 128 heads of 128 are 2048 threads."""
        arguments = self.inputs(num_heads=128, head_dim=width, tokens=3, parts=parts)
        self.check(self.run(arguments, return_lse=True), arguments)

    @pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 3), (40, 1)])
    def test_fewer_tokens_than_parts_are_not_rounded_in_between(self, shape) -> None:
        tokens, heads = shape
        fake.LAUNCHES.clear()
        for parts in (3, 8, 33):
            arguments = self.inputs(tokens=tokens, num_heads=heads, parts=parts, empty=False)
            self.check(self.run(arguments, return_lse=True), arguments)
        assert len(fake.LAUNCHES) == 3
        assert all(launch.startswith("at once") for launch in fake.LAUNCHES)

    @pytest.mark.parametrize("parts", [2, 3])
    def test_states_whose_strides_are_in_another_order_are_taken(self, parts) -> None:
        arguments = self.inputs(tokens=7, parts=parts)
        outs = [state.transpose(0, 2).contiguous().transpose(0, 2) for state in arguments["outs"]]
        assert not any(state.is_contiguous() for state in outs)
        self.check(self.run(arguments | {"outs": outs}, return_lse=True), arguments)

    @pytest.mark.parametrize("parts", [2, 4])
    def test_what_a_launch_cannot_count_is_several(self, parts, monkeypatch) -> None:
        from kernelhub.backends.flashinfer.cascade import merge

        arguments = self.inputs(tokens=21, parts=parts)
        want = self.run(arguments, return_lse=True)
        most = 5 * 64 * 4 * parts
        monkeypatch.setattr(merge, "_MOST_ELEMENTS", most)
        monkeypatch.setattr(fake, "MOST_ELEMENTS", most)
        fake.LAUNCHES.clear()
        for got, wanted in zip(self.run(arguments, return_lse=True), want, strict=True):
            assert torch.equal(got, wanted)
        assert len(fake.LAUNCHES) >= 3

    def test_the_library_alone_gives_nan_for_rows_without_keys(self) -> None:
        """Were it asked as it is: flashinfer 4051."""
        state = torch.zeros(1, 1, 64).half(), torch.full((1, 1), -torch.inf)
        other = [part.clone() for part in state]
        fake.merge_state_in_place(*state, *other)
        assert state[0].isnan().all()
        assert state[1].isnan().all()


def test_it_stands_before_torchs_and_is_taken_where_it_is_requested() -> None:
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1", "triton": "3.7.1"})
    selection = kernelhub.explain("merge_attention_states", device="H200", machine=machine)
    accepted = [decision.kernel for decision in selection.decisions if decision.accepted]
    assert accepted == ["triton.merge", NAME, "torch.merge"]
    asked = kernelhub.explain("merge_attention_states", device="A100", machine=machine, backend="flashinfer")
    assert asked.selected == NAME


@pytest.mark.parametrize(
    ("device", "facets", "codes"),
    [
        ("H200", {}, set()),
        ("A100", {"dtype": "float16", "head_dim": 512, "parts": "many", "batched": True, "lse": True}, set()),
        ("RTX5090", {"num_heads": 7}, set()),
        ("H200", {"dtype": "float32"}, {"dtype"}),
        ("H200", {"head_dim": 192}, {"value"}),
        ("MI300X", {}, {"vendor"}),
    ],
)
def test_limits_are_reported(device, facets: dict[str, Any], codes) -> None:
    kernel = next(kernel for kernel in records.KERNELS if kernel.name == NAME)
    problem = MergeProblem(device=simulated(device), **facets)
    machine = SimulatedMachine({"flashinfer": "0.6.1"})
    found = (constraint.reject(problem, machine) for constraint in kernel.constraints)
    assert {rejection.code for rejection in found if rejection} == codes


def test_without_its_module_nobody_waits_for_it() -> None:
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1"}, lacks={"modules", "nvcc"})
    told = kernelhub.explain("merge_attention_states", device="H200", machine=machine)
    decision = next(decision for decision in told.decisions if decision.kernel == NAME)
    assert not decision.accepted
    assert merge_inputs(tokens=1)["outs"][0].shape == (1, 128, 128)
