"""Linear attention that cannot be: one clear error that names the parameter, on a first call and on a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from tests.conftest import DEVICE

z = torch.zeros


def i(*shape: int) -> torch.Tensor:
    return z(*shape, dtype=torch.int32)


def batched(**changes: Any) -> dict[str, Any]:
    return {"q": z(2, 3, 4, 8), "k": z(2, 3, 4, 8), "v": z(2, 3, 4, 6), "decay": z(4)} | changes


def ragged(**changes: Any) -> dict[str, Any]:
    return {"q": z(3, 4, 8), "k": z(3, 4, 8), "v": z(3, 4, 6), "decay": z(4), "cu_seqlens": i(3)} | changes


def pooled(**changes: Any) -> dict[str, Any]:
    return batched(state=z(5, 4, 8, 6), state_indices=torch.tensor([3, 1]).int()) | changes


BAD = [
    (batched, "q", 3, "is int"),
    (batched, "q", z(4, 8), r"\[4, 8\]"),
    (batched, "q", z(2, 3, 0, 8), "give"),
    (batched, "q", z(2, 3, 4, 8).double(), "float64"),
    (batched, "q", z(2, 3, 4, 8, requires_grad=True), "requires grad"),
    (batched, "q", z(2, 3, 4, 8, device="meta"), "meta"),
    (batched, "k", z(2, 3, 4, 7), r"\[2, 3, 4, 7\]"),
    (batched, "k", z(2, 3, 4, 8).half(), "float16"),
    (batched, "k", None, "NoneType"),
    (batched, "v", None, "NoneType"),
    (batched, "v", z(2, 4, 4, 6), r"\[2, 4, 4, 6\]"),
    (batched, "v", z(2, 3, 4, 0), r"\[2, 3, 4, 0\]"),
    (batched, "v", z(2, 3, 4, 6).half(), "float16"),
    (batched, "v", z(2, 3, 4, 6, requires_grad=True), "requires grad"),
    (batched, "decay", z(3), r"\[3\]"),
    (batched, "decay", z(4).half(), "float16"),
    (batched, "decay", 0.1, "is float"),
    (batched, "decay", z(4, device="meta"), "meta"),
    (batched, "state", z(3, 4, 8, 6), r"\[3, 4, 8, 6\]"),
    (batched, "state", z(2, 4, 6, 8), r"\[2, 4, 6, 8\]"),
    (batched, "state", z(2, 4, 8, 6).half(), "float16"),
    (batched, "cu_seqlens", i(3), "with a q of shape"),
    (batched, "scale", None, "is None"),
    (batched, "scale", float("nan"), "is nan"),
    (batched, "state_indices", i(2), "without states"),
    (batched, "out", z(2, 3, 4, 8), r"\[2, 3, 4, 8\]"),
    (batched, "out", z(2, 3, 4, 6).half(), "float16"),
    (batched, "out_state", z(3, 4, 8, 6), r"\[3, 4, 8, 6\]"),
    (batched, "out_state", [1], "is list"),
    (ragged, "cu_seqlens", None, "NoneType"),
    (ragged, "cu_seqlens", i(3, 1), r"\[3, 1\]"),
    (ragged, "cu_seqlens", i(0), r"\[0\]"),
    (ragged, "cu_seqlens", z(3), "float32"),
    (ragged, "state", z(3, 4, 8, 6), r"\[3, 4, 8, 6\]"),
    (pooled, "state", z(5, 4, 8), r"give \[slots, 4, 8, 6\]"),
    (pooled, "state_indices", i(3), r"\[3\]"),
    (pooled, "state_indices", i(2).long(), "int64"),
    (pooled, "out_state", z(5, 4, 6, 8), r"\[5, 4, 6, 8\]"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("base", "parameter", "change", "words"), BAD)
def test_the_parameter_is_named(base: Any, parameter: str, change: Any, words: str, warm: bool) -> None:
    if warm:
        kernelhub.linear_attention(**base())
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.linear_attention(**base(**{parameter: change}))
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == int(warm)


def test_what_no_kernel_can_do_is_refused_with_reasons() -> None:
    wide: dict[str, Any] = {"q": z(1, 3, 1, 512), "k": z(1, 3, 1, 512), "v": z(1, 3, 1, 16), "decay": z(1)}
    with pytest.raises(NoKernel, match="head_dim is 512, outside 1 to 256"):
        kernelhub.linear_attention(**{name: value.to(DEVICE) for name, value in wide.items()}, backend="triton")


def test_a_state_may_have_any_strides() -> None:
    q, k, v = (torch.randn(4, 70, 2, 64) for _ in range(3))
    decay, state = torch.rand(2), torch.randn(4, 2, 64, 64)
    moved = torch.empty_strided((4, 2, 64, 64), (64, 16384, 1, 256)).copy_(state)
    want = kernelhub.linear_attention(q, k, v, decay, state=state, return_state=True)
    for name in kernelhub.linear_attention.kernels():
        selection = kernelhub.explain(kernelhub.linear_attention, q, k, v, decay, state=moved, backend=name)
        if selection.selected is not None:
            got = kernelhub.linear_attention(q, k, v, decay, state=moved, return_state=True, backend=name)
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
