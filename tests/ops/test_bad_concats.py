"""Keys that cannot be put together: one clear error that names the parameter, on a first call and on a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument

z = torch.zeros


def keys(**changes: Any) -> dict[str, Any]:
    return {"k_nope": z(4, 2, 8), "k_rope": z(4, 6)} | changes


BAD = [
    ("k_nope", keys(k_nope=3), "is int"),
    ("k_nope", keys(k_nope=z(4, 8)), r"\[4, 8\]"),
    ("k_nope", keys(k_nope=z(4, 0, 8)), "at least one"),
    ("k_nope", keys(k_nope=z(4, 2, 8).double()), "float64"),
    ("k_nope", keys(k_nope=z(4, 2, 8, device="meta"), k_rope=z(4, 6, device="meta")), "meta"),
    ("k_nope", keys(k_nope=z(4, 2, 8, requires_grad=True)), "requires grad"),
    ("k_rope", keys(k_rope=None), "NoneType"),
    ("k_rope", keys(k_rope=z(5, 6)), r"\[5, 6\]"),
    ("k_rope", keys(k_rope=z(4, 2, 6)), r"\[4, 2, 6\]"),
    ("k_rope", keys(k_rope=z(4, 0)), "at least one"),
    ("k_rope", keys(k_rope=z(4, 6).half()), "float16"),
    ("k_rope", keys(k_rope=z(4, 6, device="meta")), "is on meta"),
    ("k_rope", keys(k_rope=z(4, 6, requires_grad=True)), "requires grad"),
    ("out", keys(out=z(4, 2, 13)), r"\[4, 2, 13\]"),
    ("out", keys(out=z(4, 2, 14).half()), "float16"),
    ("out", keys(out=[1]), "is list"),
    ("out", keys(out=z(4, 2, 14).to_sparse()), "layout"),
    ("out", keys(out=z(4, 2, 14, device="meta")), "is on meta"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.concat_mla_k(**keys())
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.concat_mla_k(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == int(warm)
