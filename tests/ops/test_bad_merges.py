"""States that cannot be merged: one clear error that names the parameter, on a first call and on a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel

z = torch.zeros


_SHARED = z(128)
_FLOAT8_MEMORY = torch.ones(16)
_IN_FLOAT8 = _FLOAT8_MEMORY.view(torch.float8_e4m3fn).view(4, 2, 8)
_COMPRESSED = z(4, 2, 8).to_sparse_csr()


def _negative(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.complex64).conj().imag


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
    ("outs", states(outs=[z(4, 2, 8), z(4, 2, 8, device="meta")]), "on meta"),
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
    ("out", states(out=3), "is int"),
    ("out", states(out=z(2, 8).expand(4, 2, 8)), "overlaps itself"),
    ("out", states(out=_SHARED[:64].view(4, 2, 8), outs=[_SHARED[32:96].view(4, 2, 8), z(4, 2, 8)]), "overlaps outs"),
    ("out", states(out=_SHARED[:64].view(4, 2, 8), lses=[_SHARED[:8].view(2, 4), z(2, 4)]), r"overlaps lses\[0\]"),
    ("out_lse", states(out_lse=_SHARED[:8].view(2, 4), lses=[_SHARED[4:12].view(2, 4), z(2, 4)]), "overlaps lses"),
    ("out_lse", states(out=_SHARED[:64].view(4, 2, 8), out_lse=_SHARED[:8].view(2, 4)), "overlaps out"),
    ("out", states(out=_IN_FLOAT8, out_scale=_FLOAT8_MEMORY[0]), "overlaps out_scale"),
    ("out", states(out=_IN_FLOAT8, out_scale=Parameter(_FLOAT8_MEMORY[0], False)), "overlaps out_scale"),
    ("out_lse", states(out_lse=_SHARED[:8].view(2, 4), out_scale=_SHARED[7:8]), "overlaps out_scale"),
    ("outs", states(outs=[z(4, 2, 8), _negative(4, 2, 8)]), "negative bit"),
    ("lses", states(lses=[_negative(2, 4), z(2, 4)]), "negative bit"),
    ("outs", states(outs=[z(4, 2, 8).to_sparse(), z(4, 2, 8)]), "layout torch.sparse"),
    ("outs", states(outs=[_COMPRESSED, z(4, 2, 8)]), "layout torch.sparse_csr"),
    ("out_lse", states(out_lse=z(2, 4).to_sparse_csr()), "layout torch.sparse_csr"),
    ("return_lse", states(return_lse="no"), "is 'no'"),
    ("return_lse", states(return_lse=1), "is 1"),
    ("out_scale", states(out_scale=0.0), "is 0.0"),
    ("out_scale", states(out_scale=float("nan")), "is nan"),
    ("out_scale", states(out_scale=True), "is True"),
    ("out_scale", states(out_scale=z(2)), r"float32 \[2\]"),
    ("out_scale", states(out_scale=z(1).double()), "float64"),
    ("out_scale", states(out_scale=z(1, device="meta")), "on meta"),
    ("out", states(out_scale=0.5, out=z(4, 2, 8)), "dtype float32"),
    ("out_lse", states(out_lse=z(4, 2)), r"\[4, 2\]"),
    ("out_lse", states(out_lse=z(2, 4).double()), "float64"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.merge_attention_states(**states())
        kernelhub.merge_attention_states(**states(), return_lse=True)
        kernelhub.merge_attention_states(**states(), out_scale=1.0)
        kernelhub.merge_attention_states(**states(), out_scale=torch.ones(1))
    counted = sum(row.calls for row in kernelhub.report().rows)
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.merge_attention_states(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == counted


def test_what_no_kernel_can_do_is_refused_with_reasons() -> None:
    with pytest.raises(NoKernel, match=r"torch\.merge .*not_requested"):
        kernelhub.merge_attention_states(**states(), backend="torch.sdpa")
