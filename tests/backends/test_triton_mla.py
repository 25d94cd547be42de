"""What the contract does not show of the Triton kernels of latent attention: merging splits, invariance, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.mla import latent_adapter as adapters
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import MlaModel
from kernelhub.probes.device import simulated
from tests.conftest import DEVICE

pytestmark = pytest.mark.device
SMALL = MlaModel("small", 4, 64, 16)


def inputs(**changes: Any) -> dict[str, Any]:
    return mla_attention_inputs(SMALL, **{"device": DEVICE, "page_size": 64} | changes)


def split_into(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    monkeypatch.setattr(adapters.SplitKV, "splits_for", lambda *_: splits)
    monkeypatch.setattr(adapters, "CHUNK", 64)


class TestSplits:
    @pytest.mark.parametrize("splits", [1, 2, 7, 33])
    @pytest.mark.parametrize(
        "form", [{}, {"q_lens": 3}, {"q_lens": (3, 0, 1, 0)}, {"topk": 300}, {"topk": 300, "q_lens": (3, 0, 1, 0)}]
    )
    def test_any_number_of_splits_gives_the_reference(self, splits: int, form, monkeypatch) -> None:
        split_into(monkeypatch, splits)
        arguments = inputs(seq_lens=(1100, 64, 65, 0), **form)
        sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], device=DEVICE)
        out, lse = kernelhub.mla_attention(**arguments, sinks=sinks, return_lse=True, backend="triton.split_kv")
        want, want_lse = kernelhub.mla_attention.reference(**arguments, sinks=sinks, return_lse=True)
        assert compare_out(out, want, 4.5).ok
        assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)

    def test_parts_of_an_fp8_cache_are_merged_in_its_scale(self, monkeypatch) -> None:
        split_into(monkeypatch, 5)
        arguments = inputs(seq_lens=(700, 100), kv_dtype=torch.float8_e4m3fn)
        for kv_scale in (0.03, torch.tensor(0.03, device=DEVICE)):
            changed = arguments | {"kv_scale": kv_scale}
            out = kernelhub.mla_attention(**changed, backend="triton.split_kv")
            assert compare_out(out, kernelhub.mla_attention.reference(**changed), 8.0).ok

    def test_more_work_is_split_less(self) -> None:
        problem = kernelhub.explain("mla_attention", device="H200").problem
        adapter = adapters.SplitKV(problem)
        splits = [adapter.grid(batch, batch, 1 << 15).splits for batch in (1, 2, 8, 16, 33, 66, 128)]
        assert splits == sorted(splits, reverse=True)
        assert splits[0] == adapters.MOST_SPLITS
        assert splits[-1] == 1
        assert adapter.grid(1, 1, 300).splits == 3
        assert adapters.SplitKVFixed(problem).grid(64, 64, 1 << 15).splits == adapters.FIXED_SPLITS

    @pytest.mark.parametrize("form", [{}, {"q_lens": 2}, {"q_lens": (2, 1, 3), "max_seqlen_q": 3}, {"topk": 300}])
    @pytest.mark.parametrize("backend", ["triton.split_kv", "triton.split_kv_fixed"])
    def test_a_plan_declares_the_memory_that_its_splits_take(self, backend: str, form, monkeypatch) -> None:
        monkeypatch.setattr(adapters, "CHUNK", 64)
        bound = {name: form[name] for name in ("max_seqlen_q",) if name in form}
        rest = {name: value for name, value in form.items() if name not in bound}
        arguments = inputs(seq_lens=(300, 200, 150), **rest) | bound
        plan = kernelhub.mla_attention.prepare(**arguments, backend=backend)
        operands = [arguments[name] for name in ("q", "kv_cache", "block_table", "seq_lens")]
        step = plan.begin(*operands[2:], arguments.get("cu_seqlens_q"), **bound)
        out = torch.empty(*operands[0].shape[:-1], 64, dtype=torch.bfloat16, device=DEVICE)
        step.run(*operands[:2], arguments.get("topk_indices"), out=out)  # what is made once for all is not a step's
        taken = []
        empty = torch.empty

        def watched(*shape, **options):
            tensor = empty(*shape, **options)
            taken.append(tensor.numel() * tensor.itemsize)
            return tensor

        monkeypatch.setattr(torch, "empty", watched)
        step.run(*operands[:2], arguments.get("topk_indices"), out=out)
        monkeypatch.undo()
        monkeypatch.setattr(adapters, "CHUNK", 64)
        room = rest.get("topk") or operands[2].shape[1] * 64
        tokens = operands[0].shape[:-2].numel()
        assert sum(taken) == plan.workspace_bytes(num_seqs=3, num_tokens=tokens, max_kv_len=room)


class TestBatchInvariance:
    @pytest.mark.parametrize("form", [{}, {"q_lens": 2}, {"topk": 200}])
    def test_a_row_s_bits_do_not_depend_on_the_batch(self, form) -> None:
        arguments = inputs(seq_lens=(700, 300, 20, 5), **form)
        together = kernelhub.mla_attention(**arguments, backend="triton.split_kv_fixed")
        per_row = ("q", "block_table", "seq_lens", "topk_indices")
        for row in range(4):
            alone = arguments | {name: arguments[name][row : row + 1] for name in per_row if name in arguments}
            alone_out = kernelhub.mla_attention(**alone, backend="triton.split_kv_fixed")
            assert torch.equal(alone_out, together[row : row + 1])

    def test_ragged_too(self) -> None:
        arguments = inputs(seq_lens=(700, 300, 20), q_lens=(2, 1, 3)) | {"max_seqlen_q": 3}
        together = kernelhub.mla_attention(**arguments, backend="triton.split_kv_fixed")
        alone = arguments | {
            "q": arguments["q"][:2],
            "block_table": arguments["block_table"][:1],
            "seq_lens": arguments["seq_lens"][:1],
            "cu_seqlens_q": arguments["cu_seqlens_q"][:2],
        }
        assert torch.equal(kernelhub.mla_attention(**alone, backend="triton.split_kv_fixed"), together[:2])

    def test_the_policy_chooses_an_invariant_kernel(self) -> None:
        with kernelhub.use(batch_invariant=True):
            selection = kernelhub.explain("mla_attention", device="H200")
        assert selection.selected == "triton.split_kv_fixed"


class TestTiles:
    def test_they_fit_heads_and_shared_memory(self) -> None:
        def sizes(device: str, rows: int, **facets: Any) -> tuple[int, int]:
            problem = kernelhub.explain("mla_attention", device=device, **facets).problem
            tiles = adapters.latent_tiles(problem, rows)
            return tiles.block_m, tiles.block_n

        for device in ("A100", "B200"):
            assert simulated(device).shared_memory_bytes >= 128 << 10
            assert [sizes(device, rows) for rows in (1, 16, 32, 33, 128)] == [(16, 64)] * 3 + [(64, 32)] * 2
        assert [sizes("H200", rows) for rows in (1, 16, 17, 128)] == [(16, 64)] * 2 + [(64, 64)] * 2
        for device in ("L40S", "RTX5090"):
            assert [sizes(device, rows) for rows in (16, 128)] == [(16, 64), (64, 16)]
        assert sizes("H200", 128, kv_dtype="float8_e4m3fn") == (64, 128)
        assert sizes("B200", 128, kv_dtype="float8_e4m3fn") == (32, 64)
        assert sizes("L40S", 128, kv_dtype="float8_e4m3fn") == (32, 32)
