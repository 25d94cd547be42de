"""Generated `run` functions: errors name the op, and tracebacks show their lines."""

from __future__ import annotations

import inspect
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
