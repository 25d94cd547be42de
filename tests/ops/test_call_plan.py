"""Generated `run` functions: errors name the op, and tracebacks show their lines."""

from __future__ import annotations

import copy
import inspect
import pickle
import traceback

import pytest
import torch

import kernelhub


def test_an_unexpected_argument_of_run_names_the_op() -> None:
    plan = kernelhub.concat_mla_k.prepare(torch.zeros(2, 3, 8), torch.zeros(2, 1, 4))
    with pytest.raises(TypeError, match=r"^concat_mla_k\.run\(\) got an unexpected keyword argument 'scale'$"):
        plan.run(torch.zeros(2, 3, 8), torch.zeros(2, 1, 4), scale=1.0)


def test_a_traceback_shows_the_generated_line() -> None:
    plan = kernelhub.concat_mla_k.prepare(torch.zeros(2, 3, 8), torch.zeros(2, 1, 4))
    with pytest.raises(kernelhub.errors.InvalidArgument) as raised:
        plan.run(torch.zeros(2, 3, 8), torch.zeros(2, 1, 5))
    lines = [frame.line for frame in traceback.extract_tb(raised.tb) if frame.filename == "<plan of concat_mla_k>"]
    assert lines == ["return bound_run(k_nope, k_rope, out)"]


def test_run_takes_what_the_plan_does_not_fix() -> None:
    logits = torch.zeros(2, 8)
    plan = kernelhub.route_experts.prepare(logits, 2, scaling_factor=2.5, renormalize=True)
    assert list(inspect.signature(plan.run).parameters) == ["logits", "correction_bias", "out_weights", "out_ids"]
    assert plan.run(logits)[0].sum(-1).tolist() == [2.5, 2.5]


class TestCopies:
    """A module that has a plan is copied, or its plan says what to do."""

    def test_a_copied_module_runs_the_same_plan(self) -> None:
        q, k, v = torch.randn(3, 1, 5, 4, 16)
        module = torch.nn.Linear(3, 3)
        module.plan = kernelhub.attention.prepare(q, k, v, causal=True)
        assert torch.equal(copy.deepcopy(module).plan.run(q, k, v), module.plan.run(q, k, v))
        assert copy.copy(module.plan) is module.plan

    def test_a_plan_that_keeps_tensors_is_not_shared_with_a_copy(self) -> None:
        q, k, v = torch.randn(3, 1, 5, 4, 16)
        x, w13, w2 = torch.randn(3, 16), torch.randn(2, 32, 16), torch.randn(2, 16, 16)
        weights, ids = kernelhub.route_experts(torch.randn(3, 2), 1)
        for plan, kept in (
            (kernelhub.attention.prepare(q, k, v, sinks=torch.zeros(4)), "sinks"),
            (kernelhub.fused_moe.prepare(x, w13, w2, weights, ids), "w13, w2"),
        ):
            assert copy.copy(plan) is plan
            with pytest.raises(TypeError, match=f"keeps {kept}: prepare another plan"):
                copy.deepcopy(plan)

    def test_a_plan_is_not_pickled(self) -> None:
        plan = kernelhub.route_experts.prepare(torch.zeros(2, 8), 2)
        with pytest.raises(TypeError, match="belongs to this process: pickle its arguments"):
            pickle.dumps(plan)
