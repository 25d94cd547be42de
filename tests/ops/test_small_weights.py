"""Weights far below the largest of their row count: rounded to float16 as they are, what is below 2^-25 would be 0."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kernelhub
from tests.conftest import DEVICE

pytestmark = pytest.mark.device


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("score", [17.5, 20.0])  # e^-17.5 is 2^-25.2, e^-20 2^-28.9
@pytest.mark.parametrize("kernel", ["triton.prefill", "triton.split_kv"])
def test_values_behind_small_weights(kernel: str, score: float, dtype: torch.dtype, softcap: float | None) -> None:
    """One key with a value of 0, others with values of 10,000 that are unlikely: the result is theirs."""
    above = score if softcap is None else softcap * math.atanh(score / softcap)
    q = torch.zeros(1, 2, 16, device=DEVICE)
    q[..., 0] = above
    k, v = torch.zeros(64, 1, 16, device=DEVICE), torch.full((64, 1, 16), 1e4, device=DEVICE)
    k[0, :, 0], v[0] = 1.0, 0.0
    pages = {"k_cache": k.view(4, 16, 1, 16), "v_cache": v.view(4, 16, 1, 16)}
    given: dict[str, Any] = {name: value.to(dtype) for name, value in ({"q": q} | pages).items()}
    given |= {"block_table": torch.arange(4, dtype=torch.int32, device=DEVICE)[None], "scale": 1.0, "softcap": softcap}
    given |= {"seq_lens": torch.tensor([64], dtype=torch.int32, device=DEVICE)}
    want, want_lse = kernelhub.paged_attention.reference(**given, return_lse=True, compute_dtype=torch.float64)
    got, lse = kernelhub.paged_attention(**given, return_lse=True, backend=kernel)
    assert want.amin() > 1e-3
    assert ((got.double() - want).abs() <= 0.02 * want).all(), f"{got.flatten()[0]} for {want.flatten()[0]}"
    assert ((lse - want_lse).abs() < 1e-4).all()
