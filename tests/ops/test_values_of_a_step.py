"""The layers of a step share its tensors. The next step may lie in the same: what was read on the host is read anew."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.attention import dense_call, paged_call
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.mla.attention import call as mla_call
from kernelhub.ops.mla.attention.call import MlaValues
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import AttentionModel, MlaModel

SMALL = AttentionModel("small", 4, 2, 64, 64)


def bound(module: Any, function: Any, kernel: str, arguments: dict[str, Any]) -> Any:
    """What a direct call on a GPU runs, in CPU memory."""
    plan = function.prepare(**arguments, backend=kernel)
    facts = dataclasses.replace(plan.selection.problem.device, type="cuda")
    problem = dataclasses.replace(plan.selection.problem, device=facts)
    adapter = type(plan.adapter)(problem)
    assert not adapter.plans_steps
    return module.bind(adapter, problem, -1, lambda: 0, pytest.fail)


def test_offsets_of_packed_sequences() -> None:
    arguments = attention_inputs(SMALL, q_lens=(5, 20, 3), kv_lens=(5, 20, 3), dtype=torch.float32, device="cpu")
    arguments["causal"] = False
    run = bound(dense_call, kernelhub.attention, "torch.blocked", arguments)
    q, k, v, *offsets = (arguments[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    for lens in ((5, 20, 3), (3, 20, 5), (1, 1, 26)):
        for ends in offsets:
            ends[1:] = torch.tensor(lens).cumsum(0)
        out = run(q, k, v, q.shape, k.shape, v.shape, None, None, *offsets)
        torch.testing.assert_close(out, kernelhub.attention.reference(**arguments), rtol=1e-4, atol=1e-4)


def test_lengths_of_a_paged_cache() -> None:
    arguments = paged_attention_inputs(SMALL, seq_lens=(40, 9, 77), page_size=16, dtype=torch.float32, device="cpu")
    run = bound(paged_call, kernelhub.paged_attention, "torch.blocked", arguments)
    q, *rest = (arguments[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens"))
    for lens in ((40, 9, 77), (4, 3, 70), (1, 8, 2)):
        rest[-1].copy_(torch.tensor(lens))
        out = run(q, *rest, q.shape, None, None)
        torch.testing.assert_close(out, kernelhub.paged_attention.reference(**arguments), rtol=1e-4, atol=1e-4)


def test_lengths_of_a_latent_cache() -> None:
    model = MlaModel("small", 4, 64, 16)
    arguments = mla_attention_inputs(model, seq_lens=(40, 9, 77), page_size=16, dtype=torch.float32, device="cpu")
    run = bound(mla_call, kernelhub.mla_attention, "torch.gathered", arguments)
    values = MlaValues(arguments["scale"])
    for lens in ((40, 9, 77), (4, 3, 70), (1, 8, 2)):
        arguments["seq_lens"].copy_(torch.tensor(lens))
        operands = (arguments[name] for name in ("q", "kv_cache", "block_table", "seq_lens"))
        out = run(*operands, None, None, None, values, None)
        torch.testing.assert_close(out, kernelhub.mla_attention.reference(**arguments), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outlives", [False, True])
def test_a_plan_s_step_reads_once(outlives) -> None:
    """It is one engine step's, and `begin` makes another for the next."""
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    dense, paged = DenseStep(ends, ends), PagedStep(table, ends[1:], ends)
    for step in (dense, paged) if outlives else ():
        step.outlive()
    before = [dense.q_offsets(), dense.k_offsets(), paged.q_offsets(), paged.lengths()]
    ends += 1
    after = [dense.q_offsets(), dense.k_offsets(), paged.q_offsets(), paged.lengths()]
    assert (before == after) is not outlives


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, where nobody looks at its values unless asked to."""

    is_cpu = False


def test_what_a_kernel_reads_on_the_host_is_looked_at() -> None:
    """Without KERNELHUB_CHECK, too: lengths past the block table would end the device in the look-up of pages."""
    arguments = paged_attention_inputs(SMALL, seq_lens=(40, 9), q_lens=(3, 2), page_size=16, device="cpu")
    table, names = arguments["block_table"], ("seq_lens", "cu_seqlens_q")
    right = {name: arguments[name].as_subclass(OnDevice) for name in names}
    plan = kernelhub.paged_attention.prepare(**arguments, backend="triton.prefill")
    assert plan.begin(table, **right).metadata.lengths() == [40, 9]
    for name, wrong, words in (("seq_lens", [49, 9], "is 49 for sequence 0"), ("cu_seqlens_q", [0, 3, 2], "falls")):
        given = right | {name: torch.tensor(wrong, dtype=torch.int32).as_subclass(OnDevice)}
        step = plan.begin(table, **given).metadata
        with pytest.raises(InvalidArgument, match=words) as caught:
            step.lengths() if name == "seq_lens" else step.q_offsets()
        assert caught.value.parameter == name
    ends = torch.tensor([0, 3, 2], dtype=torch.int32).as_subclass(OnDevice)
    packed = attention_inputs(SMALL, q_lens=(3, 2), kv_lens=(3, 2), device="cpu")
    plan = kernelhub.attention.prepare(**packed, backend="triton.prefill")
    with pytest.raises(InvalidArgument, match="falls"):
        plan.begin(packed["cu_seqlens_q"], ends).metadata.k_offsets()
