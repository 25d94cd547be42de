"""What every kernel of `bmm_fp8` must do. Subclass `BmmFp8Contract` and name the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from tests.conftest import DEVICE


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, by what is unusual about it."""

    label: str
    inputs: dict[str, Any]

    def __str__(self) -> str:
        return self.label


EACH = {"a_scaling": "batch", "b_scaling": "batch"}
FP32 = {"out_dtype": torch.float32}
CASES = [
    Case("scaled as a whole", {}),
    Case("scaled each", EACH),
    Case("a scaled each", {"a_scaling": "batch"}),
    Case("b scaled each", {"b_scaling": "batch"}),
    *(
        Case(f"{operand} in e5m2, {tokens} rows", {**EACH, "e5m2": operand, "tokens": tokens})
        for operand in ("a", "b")
        for tokens in (5, 70)
    ),
    *(Case(f"{dtype}"[6:], {**EACH, "out_dtype": dtype}) for dtype in (torch.float16, torch.float32)),
    *(Case(f"batch of {batch}", {**EACH, **FP32, "batch": batch}) for batch in (1, 2, 9)),
    *(Case(f"{tokens} rows", {**EACH, **FP32, "tokens": tokens}) for tokens in (1, 15, 16, 17, 33, 64, 65, 130)),
    *(
        Case(f"N {n}, K {k}", {**EACH, **FP32, "n": n, "k": k})
        for n, k in ((1, 1), (63, 16), (65, 33), (129, 127), (64, 129), (128, 512))
    ),
]


class BmmFp8Contract:
    kernel: ClassVar[str]
    device: ClassVar[str] = DEVICE
    claims_determinism: ClassVar[bool] = False

    @classmethod
    def accepted_cases(cls) -> list[Case]:
        asked = {"device": torch.device(cls.device), "backend": cls.kernel}
        taken = {
            e5m2: kernelhub.explain("bmm_fp8", **asked, e5m2=e5m2).selected is not None for e5m2 in (None, "a", "b")
        }
        return [case for case in CASES if taken[case.inputs.get("e5m2")]]

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return bmm_fp8_inputs(**{"batch": 3, "tokens": 12, "n": 96, "k": 160, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.bmm_fp8(**arguments, **more, backend=self.kernel)

    def agrees(self, out: Tensor, arguments: dict[str, Any]) -> None:
        on_gpu = self.device == "cuda"
        agreement = compare(out, kernelhub.bmm_fp8.reference, arguments, matrix_instructions=on_gpu)
        assert agreement.ok, str(agreement)

    def test_matches_the_reference_in_float64(self, case: Case) -> None:
        arguments = self.inputs(**case.inputs)
        shape = (*arguments["a"].shape[:2], arguments["b"].shape[1])
        out = torch.full(shape, torch.nan, dtype=arguments["out_dtype"], device=self.device)
        assert self.run(arguments, out=out) is out
        self.agrees(out, arguments)
        made = self.run(arguments)
        assert made.is_contiguous()
        self.agrees(made, arguments)

    def test_each_matrix_is_multiplied_by_its_own(self) -> None:
        arguments = self.inputs(**EACH, **FP32)
        out = self.run(arguments)
        for i in range(3):
            one = {name: arguments[name][i : i + 1] for name in ("a", "b", "a_scale", "b_scale")}
            self.agrees(out[i : i + 1], {**one, **FP32})

    def test_scales_mean_the_same_in_every_form(self) -> None:
        forms = {"tensor": ((1,), (1, 1), (1, 1, 1)), "batch": ((3, 1), (3, 1, 1))}
        for scaling, shape in ((scaling, shape) for scaling, shapes in forms.items() for shape in shapes):
            arguments = self.inputs(a_scaling=scaling, b_scaling=scaling)
            want = self.run(arguments)
            for name in ("a_scale", "b_scale"):
                assert torch.equal(self.run({**arguments, name: arguments[name].view(shape)}), want)

    def test_nan_reaches_its_row_of_its_matrix_only(self) -> None:
        for tokens in (12, 70):
            arguments = self.inputs(tokens=tokens)
            arguments["a"].view(torch.uint8)[1, 2, 37] = 0x7F
            wrong = self.run(arguments).isnan()
            assert wrong[1, 2].all()
            assert int(wrong.sum()) == 96

    def test_operands_may_have_any_strides(self) -> None:
        """Heads in the middle, as latent attention has its queries and wants its results; b in K-major order."""
        arguments = self.inputs(**EACH)
        want = self.run(arguments)
        assert not arguments["a"].is_contiguous()
        around = torch.full((12, 5, 2 * 96), 7.0, dtype=want.dtype, device=self.device)
        out = around.transpose(0, 1)[1:4, :, ::2]
        moved = arguments["b"].view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3)
        spread = {name: torch.stack([arguments[name]] * 2, 1)[:, 0] for name in ("a_scale", "b_scale")}
        self.run({**arguments, **spread, "b": moved}, out=out)
        self.agrees(out, arguments)
        assert (around[..., 1::2] == 7.0).all()
        assert (around[:, (0, 4)] == 7.0).all()

    def test_no_rows_and_no_matrices_give_an_empty_result(self) -> None:
        assert self.run(self.inputs(tokens=0)).shape == (3, 0, 96)
        assert self.run(self.inputs(batch=0)).shape == (0, 12, 96)

    def test_explain_reads_the_call(self) -> None:
        selection = kernelhub.bmm_fp8.explain(**self.inputs(a_scaling="batch"), backend=self.kernel)
        assert selection.selected == self.kernel
        problem = selection.problem
        assert (problem.a_scaling, problem.b_scaling, problem.n, problem.k) == ("batch", "tensor", 96, 160)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.bmm_fp8.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        dtype = arguments.pop("out_dtype")
        assert torch.equal(plan.run(**arguments), self.run({**arguments, "out_dtype": dtype}))
        for change in ({"n": 128}, {"k": 128}, {"b_scaling": "batch"}):
            other = self.inputs(**change)
            other.pop("out_dtype")
            with pytest.raises(InvalidArgument, match="the plan is for"):
                plan.run(**other)

    def test_the_same_call_gives_the_same_bits(self) -> None:
        arguments = self.inputs()
        first = self.run(arguments)
        if self.claims_determinism:
            assert all(torch.equal(self.run(arguments), first) for _ in range(3))
