"""What a step's `run` of `mla_attention` holds of its operands, at the first run and after right ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import MlaModel

z = torch.zeros


@pytest.fixture(params=[None, 5], ids=["all tokens", "listed"])
def given(request) -> dict[str, Any]:
    model = MlaModel("small", 4, 16, 8)
    made = mla_attention_inputs(model, seq_lens=(9, 20), page_size=16, dtype=torch.float32, device="cpu")
    if request.param:
        made["topk_indices"] = torch.arange(request.param, dtype=torch.int32).repeat(2, 1)
    return made


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after right ones"])
def test_a_step_refuses_what_does_not_fit_it(given: dict[str, Any], warm: bool) -> None:
    step = kernelhub.mla_attention.prepare(**given).begin(given["block_table"], given["seq_lens"])
    right = {"q": given["q"], "kv_cache": given["kv_cache"], "topk_indices": given.get("topk_indices")}
    nested = torch.nested.nested_tensor([z(4, 24), z(4, 24)])
    cache, out, listed = right["kv_cache"], z(2, 4, 16), right["topk_indices"]
    if warm:
        assert torch.equal(step.run(**right), step.run(**right, out=out))
        assert torch.equal(step.run(**right), kernelhub.mla_attention(**given))
    bad = [
        ("q", z(1, 4, 24)),
        ("q", z(3, 4, 24)),
        ("q", z(2, 4, 16)),
        ("q", z(2, 4, 24).half()),
        ("q", nested),
        ("q", torch._neg_view(z(2, 4, 24))),
        ("q", z(2, 4, 24).requires_grad_()),
        ("q", [1.0]),
        ("kv_cache", cache[:-1]),
        ("kv_cache", cache.half()),
        ("kv_cache", cache.to("meta")),
        ("kv_cache", nested),
        ("topk_indices", z(2, 5, dtype=torch.int32) if listed is None else None),
        ("topk_indices", nested),
        ("out", z(1, 4, 16)),
        ("out", z(3, 4, 16)),
        ("out", z(2, 4, 16).half()),
        ("out", z(1, 4, 16).expand(2, 4, 16)),
        ("out", nested),
        ("out", 3),
    ]
    if listed is not None:
        bad += [("topk_indices", listed[:1]), ("topk_indices", listed.long()), ("topk_indices", [[0]])]
    for parameter, wrong in bad:
        with pytest.raises(InvalidArgument) as caught:
            step.run(**(right | {parameter: wrong}))
        assert caught.value.parameter == parameter
        with pytest.raises(InvalidArgument) as caught:
            step.run(**({"out": out} | right | {parameter: wrong}))
        assert caught.value.parameter == parameter


def test_steps_of_one_plan_do_not_take_over_what_another_was_shown(given: dict[str, Any]) -> None:
    """A plan knows the form of its last runs; a step of fewer sequences still asks for its own."""
    plan = kernelhub.mla_attention.prepare(**given)
    right = {"q": given["q"], "kv_cache": given["kv_cache"], "topk_indices": given.get("topk_indices")}
    plan.begin(given["block_table"], given["seq_lens"]).run(**right)
    with pytest.raises(InvalidArgument, match="1 sequences"):
        plan.begin(given["block_table"][:1], given["seq_lens"][:1]).run(**right)
