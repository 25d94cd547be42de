"""Tokens that cannot be written to a KV cache: an error that names the parameter, on a first call and a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument

z = torch.zeros
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SLOTS = torch.tensor([0, 7, -1])


def call(**changes: Any) -> dict[str, Any]:
    """3 tokens of 2 heads of 16 and 8 to 2 pages of 4."""
    made = {"k": z(3, 2, 16), "v": z(3, 2, 8), "k_cache": z(2, 4, 2, 16), "v_cache": z(2, 4, 2, 8)}
    return made | {"slot_mapping": SLOTS} | changes


def fp8(**changes: Any) -> dict[str, Any]:
    caches = {"k_cache": z(2, 4, 2, 16).to(FP8), "v_cache": z(2, 4, 2, 8).to(FP8), "k_scale": 1.0, "v_scale": 1.0}
    return call(**caches | changes)


def rope(**changes: Any) -> dict[str, Any]:
    embedding = {"q": z(3, 5, 16), "positions": torch.tensor([8, 0, 99]), "cos_sin_cache": z(9, 12)}
    return call(**embedding | changes)


PAIR, BOTH = z(2, 4, 2, 24), z(3, 7, 16)
BAD = [
    ("k", call(k=[1]), "is list"),
    ("k", call(k=z(3, 32)), r"\[3, 32\]"),
    ("k", call(k=z(3, 0, 16)), "at least one head"),
    ("k", call(k=z(3, 2, 16).double()), "float64"),
    ("k", call(k=z(3, 2, 16, device="meta")), "meta"),
    ("k", call(k=z(3, 2, 16, requires_grad=True)), "requires grad"),
    ("v", call(v=None), "NoneType"),
    ("v", call(v=z(3, 1, 8)), r"\[3, 2, DV\]"),
    ("v", call(v=z(4, 2, 8)), r"\[4, 2, 8\]"),
    ("v", call(v=z(3, 2, 8).half()), "float16"),
    ("k_cache", call(k_cache=z(2, 4, 2, 17)), "page_size, 2, 16"),
    ("k_cache", call(k_cache=z(2, 4, 3, 16)), "page_size, 2, 16"),
    ("k_cache", call(kv_layout="HND"), "2, page_size, 16"),
    ("k_cache", call(k_cache=z(2, 0, 2, 16), v_cache=z(2, 0, 2, 8)), "at least one token"),
    ("k_cache", call(k_cache=z(0, 4, 2, 16), v_cache=z(0, 4, 2, 8)), "at least one page"),
    ("k_cache", call(k_cache=z(2, 4, 2, 16).half(), v_cache=z(2, 4, 2, 8).half()), "float16"),
    ("k_cache", call(k_cache=z(1, 4, 2, 16).expand(2, 4, 2, 16)), "overlaps itself"),
    ("k_cache", call(k_cache=PAIR[..., :16], v_cache=PAIR[..., 8:16]), "overlaps v_cache"),
    ("v_cache", call(v_cache=z(3, 4, 2, 8)), r"give \[2, 4, 2, 8\]"),
    ("v_cache", call(v_cache=z(2, 4, 2, 8).to(FP8)), "float8_e4m3fn"),
    ("v_cache", call(v_cache=z(2, 4, 2, 8, device="meta")), "is on meta"),
    ("v_cache", call(v=PAIR[0, :3, :, :8], v_cache=PAIR[..., :8]), "overlaps v in"),
    ("slot_mapping", call(slot_mapping=SLOTS.int()), "int32"),
    ("slot_mapping", call(slot_mapping=SLOTS[:2]), r"give \[3\]"),
    ("slot_mapping", call(slot_mapping=torch.tensor([0, 8, -1])), "is 8 for token 1"),
    ("slot_mapping", call(slot_mapping=torch.tensor([3, 3, -1])), "tokens 0 and 1"),
    ("k_scale", call(k_scale=0.5, v_scale=0.5), "belong to an fp8 cache"),
    ("k_scale", fp8(k_scale=None, v_scale=None), "is None with a float8_e4m3fn"),
    ("k_scale", fp8(k_scale=0.0), "is 0.0"),
    ("k_scale", fp8(k_scale="1"), "'1'"),
    ("v_scale", fp8(v_scale=float("nan")), "nan"),
    ("v_scale", fp8(v_scale=z(1)), "another form"),
    ("v_scale", fp8(k_scale=z(1), v_scale=z(2)), "another form"),
    ("k_scale", fp8(k_scale=z(3), v_scale=z(3)), "one per KV head"),
    ("v_scale", fp8(k_scale=z(1), v_scale=z(1).double()), "float64"),
    ("kv_layout", call(kv_layout="NDH"), "'NDH'"),
    ("positions", call(positions=SLOTS), "without cos_sin_cache"),
    ("q", call(q=z(3, 2, 16)), "without cos_sin_cache"),
    ("positions", rope(positions=None), "NoneType"),
    ("positions", rope(positions=SLOTS.int()), "int32"),
    ("positions", rope(positions=SLOTS[:2]), r"give \[3\]"),
    ("positions", rope(positions=torch.tensor([8, 9, 0])), "is 9 for token 1"),
    ("positions", rope(positions=torch.tensor([8, -1, 0])), "is -1 for token 1"),
    ("cos_sin_cache", rope(cos_sin_cache=z(9, 12).bfloat16()), "bfloat16"),
    ("cos_sin_cache", rope(cos_sin_cache=z(9, 18)), "even rotary_dim of 2 to 16"),
    ("cos_sin_cache", rope(cos_sin_cache=z(9, 7)), "even rotary_dim"),
    ("cos_sin_cache", rope(cos_sin_cache=z(0, 12)), r"\[0, 12\]"),
    ("cos_sin_cache", rope(cos_sin_cache=z(12)), r"\[12\]"),
    ("q", rope(q=z(3, 5, 15)), r"give float32 \[3, QH, 16\]"),
    ("q", rope(q=z(3, 5, 16).half()), "float16"),
    ("q", rope(q=z(3, 1, 16).expand(3, 5, 16)), "overlaps itself"),
    ("q", rope(q=BOTH[:, :5], k=BOTH[:, 4:6]), "overlaps k"),
    ("is_neox", rope(is_neox="yes"), "'yes'"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.write_kv_cache(**call())
        kernelhub.write_kv_cache(**fp8())
        kernelhub.write_kv_cache(**rope())
        kernelhub.write_kv_cache(**fp8(k_scale=torch.ones(1), v_scale=torch.ones(1)))
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.write_kv_cache(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == 4 * warm
