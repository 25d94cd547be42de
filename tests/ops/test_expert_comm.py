"""`moe_dispatch` and `moe_combine` on one rank: under torch.compile, and what their results say of themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.ops.comm.experts.inputs import dispatch_inputs
from kernelhub.ops.comm.experts.problem import FORMATS

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
