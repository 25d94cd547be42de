"""Operands that are infinite or NaN: a query that sees one gets no number where the reference gives none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import NoKernel

DENSE = (
    "torch.packed", "torch.sdpa", "torch.blocked", "cpp.split_kv", "cpp.avx512_bf16", "triton.prefill",
    "triton.split_kv",
)  # fmt: skip
PAGED = ("torch.packed", "torch.blocked", "cpp.split_kv", "cpp.avx512_bf16", "triton.prefill", "triton.split_kv")
INF, NAN = float("inf"), float("nan")


def checked(op: Any, kernel: str, arguments: dict[str, Any]) -> None:
    try:
        got: Tensor = op(**arguments, backend=kernel)
    except NoKernel as error:
        pytest.skip(f"{kernel} does not run here, which costs this case: {str(error).splitlines()[0]}")
    want: Tensor = op.reference(**arguments)
    assert not want.isfinite().all()
    assert not (got.isfinite() & ~want.isfinite()).any(), "a number where the reference gives none"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", DENSE)
@pytest.mark.parametrize("tokens", [1, 40])
def test_attention(kernel: str, tokens: int, dtype: torch.dtype) -> None:
    for name, value in (("k", INF), ("k", -INF), ("k", NAN), ("v", INF), ("v", NAN), ("q", INF), ("q", NAN)):
        for causal in (False, True):
            torch.manual_seed(3)
            q, k, v = (torch.randn(1, length, heads, 64).to(dtype) for length, heads in ((tokens, 4), (70, 2), (70, 2)))
            {"q": q, "k": k, "v": v}[name][0, 0, 1, 3] = value  # the first key, which all see
            checked(kernelhub.attention, kernel, {"q": q, "k": k, "v": v, "causal": causal})


@pytest.mark.parametrize("kernel", PAGED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_paged_attention(kernel: str, dtype: torch.dtype) -> None:
    for name, value in (("k_cache", INF), ("k_cache", NAN), ("v_cache", INF), ("v_cache", NAN), ("q", -INF)):
        torch.manual_seed(3)
        arguments = {
            "q": torch.randn(3, 4, 64).to(dtype),
            "k_cache": torch.randn(9, 16, 2, 64).to(dtype),
            "v_cache": torch.randn(9, 16, 2, 64).to(dtype),
            "block_table": torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0]], dtype=torch.int32),
            "seq_lens": torch.tensor([40, 48, 20], dtype=torch.int32),
        }
        arguments[name][1, 0] = value
        checked(kernelhub.paged_attention, kernel, arguments)
