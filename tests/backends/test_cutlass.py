"""What the adapters of cutlass hand to the libraries is what they ask for: they run against ones in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.cutlass.requirements import MOST_ADDED_FAST
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from tests.backends.cutlass_fakes import on_the_cpu
from tests.contract import fp4_gemm, fp8_gemm
from tests.contract.grouped_small import SmallGroupsContract

FP16 = torch.float16


class OnTheCpu:
    device = "cpu"

    @classmethod
    def accepted_cases(cls) -> list[Any]:
        with on_the_cpu():
            return super().accepted_cases()  # type: ignore[misc]

    @pytest.fixture(autouse=True)
    def fake(self, clean_hub):
        with on_the_cpu():
            yield


class TestVllmScaledMm(OnTheCpu, fp8_gemm.Fp8GemmContract):
    kernel = "fake.vllm_scaled_mm"
    plain = {"scaling": "row", "n": 192, "k": 256}  # noqa: RUF012


class TestSglScaledMm(TestVllmScaledMm):
    kernel = "fake.sgl_fp8_scaled_mm"


class TestVllmBlockwise(OnTheCpu, fp8_gemm.Fp8GemmContract):
    kernel = "fake.vllm_blockwise"
    takes_bias = False
    plain = {"scaling": "block", "n": 256, "k": 256}  # noqa: RUF012

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        dtype = arguments.pop("out_dtype")
        plan = kernelhub.fp8_gemm.prepare(**arguments, out_dtype=dtype, backend=self.kernel)
        assert plan.workspace_bytes(num_tokens=20) > 0
        assert torch.equal(plan.run(**arguments), self.run({**arguments, "out_dtype": dtype}))


class TestSglBlockwise(TestVllmBlockwise):
    kernel = "fake.sgl_fp8_blockwise"


class TestVllmFp4(OnTheCpu, fp4_gemm.Fp4GemmContract):
    kernel = "fake.vllm_fp4"

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return super().inputs(**{"a_format": "nvfp4", "n": 96} | changes)

    def test_every_operand_changes_the_result(self) -> None:
        arguments = self.inputs()
        first = self.run(arguments)
        for name in ("a_scale", "b_scale", "a_global_scale", "b_global_scale"):
            other = (arguments[name].float() * 2).to(arguments[name].dtype)
            assert not torch.equal(self.run({**arguments, name: other}), first), name

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        want = self.run(arguments)
        moved = dict(arguments)
        for name in ("a", "b", "a_scale", "b_scale"):
            raw = arguments[name].view(torch.uint8)
            moved[name] = torch.stack([raw, torch.zeros_like(raw)], 2).flatten(1)[:, ::2].view(arguments[name].dtype)
        wide = torch.full((5, 192), torch.nan, dtype=torch.bfloat16)
        assert torch.equal(self.run(moved, out=wide[:, ::2]), want)
        assert wide[:, 1::2].isnan().all()

    def test_leading_dimensions_are_kept(self) -> None:
        arguments = self.inputs(tokens=6)
        want = self.run(arguments)
        moved = arguments | {name: arguments[name].unflatten(0, (2, 3)) for name in ("a", "a_scale")}
        assert torch.equal(self.run(moved), want.unflatten(0, (2, 3)))

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.fp4_gemm.prepare(**arguments, backend=self.kernel)
        operands = {name: value for name, value in arguments.items() if name != "out_dtype"}
        assert torch.equal(plan.run(**operands), self.run(arguments))
        packed = self.packed(arguments)
        assert packed["b"].layout == "nvfp4.scales128x4.v1"
        again = kernelhub.fp4_gemm.prepare(**packed, backend=self.kernel)
        rest = {name: value for name, value in packed.items() if name != "out_dtype"}
        assert torch.equal(again.run(**rest), self.run(arguments))

    def test_bytes_and_dtypes_of_one_format_are_the_same(self) -> None:
        arguments = self.inputs()
        as_fp4 = {name: arguments[name].view(torch.float4_e2m1fn_x2) for name in "ab"}
        assert torch.equal(self.run({**arguments, **as_fp4}), self.run(arguments))

    test_float32_results_need_no_rounding = None  # it gives no float32
    test_scales_at_the_ends_of_their_range_are_right = None  # of mxfp4


def added_fast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b.T as Ada and Hopper add: 32 products and the sum so far, each cut off 13 bits below the largest."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for start in range(0, a.shape[1], 32):
        part = slice(start, start + 32)
        terms = torch.cat([a[:, None, part].double() * b[None, :, part].double(), total[..., None]], -1)
        unit = torch.exp2(terms.abs().amax(-1, keepdim=True).clamp(min=1e-300).log2().floor() - 13)
        total = ((terms / unit).trunc() * unit).sum(-1)
    return total


def test_sums_of_14_bits_agree_up_to_the_k_that_records_take_and_not_far_beyond() -> None:
    def worst(k: int, dtype: torch.dtype, seed: int) -> Any:
        arguments = fp8_gemm_inputs(tokens=48, n=48, k=k, scaling="row", out_dtype=dtype, seed=seed)
        scales = arguments["a_scale"].reshape(-1, 1) * arguments["b_scale"].reshape(1, -1)
        made = (added_fast(arguments["a"], arguments["b"]) * scales).to(dtype)
        return compare(made, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)

    for seed in range(3):
        assert max(vars(worst(MOST_ADDED_FAST, torch.bfloat16, seed)).values()) < 0.75
        assert not worst(8 * MOST_ADDED_FAST, FP16, seed).ok


class TestVllmNvFp4Groups(OnTheCpu, SmallGroupsContract):
    kernel = "fake.vllm_groups_nvfp4"
    formats = ("nvfp4 x nvfp4",)


class TestVllmMxFp4Groups(TestVllmNvFp4Groups):
    kernel = "fake.vllm_groups_mxfp4"
    formats = ("mxfp4 x mxfp4",)
