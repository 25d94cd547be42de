"""The Gluon decode of latent attention in the emulator: its contract, interleavings, and planted faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelhub.backends.gluon.mla import adapter, decode, decode_float8, few_float8
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.mla.attention.reference import mla_attention_reference
from kernelhub.probes.device import simulated
from kernelhub.testing import OpContract
from tests.contract.mla_attention import MlaContract
from tests.gluon.emulate import EmulationError
from tests.gluon.emulated import Emulated, emulated
from tests.gluon.planted import planted

TWO_SMS = dataclasses.replace(simulated("H200"), num_sms=2)


class TestDecode(Emulated, OpContract):
    op, kernel = "mla_attention", "emulated.decode"
    most_elements = None
    labels = ("decode, sinks, deepseek, pages of 64", "1 sequences, 128 heads, pages of 64")


class TestDecodeOfFloat8(Emulated, MlaContract):
    kernel = "emulated.decode_fp8"
    device = "cpu"
    most_elements = 1_000_000
    fewest_cases = 5
    widths = (512, 64)
    page_size = 64
    kv_scale = "tensor"


class TestDecodeOfFloat8InTilesOf64(TestDecodeOfFloat8):
    @pytest.fixture(autouse=True)
    def no_few_rows(self, here: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adapter.DecodeFloat8, "few", False)


def run(
    seed: int,
    tokens: int | None = None,
    seq_lens: Any = (300, 0, 65),
    spoil: Any = None,
    kv_scale: float | None = None,
    heads: int = 6,
    **features: Any,
) -> bool:
    """Whether a step of few heads, which two programs share, gives the reference."""
    kv_dtype = None if kv_scale is None else torch.float8_e4m3fn
    arguments = mla_attention_inputs(num_heads=heads, seq_lens=seq_lens, q_lens=tokens, kv_dtype=kv_dtype)
    if kv_scale is not None:
        arguments["kv_scale"] = torch.tensor([kv_scale]) if features.get("on_device") else kv_scale
    if spoil is not None:
        spoil(arguments)
    q = arguments["q"]
    sinks = torch.linspace(-1, 4, heads) if features.get("sinks") else None
    causal = features.get("causal", tokens is not None)
    problem = MlaProblem(
        device=TWO_SMS,
        num_heads=heads,
        q_len="one" if tokens is None else "few",
        causal=causal,
        lse=True,
        sinks=sinks is not None,
        kv_dtype="bfloat16" if kv_scale is None else "float8_e4m3fn",
        kv_scale=None if kv_scale is None else "tensor" if features.get("on_device") else "value",
    )
    out = features.get("out", torch.full((*q.shape[:-1], 512), torch.nan, dtype=q.dtype))
    lse = torch.full((heads, len(q)) if tokens is None else (len(q), heads, tokens), torch.nan)
    step = PagedStep(arguments["block_table"], arguments["seq_lens"])
    values = MlaValues(arguments["scale"], sinks, arguments.get("kv_scale"))
    with emulated(seed):
        made = (adapter.Decode if kv_scale is None else adapter.DecodeFloat8)(problem)
        made.few = features.get("few", True)
        made.launch(q, arguments["kv_cache"], None, step, values, out, lse)
    want, want_lse = mla_attention_reference(**arguments, causal=causal, sinks=sinks, return_lse=True)
    return bool(compare_out(out, want, 4.5).ok and compare_lse(lse, want_lse) <= lse_tolerance(out.dtype))


FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float8": {"kv_scale": 2.0**-6, "few": False},
    "few rows of float8": {"kv_scale": 2.0**-6},
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@forms
def test_an_interleaving_gives_the_reference(form: dict[str, Any]) -> None:
    assert run(0, **form)


@forms
@pytest.mark.parametrize("seed", range(1, 3))
def test_every_interleaving_gives_the_reference(seed: int, form: dict[str, Any]) -> None:
    assert run(seed, **form)


@forms
def test_two_tokens_and_sinks(form: dict[str, Any]) -> None:
    assert run(0, tokens=2, sinks=True, on_device=True, **form)


@forms
def test_two_tokens_of_eleven_heads(form: dict[str, Any]) -> None:
    assert run(0, heads=11, tokens=2, sinks=True, on_device=True, **form)


@forms
def test_two_tokens_that_see_all_keys(form: dict[str, Any]) -> None:
    assert run(0, tokens=2, causal=False, **form)


@forms
def test_more_heads_than_a_tile_has(form: dict[str, Any]) -> None:
    assert run(0, heads=70, seq_lens=(129, 0, 40), **form)


@pytest.mark.parametrize("few", [False, True])
def test_a_scale_below_zero_and_queries_of_any_size(few: bool) -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        q = arguments["q"]
        q[0, 1], q[0, 2], q[0, 3] = 0.0, q[0, 2] * 2.0**-100, q[0, 3] * 2.0**-130
        q[2] *= 2.0**60
        arguments["scale"] *= 2.0**-60

    assert run(0, spoil=spoil, kv_scale=-(2.0**-6), few=few)


@forms
def test_what_no_sequence_uses_is_not_read(form: dict[str, Any]) -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        table = arguments["block_table"]
        arguments["block_table"] = torch.cat([torch.where(table < 0, 1 << 30, table), table * 0 - 7], 1)

    assert run(0, spoil=spoil, **form)


@forms
@pytest.mark.parametrize("row", [576, 640], ids=["pages side by side", "rows apart"])
def test_strided_operands(row: int, form: dict[str, Any]) -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        q, cache = arguments["q"], arguments["kv_cache"]
        arguments["q"] = torch.full((*q.shape[:-1], 640), torch.nan, dtype=q.dtype)[..., 64:].copy_(q)
        layers = torch.full((len(cache), 3, 64, row), torch.nan).to(cache.dtype)  # pages of layers side by side
        layers[:, 1, :, :576] = cache
        arguments["kv_cache"] = layers[:, 1, :, :576]

    out = torch.full((3, 6, 1024), torch.nan).bfloat16()[..., ::2]
    assert run(0, spoil=spoil, out=out, **form)


@forms
def test_operands_that_are_copied(form: dict[str, Any]) -> None:
    """A cache one element past an aligned address, one page for all sequences, and strided lengths and tables."""

    def spoil(arguments: dict[str, Any]) -> None:
        values = torch.linspace(-1, 1, 64 * 576 + 1) ** 3 / form.get("kv_scale", 1.0)
        arguments["kv_cache"] = values.to(arguments["kv_cache"].dtype)[1:].view(1, 64, 576)
        arguments["block_table"] = torch.zeros(3, 10, dtype=torch.int32)[:, ::2]
        arguments["seq_lens"] = torch.tensor([300, -1, 0, -1, 65, -1], dtype=torch.int32)[::2]

    assert run(0, spoil=spoil, **form)


@forms
@pytest.mark.parametrize("seq_lens", [(700,), (64, 64, 300, 1), (0, 0), (128, 256, 129, 191, 192, 193)], ids=str)
def test_long_sequences_are_shared_by_all_programs(seq_lens: tuple[int, ...], form: dict[str, Any]) -> None:
    assert run(0, seq_lens=seq_lens, **form)


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


FAULTS_OF_FLOAT8 = {
    "the left half of even pages is filled before it is released": ("mbarrier.wait(empty_l.index(0), phase)", "pass"),
    "the right half of even pages is filled before it is released": ("mbarrier.wait(empty_r.index(0), phase)", "pass"),
    "the right half of odd pages is filled before it is released": ("mbarrier.wait(empty_r.index(1), phase)", "pass"),
    "the queries are filled before they are released": FAULTS["the queries are filled before they are released"],
    "queries are narrowed before they have come": ("            mbarrier.wait(full_q, walked & 1)\n", ""),
    "halves are written with no fence": (
        "    fence_async_shared()\n    for piece in",
        "    for piece in",
    ),
    "scores lack the power of their row": (
        "rope, factors)\n",
        "rope, factors)\n            factors.store(factors.load() * 2)\n",
    ),
    "odd pages end where even ones do": ("odd, page_sixteens, limit - 64)", "odd, page_sixteens, limit)"),
    "the next pair ends where this one does": ("page_sixteens, limit - 128)", "page_sixteens, limit)"),
    "the page after the next comes next": ("odd = next_odd", "pass"),
}


FAULTS_OF_FEW = {
    "even pages are filled before they are released": ("mbarrier.wait(empty.index(0), phase)", "pass"),
    "odd pages are filled before they are released": ("mbarrier.wait(empty.index(1), phase)", "pass"),
    "the queries are filled before they are released": FAULTS["the queries are filled before they are released"],
    "queries are narrowed before they have come": FAULTS_OF_FLOAT8["queries are narrowed before they have come"],
    "no wait for the left half": ("mbarrier.wait(full.index(ODD * 2), phase)", "pass"),
    "no wait for the right half": ("mbarrier.wait(full.index(ODD * 2 + 1), phase)", "pass"),
    "no wait for the sums of odd pages": ("mbarrier.wait(sums_ready, 0)", "pass"),
    "sums are written over others": ("mbarrier.wait(sums_taken, walked & 1)", "pass"),
    "no fence behind the probabilities": (
        "fence_async_shared()\n                mbarrier.arrive(p_ready",
        "mbarrier.arrive(p_ready",
    ),
    "halves are written with no fence": (
        "                fence_async_shared()\n                mbarrier.arrive(full.index(3)",
        "                mbarrier.arrive(full.index(3)",
    ),
    "keys past the end are seen": ("(key < kv_len)[:, None]", "(key < kv_len + 1)[:, None]"),
    **{
        name: FAULTS_OF_FLOAT8[name]
        for name in ("odd pages end where even ones do", "the next pair ends where this one does")
    },
    "the page after the next comes next": ("odd = next_odd", "pass"),
    "sums are not scaled to one maximum": (" * other[None, :]", ""),
}


@pytest.mark.parametrize(
    ("rows", "num_seqs", "parts"),
    [
        (128, 64, 64),  # of 66: no sequence is cut
        (128, 32, 64),  # each sequence has two parts
        (128, 128, 64),  # a part has two sequences
        (256, 32, 32),  # two queries, of 33
        (128, 63, 63),
        (128, 48, 66),  # 48 would leave more than a twentieth idle
        (128, 96, 66),
        (128, 31, 66),  # few sequences
        (64, 64, 132),  # one tile
        (128, 0, 66),
    ],
)
def test_many_sequences_are_cut_alike(rows: int, num_seqs: int, parts: int) -> None:
    made = adapter.Decode.__new__(adapter.Decode)
    made.problem = SimpleNamespace(device=simulated("H200"))
    assert made._cut(rows, num_seqs) == (-(-rows // 64), parts)
    made.alike = False
    assert made._cut(rows, num_seqs) == (-(-rows // 64), 132 // -(-rows // 64))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_workspace_holds_the_parts_of_fewer_sequences(tokens: int) -> None:
    made = adapter.Decode.__new__(adapter.Decode)
    made.problem = SimpleNamespace(num_heads=128, device=simulated("H200"))
    a_part = 2 * 64 * (512 + 1) * 4
    needed = 0
    for num_seqs in range(1, 257):
        tiles, parts = made._cut(128 * tokens, num_seqs)
        needed = max(needed, tiles * parts * a_part)
        assert made.workspace_bytes(num_seqs, num_seqs * tokens, 8192) >= needed


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        *((decode, fault) for fault in FAULTS),
        *((decode_float8, fault) for fault in FAULTS_OF_FLOAT8),
        *((few_float8, fault) for fault in FAULTS_OF_FEW),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.rpartition(".")[2],
)
def test_planted_faults_are_found(module: Any, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = f"{module.__name__.rpartition('.')[2]}_kernel"
    faults = {decode: FAULTS, decode_float8: FAULTS_OF_FLOAT8, few_float8: FAULTS_OF_FEW}[module]
    monkeypatch.setattr(adapter, kernel, getattr(planted(module, *faults[fault], tmp_path), kernel))
    form = FORMS["bfloat16"] if module is decode else {"kv_scale": 2.0**-6, "few": module is few_float8}

    def wrong(seed: int) -> bool:
        try:
            return not run(seed, seq_lens=(1, 200, 330 if module is decode else 300), **form)
        except EmulationError:
            return True

    assert any(wrong(seed) for seed in range(25))
