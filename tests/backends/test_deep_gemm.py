"""What DeepGEMM's adapters hand to the library is what it documents: they run against one in plain torch."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.formats import from_e8m0
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.ops.indexer.inputs import logits_inputs, paged_logits_inputs
from kernelhub.testing import OpContract
from tests.backends.deep_gemm_copies import installed, on_the_cpu, write
from tests.contract import fp8_gemm, grouped_gemm, indexer
from tests.contract.indexer import shaped


class OnTheCpu:
    device = "cpu"

    @classmethod
    def accepted_cases(cls) -> list[Any]:
        with on_the_cpu():
            cases = super().accepted_cases()  # type: ignore[misc]
        return [*cases, *cls.own_cases()]

    @classmethod
    def own_cases(cls) -> list[Any]:
        return []

    @pytest.fixture(autouse=True)
    def fake(self, clean_hub, tmp_path_factory):
        root = tmp_path_factory.mktemp("library")
        write(root)
        with installed(root), on_the_cpu():
            yield


class TestFp8Blocks(OnTheCpu, fp8_gemm.Fp8GemmContract):
    kernel = "fake.fp8_blocks"
    takes_bias = False

    def test_scales_in_the_librarys_layout_are_not_copied(self) -> None:
        arguments = self.inputs(tokens=20)
        column_major = arguments["a_scale"].t().contiguous().t()
        layouts = __import__("kernelhub.backends.deep_gemm.layouts", fromlist=["layouts"])
        assert layouts.scales_of_rows(column_major, False) is column_major
        assert layouts.scales_of_rows(arguments["a_scale"], False).stride() == (1, 20)
        assert torch.equal(self.run({**arguments, "a_scale": column_major}), self.run(arguments))


class TestFp8BlocksUe8m0(TestFp8Blocks):
    kernel = "fake.fp8_blocks_ue8m0"
    fewest_cases = 1
    plain = {"scaling": "block", "n": 192, "k": 256, "e8m0": (True, True)}  # noqa: RUF012

    @classmethod
    def own_cases(cls) -> list[fp8_gemm.Case]:
        return [case for case in super().own_cases() if "e8m0" not in case.inputs]

    def test_scales_in_the_librarys_layout_are_not_copied(self) -> None:
        """They are packed: no checkpoint holds them so."""

    def test_float32_scales_are_refused_not_rounded(self) -> None:
        selection = kernelhub.fp8_gemm.explain(**fp8_gemm_inputs(), backend=self.kernel)
        assert selection.selected is None
        assert "rounding other scales to powers of two would change the result" in str(selection)


class TestContiguous(OnTheCpu, grouped_gemm.GroupedGemmContract):
    kernel = "fake.fp8_contiguous"
    formats = ("block",)
    takes_masked = False
    awkward_k = 256
    powers_of_two = False

    def inputs(self, **changes: Any) -> dict[str, Any]:
        shape = {"n": 192, "k": 256, "format": "block", "powers_of_two": self.powers_of_two, "device": "cpu"}
        return grouped_gemm_inputs(**shape | changes)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.grouped_gemm.prepare(**arguments, backend=self.kernel)
        assert torch.equal(plan.run(**arguments)[:25], self.run(arguments)[:25])
        with pytest.raises(InvalidArgument, match="the plan is for"):
            plan.run(**self.inputs(n=64))

    def test_offsets_that_make_no_sense_write_nothing_outside(self) -> None:
        arguments = self.inputs(sizes=(5, 0, 19, 1))
        ends = arguments["offsets"]
        for wrong in ((9, 3, 40, 2), (-5, 10**6, 0, 7)):
            ends[:] = torch.tensor((5, 5, 24, 25))
            plan = kernelhub.grouped_gemm.prepare(**arguments, backend=self.kernel)
            moved = torch.tensor(wrong, dtype=torch.int32)
            plan.adapter.launch(_operands(arguments | {"offsets": moved}), torch.zeros(28, 192).bfloat16())


class TestContiguousUe8m0(TestContiguous):
    kernel = "fake.fp8_contiguous_ue8m0"
    powers_of_two = True


class TestContiguousBf16(TestContiguous):
    kernel = "fake.bf16_contiguous"
    formats = ("bfloat16",)
    awkward_k = 192

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return super().inputs(**{"format": "bfloat16"} | changes)


def _operands(arguments: dict[str, Any]) -> Any:
    from kernelhub.ops.gemm.grouped.adapter import GroupedOperands

    names = GroupedOperands._fields
    return GroupedOperands(*(arguments.get(name) for name in names))


class TestMasked(OnTheCpu, OpContract):
    op = "grouped_gemm"
    kernel = "fake.fp8_masked"
    formats: ClassVar[tuple[dict[str, Any], ...]] = ({"format": "block"}, {"format": "block", "powers_of_two": True})

    def test_operands_may_have_any_strides(self) -> None:
        for form in self.formats:
            arguments = grouped_gemm_inputs(n=192, k=256, masked=True, sizes=(40, 0, 131), **form)
            moved = dict(arguments)
            for key in ("a", "b", "a_scale", "b_scale"):
                if key in arguments:
                    value = arguments[key]
                    raw = value.view(torch.uint8) if value.element_size() == 1 else value
                    moved[key] = raw.transpose(-1, -2).contiguous().transpose(-1, -2).view(value.dtype)
            wide = torch.full((3, 134, 384), torch.nan).bfloat16()
            kernelhub.grouped_gemm(**moved, out=wide[..., ::2], backend=self.kernel)
            grouped_gemm.GroupedGemmContract().check(wide[..., ::2], arguments)
            assert wide[..., 1::2].isnan().all()


class TestMaskedUe8m0(TestMasked):
    kernel = "fake.fp8_masked_ue8m0"
    formats = TestMasked.formats[1:]


class TestMaskedBf16(TestMasked):
    kernel = "fake.bf16_masked"
    formats = ({"format": "bfloat16"},)


class TestLogits(OnTheCpu, indexer.LogitsContract):
    kernel = "fake.logits"

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return super().inputs(**{"model": shaped(32, 64)} | changes)

    def test_each_query_has_a_range_of_its_own(self) -> None:
        arguments = self.inputs(tokens=7)
        arguments["cu_seqlen_ks"] = torch.tensor([0, 3, 130, 149, 150, 20, -4], dtype=torch.int32)
        arguments["cu_seqlen_ke"] = torch.tensor([150, 3, 2, 150, 150, 21, 400], dtype=torch.int32)
        self.check(self.run(arguments), arguments)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        moved = {name: value.repeat_interleave(2, 0)[::2] for name, value in arguments.items() if value.ndim == 1}
        moved["weights"] = arguments["weights"].T.contiguous().T
        moved["q"] = arguments["q"].view(torch.uint8).permute(1, 2, 0).contiguous().permute(2, 0, 1).view(indexer.FP8)
        moved["k"] = arguments["k"].view(torch.uint8).repeat(1, 3)[:, 64:128].view(indexer.FP8)
        out = torch.zeros(18, 302)[:, 1:301:2]
        self.run(arguments | moved, out=out)
        assert torch.equal(out, self.run(arguments))

    test_what_is_not_seen_is_not_let_in = None  # of float32
    test_nan_that_is_seen_is_not_hidden = None  # of float32


class TestPagedLogits(OnTheCpu, indexer.PagedLogitsContract):
    kernel = "fake.logits"

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return super().inputs(**{"model": shaped(32, 64), "page_size": 64} | changes)

    def test_pages_that_hold_their_scales_are_not_copied(self) -> None:
        fused = self.inputs(fused=True)["k_cache"]
        adapter = __import__("kernelhub.backends.deep_gemm.indexer", fromlist=["indexer"])
        layers = torch.zeros(fused.shape[0], 2, *fused.shape[1:], dtype=torch.uint8)
        for cache in (fused, layers[:, 1]):
            view = adapter._fused_view(*indexer.split_cache(cache, None, 64))
            assert view.data_ptr() == cache.data_ptr()
            assert view.stride() == cache.stride()

    def test_a_table_with_too_few_pages_for_the_columns(self) -> None:
        arguments = self.inputs(fused=True, max_seq_len=500)
        arguments["block_table"] = arguments["block_table"][:, :3]
        self.check(self.run(arguments), arguments)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.paged_mqa_logits.prepare(**arguments, backend=self.kernel)
        assert torch.equal(plan.run(**arguments), self.run(arguments))

    test_what_is_not_seen_is_not_let_in = None  # of float32


def test_scales_of_every_byte_are_exact_in_both_layouts() -> None:
    from kernelhub.backends.deep_gemm.layouts import scales_of_blocks, scales_of_rows

    codes = torch.arange(256).to(torch.uint8).view(32, 8)
    want = from_e8m0(codes)
    for held in (codes, codes.view(torch.float8_e8m0fnu), codes.t().contiguous().t()):
        for made in (scales_of_rows(held, False), scales_of_blocks(held, 4096, False)):
            assert torch.equal(made.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))
        packed = scales_of_rows(held, True)
        assert packed.stride() == (1, 32)
        assert torch.equal(packed.contiguous().view(torch.uint8).view(32, 8), codes)
    of_seven = scales_of_rows(codes[:, :7], True).contiguous().view(torch.uint8).view(32, 8)
    assert torch.equal(of_seven[:, :7], codes[:, :7])
    assert not of_seven[:, 7].any()


def test_the_operands_of_these_tests_are_not_what_the_library_wants_by_chance() -> None:
    """The fake would refuse them, did the adapter pass them on as they are."""
    assert fp8_gemm_inputs(tokens=20, n=192, k=256)["a_scale"].stride() != (1, 20)
    assert paged_logits_inputs(fused=False)["k_cache"].dtype is not torch.uint8
    assert logits_inputs()["cu_seqlen_ke"].dtype is torch.int32
