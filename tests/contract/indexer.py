"""What every kernel of the indexer's ops must do. Subclass a contract and name the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.evidence.cases import CASES
from kernelhub.ops.indexer.inputs import logits_inputs, paged_logits_inputs, topk_inputs
from kernelhub.ops.indexer.layout import split_cache
from kernelhub.ops.indexer.tolerance import most_wrong, relative_error_allowed, sizes
from kernelhub.ops.models.shapes import IndexerModel
from kernelhub.testing import KernelCase, OpContract
from tests.conftest import DEVICE

FP8 = torch.float8_e4m3fn
DTYPES = (FP8, torch.bfloat16, torch.float16, torch.float32)
SMALL = IndexerModel("small", 6, 32, 64)


def shaped(heads: int, width: int) -> IndexerModel:
    return IndexerModel(f"{heads} x {width}", heads, width, 64)


class LogitsContract(OpContract):
    """`mqa_logits`."""

    op = "mqa_logits"
    device = DEVICE

    def inputs(self, **changes: Any) -> dict[str, Any]:
        made = logits_inputs(**{"model": SMALL, "tokens": 18, "keys": 150, "device": self.device} | changes)
        if changes.get("tokens", 18) > changes.get("keys", 150):
            made["cu_seqlen_ke"] = torch.full_like(made["cu_seqlen_ke"], changes["keys"])
        return made

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.mqa_logits(**arguments, **more, backend=self.kernel)

    def check(self, got: Tensor, arguments: dict[str, Any]) -> None:
        want = kernelhub.mqa_logits.reference(**arguments, dtype=torch.float64)
        q, k = arguments["q"], arguments["k"]
        allowed = relative_error_allowed(*q.shape[1:], float8_products=q.dtype is FP8 and q.is_cuda)
        assert got.dtype is torch.float32
        assert got.shape == want.shape
        wrong = most_wrong(got, want, sizes(q, k, arguments["k_scale"], arguments["weights"]), allowed)
        assert wrong is None, wrong

    def test_the_reference_in_float32_is_within_its_tolerance(self) -> None:
        for changes in ({}, {"model": "deepseek-v3.2"}):
            arguments = self.inputs(**changes)
            self.check(kernelhub.mqa_logits.reference(**arguments), arguments)

    def test_each_query_has_a_range_of_its_own(self) -> None:
        arguments = self.inputs(tokens=7)
        starts, ends = [0, 3, 130, 149, 150, 20, -4], [150, 3, 2, 150, 150, 21, 400]
        arguments["cu_seqlen_ks"] = torch.tensor(starts, dtype=torch.int32, device=self.device)
        arguments["cu_seqlen_ke"] = torch.tensor(ends, dtype=torch.int32, device=self.device)
        got = self.run(arguments)
        self.check(got, arguments)
        assert got.isfinite().sum(1).tolist() == [150, 0, 0, 1, 0, 1, 150]

    def test_what_is_not_seen_is_not_let_in(self) -> None:
        arguments = self.inputs(dtype=torch.float32)
        want = self.run(arguments)
        arguments["k"][:18] = torch.nan
        arguments["k_scale"][:18] = torch.nan
        assert torch.equal(self.run(arguments), want)

    def test_nan_that_is_seen_is_not_hidden(self) -> None:
        arguments = self.inputs(dtype=torch.float32)
        arguments["k"][60] = torch.nan
        assert self.run(arguments)[:, 60].isnan().all()

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        want = self.run(arguments)
        moved = dict(arguments)
        moved["q"] = arguments["q"].view(torch.uint8).permute(1, 2, 0).contiguous().permute(2, 0, 1).view(FP8)
        moved["k"] = arguments["k"].view(torch.uint8).repeat(1, 3)[:, 32:64].view(FP8)
        moved["k_scale"] = arguments["k_scale"].repeat_interleave(2)[::2]
        moved["weights"] = arguments["weights"].T.contiguous().T
        for name in ("cu_seqlen_ks", "cu_seqlen_ke"):
            moved[name] = arguments[name].repeat_interleave(3)[::3]
        wide = torch.zeros(20, 302, device=self.device)
        out = wide[1:19, 1:301:2]
        self.run(moved, out=out)
        assert torch.equal(out, want)
        assert not wide[0].any()
        assert not wide[-1].any()
        assert not wide[:, ::2].any()

    def test_nothing_gives_an_empty_result(self) -> None:
        assert self.run(self.inputs(tokens=0)).shape == (0, 150)
        assert self.run(self.inputs(tokens=0, keys=0)).shape == (0, 0)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.mqa_logits.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        assert torch.equal(plan.run(**arguments), self.run(arguments))
        with pytest.raises(InvalidArgument, match="the plan is for float8_e4m3fn"):
            plan.run(**self.inputs(dtype=torch.float16))
        with pytest.raises(InvalidArgument, match="the plan is for"):
            plan.run(**self.inputs(k_scale=False))


class PagedLogitsContract(OpContract):
    """`paged_mqa_logits`."""

    op = "paged_mqa_logits"
    device = DEVICE

    def inputs(self, **changes: Any) -> dict[str, Any]:
        base = {"model": SMALL, "seq_lens": (131, 40), "page_size": 16, "device": self.device}
        return paged_logits_inputs(**base | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.paged_mqa_logits(**arguments, **more, backend=self.kernel)

    def check(self, got: Tensor, arguments: dict[str, Any]) -> None:
        want = kernelhub.paged_mqa_logits.reference(**arguments, dtype=torch.float64)
        q = arguments["q"]
        k, k_scale = split_cache(arguments["k_cache"], arguments["k_scale_cache"], q.shape[-1])
        largest = sizes(
            q.flatten(0, 1),
            k.float().abs().flatten(0, 1).amax(0, keepdim=True),
            None if k_scale is None else k_scale.amax().view(1),
            arguments["weights"],
        )
        allowed = relative_error_allowed(*q.shape[2:], float8_products=q.dtype is FP8 and q.is_cuda)
        assert got.dtype is torch.float32
        assert got.shape == want.shape
        wrong = most_wrong(got, want, largest.expand_as(want), allowed)
        assert wrong is None, wrong

    def test_the_reference_in_float32_is_within_its_tolerance(self) -> None:
        for changes in ({}, {"model": "deepseek-v3.2"}):
            arguments = self.inputs(**changes)
            self.check(kernelhub.paged_mqa_logits.reference(**arguments), arguments)

    def test_a_cache_with_scales_is_the_same_as_one_beside_them(self) -> None:
        apart, fused = self.inputs(next_n=2), self.inputs(next_n=2, fused=True)
        want = self.run(apart)
        assert torch.equal(self.run(fused), want)
        shape = fused["k_cache"].shape
        assert torch.equal(self.run(fused | {"k_cache": fused["k_cache"].view(*shape[:2], shape[3])}), want)
        layers = torch.zeros(shape[0], 3, *shape[1:], dtype=torch.uint8, device=self.device)
        layers[:, 1] = fused["k_cache"]
        assert torch.equal(self.run(fused | {"k_cache": layers[:, 1]}), want)

    def test_is_what_unpaged_scores_are(self) -> None:
        arguments = self.inputs(seq_lens=(70,), next_n=3)
        pages = arguments["block_table"][0, :5].long()
        k = arguments["k_cache"].view(torch.uint8)[pages].flatten(0, 1)[:70].view(FP8)
        ends = torch.tensor([68, 69, 70], dtype=torch.int32, device=self.device)
        own = self.kernel.partition(".")[0]
        want = kernelhub.mqa_logits(
            arguments["q"][0],
            k,
            arguments["k_scale_cache"][pages].flatten()[:70],
            arguments["weights"],
            torch.zeros_like(ends),
            ends,
            backend=[name for name in kernelhub.mqa_logits.kernels() if name.startswith(f"{own}.")] or None,
        )
        got = self.run(arguments)
        assert got.isfinite().sum(1).tolist() == [68, 69, 70]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    def test_what_is_not_seen_is_not_let_in(self) -> None:
        arguments = self.inputs(dtype=torch.float32)
        want = self.run(arguments)
        used = arguments["block_table"]
        arguments["k_cache"][used[0, 8].long(), 3:] = torch.nan
        free = [page for page in range(arguments["k_cache"].shape[0]) if page not in used.flatten().tolist()]
        arguments["k_cache"][free] = torch.nan
        arguments["block_table"] = torch.where(used < 0, free[0], used)
        assert torch.equal(self.run(arguments), want)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs(next_n=2)
        want = self.run(arguments)
        moved = dict(arguments)
        raw = arguments["q"].view(torch.uint8)
        moved["q"] = raw.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2).view(FP8)
        cache = arguments["k_cache"].view(torch.uint8)
        moved["k_cache"] = cache.transpose(0, 1).contiguous().transpose(0, 1).view(FP8)
        moved["k_scale_cache"] = arguments["k_scale_cache"].T.contiguous().T
        moved["weights"] = arguments["weights"].T.contiguous().T
        moved["block_table"] = torch.cat([arguments["block_table"]] * 2, 1)[:, : arguments["block_table"].shape[1]]
        moved["seq_lens"] = arguments["seq_lens"].repeat_interleave(2)[::2]
        wide = torch.zeros(4, 263, device=self.device)
        out = wide[:, :262:2]
        self.run(moved, out=out)
        assert torch.equal(out, want)
        assert not wide[:, 1::2].any()

    def test_nothing_gives_an_empty_result(self) -> None:
        assert self.run(self.inputs(seq_lens=(), max_seq_len=9)).shape == (0, 9)
        assert self.run(self.inputs(max_seq_len=0, seq_lens=(0, 0))).shape == (2, 0)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.paged_mqa_logits.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        assert torch.equal(plan.run(**arguments), self.run(arguments))
        assert torch.equal(plan.run(**self.inputs(fused=True)), self.run(arguments))
        with pytest.raises(InvalidArgument, match="pages of 16"):
            plan.run(**self.inputs(page_size=8))


class TopKContract(OpContract):
    """`topk_indices`: every kernel gives the very same answer."""

    op = "topk_indices"
    device = DEVICE

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        """On a CPU, without the cases of k 2048 that repeat one of k 300."""
        cases = super().accepted_cases()
        labels = {case.label for case in cases if case.device == "cpu"}
        return [
            case for case in cases if case.label.replace("2048 of each", "300 of each") not in labels - {case.label}
        ]

    def of_case(self, label: str) -> dict[str, Any]:
        """The arguments of one of the op's cases."""
        case = next(case for case in CASES[self.op].cases() if case.label == label)
        return dict(case.make(torch.device(self.device)))

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return topk_inputs(**{"tokens": 3, "keys": 5000, "k": 300, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.topk_indices(**arguments, **more, backend=self.kernel)

    def test_ties_infinities_and_ranges_give_these_indices(self) -> None:
        assert self.run(self.of_case("values of every kind, 1 of each row")).flatten().tolist() == [4, 7, -1, 11]
        got = self.run(self.of_case("ranges without columns and past the row"))
        assert (got >= 0).sum(1).tolist() == [0, 0, 6, 8]

    def test_what_is_outside_of_a_row_is_not_read(self) -> None:
        arguments = self.inputs(keys=100, k=10)
        want = self.run(arguments)
        column = torch.arange(100, device=self.device)
        outside = (column < arguments["row_starts"][:, None]) | (column >= arguments["row_ends"][:, None])
        assert torch.equal(self.run(arguments | {"logits": arguments["logits"].masked_fill(outside, torch.inf)}), want)

    def test_a_start_below_zero_counts_as_zero(self) -> None:
        arguments = self.inputs(keys=100, k=10)
        starts = torch.tensor([-7, -1, 0], dtype=torch.int32, device=self.device)
        want = self.run(arguments | {"row_starts": torch.zeros_like(starts)})
        assert torch.equal(self.run(arguments | {"row_starts": starts}), want)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs(keys=3000)
        want = self.run(arguments)
        moved = {"logits": arguments["logits"].T.contiguous().T, "k": 300}
        for name in ("row_starts", "row_ends"):
            moved[name] = arguments[name].repeat_interleave(2)[::2]
        wide = torch.zeros(3, 601, dtype=torch.int32, device=self.device)
        self.run(moved, out=wide[:, :600:2])
        assert torch.equal(wide[:, :600:2], want)
        assert not wide[:, 1::2].any()

    def test_takes_what_the_logits_give(self) -> None:
        arguments = logits_inputs(SMALL, tokens=5, keys=90, device=self.device)
        logits = kernelhub.mqa_logits(**arguments)
        chosen = self.run({"logits": logits, "k": 64})
        for row, (start, end) in enumerate(
            zip(arguments["cu_seqlen_ks"].tolist(), arguments["cu_seqlen_ke"].tolist(), strict=True)
        ):
            assert all(start <= place < end for place in chosen[row].tolist() if place != -1)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.topk_indices.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        assert torch.equal(plan.run(**arguments), self.run(arguments))
        with pytest.raises(InvalidArgument, match="the plan is for 300"):
            plan.run(arguments["logits"], 301, arguments["row_starts"], arguments["row_ends"])
        with pytest.raises(InvalidArgument, match="the plan is for 300 of rows with starts"):
            plan.run(arguments["logits"], 300)

    def test_memory_is_declared(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.topk_indices.prepare(**arguments, backend=self.kernel)
        few = plan.workspace_bytes(num_tokens=3, max_kv_len=5000)
        assert 0 <= few <= plan.workspace_bytes(num_tokens=300, max_kv_len=131072)
