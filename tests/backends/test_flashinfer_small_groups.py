"""FlashInfer's grouped products of NVFP4, MXFP4 and MXFP8 keep the contract of `grouped_gemm`, with ones of torch."""

from __future__ import annotations

import pytest

from tests.backends.test_flashinfer import OnFake
from tests.backends.test_flashinfer_groups import rejected
from tests.contract.grouped_small import SmallGroupsContract

FP4, FP8 = "float4_e2m1fn_x2", "float8_e4m3fn"
NVFP4 = {"a_dtype": FP4, "b_dtype": FP4, "a_scale": "nvfp4", "b_scale": "nvfp4"}
MXFP4 = {"a_dtype": FP4, "b_dtype": FP4, "a_scale": "mxfp4", "b_scale": "mxfp4"}
MIXED = {"a_dtype": FP8, "b_dtype": FP4, "a_scale": "mxfp8", "b_scale": "mxfp4"}
MXFP8 = {"a_dtype": FP8, "b_dtype": FP8, "a_scale": "mxfp8", "b_scale": "mxfp8"}


class TestNvFp4(OnFake, SmallGroupsContract):
    kernel = "flashinfer.groups_nvfp4"
    formats = ("nvfp4 x nvfp4",)


class TestMxfp8Mxfp4(OnFake, SmallGroupsContract):
    kernel = "flashinfer.groups_mxfp8_mxfp4"
    formats = ("mxfp8 x mxfp4",)


class TestMaskedNvFp4(OnFake, SmallGroupsContract):
    kernel = "flashinfer.masked_cute_dsl"
    formats = ("nvfp4 x nvfp4",)
    forms = (True,)


class TestMaskedMxFp4(TestMaskedNvFp4):
    formats = ("mxfp4 x mxfp4",)


class TestMaskedMxFp8(TestMaskedNvFp4):
    formats = ("mxfp8 x mxfp8",)


@pytest.mark.parametrize(
    ("kernel", "device", "facets", "codes"),
    [
        ("groups_nvfp4", "RTX5090", NVFP4, set()),
        ("groups_nvfp4", "B200", NVFP4, {"capability"}),
        ("groups_nvfp4", "RTX5090", NVFP4 | {"n": 1600}, {"divisibility"}),
        ("groups_nvfp4", "RTX5090", NVFP4 | {"k": 2080}, {"divisibility"}),
        ("groups_nvfp4", "RTX5090", NVFP4 | {"out_dtype": "float32"}, {"dtype"}),
        ("groups_nvfp4", "RTX5090", MXFP4, {"value"}),
        ("groups_mxfp8_mxfp4", "B200", MIXED, set()),
        ("groups_mxfp8_mxfp4", "B300", MIXED | {"masked": True}, set()),
        ("groups_mxfp8_mxfp4", "RTX5090", MIXED, set()),
        ("groups_mxfp8_mxfp4", "H200", MIXED, {"capability"}),
        ("groups_mxfp8_mxfp4", "B200", MXFP8, {"value", "dtype"}),
        ("masked_cute_dsl", "B200", NVFP4 | {"masked": True}, {"not_built", "package_missing"}),
        ("masked_cute_dsl", "B200", NVFP4, {"not_built", "package_missing", "value"}),
        ("masked_cute_dsl", "B200", MIXED | {"masked": True}, {"not_built", "package_missing", "value"}),
        ("masked_cute_dsl", "H200", NVFP4 | {"masked": True}, {"not_built", "package_missing", "capability"}),
    ],
)
def test_limits_are_reported(kernel: str, device: str, facets: dict[str, object], codes: set[str]) -> None:
    assert rejected(f"flashinfer.{kernel}", device, **facets) == codes
