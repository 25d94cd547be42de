"""A warm-up with `packing=True` earns trust for kernels that need their weights packed, and makes them ready so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.constraint import OnDevice, OneOf, anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.standing import published
from kernelhub.evidence import trust
from kernelhub.ops.models.calls import need_of
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import PLAIN
from kernelhub.probes.device import facts
from kernelhub.warming.outcome import BEFORE
from kernelhub.warming.there import list_wanted
from tests.backends.marlin_fake import on_the_cpu
from tests.dispatch.backends import register
from tests.ops.test_packed_experts import LAYER, SIZES, Mirrored, layer, record

CLAIMED = (published("*", evidence="https://example.com/fast", figure="3x of torch.experts", seconds=9),)
QUICK: dict[str, Any] = {"token_counts": [2, 5], "device": "cpu", "jobs": 1}


class Spoilt(Mirrored):
    """Packs rightly, and computes wrongly."""

    def launch(self, *arguments: Any) -> None:
        super().launch(*arguments)
        arguments[-1].mul_(1.5)


def claimed(name: str, tag: str, target: str) -> Kernel:
    made = record(name, tag)
    fields = {field for constraint in made.constraints for field in constraint.fields} - {"device", "weights"}
    plain = (OnDevice("cpu"), OneOf("weights", (PLAIN,)), anything(*sorted(fields)))
    return dataclasses.replace(made, target=target, standings=CLAIMED, constraints=plain)


RIGHT = claimed("mirror.right", "experts.mirror.v1", "tests.ops.test_packed_experts:Mirrored")
WRONG = claimed("broken.wrong", "experts.broken.v1", f"{__name__}:Spoilt")


@pytest.fixture(autouse=True)
def nothing_earned() -> Iterator[None]:
    yield
    trust.forget_unwritten()


@pytest.fixture
def arguments() -> dict[str, Any]:
    return moe_inputs(**SIZES)


def need(arguments: dict[str, Any]) -> Any:
    return need_of("fused_moe", kernelhub.fused_moe.explain(**arguments).problem)


def chosen(arguments: dict[str, Any]) -> str | None:
    selection = kernelhub.fused_moe.explain(**arguments, packing=True)
    assert kernelhub.fused_moe.prepare(**arguments, packing=True).kernel == selection.selected
    assert kernelhub.explain("fused_moe", device="cpu", packing=True, **dict(need(arguments).facets)).selected == (
        selection.selected
    )
    return selection.selected


def test_it_is_earned_then_chosen_and_gives_the_reference_s_numbers(arguments) -> None:
    register("mirror", RIGHT)
    before = chosen(arguments)
    assert before != "mirror.right"
    done = kernelhub.warmup([need(arguments)], packing=True, **QUICK)
    assert done.ok
    assert [(item.kernel, item.ok) for item in done.earned] == [("mirror.right", True)]
    assert {item.kernel for item in done.items} == {"mirror.right"}
    assert chosen(arguments) == "mirror.right"
    assert kernelhub.fused_moe.explain(**arguments).selected == before, "who does not pack has what he had"

    call = {name: value for name, value in arguments.items() if name not in LAYER}
    want = kernelhub.fused_moe.reference(**arguments)
    with kernelhub.seal():
        plan = kernelhub.fused_moe.prepare(**arguments, packing=True)
        w13, w2 = plan.pack(**layer(arguments))
        again = kernelhub.fused_moe.prepare(**call, w13=w13, w2=w2)
        step = (arguments["x"], arguments["topk_weights"], arguments["topk_ids"])
        for out in (plan.run(*step), again.run(*step), kernelhub.fused_moe(**call, w13=w13, w2=w2)):
            torch.testing.assert_close(out.float(), want.float(), atol=2e-2, rtol=2e-2)

    HUB.forget_evidence()  # as a later process would, from what is on disk
    assert chosen(arguments) == "mirror.right"
    second = kernelhub.warmup([need(arguments)], packing=True, **QUICK)
    assert second.earned == ()
    third = kernelhub.warmup([need(arguments)], packing=True, **QUICK)
    assert {item.how for item in third.items} == {BEFORE}


def test_one_that_is_wrong_is_quarantined_and_the_next_is_tried(arguments) -> None:
    register("broken", WRONG)
    register("mirror", RIGHT)
    done = kernelhub.warmup([need(arguments)], packing=True, **QUICK)
    assert [(item.kernel, item.ok) for item in done.earned] == [("broken.wrong", False), ("mirror.right", True)]
    assert chosen(arguments) == "mirror.right"
    with kernelhub.use(trust="vendor"):
        selection = kernelhub.fused_moe.explain(**arguments, packing=True)
    assert selection.selected == "mirror.right"
    assert next(item.code for item in selection.decisions if item.kernel == "broken.wrong") == "quarantined"


def test_without_packing_nothing_is_earned_for_it(arguments) -> None:
    register("mirror", RIGHT)
    done = kernelhub.warmup([need(arguments)], **QUICK)
    assert done.earned == ()
    assert "mirror.right" not in {item.kernel for item in done.items}


def test_a_plan_that_packs_is_made_ready_as_it_is(arguments) -> None:
    register("mirror", RIGHT)
    with kernelhub.use(trust="vendor"):
        plan = kernelhub.fused_moe.prepare(**arguments, packing=True)
        done = kernelhub.warmup([plan], verify=False, **QUICK)
        assert {item.kernel for item in done.items} == {plan.kernel} == {"mirror.right"}


def test_what_has_no_weights_to_pack_is_made_ready_as_ever() -> None:
    quantize = need_of("route_experts", kernelhub.explain("route_experts", device="cpu", num_experts=16).problem)
    assert kernelhub.warmup([quantize], packing=True, verify=False, **QUICK).ok


def test_a_list_for_another_device_names_kernels_that_pack() -> None:
    machine = kernelhub.SimulatedMachine({"flashinfer": "0.6.18", "triton": "3.7.1"}, verified=["flashinfer"])
    for packing, kernel in ((False, "flashinfer.cutlass_experts"), (True, "flashinfer.trtllm_experts")):
        listed = list_wanted("qwen3-30b-a3b", device="B200", machine=machine, packing=packing)
        assert {item.kernel for item in listed if item.op == "fused_moe"} == {kernel}


PRODUCTS: dict[str, dict[str, Any]] = {
    "fp4_gemm": {"n": 64, "k": 128},
    "fp8_gemm": {"n": 64, "k": 128, "weight_only": "bfloat16", "scaling": "row"},
}


def warmed_product(op: str) -> Any:
    """Marlin's kernels, in plain torch and verified by nobody, where they would be first."""
    selection = kernelhub.explain(op, device="cpu", packing=True, **PRODUCTS[op])
    assert not selection.selected.startswith("fake.")
    (tried,) = kernelhub.warmup([need_of(op, selection.problem)], packing=True, **QUICK).earned
    return tried, kernelhub.explain(op, device="cpu", packing=True, **PRODUCTS[op])


