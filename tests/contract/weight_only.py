"""What every kernel of `fp8_gemm` with a feature `weight_only` must do. Subclass and name the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.testing import KernelCase, OpContract
from tests.conftest import DEVICE
from tests.contract.fp8_gemm import is_weight_only

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class WeightOnlyContract(OpContract):
    op = "fp8_gemm"
    device = DEVICE

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        return [case for case in super().accepted_cases() if is_weight_only(case)]

    def inputs(self, **changes: Any) -> dict[str, Any]:
        plain = {"tokens": 20, "n": 192, "k": 256, "weight_only": BF16, "device": self.device}
        return fp8_gemm_inputs(**plain | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.fp8_gemm(**arguments, **more, backend=self.kernel)

    def agrees(self, out: Tensor, arguments: dict[str, Any]) -> None:
        on_gpu = self.device == "cuda"
        agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=on_gpu)
        assert agreement.ok, str(agreement)

    def test_every_code_is_decoded_exactly(self) -> None:
        codes = torch.arange(256, device=self.device).to(torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        b = codes.repeat(192, 1).view(E4M3)
        a = torch.eye(256, device=self.device)
        for dtype in (BF16, FP16):
            for scale in (torch.ones((), device=self.device), torch.ones(192, device=self.device),
                          torch.ones(2, 2, device=self.device)):  # fmt: skip
                out = self.run({"a": a.to(dtype), "b": b, "a_scale": None, "b_scale": scale, "out_dtype": FP32})
                assert torch.equal(out, b.float().t())

    def test_nan_reaches_its_row_or_column_and_no_other(self) -> None:
        for tokens in (3, 70):
            arguments = self.inputs(tokens=tokens)
            arguments["a"][1, 37] = torch.nan
            wrong = self.run(arguments).isnan()
            assert wrong[1].all()
            assert int(wrong.sum()) == 192
            arguments = self.inputs(tokens=tokens)
            arguments["b"].view(torch.uint8)[65, 200] = 0x7F
            wrong = self.run(arguments).isnan()
            assert wrong[:, 65].all()
            assert int(wrong.sum()) == tokens

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs(bias=True)
        want = self.run(arguments)
        moved = dict(arguments)
        for name in ("a", "b", "b_scale"):
            raw = arguments[name].view(torch.uint8) if name == "b" else arguments[name]
            moved[name] = raw.t().contiguous().t().view(arguments[name].dtype)
        around = torch.full((22, 2 * want.shape[1]), 7.0, dtype=want.dtype, device=self.device)
        self.run(moved, out=around[1:-1, ::2])
        self.agrees(around[1:-1, ::2], arguments)
        assert (around[:, 1::2] == 7.0).all()
        assert (around[0] == 7.0).all()
        assert (around[-1] == 7.0).all()

    def test_explain_reads_the_call(self) -> None:
        problem = kernelhub.fp8_gemm.explain(**self.inputs(weight_only=FP16), backend=self.kernel).problem
        assert (problem.weight_only, problem.scaling, problem.n, problem.k) == ("float16", "block", 192, 256)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.fp8_gemm.prepare(**arguments, backend=self.kernel)
        rest = {name: value for name, value in arguments.items() if name != "out_dtype"}
        assert torch.equal(plan.run(**rest), self.run(arguments))
        assert plan.workspace_bytes(num_tokens=20) >= 0
        with pytest.raises(InvalidArgument, match="the plan is for bfloat16"):
            plan.run(**rest | {"a": rest["a"].half()})
        quantised = self.inputs(weight_only=None)
        with pytest.raises(InvalidArgument, match="the plan is for"):
            plan.run(**{name: value for name, value in quantised.items() if name != "out_dtype"})
        of_codes = kernelhub.fp8_gemm.prepare(**quantised)
        with pytest.raises(InvalidArgument, match="the plan is for"):
            of_codes.run(**rest)
