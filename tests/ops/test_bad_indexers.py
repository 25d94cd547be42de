"""What the indexer cannot take: one clear error that names the parameter, on a first call and on a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from tests.conftest import DEVICE

z = torch.zeros
FP8 = torch.float8_e4m3fn


def i(*shape: int) -> torch.Tensor:
    return z(*shape, dtype=torch.int32)


def b(*shape: int) -> torch.Tensor:
    return z(*shape, dtype=torch.uint8)


def scores(**changes: Any) -> dict[str, Any]:
    base = {"q": z(3, 2, 8), "k": z(5, 8), "k_scale": z(5), "weights": z(3, 2)}
    return base | {"cu_seqlen_ks": i(3), "cu_seqlen_ke": i(3)} | changes


def paged(**changes: Any) -> dict[str, Any]:
    base = {"q": z(2, 1, 4, 8), "k_cache": z(5, 16, 8), "k_scale_cache": z(5, 16), "weights": z(2, 4)}
    return base | {"block_table": i(2, 3), "seq_lens": i(2), "max_seq_len": 40} | changes


def fused(**changes: Any) -> dict[str, Any]:
    return paged(q=z(2, 1, 4, 8).to(FP8), k_cache=b(5, 16, 1, 12), k_scale_cache=None) | changes


def rows(**changes: Any) -> dict[str, Any]:
    return {"logits": z(3, 10), "k": 4, "row_starts": i(3), "row_ends": i(3)} | changes


BAD = (
    [
        ("mqa_logits", scores, parameter, change, words)
        for parameter, change, words in [
            ("q", 3, "is int"),
            ("q", z(3, 8), r"\[3, 8\]"),
            ("q", z(3, 0, 8), r"\[3, 0, 8\]"),
            ("q", z(3, 2, 8).double(), "float64"),
            ("q", z(3, 2, 8, device="meta"), "meta"),
            ("q", z(3, 2, 8, requires_grad=True), "requires grad"),
            ("k", None, "NoneType"),
            ("k", z(5, 9), r"\[5, 9\]"),
            ("k", z(5, 1, 8), r"\[5, 1, 8\]"),
            ("k", z(5, 8).half(), "float16"),
            ("k_scale", z(4), r"\[4\]"),
            ("k_scale", z(5).half(), "float16"),
            ("k_scale", 1.0, "is float"),
            ("weights", z(3, 3), r"\[3, 3\]"),
            ("weights", z(3, 2).bfloat16(), "bfloat16"),
            ("weights", z(3, 2, device="meta"), "meta"),
            ("cu_seqlen_ks", i(4), r"\[4\]"),
            ("cu_seqlen_ks", z(3), "float32"),
            ("cu_seqlen_ke", i(3).long(), "int64"),
            ("cu_seqlen_ke", None, "NoneType"),
            ("out", z(3, 6), r"\[3, 6\]"),
            ("out", z(3, 5).half(), "float16"),
        ]
    ]
    + [
        ("paged_mqa_logits", base, parameter, change, words)
        for base, parameter, change, words in [
            (paged, "q", None, "NoneType"),
            (paged, "q", z(2, 4, 8), r"\[2, 4, 8\]"),
            (paged, "q", z(2, 1, 4, 8).int(), "int32"),
            (paged, "k_cache", z(5, 16, 9), r"\[5, 16, 9\]"),
            (paged, "k_cache", z(5, 16, 1, 8), r"\[5, 16, 1, 8\]"),
            (paged, "k_cache", z(5, 16, 8).half(), "float16"),
            (paged, "k_cache", b(5, 16, 12), "uint8 with a q of float32"),
            (paged, "k_scale_cache", z(5, 15), r"\[5, 15\]"),
            (paged, "weights", z(4, 4), r"\[4, 4\]"),
            (paged, "block_table", i(3, 3), r"\[3, 3\]"),
            (paged, "block_table", i(2), r"\[2\]"),
            (paged, "block_table", z(2, 3), "float32"),
            (paged, "seq_lens", i(3), r"\[3\]"),
            (paged, "max_seq_len", -1, "is -1"),
            (paged, "max_seq_len", 4.0, "is 4.0"),
            (paged, "out", z(2, 41), r"\[2, 41\]"),
            (fused, "k_cache", b(5, 16, 1, 13), "uint8 of shape"),
            (fused, "k_cache", b(5, 16, 2, 12), "uint8 of shape"),
            (fused, "k_cache", b(5, 32, 1, 12)[:, ::2], "strides"),
            (fused, "k_cache", b(961)[1:].view(5, 16, 1, 12), "multiples of 4 bytes"),
            (fused, "k_scale_cache", z(5, 16), "holds scales"),
        ]
    ]
    + [
        ("topk_indices", rows, parameter, change, words)
        for parameter, change, words in [
            ("logits", [1.0], "is list"),
            ("logits", z(10), r"\[10\]"),
            ("logits", z(3, 10).half(), "float16"),
            ("logits", z(3, 10, requires_grad=True), "requires grad"),
            ("k", 0, "is 0"),
            ("k", 2.0, "is 2.0"),
            ("k", [4], r"is \[4\]"),
            ("row_starts", i(2), r"\[2\]"),
            ("row_ends", z(3), "float32"),
            ("row_ends", 7, "is int"),
            ("out", i(3, 5), r"\[3, 5\]"),
            ("out", z(3, 4), "float32"),
        ]
    ]
)


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("op", "base", "parameter", "change", "words"), BAD)
def test_the_parameter_is_named(op: str, base: Any, parameter: str, change: Any, words: str, warm: bool) -> None:
    function = getattr(kernelhub, op)
    if warm:
        function(**base())
    with pytest.raises(InvalidArgument, match=words) as caught:
        function(**base(**{parameter: change}))
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == int(warm)


def test_a_width_that_scales_cannot_follow_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="divisible by 4"):
        kernelhub.paged_mqa_logits(**fused(q=z(2, 1, 4, 6).to(FP8), k_cache=b(5, 16, 10)))


def test_what_no_kernel_can_do_is_refused_with_reasons() -> None:
    big = {name: value.to(DEVICE) for name, value in scores(q=z(3, 128, 256), k=z(5, 256), weights=z(3, 128)).items()}
    with pytest.raises(NoKernel, match="128 heads of 256 in float32 do not fit"):
        kernelhub.mqa_logits(**big, backend="triton")
