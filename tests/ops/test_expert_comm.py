"""`moe_dispatch` and `moe_combine` on one rank: under torch.compile, and what their results say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.ops.comm.experts.cases import by_expert
from kernelhub.ops.comm.experts.inputs import dispatch_inputs
from kernelhub.ops.comm.experts.problem import FORMATS
from kernelhub.ops.comm.experts.received import Dispatched
from kernelhub.ops.comm.experts.results import Fresh, outputs_of
from kernelhub.ops.formats import E4M3

SMALL = {"tokens": 5, "hidden_size": 64, "num_experts": 8, "top_k": 2, "max_tokens": 9}


@pytest.mark.parametrize("format", FORMATS[1:2])
def test_both_are_one_graph(format: str) -> None:
    given = dispatch_inputs(**SMALL, format=format)
    name, most = given["group"], given["max_tokens"]

    def layer(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, str]:
        sent = kernelhub.moe_dispatch(x, topk_ids, topk_weights, name, 8, format=format, max_tokens=most)
        return kernelhub.moe_combine(sent.x * 2, sent.handle, name), sent.weighed_by

    operands = (given["x"], given["topk_ids"], given["topk_weights"])
    torch._dynamo.reset()
    out, weighed_by = torch.compile(layer, backend="aot_eager", fullgraph=True)(*operands)
    want, _ = layer(*operands)
    assert torch.equal(out, want)
    assert weighed_by == ("experts" if format == "tokens" else "combine")


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("format", FORMATS)
def test_a_result_is_written_again(format: str, dtype: torch.dtype) -> None:
    """With other numbers of tokens, eagerly and in a graph of torch.compile; its memory and its handle stay."""
    given = [
        dispatch_inputs(**SMALL | {"tokens": tokens}, format=format, dtype=dtype, seed=tokens) for tokens in (5, 0, 9)
    ]
    plan, options = kernelhub.moe_dispatch.prepare(**given[0]), {"max_tokens": 9, "format": format}
    names = ("x", "topk_ids", "topk_weights", "scales")

    def compiled(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None, out: Dispatched) -> Any:
        group = given[0]["group"]
        return kernelhub.moe_dispatch(x, topk_ids, topk_weights, group, 8, scales=scales, **options, out=out)

    torch._dynamo.reset()
    traced = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for run in (kernelhub.moe_dispatch, plan.run, *([traced] if dtype is E4M3 else [])):
        for out in (plan.results(), kernelhub.moe_dispatch(**given[0])):
            handle, places = out.handle, outputs_of(out)
            for turn, call in enumerate(given[:1] * 2 if run is traced else (*given, *given[:1] * 4)):
                for place in places:
                    place.view(torch.uint8).fill_(0xA5)
                operands = {name: call.get(name) for name in names}
                sent = run(**call if run is kernelhub.moe_dispatch else operands, out=out)
                assert all(one is other for one, other in zip(outputs_of(sent), places, strict=True))
                assert run is traced or (sent is out and out.handle is handle)
                got, want = by_expert(out), by_expert(kernelhub.moe_dispatch(**call))
                for name, part in want.items():
                    same = torch.equal(got[name].view(torch.uint8), part.view(torch.uint8))
                    assert same, (turn, name)
                y = torch.randn(out.x.shape).nan_to_num()
                want = kernelhub.moe_combine(y, kernelhub.moe_dispatch(**call).handle, call["group"])
                assert torch.equal(kernelhub.moe_combine(y, handle, call["group"]), want)


@pytest.mark.parametrize("format", FORMATS)
def test_results_of_a_plan_are_those_of_no_tokens(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A combine of one, and the experts, read no row, whatever its memory held."""
    given = dispatch_inputs(**SMALL, format=format)
    plan, alone = kernelhub.moe_dispatch.prepare(**given), Fresh.alone

    def used(fresh: Fresh) -> tuple[Tensor, ...]:
        places = alone(fresh)
        for place in places:
            place.view(torch.uint8).fill_(0x5A)
        return places

    monkeypatch.setattr(Fresh, "alone", used)
    out = plan.results()
    want = kernelhub.moe_dispatch(**dispatch_inputs(**SMALL | {"tokens": 0}, format=format))
    assert all(torch.equal(part, like) for part, like in zip(outputs_of(out)[1:], outputs_of(want)[1:], strict=True))
    assert kernelhub.moe_combine(torch.randn(out.x.shape), out.handle, given["group"]).shape == (0, 64)


def test_results_of_a_plan_need_a_capacity() -> None:
    plan = kernelhub.moe_dispatch.prepare(**dispatch_inputs(**SMALL | {"max_tokens": None}))
    with pytest.raises(kernelhub.errors.InvalidArgument, match="max_tokens is None"):
        plan.results()


def test_exact_shapes_are_refused_in_a_graph() -> None:
    given = dispatch_inputs(**SMALL | {"max_tokens": None})
    torch._dynamo.reset()
    with pytest.raises(Exception, match="exact shapes depend on values"):
        torch.compile(lambda arguments: kernelhub.moe_dispatch(**arguments).x, backend="eager", fullgraph=True)(given)


@pytest.mark.parametrize("most", [None, 9])
@pytest.mark.parametrize("format", FORMATS)
def test_the_format_is_that_of_the_call(format: str, most: int | None) -> None:
    sent = kernelhub.moe_dispatch(**dispatch_inputs(**SMALL | {"max_tokens": most}, format=format))
    assert sent.format == format
    rows = {"tokens": most or 5, "contiguous": 2 * (most or 5), "masked": most or int(sent.counts.max())}[format]
    assert sent.x.shape[-2] == rows
    assert int(sent.counts.sum()) == 10
