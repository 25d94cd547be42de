"""What Marlin's kernels ask of the machine and of a problem, and how their library's operator is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.marlin.fp4 import E2M1
from kernelhub.backends.marlin.kernels import SCHEMA, VLLM
from kernelhub.backends.marlin.locks import Locks
from kernelhub.backends.shared.operators import mismatch
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import NoKernel
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from tests.backends import marlin_fake
from tests.backends.cutlass_fakes import registered
from tests.dispatch.backends import OF_TRUST

NVFP4 = {"a_format": "bfloat16", "n": 1024, "k": 1024, "weight_layout": "marlin.nvfp4.bfloat16.v1"}
HALF = {
    **NVFP4,
    "a_format": "float16",
    "out_dtype": "float16",
    "weight_layout": "marlin.nvfp4.float16.v1",
}
MXFP4 = {**NVFP4, "b_format": "mxfp4", "weight_layout": "marlin.mxfp4.v1"}


def codes(kernel: str, device: str = "H200", vllm: str = "0.33.0", **facets: Any) -> set[str]:
    machine = SimulatedMachine({"triton": "3.7.1", **({"vllm": vllm} if vllm else {})})
    selection = kernelhub.explain("fp4_gemm", device=device, machine=machine, **facets)
    own = next(item for item in selection.decisions if item.kernel == f"marlin.{kernel}")
    return {rejection.code for rejection in own.rejections} - OF_TRUST


@pytest.mark.parametrize(
    ("kernel", "facets", "changes", "code"),
    [
        *(("nvfp4_bfloat16", NVFP4, {"device": name}, None) for name in ("A100", "L40S", "H100", "H200", "sm_86")),
        *(("nvfp4_bfloat16", NVFP4, {"device": name}, "capability") for name in ("B200", "RTX5090", "sm_75")),
        ("nvfp4_bfloat16", NVFP4, {"vllm": ""}, "package_missing"),
        ("nvfp4_bfloat16", NVFP4, {"vllm": "0.32.1"}, "package_version"),
        ("nvfp4_bfloat16", NVFP4, {"weight_layout": "checkpoint"}, "layout"),
        ("nvfp4_bfloat16", NVFP4, {"weight_layout": "marlin.nvfp4.float16.v1"}, "layout"),
        ("nvfp4_bfloat16", NVFP4, {"n": 1}, None),
        ("nvfp4_bfloat16", NVFP4, {"k": 64}, None),
        ("nvfp4_bfloat16", NVFP4, {"k": 1040}, "divisibility"),
        ("nvfp4_bfloat16", NVFP4, {"out_dtype": "float32"}, "dtype"),
        ("nvfp4_bfloat16", NVFP4, {"out_dtype": "float16"}, "dtype"),
        ("nvfp4_bfloat16", NVFP4, {"bias": True}, "feature"),
        ("nvfp4_bfloat16", NVFP4, {"a_format": "nvfp4"}, "value"),
        ("nvfp4_float16", HALF, {}, None),
        ("nvfp4_float16", HALF, {"out_dtype": "bfloat16"}, "dtype"),
        ("mxfp4", MXFP4, {}, None),
        ("mxfp4", MXFP4, {"b_format": "nvfp4"}, "value"),
        ("mxfp4", MXFP4, {"k": 2880}, None),
        ("mxfp4", MXFP4, {"k": 2912}, "divisibility"),
    ],
)
def test_limits(kernel: str, facets: dict[str, Any], changes: dict[str, Any], code: str | None) -> None:
    assert codes(kernel, **facets | changes) == ({code} if code else set())


def test_a_packed_weight_leaves_no_alternative_and_a_plain_one_is_not_marlin_s() -> None:
    machine = SimulatedMachine({"triton": "3.7.1", "vllm": "0.33.0"})
    for facets, kernel in ((NVFP4, "nvfp4_bfloat16"), (HALF, "nvfp4_float16"), (MXFP4, "mxfp4")):
        selection = kernelhub.explain("fp4_gemm", device="A100", machine=machine, **facets)
        assert selection.selected == f"marlin.{kernel}"
        plain = kernelhub.explain(
            "fp4_gemm", device="A100", machine=machine, **facets | {"weight_layout": "checkpoint"}
        )
        assert plain.selected == "triton.fp4_gemm"


def test_the_call_fits_the_schema_of_the_released_version() -> None:
    assert mismatch(torch._C.parse_schema("marlin_gemm" + marlin_fake.SCHEMA), "marlin_gemm", SCHEMA) is None
    older = marlin_fake.SCHEMA.replace("Tensor? b_zeros_or_none", "Tensor? b_zeros_or_none, Tensor? g_idx_or_none")
    assert "g_idx_or_none" in (mismatch(torch._C.parse_schema("marlin_gemm" + older), "marlin_gemm", SCHEMA) or "")
    assert E2M1 == marlin_fake.FLOAT4_E2M1F
    assert VLLM.namespace == "_C"


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        (None, "vllm is not installed"),
        (marlin_fake.SCHEMA.replace("Tensor workspace, ", "Tensor workspace, bool has_zp, "), r"takes .*bool has_zp"),
    ],
)
def test_a_library_without_the_operator_or_with_another_is_reported(schema: str | None, match: str, clean_hub) -> None:
    arguments = fp4_gemm_inputs(tokens=2, n=64, k=64)
    schemas = {} if schema is None else {"marlin_gemm": schema}
    with (
        marlin_fake.on_the_cpu(with_library=False),
        registered("_C", schemas, marlin_gemm=lambda *_: None),
        pytest.raises(NoKernel, match=match),
    ):
        kernelhub.fp4_gemm.prepare(**arguments, backend="fake")


def test_locks_are_zero_and_enough() -> None:
    made = Locks().on(torch.device("cpu"))
    assert made.dtype is torch.int32
    assert made.numel() >= 148  # a B200
    assert not made.any()
