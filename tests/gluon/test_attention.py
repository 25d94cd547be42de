"""The Gluon prefill over float8 in the emulator: contracts, interleavings, what it must not read, planted faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelhub.backends.gluon.attention import converting, prefill
from kernelhub.backends.gluon.attention.float8_adapter import PrefillOfFloat8
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.problem import DenseAttentionProblem, PagedAttentionProblem
from kernelhub.ops.attention.reference import attention_reference, paged_attention_reference
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.probes.device import simulated
from tests.contract.attention import DenseContract, PagedContract
from tests.gluon.emulate import EmulationError
from tests.gluon.emulated import Emulated, emulated
from tests.gluon.planted import planted

TWO_SMS = dataclasses.replace(simulated("H200"), num_sms=2)
MODEL = AttentionModel("two heads of a group", 2, 1, 64, 64)
_OF_FLOAT8: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn}


class TestPagedPrefillOfFloat8(Emulated, PagedContract):
    kernel = "emulated.prefill_fp8"
    device = "cpu"
    widest = torch.float16
    plain = PagedContract.plain | {"kv_scale": "tensor"}
    rich = PagedContract.plain | {"q_lens": 3, "causal": True, "kv_scale": "head"}


class TestPrefillOfFloat8(Emulated, DenseContract):
    kernel = "emulated.prefill_fp8"
    device = "cpu"
    model = AttentionModel("four heads of 128", 4, 2, 128, 128)
    widest = torch.float16
    plain = DenseContract.plain | {"kv_scale": "tensor"}
    rich = DenseContract.rich | {"kv_scale": "head"}


class TestPrefillOfFloat8Any(Emulated, DenseContract):
    kernel = "emulated.prefill_fp8_any"
    device = "cpu"
    widest = torch.float16
    plain = DenseContract.plain | {"kv_scale": "tensor"}
    rich = DenseContract.rich | {"kv_scale": "head"}


class TestPagedPrefillOfFloat8Any(Emulated, PagedContract):
    kernel = "emulated.prefill_fp8_any"
    device = "cpu"
    widest = torch.float16
    plain = PagedContract.plain | {"kv_scale": "tensor"}
    rich = PagedContract.rich | {"kv_scale": "head"}


def dense(seed: int, more: dict[str, Any] | None = None, spoil: Any = None, **inputs: Any) -> bool:
    """Whether a call of `attention` gives the reference."""
    arguments = attention_inputs(MODEL, **_OF_FLOAT8 | inputs) | (more or {})
    if spoil is not None:
        spoil(arguments)
    ragged = "cu_seqlens_q" in arguments
    problem = DenseAttentionProblem(**_facets(arguments, ragged))
    step = DenseStep(arguments.get("cu_seqlens_q"), arguments.get("cu_seqlens_k"))
    out = _run(seed, problem, arguments["q"], arguments["k"], arguments["v"], step, arguments)
    return bool(compare_out(out, attention_reference(**arguments), 4.5).ok)


def paged(seed: int, more: dict[str, Any] | None = None, spoil: Any = None, **inputs: Any) -> bool:
    """Whether a call of `paged_attention` gives the reference."""
    arguments = paged_attention_inputs(MODEL, **_OF_FLOAT8 | inputs) | (more or {})
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
        "sinks": "sinks" in arguments,
    } | _facets_of_scales(arguments)


def _facets_of_scales(arguments: dict[str, Any]) -> dict[str, Any]:
    scale = arguments["k_scale"]
    form = "value" if isinstance(scale, float) else "tensor" if scale.numel() == 1 else "head"
    return {
        "kv_dtype": str(arguments["k_cache" if "k_cache" in arguments else "k"].dtype).removeprefix("torch."),
        "kv_scale": form,
    }


def _run(
    seed: int, problem: DenseAttentionProblem, q: Tensor, k: Tensor, v: Tensor, step: Any, arguments: dict[str, Any]
) -> Tensor:
    values = Values(
        problem.head_dim_qk**-0.5,
        arguments.get("window", -1),
        0 if problem.causal else -1,
        sinks=arguments.get("sinks"),
        k_scale=arguments.get("k_scale"),
        v_scale=arguments.get("v_scale"),
    )
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    with emulated(seed):
        PrefillOfFloat8(problem).launch(q, k, v, step, values, out, None)
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


FLOAT8: dict[str, Any] = {"seq_lens": (300, 0, 130), "q_lens": (140, 0, 5)}


@pytest.mark.parametrize("seed", range(2))
def test_every_interleaving_of_float8_gives_the_reference(seed: int) -> None:
    assert paged(seed, page_size=64, **FLOAT8)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("width", [64, 96])
def test_windows_over_float8(width: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.MODEL", AttentionModel("four heads of two groups", 4, 2, width, width))
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    assert paged(seed, {"window": 127, "sinks": sinks}, page_size=16, **FLOAT8)
    lengths = {"q_lens": (20, 0, 140, 3), "kv_lens": (5, 7, 400, 0)}
    assert dense(seed, {"window": 60}, **lengths)


@pytest.mark.parametrize("window", [0, 20, 63, 64, 127, 200])
@pytest.mark.parametrize("pack", [1, 2, 8])
def test_warpgroups_that_take_only_their_own_steps(pack: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 keys, so that the rows of one warpgroup see none of a tile's first or last; rows of some heads."""
    init = PrefillOfFloat8.__init__

    def own(self: PrefillOfFloat8, problem: Any) -> None:
        init(self, problem)
        self._static |= {"OWN": True, "BLOCK_N": 64, "PACK": pack}
        self._block_n = 64

    monkeypatch.setattr(PrefillOfFloat8, "__init__", own)
    model = AttentionModel("two groups", 2 * pack, 2, 64, 64)
    monkeypatch.setattr(f"{__name__}.MODEL", model)
    more = {"window": window, "sinks": torch.linspace(-1, 0.5, 2 * pack)}
    lengths: dict[str, Any] = {"seq_lens": (300, 0, 130, 64, 200), "q_lens": (140, 0, 5, 64, 190)}
    assert paged(window, more, page_size=16, **lengths)
    lengths = {"q_lens": (20, 0, 140, 3, 65), "kv_lens": (5, 7, 400, 0, 65)}
    assert dense(window, more, **lengths)
    assert dense(window, more | {"causal": False}, **lengths)
    assert dense(window, {"sinks": more["sinks"]}, **lengths)


