"""States that cannot be merged: one clear error that names the parameter, on a first call and on a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel

z = torch.zeros


def states(**changes: Any) -> dict[str, Any]:
    return {"outs": [z(4, 2, 8), z(4, 2, 8)], "lses": [z(2, 4), z(2, 4)]} | changes


BAD = [
    ("outs", states(outs=3), "is int"),
    ("outs", states(outs=[z(4, 2, 8), [1.0]]), "holds list at 1"),
    ("outs", states(outs=[z(4, 2, 8)], lses=[z(2, 4)]), "holds 1 states"),
    ("outs", states(outs=[]), "holds 0 states"),
    ("outs", states(outs=[z(4, 8), z(4, 8)]), r"\[4, 8\]"),
    ("outs", states(outs=[z(4, 2, 8).int(), z(4, 2, 8).int()]), "dtype int32"),
    ("outs", states(outs=[z(4, 2, 8).double(), z(4, 2, 8).double()]), "dtype float64"),
    ("outs", states(outs=[z(4, 2, 8), z(5, 2, 8)]), r"\[5, 2, 8\] at 1"),
    ("outs", states(outs=[z(4, 2, 8), z(4, 2, 8).half()]), "float16"),
    ("outs", states(outs=[z(4, 2, 8), z(4, 2, 8, device="meta")]), "on meta at 1"),
    ("outs", states(outs=[z(4, 2, 8, device="meta")] * 2, lses=[z(2, 4, device="meta")] * 2), "on meta"),
    ("outs", states(outs=[z(4, 2, 8), z(4, 2, 8, requires_grad=True)]), "requires grad"),
    ("lses", states(lses=[z(2, 4)]), "holds 1; outs holds 2"),
    ("lses", states(lses=[z(2, 4), z(4, 2)]), r"\[4, 2\] at 1"),
    ("lses", states(lses=[z(2, 4), z(2, 4).half()]), "float16"),
    ("lses", states(lses=[z(2, 4), None]), "NoneType"),
    ("lses", states(lses=[z(2, 4), z(2, 4, device="meta")]), "on meta"),
    ("out", states(out=z(4, 2, 7)), r"\[4, 2, 7\]"),
    ("out", states(out=z(4, 2, 8).half()), "float16"),
    ("out", states(out=z(4, 2, 8, device="meta")), "on meta"),
    ("out_lse", states(out_lse=z(4, 2)), r"\[4, 2\]"),
    ("out_lse", states(out_lse=z(2, 4).double()), "float64"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.merge_attention_states(**states())
        kernelhub.merge_attention_states(**states(), return_lse=True)
    counted = sum(row.calls for row in kernelhub.report().rows)
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.merge_attention_states(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == counted


def test_what_no_kernel_can_do_is_refused_with_reasons() -> None:
    with pytest.raises(NoKernel, match=r"torch\.merge .*not_requested"):
        kernelhub.merge_attention_states(**states(), backend="torch.sdpa")
