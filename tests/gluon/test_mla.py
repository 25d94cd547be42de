"""The Gluon decode of latent attention in the emulator: its contract, interleavings, and planted faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelhub.backends.gluon.mla import adapter, decode
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.mla.attention.reference import mla_attention_reference
from kernelhub.probes.device import simulated
from kernelhub.testing import OpContract
from tests.gluon.emulate import EmulationError
from tests.gluon.emulated import Emulated, emulated
from tests.gluon.planted import planted

TWO_SMS = dataclasses.replace(simulated("H200"), num_sms=2)


class TestDecode(Emulated, OpContract):
    op, kernel = "mla_attention", "emulated.decode"
    most_elements = None
    labels = ("decode, sinks, deepseek, pages of 64", "1 sequences, 128 heads, pages of 64")


def run(seed: int, tokens: int | None = None, seq_lens: Any = (300, 0, 65), spoil: Any = None, **features: Any) -> bool:
    """Whether a step of few heads, which two programs share, gives the reference."""
    arguments = mla_attention_inputs(num_heads=6, seq_lens=seq_lens, q_lens=tokens)
    if spoil is not None:
        spoil(arguments)
    q = arguments["q"]
    sinks = torch.linspace(-1, 4, 6) if features.get("sinks") else None
    causal = tokens is not None
    few = "one" if tokens is None else "few"
    problem = MlaProblem(device=TWO_SMS, num_heads=6, q_len=few, causal=causal, lse=True, sinks=sinks is not None)
    out = torch.full((*q.shape[:-1], 512), torch.nan, dtype=q.dtype)
    lse = torch.full((6, len(q)) if tokens is None else (len(q), 6, tokens), torch.nan)
    step = PagedStep(arguments["block_table"], arguments["seq_lens"])
    with emulated(seed):
        made = adapter.Decode(problem)
        made.launch(q, arguments["kv_cache"], None, step, MlaValues(arguments["scale"], sinks), out, lse)
    want, want_lse = mla_attention_reference(**arguments, sinks=sinks, return_lse=True)
    return bool(compare_out(out, want, 4.5).ok and compare_lse(lse, want_lse) <= lse_tolerance(out.dtype))


def test_an_interleaving_gives_the_reference() -> None:
    assert run(0)


@pytest.mark.parametrize("seed", range(1, 3))
def test_every_interleaving_gives_the_reference(seed: int) -> None:
    assert run(seed)


def test_two_tokens_and_sinks() -> None:
    assert run(0, tokens=2, sinks=True)


def test_what_no_sequence_uses_is_not_read() -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        table = arguments["block_table"]
        arguments["block_table"] = torch.cat([torch.where(table < 0, 1 << 30, table), table * 0 - 7], 1)

    assert run(0, spoil=spoil)


def test_strided_operands() -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        q, cache = arguments["q"], arguments["kv_cache"]
        arguments["q"] = torch.full((*q.shape[:-1], 640), torch.nan, dtype=q.dtype)[..., 64:].copy_(q)
        layers = torch.full((len(cache), 3, 64, 576), torch.nan, dtype=cache.dtype)  # pages of layers side by side
        layers[:, 1] = cache
        arguments["kv_cache"] = layers[:, 1]

    assert run(0, spoil=spoil)


def test_long_sequences_are_shared_by_all_programs() -> None:
    for seq_lens in ((700,), (64, 64, 300, 1), (0, 0)):
        assert run(0, seq_lens=seq_lens)


FAULTS = {
    "a buffer is filled before it is released": ("mbarrier.wait(empty, (done & 1) ^ 1)", "pass"),
    "the queries are filled before they are released": ("mbarrier.wait(empty_q, (walked & 1) ^ 1)", "pass"),
    "no wait for the rotary part": ("mbarrier.wait(full_r.index(4), phase)", "pass"),
    "no wait for a piece of the latent": ("mbarrier.wait(full.index(piece), phase)", "pass"),
    "no wait for the probabilities of even pages": ("mbarrier.wait(bars.index(EVEN_READY), phase)", "pass"),
    "no fence behind the probabilities of odd pages": (
        "fence_async_shared()\n    mbarrier.arrive(bars.index(ODD_READY)",
        "mbarrier.arrive(bars.index(ODD_READY)",
    ),
    "NaN past the end is multiplied": ("clear_from(k_left.index(1), tail - 64)", "pass"),
    "keys past the end are seen": ("if key + 64 > unseen:", "if key > unseen:"),
    "the sums of one warpgroup": ("whole = total + vecs.index(BETA - ODD).load(ROW_S)", "whole = total"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planted(decode, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(adapter, "decode_kernel", made.decode_kernel)

    def wrong(seed: int) -> bool:
        try:
            return not run(seed, seq_lens=(1, 200, 330))
        except EmulationError:
            return True

    assert any(wrong(seed) for seed in range(25))