@pytest.mark.parametrize("width", [64, 96])
def test_dense_operands_of_float8_with_any_strides(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.MODEL", AttentionModel("four heads of two groups", 4, 2, width, width))

    def spoil(arguments: dict[str, Any]) -> None:
        """Side by side in a row, with NaN behind each token, and factors of either sign."""
        k, v = arguments["k"].view(torch.uint8), arguments["v"].view(torch.uint8)
        wide = torch.full((*k.shape[:2], 6, width), 0x7F, dtype=torch.uint8)
        wide[:, :, :2], wide[:, :, 3:5] = k, v
        arguments["k"], arguments["v"] = (wide[:, :, at : at + 2].view(torch.float8_e4m3fn) for at in (0, 3))
        for name in ("k_scale", "v_scale"):
            arguments[name] = arguments[name] * torch.tensor([1.0, -0.5])

    def expanded(arguments: dict[str, Any]) -> None:
        arguments["v"] = arguments["v"][:, :1].expand_as(arguments["v"])
        arguments["k"] = arguments["k"].transpose(1, 3).contiguous().transpose(1, 3)

    for change in (spoil, expanded):
        assert dense(0, spoil=change, batch=2, q_tokens=20, kv_tokens=70)


@pytest.mark.parametrize("factor", [1.0, -1.0])
def test_factors_of_float8_of_either_sign_beside_nan(factor: float) -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        for name in ("k_scale", "v_scale"):
            arguments[name] = torch.tensor([factor * arguments[name]])
        for length, pages in zip(FLOAT8["seq_lens"], arguments["block_table"], strict=True):
            for name in ("k_cache", "v_cache") if length % 16 else ():
                raw = arguments[name].view(torch.uint8)
                raw[int(pages[length // 16]), length % 16 :] = 0x7F  # NaN

    assert paged(0, spoil=spoil, page_size=16, **FLOAT8)


@pytest.mark.parametrize("row", [0.0, 1e-38, 1e36])
def test_queries_of_any_size_over_float8(row: float) -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        arguments["q"][3] = row
        arguments["q"][140] *= 1e30
        arguments["k_scale"], arguments["v_scale"] = torch.tensor([1e-33]), torch.tensor([0.03])

    assert paged(0, spoil=spoil, page_size=64, **FLOAT8)


def test_a_factor_of_keys_of_zero() -> None:
    def spoil(arguments: dict[str, Any]) -> None:
        arguments["k_scale"], arguments["v_scale"] = torch.tensor([0.0]), torch.tensor([0.5])

    assert paged(0, spoil=spoil, page_size=64, **FLOAT8)


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
    monkeypatch.setattr(PrefillOfFloat8, "kernel", made.prefill_kernel)

    def wrong(seed: int) -> bool:
        try:
            return not paged(seed, seq_lens=(300, 200), q_lens=(140, 5), page_size=64)
        except (EmulationError, AttributeError, UnboundLocalError):  # a product that nobody waited for is no number
            return True

    assert any(wrong(seed) for seed in range(25))


FAULTS_OF_FLOAT8 = {
    "a raw tile is converted before it came": ("mbarrier.wait(raw_k_full.index(r), came)", "pass"),
    "keys are converted into a tile in use": ("mbarrier.wait(k_empty.index(s), left)", "pass"),
    "values are converted into a tile in use": ("mbarrier.wait(v_empty.index(s), left)", "pass"),
    "no fence after the conversion": ("    fence_async_shared()\n", ""),
    "a raw tile is never released": ("mbarrier.arrive(raw_v_empty.index(r), count=1)", "pass"),
    "a raw tile is released before it is read": (
        "                convert_tile(raw_v.index(r), v_bufs.index(s), sign, False)\n"
        "                mbarrier.arrive(v_full.index(s), count=1)\n"
        "                mbarrier.arrive(raw_v_empty.index(r), count=1)\n",
        "                mbarrier.arrive(raw_v_empty.index(r), count=1)\n"
        "                convert_tile(raw_v.index(r), v_bufs.index(s), sign, False)\n"
        "                mbarrier.arrive(v_full.index(s), count=1)\n",
    ),
    "every head has the factor of the first": ("at = scales + head // GROUP", "at = scales"),
    "queries are multiplied before they are narrowed": (
        "    fence_async_shared()\n    mbarrier.arrive(ready, count=1)",
        "    mbarrier.arrive(ready, count=1)",
    ),
    "rows are not multiplied by their powers of two": ("(raw * inverse[:, None])", "(raw * 0.25)"),
}
FAULTS_OF_96 = {
    "the last columns of keys are not converted": (
        "convert_tile(raw_k1.index(r), k_bufs1.index(s)",
        "(raw_k1, k_bufs1",
    ),
    "the last columns have no sign": (
        "k_bufs1.index(s), sign, SCALES > 1)",
        "k_bufs1.index(s), sign, False)",
    ),
    "rows are as large as their first columns": ("largest = gl.maximum(largest,", "(largest,"),
    "the last columns of queries stay as they are": ("made1.store(", "("),
}


@pytest.mark.parametrize("fault", [*FAULTS_OF_FLOAT8, *FAULTS_OF_96])
def test_planted_faults_of_float8_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    width = 96 if fault in FAULTS_OF_96 else 64
    made = planted(converting, *(FAULTS_OF_FLOAT8 | FAULTS_OF_96)[fault], tmp_path)
    for name in ("convert_tiles", "scale_of", "narrowed"):
        monkeypatch.setattr(prefill, name, getattr(made, name))
    monkeypatch.setattr(f"{__name__}.MODEL", AttentionModel("two groups", 2, 2, width, width))

    def by_head(arguments: dict[str, Any]) -> None:
        arguments["q"][..., 64:] *= 1e5  # beyond what float16 holds beside the first columns
        arguments["q"] *= 1e-5 if width > 64 else 1.0
        for name in ("k_scale", "v_scale"):
            arguments[name] = arguments[name] * torch.tensor([1.0, -0.5])

    def wrong(seed: int) -> bool:
        try:
            return not paged(seed, spoil=by_head, page_size=64, **FLOAT8)
        except EmulationError:
            return True

    assert any(wrong(seed) for seed in range(25))
