"""What every kernel of `bmm_fp8` must do. Subclass `BmmFp8Contract` and name the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.testing import OpContract
from tests.conftest import DEVICE

EACH = {"a_scaling": "batch", "b_scaling": "batch"}
FP32 = {"out_dtype": torch.float32}


class BmmFp8Contract(OpContract):
    op = "bmm_fp8"
    device = DEVICE

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return bmm_fp8_inputs(**{"batch": 3, "tokens": 12, "n": 96, "k": 160, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.bmm_fp8(**arguments, **more, backend=self.kernel)

    def agrees(self, out: Tensor, arguments: dict[str, Any]) -> None:
        on_gpu = self.device == "cuda"
        agreement = compare(out, kernelhub.bmm_fp8.reference, arguments, matrix_instructions=on_gpu)
        assert agreement.ok, str(agreement)

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
        assert want.is_contiguous()
        assert not arguments["a"].is_contiguous()
        around = torch.full((12, 5, 2 * 96), 7.0, dtype=want.dtype, device=self.device)
        out = around.transpose(0, 1)[1:4, :, ::2]
        moved = arguments["b"].view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3)
        spread = {name: torch.stack([arguments[name]] * 2, 1)[:, 0] for name in ("a_scale", "b_scale")}
        assert self.run({**arguments, **spread, "b": moved}, out=out) is out
        self.agrees(out, arguments)
        assert (around[..., 1::2] == 7.0).all()
        assert (around[:, (0, 4)] == 7.0).all()

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
