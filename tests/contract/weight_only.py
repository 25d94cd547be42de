"""What every kernel of `fp8_gemm` with a feature `weight_only` must do. Subclass and name the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from tests.conftest import DEVICE

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, by what is unusual about it."""

    label: str
    inputs: dict[str, Any]

    def __str__(self) -> str:
        return self.label


SCALINGS = {
    "tensor": {"scaling": "tensor"},
    "channel": {"scaling": "row"},
    "block": {"scaling": "block"},
    "block in e8m0": {"scaling": "block", "e8m0": (False, True)},
    "row block": {"scaling": "row_block"},
}
CASES = [
    *(
        Case(f"{label}, {str(dtype)[6:]} to {str(out)[6:]}", {**form, "weight_only": dtype, "out_dtype": out})
        for label, form in SCALINGS.items()
        for dtype, out in ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32))
    ),
    *(
        Case(f"{label}, {tokens} rows", {**form, "tokens": tokens, "out_dtype": FP32})
        for label, form in SCALINGS.items()
        for tokens in (1, 3, 16, 17, 64, 65, 130)
    ),
    *(
        Case(f"{label}, N {n}, K {k}", {**form, "n": n, "k": k, "out_dtype": FP32, "bias": True})
        for label, form in SCALINGS.items()
        for n, k in ((1, 128), (7, 16), (63, 129), (129, 31), (130, 1), (200, 300))
    ),
    *(Case(f"{label}, a long K", {**form, "tokens": 3, "k": 2304}) for label, form in SCALINGS.items()),
]


class WeightOnlyContract:
    kernel: ClassVar[str]
    device: ClassVar[str] = DEVICE

    @classmethod
    def accepted_cases(cls) -> list[Case]:
        return CASES

    def inputs(self, **changes: Any) -> dict[str, Any]:
        plain = {"tokens": 20, "n": 192, "k": 256, "weight_only": BF16, "device": self.device}
        return fp8_gemm_inputs(**plain | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.fp8_gemm(**arguments, **more, backend=self.kernel)

    def agrees(self, out: Tensor, arguments: dict[str, Any]) -> None:
        on_gpu = self.device == "cuda"
        agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=on_gpu)
        assert agreement.ok, str(agreement)

    def test_matches_the_reference_in_float64(self, case: Case) -> None:
        arguments = self.inputs(**case.inputs)
        made = self.run(arguments)
        assert made.dtype is arguments["out_dtype"]
        assert made.is_contiguous()
        self.agrees(made, arguments)
        out = torch.full_like(made, torch.nan)
        assert self.run(arguments, out=out) is out
        assert torch.equal(out, made)

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

    def test_each_scale_is_that_of_its_own_part(self) -> None:
        for scaling in ("row", "block"):
            arguments = self.inputs(scaling=scaling, n=200, k=300, out_dtype=FP32)
            scale = arguments["b_scale"].clone()
            scale[-1, -1] *= 2
            changed = arguments | {"b_scale": scale}
            out = self.run(changed)
            self.agrees(out, changed)
            assert not torch.equal(out, self.run(arguments))

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

    def test_no_rows_give_an_empty_result(self) -> None:
        assert self.run(self.inputs(tokens=0)).shape == (0, 192)

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