def test_a_product_with_packed_weights_is_earned_too() -> None:
    with on_the_cpu(standings=CLAIMED):
        tried, selection = warmed_product("fp4_gemm")
    assert tried.ok
    assert selection.selected == tried.kernel


@pytest.mark.parametrize("scaling", ["row", "tensor", "block"])
def test_a_format_that_rounds_scales_is_asked_with_scales_that_it_holds(scaling) -> None:
    """Marlin's scales have the dtype of the activations, and those of blocks are powers of two."""
    product = {**PRODUCTS["fp8_gemm"], "k": 256, "scaling": scaling}
    with on_the_cpu(standings=CLAIMED):
        problem = kernelhub.explain("fp8_gemm", device="cpu", **product).problem
        done = kernelhub.warmup([need_of("fp8_gemm", problem)], packing=True, **QUICK)
        (tried,) = done.earned
        assert tried.ok
        assert kernelhub.explain("fp8_gemm", device="cpu", packing=True, **product).selected == tried.kernel
        assert {(item.kernel, item.how != "failed") for item in done.items} == {(tried.kernel, True)}
        assert not any("in place of" in item.reason for item in done.items)
        (covered,) = trust.covered(facts(torch.device("cpu")))["fp8_gemm", tried.kernel]
        bits = 1 if scaling == "block" else 8
        assert all(f"scales of {bits} bits" in call for call in covered.calls), "said where the evidence lies"
