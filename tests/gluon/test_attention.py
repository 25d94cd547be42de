"""The Gluon prefill in the emulator: its contract, interleavings, what it must not read, and planted faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelhub.backends.gluon.attention import adapter, prefill
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.problem import DenseAttentionProblem, PagedAttentionProblem
from kernelhub.ops.attention.reference import attention_reference, paged_attention_reference
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.probes.device import simulated
from kernelhub.testing import OpContract
from tests.gluon.emulate import EmulationError
from tests.gluon.emulated import Emulated, emulated
from tests.gluon.planted import planted

TWO_SMS = dataclasses.replace(simulated("H200"), num_sms=2)
MODEL = AttentionModel("two heads of a group", 2, 1, 64, 64)


class TestPrefill(Emulated, OpContract):
    op, kernel = "attention", "emulated.prefill_any"
    labels = ("sinks, causal, width 64", "ragged, causal, both windows, softcap", "scale below zero, width 64")


class TestPagedPrefill(Emulated, OpContract):
    op, kernel = "paged_attention", "emulated.prefill_any"
    labels = ("mixed and padded, width 64",)


def dense(seed: int, more: dict[str, Any] | None = None, spoil: Any = None, **inputs: Any) -> bool:
    """Whether a call of `attention` gives the reference."""
    arguments = attention_inputs(MODEL, **inputs) | (more or {})
    if spoil is not None:
        spoil(arguments)
    ragged = "cu_seqlens_q" in arguments
    problem = DenseAttentionProblem(**_facets(arguments, ragged))
    step = DenseStep(arguments.get("cu_seqlens_q"), arguments.get("cu_seqlens_k"))
    out = _run(seed, problem, arguments["q"], arguments["k"], arguments["v"], step, arguments)
    return bool(compare_out(out, attention_reference(**arguments), 4.5).ok)


def paged(seed: int, more: dict[str, Any] | None = None, spoil: Any = None, **inputs: Any) -> bool:
    """Whether a call of `paged_attention` gives the reference."""
    arguments = paged_attention_inputs(MODEL, **inputs) | (more or {})
    if spoil is not None:
        spoil(arguments)
    ragged = "cu_seqlens_q" in arguments
    sizes = {"page_size": inputs["page_size"], "kv_layout": arguments["kv_layout"]}
    problem = PagedAttentionProblem(**_facets({"causal": True} | arguments, ragged), **sizes)
    step = PagedStep(arguments["block_table"], arguments["seq_lens"], arguments.get("cu_seqlens_q"))
    out = _run(seed, problem, arguments["q"], arguments["k_cache"], arguments["v_cache"], step, arguments)
    return bool(compare_out(out, paged_attention_reference(**arguments), 4.5).ok)


def _facets(arguments: dict[str, Any], ragged: bool) -> dict[str, Any]:
    return {
        "device": TWO_SMS,
        "head_dim_qk": MODEL.head_dim_qk,
        "head_dim_vo": MODEL.head_dim_vo,
        "num_q_heads": MODEL.num_q_heads,
        "num_kv_heads": MODEL.num_kv_heads,
        "q_len": "any" if ragged else "many",
        "ragged": ragged,
        "causal": arguments["causal"],
        "window_left": "window" in arguments,
    }


def _run(
    seed: int, problem: DenseAttentionProblem, q: Tensor, k: Tensor, v: Tensor, step: Any, arguments: dict[str, Any]
) -> Tensor:
    values = Values(
        problem.head_dim_qk**-0.5,
        arguments.get("window", -1),
        0 if problem.causal else -1,
        sinks=arguments.get("sinks"),
    )
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    with emulated(seed):
        adapter.Prefill(problem).launch(q, k, v, step, values, out, None)
    return out


def test_an_interleaving_gives_the_reference() -> None:
    assert dense(0, batch=1, q_tokens=140, kv_tokens=300)


@pytest.mark.parametrize("seed", range(1, 3))
def test_every_interleaving_gives_the_reference(seed: int) -> None:
    assert dense(seed, batch=1, q_tokens=140, kv_tokens=300)


def test_pages_of_every_size() -> None:
    lengths = {"seq_lens": (150, 0, 33), "q_lens": (130, 0, 3)}
    assert paged(0, page_size=16, **lengths)
    assert paged(1, page_size=256, kv_layout="HND", **lengths)


def test_a_window_and_keys_of_other_lengths() -> None:
    assert dense(0, {"window": 150}, q_lens=(20, 0, 140, 3), kv_lens=(5, 7, 400, 0))


def test_what_no_sequence_uses_is_not_read() -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        table = arguments["block_table"]
        arguments["block_table"] = torch.cat([torch.where(table < 0, 1 << 30, table), table * 0 - 7], 1)

    assert paged(0, spoil=spoil, seq_lens=(70, 0), q_lens=(70, 0), page_size=64)


def test_operands_of_any_strides() -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        arguments["q"] = arguments["q"].transpose(1, 2).contiguous().transpose(1, 2)  # heads first
        both = torch.stack([arguments["k"], arguments["v"]], -2).flatten(-2)  # side by side in a row
        arguments["k"], arguments["v"] = both[..., :64], both[..., 64:]

    def expanded(arguments: dict[str, Any]) -> None:
        arguments["v"] = arguments["v"][:, :1].expand_as(arguments["v"])  # the same row for every token
        arguments["k"] = arguments["k"].transpose(1, 3).contiguous().transpose(1, 3)

    for change in (spoil, expanded):
        assert dense(0, spoil=change, batch=2, q_tokens=20)


FAULTS = {
    "keys are filled before they are released": ("mbarrier.wait(k_empty.index(s), phase)", "pass"),
    "values are filled before they are released": ("mbarrier.wait(v_empty.index(s), phase)", "pass"),
    "no wait for keys": ("mbarrier.wait(k_full.index(s), (step // STAGES) & 1)\n    if", "if"),
    "keys are released before the product": ("x = warpgroup_mma_wait(1, deps=(started,))\n    mbarrier", "mbarrier"),
    "NaN past the end is multiplied": ("if n + BLOCK_N > kv_len:", "if n > kv_len:"),
    "the other warpgroup's rows are not awaited": ("mbarrier.wait(cleared, phase)", "pass"),
    "keys after a query are seen": ("gl.minimum(position + window_right, kv_len - 1)", "(position * 0 + kv_len - 1)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planted(prefill, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(adapter, "prefill_kernel", made.prefill_kernel)

    def wrong(seed: int) -> bool:
        try:
            return not paged(seed, seq_lens=(300, 200), q_lens=(140, 5), page_size=64)
        except (EmulationError, AttributeError, UnboundLocalError):  # a product that nobody waited for is no number
            return True

    assert any(wrong(seed) for seed in range(25))
