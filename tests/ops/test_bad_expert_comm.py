"""Arguments of expert collectives that break the contract: one error that names the parameter, before a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.comm.experts.problem import FORMATS
from kernelhub.ops.comm.experts.results import outputs_of
from kernelhub.ops.comm.inputs import alone

z = torch.zeros
CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn


def tokens(**changes: Any) -> dict[str, Any]:
    usual = {"x": z(4, 130), "topk_ids": z(4, 2).int(), "topk_weights": z(4, 2), "group": alone(CPU), "num_experts": 8}
    return usual | changes


def results(**changes: Any) -> dict[str, Any]:
    sent = kernelhub.moe_dispatch(**tokens(), max_tokens=6)
    return {"y": sent.x, "handle": sent.handle, "group": alone(CPU)} | changes


def header(**numbers: int) -> list[torch.Tensor]:
    handle = list(results()["handle"])
    handle[0] = handle[0].clone()
    for place, number in numbers.items():
        handle[0][int(place[1:])] = number
    return handle


DISPATCH = [
    ("x", {"x": 3}, "is int"),
    ("x", {"x": z(4)}, r"shape \[4\]"),
    ("x", {"x": z(4, 0)}, r"shape \[4, 0\]"),
    ("x", {"x": z(4, 130).int()}, "int32"),
    ("x", {"x": z(4, 130, device="meta")}, "meta"),
    ("x", {"x": z(4, 130, requires_grad=True)}, "requires grad"),
    ("x", {"max_tokens": 3}, "has 4 tokens; max_tokens is 3"),
    ("topk_ids", {"topk_ids": z(4, 2).long()}, "int64"),
    ("topk_ids", {"topk_ids": z(3, 2).int()}, r"\[3, 2\]"),
    ("topk_ids", {"topk_ids": z(4, 0).int()}, r"\[4, 0\]"),
    ("topk_weights", {"topk_weights": z(4, 2).half()}, "float16"),
    ("topk_weights", {"topk_weights": z(4, 3)}, "topk_ids has 2 columns"),
    ("topk_weights", {"topk_weights": z(4, 2, device="meta")}, "meta"),
    ("group", {"group": None}, "is NoneType"),
    ("group", {"group": "nobody"}, "not registered"),
    ("group", {"group": dist.GroupMember.NON_GROUP_MEMBER}, "excludes this process"),
    ("num_experts", {"num_experts": 0}, "is 0"),
    ("num_experts", {"num_experts": 2.0}, "is 2.0"),
    ("scales", {"scales": z(4, 2)}, "is given; x is float32"),
    ("scales", {"x": z(4, 130).to(E4M3)}, "is missing"),
    ("scales", {"x": z(4, 130).to(E4M3), "scales": z(4, 1)}, r"float32 \[4, 2\]"),
    ("scales", {"x": z(4, 130).to(E4M3), "scales": z(4, 2).half()}, "float16"),
    ("format", {"format": "grouped"}, "tokens, contiguous, masked"),
    ("format", {"format": None}, "is None"),
    ("max_tokens", {"max_tokens": 0}, "is 0"),
    ("max_tokens", {"max_tokens": 8.0}, "is 8.0"),
]
COMBINE = [
    ("y", {"y": z(6, 130).int()}, "int32"),
    ("y", {"y": z(5, 130)}, r"give \[6, H\], a row for each of the dispatched x \(tokens\)"),
    ("y", {"y": z(6)}, r"\[6\]"),
    ("y", {"y": z(6, 130, device="meta")}, "meta"),
    ("y", {"y": z(6, 130, requires_grad=True)}, "requires grad"),
    ("handle", {"handle": None}, "is no handle"),
    ("handle", {"handle": []}, "is no handle"),
    ("handle", {"handle": [z(1)] * 6}, "is no handle"),
    ("group", {"group": "nobody"}, "not registered"),
    ("out", {"out": z(5, 130)}, r"\[5, 130\]"),
    ("out", {"out": z(4, 130).half()}, "float16"),
    ("out", {"out": z(1, 130).expand(4, 130)}, "out"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "changes", "words"), DISPATCH)
def test_a_dispatch_names_the_parameter(parameter: str, changes: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.moe_dispatch(**tokens())
        kernelhub.moe_dispatch(**tokens(), max_tokens=6)
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.moe_dispatch(**tokens(**changes))
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_destination_of_another_form_is_refused_by_name(format: str, warm: bool) -> None:
    """Before anything is launched: no tensor of the destination changes, nor its handle."""
    given: dict[str, Any] = tokens() | {"format": format, "max_tokens": 6}
    good = kernelhub.moe_dispatch(**given)
    for _ in range(5 if warm else 0):
        assert kernelhub.moe_dispatch(**given, out=good) is good
    other = kernelhub.moe_dispatch(**given | {"format": FORMATS[FORMATS.index(format) - 1]})
    wide = z(*good.x.shape[:-1], 131)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (good, {"max_tokens": None}, "without max_tokens"),
        (good, {"max_tokens": 7}, "out.x has shape"),
        (tuple(good), {}, "out is tuple"),
        (good.x, {}, "out is Tensor"),
        (other, {}, "out"),
        (good._replace(handle=good.handle[:4]), {}, "out is Dispatched"),
        (good._replace(handle=tuple(good.handle)), {}, "out is Dispatched"),
        (good._replace(x=good.x[..., :-1]), {}, "out.x has shape"),
        (good._replace(x=good.x.half()), {}, "out.x has dtype float16"),
        (good._replace(x=good.x.to("meta")), {}, "out.x"),
        (good._replace(x=wide[..., 1:]), {}, "out.x has strides"),
        (good._replace(x=z(*good.x.shape[:-1], 1).expand(good.x.shape)), {}, "out.x overlaps itself"),
        (good._replace(x=z(*good.x.shape, requires_grad=True)), {}, "out.x requires grad"),
        (good._replace(counts=good.counts.long()), {}, "out.counts has dtype int64"),
        (good._replace(counts=good.x.view(-1).view(torch.int32)[:8]), {}, "out.counts overlaps out.x"),
        (good._replace(scales=z(12, 2)), {}, "out.scales is given"),
        (good, {"x": good.x.view(-1, 130)[:4]}, "out.x overlaps x"),
        (good, {"topk_ids": good.handle[2][:4]}, "overlaps topk_ids"),
    ]
    before = [part.view(torch.uint8).clone() for part in outputs_of(good)], list(good.handle)
    for out, changes, words in cases:
        with pytest.raises(InvalidArgument, match=words) as caught:
            kernelhub.moe_dispatch(**given | changes, out=out)
        assert caught.value.parameter.partition(".")[0] == "out"
    assert all(torch.equal(part.view(torch.uint8), was) for part, was in zip(outputs_of(good), before[0], strict=True))
    assert all(one is other for one, other in zip(good.handle, before[1], strict=True))


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "changes", "words"), COMBINE)
def test_a_combine_names_the_parameter(parameter: str, changes: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.moe_combine(**results())
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.moe_combine(**results(**changes))
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_result_of_a_combine_shares_no_memory_with_the_handle(at: int) -> None:
    given = results()
    memory = z(1000)
    part = given["handle"][at]
    place = memory[: part.numel()].view(part.dtype).view(part.shape).copy_(part)
    given["handle"] = [*given["handle"][:at], place, *given["handle"][at + 1 :]]
    apart, overlapping = memory[400:920].view(4, 130), memory[part.numel() - 1 :][:520].view(4, 130)
    for _ in range(4):
        kernelhub.moe_combine(**given, out=apart)
    with pytest.raises(InvalidArgument, match=rf"out overlaps handle\[{at}\]") as caught:
        kernelhub.moe_combine(**given, out=overlapping)
    assert caught.value.parameter == "out"


@pytest.mark.parametrize(
    "numbers", [{"_0": 3}, {"_1": -1}, {"_1": 9}, {"_2": 0}, {"_3": 0}, {"_4": 5}, {"_6": -6}], ids=str
)
def test_a_damaged_handle_is_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="is no handle") as caught:
        kernelhub.moe_combine(**results(handle=header(**numbers)))
    assert caught.value.parameter == "handle"


def test_a_plan_refuses_what_it_was_not_prepared_for() -> None:
    plan = kernelhub.moe_dispatch.prepare(**tokens(), max_tokens=6)
    with pytest.raises(InvalidArgument, match="the plan is for 130"):
        plan.run(z(4, 128), z(4, 2).int(), z(4, 2))
    with pytest.raises(InvalidArgument, match="the plan is for 2"):
        plan.run(z(4, 130), z(4, 3).int(), z(4, 3))
    with pytest.raises(InvalidArgument, match="has 7 tokens; max_tokens is 6"):
        plan.run(z(7, 130), z(7, 2).int(), z(7, 2))
    sent = plan.run(z(6, 130), z(6, 2).int(), z(6, 2))
    combine = kernelhub.moe_combine.prepare(sent.x, sent.handle, alone(CPU))
    with pytest.raises(InvalidArgument, match=r"the plan is for torch\.float32"):
        combine.run(sent.x.half(), sent.handle)
    exact = kernelhub.moe_dispatch(**tokens())
    with pytest.raises(InvalidArgument, match="the plan is for few"):
        combine.run(exact.x, exact.handle)


def test_a_format_that_the_expert_kernel_does_not_take_is_named() -> None:
    sent = kernelhub.moe_dispatch(**tokens(), format="masked")
    with pytest.raises(InvalidArgument, match="x"):
        kernelhub.fused_moe(sent.x, z(8, 64, 130), z(8, 130, 32), z(4, 2), z(4, 2).int())
    for format in ("contiguous", "masked"):
        sent = kernelhub.moe_dispatch(**tokens(), format=format)
        with pytest.raises(InvalidArgument, match=r"topk_weights is None; .*grouped_gemm takes rows that are sorted"):
            kernelhub.fused_moe(sent.x, z(8, 64, 130), z(8, 130, 32), sent.topk_weights, sent.topk_ids)
    sent = kernelhub.moe_dispatch(**tokens(), format="tokens")
    with pytest.raises(InvalidArgument, match="offsets and group_sizes are both missing"):
        kernelhub.grouped_gemm(sent.x, z(8, 64, 130), offsets=sent.offsets)


@pytest.mark.parametrize("op", ["moe_dispatch", "moe_combine"])
def test_a_backend_other_than_the_usual_is_rejected(op: str) -> None:
    selection = kernelhub.explain(op, device="CPU", group_backend="other")
    assert selection.selected is None
    with pytest.raises(NoKernel, match="neither NCCL for a GPU nor gloo for a CPU"):
        raise getattr(kernelhub, op).op.no_kernel(selection, None)


def test_experts_that_ranks_cannot_share_equally_are_a_contradiction() -> None:
    with pytest.raises(Exception, match="10, which 4 ranks cannot share equally"):
        kernelhub.explain("moe_dispatch", device="CPU", num_experts=10, world_size=4)
