"""Marlin's kernels of float8 weights against one in plain torch; weights whose scales it would round are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.marlin.fp8 import E4M3FN
from kernelhub.backends.marlin.order import (
    ordered_bytes,
    ordered_columns,
    ordered_scales,
    plain_bytes,
    plain_columns,
    plain_scales,
)
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.formats import from_e8m0, to_e8m0_up
from kernelhub.testing import KernelCase
from tests.backends.marlin_fake import FLOAT8_E4M3FN, of_column, on_the_cpu
from tests.contract.weight_only import BF16, FP16, WeightOnlyContract
from tests.dispatch.backends import OF_TRUST
from tests.ops.test_compile import compiled


class TestBfloat16(WeightOnlyContract):
    """The contract, of weights that are packed first and whose scales the format holds."""

    kernel = "fake.fp8_bfloat16"
    device = "cpu"
    dtype = BF16

    @pytest.fixture(autouse=True)
    def fake(self, clean_hub):
        with on_the_cpu():
            yield

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        with on_the_cpu():
            found = super().accepted_cases()
        return [case for case in found if "few bits" in case.label or "e8m0" in case.label]

    def inputs(self, **changes: Any) -> dict[str, Any]:
        made = super().inputs(**{"weight_only": self.dtype, "out_dtype": self.dtype} | changes)
        scale = made["b_scale"]
        if scale.dtype is torch.float32:
            blocks = scale.ndim == 2 and changes.get("scaling", "block") == "block"
            made["b_scale"] = from_e8m0(to_e8m0_up(scale)) if blocks else scale.to(self.dtype).float()
        return made

    def packed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        plan = kernelhub.fp8_gemm.prepare(**arguments, backend=self.kernel)
        return arguments | {"b": plan.pack(arguments["b"], arguments["b_scale"]), "b_scale": None}

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return super().run(self.packed(arguments) if isinstance(arguments["b"], Tensor) else arguments, **more)

    def test_every_code_is_decoded_exactly(self) -> None:
        codes = torch.arange(256).to(torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        b = torch.stack([codes.roll(row) for row in range(192)]).view(torch.float8_e4m3fn)
        a = torch.eye(256).to(self.dtype)
        for scale in (torch.ones(()), torch.ones(192), torch.ones(2, 2)):
            out = self.run({"a": a, "b": b, "a_scale": None, "b_scale": scale, "out_dtype": self.dtype})
            assert torch.equal(out, b.to(self.dtype).t())

    def test_each_scale_is_that_of_its_own_part(self) -> None:
        for scaling in ("row", "block"):
            arguments = self.inputs(scaling=scaling, n=200, k=384)
            arguments["b_scale"][-1, -1] *= 2
            self.agrees(self.run(arguments), arguments)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        want = self.run(arguments)
        moved = arguments | {"a": arguments["a"].t().contiguous().t()}
        moved["b"] = arguments["b"].view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
        wide = torch.full((20, 384), torch.nan, dtype=self.dtype)
        assert torch.equal(self.run(moved, out=wide[:, ::2]), want)
        assert wide[:, 1::2].isnan().all()

    def test_explain_reads_the_call(self) -> None:
        problem = kernelhub.fp8_gemm.explain(**self.packed(self.inputs()), backend=self.kernel).problem
        told = (problem.weight_only, problem.scaling, problem.n, problem.k)
        assert told == (str(self.dtype)[6:], "block", 192, 256)
        assert problem.weight_layout == f"marlin.fp8.{str(self.dtype)[6:]}.v1"

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        packed = self.packed(arguments)
        plan = kernelhub.fp8_gemm.prepare(**packed, backend=self.kernel)
        assert plan.workspace_bytes(num_tokens=20) > 0
        assert torch.equal(plan.run(packed["a"], packed["b"]), self.run(arguments))
        with pytest.raises(InvalidArgument, match="is laid out as checkpoint"):
            plan.run(arguments["a"], arguments["b"], None, arguments["b_scale"])
        other = kernelhub.fp8_gemm.prepare(**arguments, backend="torch")
        with pytest.raises(InvalidArgument, match=r"is laid out as marlin\.fp8"):
            other.run(packed["a"], packed["b"])

    def test_only_packed_weights_are_taken(self) -> None:
        arguments = self.inputs()
        with pytest.raises(NoKernel, match="layout"):
            kernelhub.fp8_gemm(**arguments, backend=self.kernel)
        assert kernelhub.fp8_gemm.prepare(**arguments, backend=self.kernel).needs_packing

    def test_a_packed_weight_needs_no_other_selection_and_gives_back_its_bits(self) -> None:
        for form in ({"scaling": "tensor"}, {"scaling": "row"}, {"scaling": "block"}, {"e8m0": (False, True)},
                     {"k": 128}, {"n": 65, "k": 384}):  # fmt: skip
            arguments = self.inputs(**form)
            packed = self.packed(arguments)
            assert torch.equal(kernelhub.fp8_gemm(**packed), self.run(arguments))
            b, scale = packed["b"].unpack()
            assert torch.equal(b.view(torch.uint8), arguments["b"].view(torch.uint8))
            assert (scale.dtype, scale.shape) == (arguments["b_scale"].dtype, arguments["b_scale"].shape)
            assert torch.equal(scale.float(), arguments["b_scale"].float())
            assert torch.equal(kernelhub.fp8_gemm.reference(**packed), kernelhub.fp8_gemm.reference(**arguments))
            moved = packed | {"b": packed["b"].to("cpu")}
            assert torch.equal(kernelhub.fp8_gemm(**moved), self.run(arguments))

    def test_scales_that_would_be_rounded_are_refused_when_packed(self) -> None:
        for scaling, words in (("row", f"that {str(self.dtype)[6:]} cannot represent"), ("block", "not powers of two")):
            arguments = self.inputs(scaling=scaling)
            scale = arguments["b_scale"].clone()
            scale[-1, -1] = 0.75 if scaling == "block" else 1 + 2**-13
            plan = kernelhub.fp8_gemm.prepare(**arguments, backend=self.kernel)
            with pytest.raises(InvalidArgument, match=words) as caught:
                plan.pack(arguments["b"], scale)
            assert caught.value.parameter == "b_scale"
            scale[-1, -1] = torch.nan
            with pytest.raises(InvalidArgument, match="holds 1 scales"):
                plan.pack(arguments["b"], scale)

    def test_what_is_no_weight_of_the_plan_is_not_packed(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.fp8_gemm.prepare(**arguments, backend=self.kernel)
        with pytest.raises(InvalidArgument, match="is list"):
            plan.pack([1], arguments["b_scale"])
        with pytest.raises(InvalidArgument, match="the plan is for"):
            plan.pack(arguments["b"], torch.ones(()))
        quantised = self.inputs(weight_only=None)
        with pytest.raises(InvalidArgument, match="bfloat16 or float16 activations"):
            kernelhub.fp8_gemm.prepare(**quantised).pack(quantised["b"], quantised["b_scale"])

    def test_a_packed_weight_beside_what_does_not_fit_is_refused(self) -> None:
        arguments = self.inputs()
        packed = self.packed(arguments)
        with pytest.raises(InvalidArgument, match="the packed weight holds it"):
            kernelhub.fp8_gemm(**packed | {"b_scale": arguments["b_scale"]})
        quantised = self.inputs(weight_only=None)
        with pytest.raises(InvalidArgument, match="packed weights go with"):
            kernelhub.fp8_gemm(quantised["a"], packed["b"], quantised["a_scale"])

    def test_a_packed_weight_is_traced(self) -> None:
        torch._dynamo.reset()
        packed = self.packed(self.inputs())
        run, counter = compiled(lambda a: kernelhub.fp8_gemm(a, packed["b"], out_dtype=self.dtype) * 2)
        for tokens in (2, 7, 20):
            rows = packed["a"][:tokens]
            assert torch.equal(run(rows), kernelhub.fp8_gemm(rows, packed["b"], out_dtype=self.dtype) * 2)
        assert counter.frame_count <= 2

    def test_nan_reaches_its_row_or_column_and_no_other(self) -> None:
        arguments = self.inputs(tokens=3)
        arguments["a"][1, 37] = torch.nan
        wrong = self.run(arguments).isnan()
        assert wrong[1].all()
        assert int(wrong.sum()) == 192


class TestFloat16(TestBfloat16):
    kernel = "fake.fp8_float16"
    dtype = FP16


def test_the_type_is_vllms() -> None:
    assert E4M3FN == FLOAT8_E4M3FN


def test_orders_are_undone() -> None:
    codes = torch.randint(0, 256, (128, 64), dtype=torch.uint8)
    assert torch.equal(plain_bytes(ordered_bytes(codes)), codes)
    scale = torch.randn(128, 3).bfloat16()
    assert torch.equal(plain_scales(ordered_scales(scale)), scale)
    assert torch.equal(plain_columns(ordered_columns(scale[:, 0].contiguous())), scale[:, 0])
    rows = torch.arange(128)
    assert torch.equal(ordered_columns(rows.to(torch.int16))[0, of_column(rows)], rows.to(torch.int16))


@pytest.mark.parametrize(
    ("device", "facets", "code"),
    [
        ("A100", {}, None),
        ("L40S", {"scaling": "row"}, None),
        ("H200", {"scaling": "tensor"}, None),
        ("B200", {}, "capability"),
        ("A100", {"k": 4160}, "divisibility"),
        ("A100", {"scaling": "row", "k": 4160}, None),
        ("A100", {"scaling": "row", "k": 4100}, "divisibility"),
        ("A100", {"out_dtype": "float32"}, "dtype"),
        ("A100", {"bias": True}, "feature"),
        ("A100", {"weight_only": "float16"}, "value"),
    ],
)
def test_limits_are_reported(device: str, facets: dict[str, Any], code: str | None) -> None:
    machine = SimulatedMachine({"triton": "3.7.1", "vllm": "0.33.0"})
    layout = {"weight_layout": "marlin.fp8.bfloat16.v1"}
    selection = kernelhub.explain(
        "fp8_gemm", device=device, machine=machine, **{"weight_only": "bfloat16"} | layout | facets
    )
    own = next(item for item in selection.decisions if item.kernel == "marlin.fp8_bfloat16")
    codes = {rejection.code for rejection in own.rejections} - OF_TRUST
    assert code in codes if code else not codes
