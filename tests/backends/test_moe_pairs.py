"""The pairs of a dispatch format and an op for experts keep the contract of `expert_parallel_moe`."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.moe_pairs.kernels import PAIRS
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.moe.parallel.inputs import parallel_inputs
from tests.contract.experts_comm import ParallelContract

pytestmark = pytest.mark.device
SMALL: dict[str, Any] = {
    "tokens": 5,
    "num_experts": 4,
    "hidden_size": 64,
    "intermediate_size": 32,
    "top_k": 2,
    "max_tokens": 8,
}


class TestTokens(ParallelContract):
    kernel = "moe_pairs.tokens"


class TestContiguous(ParallelContract):
    kernel = "moe_pairs.contiguous"


class TestMasked(ParallelContract):
    kernel = "moe_pairs.masked"


class TestContiguousFp8(ParallelContract):
    kernel = "moe_pairs.contiguous_fp8"


class TestMaskedFp8(ParallelContract):
    kernel = "moe_pairs.masked_fp8"


def test_every_pair_of_the_table_is_a_kernel() -> None:
    known = {name for name in kernelhub.expert_parallel_moe.kernels() if not name.startswith("unsupported.")}
    assert known == {f"moe_pairs.{pair.name}" for pair in PAIRS}


def test_a_pair_refuses_weights_that_its_experts_do_not_take() -> None:
    given = parallel_inputs(**SMALL, weights="mxfp4")
    assert kernelhub.expert_parallel_moe.explain(**given).selected == "moe_pairs.tokens"
    with pytest.raises(NoKernel, match="grouped_gemm runs these in format masked"):
        kernelhub.expert_parallel_moe(**given, backend="moe_pairs.masked")
    blocks = parallel_inputs(**SMALL | {"hidden_size": 128, "intermediate_size": 128}, weights="fp8_block")
    with pytest.raises(NoKernel, match="which is opt-in"):
        kernelhub.expert_parallel_moe(**blocks, backend="moe_pairs.masked_fp8")


def test_a_plan_names_its_steps() -> None:
    plan = kernelhub.expert_parallel_moe.prepare(**parallel_inputs(**SMALL), backend="moe_pairs.contiguous")
    steps = [part.step for part in plan.parts]
    assert steps == ["moe_dispatch", "grouped_gemm", "silu_and_mul", "grouped_gemm", "moe_combine"]
    assert "format contiguous" in str(plan.parts[0])
    assert "weights applied by the combine" in str(plan.parts[-1])
    assert all(part.selection.selected for part in plan.parts if part.selection)


def test_a_plan_is_of_its_room_and_shapes() -> None:
    given = parallel_inputs(**SMALL)
    plan = kernelhub.expert_parallel_moe.prepare(**given)
    operands = [given[name] for name in ("x", "w13", "w2", "topk_weights", "topk_ids")]
    assert torch.equal(plan.run(*operands), kernelhub.expert_parallel_moe(**given))
    more = [operands[0].repeat(2, 1), *operands[1:3], operands[3].repeat(2, 1), operands[4].repeat(2, 1)]
    with pytest.raises(InvalidArgument, match="has 10 tokens; max_tokens is 8"):
        plan.run(*more)
    narrow = parallel_inputs(**SMALL | {"hidden_size": 32})
    with pytest.raises(InvalidArgument, match="the plan is for 64"):
        plan.run(*(narrow[name] for name in ("x", "w13", "w2", "topk_weights", "topk_ids")))


@pytest.mark.parametrize(
    ("parameter", "changes", "words"),
    [
        ("x", {"x": torch.zeros(5, 32)}, "expert_parallel_moe: "),
        ("w2", {"w2": None}, "expert_parallel_moe: w2"),
        ("topk_ids", {"topk_ids": torch.zeros(5, 2)}, "expert_parallel_moe: topk_ids"),
        ("group", {"group": "nobody"}, "not registered"),
        ("max_tokens", {"max_tokens": 0}, "is 0"),
        ("max_tokens", {"max_tokens": True}, "is True"),
        ("x", {"max_tokens": 4}, "has 5 tokens"),
        ("out", {"out": torch.zeros(5, 32)}, r"\[5, 32\]"),
    ],
)
def test_the_parameter_is_named(parameter: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.expert_parallel_moe(**parallel_inputs(**SMALL) | changes)
    assert caught.value.parameter == parameter or parameter == "x"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_explain_names_the_steps_that_a_plan_runs(pair: Any) -> None:
    blocks = {"hidden_size": 128, "intermediate_size": 128, "weights": "fp8_block", "activation_dtype": "fp8_block"}
    given = parallel_inputs(**SMALL | (blocks if pair.float8 else {}))
    kernel = f"moe_pairs.{pair.name}"
    explained = kernelhub.expert_parallel_moe.explain(**given, backend=kernel)
    plan = kernelhub.expert_parallel_moe.prepare(**given, backend=kernel)
    assert [step.split()[0].rstrip(",") for step in explained.steps] == [part.step for part in plan.parts]
    assert f"moe_dispatch in format {pair.format}" in explained.steps
    assert explained.to_dict()["steps"] == list(explained.steps)
    assert f"steps: {'; '.join(explained.steps)}" in str(explained)


@pytest.mark.parametrize("max_tokens", [8, 300, None])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_explain_names_the_kernel_that_runs_in_each_step(pair: Any, max_tokens: int | None) -> None:
    blocks = {"hidden_size": 128, "intermediate_size": 128, "weights": "fp8_block", "activation_dtype": "fp8_block"}
    given = parallel_inputs(**SMALL | {"max_tokens": max_tokens} | (blocks if pair.float8 else {}))
    kernel = f"moe_pairs.{pair.name}"
    explained = kernelhub.expert_parallel_moe.explain(**given, backend=kernel)
    plan = kernelhub.expert_parallel_moe.prepare(**given, backend=kernel)
    ran = [
        (part.selection.op, part.selection.problem, part.selection.selected) for part in plan.parts if part.selection
    ]
    named = [(part.op, part.problem, part.selected) for part in explained.calls]
    assert [one for one in ran if one not in named] == []
    assert [part["op"] for part in explained.to_dict()["parts"]] == [op for op, *_ in named]
    for op, _, selected in ran:
        assert f"  {op} by {selected}" in str(explained)
    assert "unsupported.deep_ep_elastic (no_adapter)" in str(explained)
    again = pickle.loads(pickle.dumps(explained))
    assert [(part.op, part.problem, part.selected) for part in again.calls] == named


def test_the_link_of_the_ranks_decides_on_the_kernels_of_a_pair() -> None:
    machine = SimulatedMachine({"triton": "3.7.1"})
    facets = {"device": "H200", "world_size": 4, "backend": "moe_pairs.tokens", "machine": machine}
    linked = kernelhub.explain(kernelhub.expert_parallel_moe, **facets, link="nvlink")
    apart = kernelhub.explain(kernelhub.expert_parallel_moe, **facets, link="network")
    exact = kernelhub.explain(kernelhub.expert_parallel_moe, **facets, link="network", capacity="exact")
    assert [linked.calls[at].selected for at in (0, -1)] == ["triton.push"] * 2
    assert [apart.calls[at].selected for at in (0, -1)] == ["torch.gather_fixed", "torch.reduce_scatter_fixed"]
    assert [exact.calls[at].selected for at in (0, -1)] == ["torch.all_to_all"] * 2
    assert exact.calls[-1].problem.rows == "needed"
    assert any(one.kernel == "triton.push" and not one.accepted for one in apart.calls[0].decisions)
    assert "triton.push (" in str(apart)
    assert [step for step, _, _ in linked.called] == ["moe_dispatch", "fused_moe", "fused_moe", "moe_combine"]
    assert [kernel.partition(" (")[2] for _, kernel, _ in linked.called] == ["", "rows few)", "rows many)", ""]
