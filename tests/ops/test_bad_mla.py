"""Calls of latent attention that cannot be: an error that names the parameter, on a first call and a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument

z = torch.zeros
FP8 = torch.float8_e4m3fn


def ints(*values: int, **options: Any) -> torch.Tensor:
    return torch.tensor(values, **{"dtype": torch.int32, **options})


def call(**changes: Any) -> dict[str, Any]:
    """Decode of 2 sequences, 3 heads of 16 + 8, over 4 pages of 4."""
    given = {
        "q": z(2, 3, 24),
        "kv_cache": z(4, 4, 24),
        "block_table": ints(0, 1, 3, 2).view(2, 2),
        "seq_lens": ints(5, 8),
        "scale": 0.1,
        "value_dim": 16,
    }
    return given | changes


OFFSETS = ints(0, 1, 2)
LISTED = ints(0, 1, -1, 2, 3, 4).view(2, 3)
BAD = [
    ("q", call(q=3), "is int"),
    ("q", call(q=z(2, 24)), r"\[2, 24\]"),
    ("q", call(q=z(2, 1, 3, 24), cu_seqlens_q=OFFSETS), "with cu_seqlens_q"),
    ("q", call(q=z(2, 3, 24).double()), "float64"),
    ("q", call(q=z(2, 0, 24)), "at least one"),
    ("q", call(q=z(3, 3, 24)), "seq_lens has 2 sequences"),
    ("q", call(q=z(2, 3, 24, requires_grad=True)), "requires grad"),
    ("q", call(q=z(2, 3, 24, device="meta")), "meta"),
    ("kv_cache", call(kv_cache=None), "NoneType"),
    ("kv_cache", call(kv_cache=z(4, 24)), r"\[4, 24\]"),
    ("kv_cache", call(kv_cache=z(4, 4, 2, 24)), "page_size, 1, 24"),
    ("kv_cache", call(kv_cache=z(4, 4, 32)), "rows of 32"),
    ("kv_cache", call(kv_cache=z(4, 0, 24)), "at least one token"),
    ("kv_cache", call(kv_cache=z(4, 4, 24).half()), "float16"),
    ("kv_cache", call(kv_cache=z(4, 4, 24, device="meta")), "is on meta"),
    ("kv_cache", call(kv_cache=z(4, 4, 24, requires_grad=True)), "requires grad"),
    ("value_dim", call(value_dim=0), "is 0"),
    ("value_dim", call(value_dim=25), "from 1 to 24"),
    ("value_dim", call(value_dim=16.0), "16.0"),
    ("scale", call(scale=None), "before absorption"),
    ("scale", call(scale=float("nan")), "nan"),
    ("scale", call(scale="1"), "'1'"),
    ("block_table", call(block_table=z(2, 2)), "float32"),
    ("block_table", call(block_table=ints(0, 1, 3, 4).view(2, 2)), "kv_cache has 4 pages"),
    ("seq_lens", call(seq_lens=ints(5, 8, 8)), "3 lengths"),
    ("seq_lens", call(seq_lens=ints(5, 9)), "room for 8"),
    ("cu_seqlens_q", call(cu_seqlens_q=ints(0, 2)), "2 offsets"),
    ("cu_seqlens_q", call(cu_seqlens_q=ints(0, 2, 3)), "there are 2 tokens"),
    ("max_seqlen_q", call(cu_seqlens_q=ints(0, 0, 2), max_seqlen_q=1), "has 2 tokens"),
    ("max_seqlen_q", call(cu_seqlens_q=OFFSETS, max_seqlen_q="2"), "'2'"),
    ("topk_indices", call(topk_indices=LISTED.long()), "int64"),
    ("topk_indices", call(topk_indices=LISTED[:1]), r"give \[2, topk\]"),
    ("topk_indices", call(topk_indices=LISTED.to("meta")), "is on meta"),
    ("topk_indices", call(topk_indices=[1]), "is list"),
    ("topk_indices", call(q=z(2, 2, 3, 24), topk_indices=LISTED), r"give \[2, 2, topk\]"),
    ("sinks", call(sinks=z(4)), r"give \[3\]"),
    ("sinks", call(sinks=ints(1, 2, 3)), "int32"),
    ("sinks", call(sinks=z(3, device="meta")), "is on meta"),
    ("sinks", call(sinks=z(3, requires_grad=True)), "requires grad"),
    ("kv_scale", call(kv_scale=0.5), "belong to an fp8 cache"),
    ("kv_scale", call(kv_cache=z(4, 4, 24).to(FP8)), "is None with an fp8"),
    ("kv_scale", call(kv_cache=z(4, 4, 24).to(FP8), kv_scale=z(2)), "one element"),
    ("kv_scale", call(kv_cache=z(4, 4, 24).to(FP8), kv_scale=z(1).double()), "float64"),
    ("kv_scale", call(kv_cache=z(4, 4, 24).to(FP8), kv_scale=float("inf")), "inf"),
    ("kv_scale", call(kv_cache=z(4, 4, 24).to(FP8), kv_scale=z(1, device="meta")), "is on meta"),
    ("out", call(out=z(2, 3, 24)), r"give \[2, 3, 16\]"),
    ("out", call(out=z(2, 3, 16).half()), "float16"),
    ("out", call(out=[1]), "is list"),
    ("out", call(out=z(2, 3, 16, device="meta")), "is on meta"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    calls = 0
    if warm:
        fp8 = call(kv_cache=z(4, 4, 24).to(FP8), kv_scale=z(1))
        forms = ({}, {"topk_indices": LISTED}, {"sinks": z(3)}, {"cu_seqlens_q": OFFSETS})
        for form in forms:
            kernelhub.mla_attention(**call(**form))
        kernelhub.mla_attention(**fp8)
        kernelhub.mla_attention(**(fp8 | {"kv_scale": 1.0}))
        calls = len(forms) + 2
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.mla_attention(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == calls


def test_the_scale_has_no_default() -> None:
    given = call()
    del given["scale"]
    with pytest.raises(TypeError, match="scale"):
        kernelhub.mla_attention(**given)
