"""Rows that cannot be written to a latent cache: an error that names the parameter, on a first call and a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument

z = torch.zeros
FP8 = torch.float8_e4m3fn
SLOTS = torch.tensor([0, 7, -1])


def call(**changes: Any) -> dict[str, Any]:
    """3 tokens of 16 + 8 to 2 pages of 4."""
    return {"kv_c": z(3, 16), "k_rope": z(3, 8), "kv_cache": z(2, 4, 24), "slot_mapping": SLOTS} | changes


def fp8(**changes: Any) -> dict[str, Any]:
    return call(kv_cache=z(2, 4, 24).to(FP8), **changes)


BAD = [
    ("kv_c", call(kv_c=[1]), "is list"),
    ("kv_c", call(kv_c=z(3, 1, 16)), r"\[3, 1, 16\]"),
    ("kv_c", call(kv_c=z(3, 0)), "at least one"),
    ("kv_c", call(kv_c=z(3, 16).double()), "float64"),
    ("kv_c", call(kv_c=z(3, 16, device="meta")), "meta"),
    ("kv_c", call(kv_c=z(3, 16, requires_grad=True)), "requires grad"),
    ("k_rope", call(k_rope=None), "NoneType"),
    ("k_rope", call(k_rope=z(4, 8)), r"\[4, 8\]"),
    ("k_rope", call(k_rope=z(3, 2, 8)), r"\[3, 2, 8\]"),
    ("k_rope", call(k_rope=z(3, 8).half()), "float16"),
    ("k_rope", call(k_rope=z(3, 8, device="meta")), "is on meta"),
    ("kv_cache", call(kv_cache=z(2, 4, 25)), "page_size, 24"),
    ("kv_cache", call(kv_cache=z(2, 4, 2, 24)), "page_size, 1, 24"),
    ("kv_cache", call(kv_cache=z(2, 0, 24)), "at least one token"),
    ("kv_cache", call(kv_cache=z(0, 4, 24)), "at least one page"),
    ("kv_cache", call(kv_cache=z(2, 4, 24).half()), "float16"),
    ("kv_cache", call(kv_cache=z(2, 4, 24, device="meta")), "is on meta"),
    ("kv_cache", call(kv_cache=z(2, 4, 24, requires_grad=True)), "requires grad"),
    ("slot_mapping", call(slot_mapping=SLOTS.int()), "int32"),
    ("slot_mapping", call(slot_mapping=SLOTS[:2]), r"give \[3\]"),
    ("slot_mapping", call(slot_mapping=torch.tensor([0, 8, -1])), "is 8 for token 1"),
    ("slot_mapping", call(slot_mapping=[0, 1, 2]), "is list"),
    ("kv_scale", call(kv_scale=0.5), "belong to an fp8 cache"),
    ("kv_scale", fp8(), "is None with an fp8"),
    ("kv_scale", fp8(kv_scale=0.0), "other than 0"),
    ("kv_scale", fp8(kv_scale=float("nan")), "nan"),
    ("kv_scale", fp8(kv_scale="1"), "'1'"),
    ("kv_scale", fp8(kv_scale=z(2)), "one element"),
    ("kv_scale", fp8(kv_scale=z(1).double()), "float64"),
    ("kv_scale", fp8(kv_scale=z(1, device="meta")), "is on meta"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD)
def test_the_parameter_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.write_mla_cache(**call())
        kernelhub.write_mla_cache(**fp8(kv_scale=1.0))
        kernelhub.write_mla_cache(**fp8(kv_scale=torch.ones(1)))
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.write_mla_cache(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == 3 * warm


@pytest.mark.parametrize("skipped", [0, 3])
@pytest.mark.parametrize("tokens", [3, 64, 65, 300])
@pytest.mark.parametrize("apart", [1, 7, 1000])  # far apart they are sorted, else counted
def test_a_slot_of_two_tokens_is_found(apart: int, tokens: int, skipped: int) -> None:
    slots = 5 + apart * torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    if skipped:
        slots[1::skipped] = -1
    arguments = {"kv_c": z(tokens, 2), "k_rope": z(tokens, 0), "kv_cache": z(tokens, apart + 5, 2)}
    kernelhub.write_mla_cache(**arguments, slot_mapping=slots)
    slots[tokens - 1] = slots[0]
    words = f"is {int(slots[0])} for tokens 0 and {tokens - 1}"
    with pytest.raises(InvalidArgument, match=words):
        kernelhub.write_mla_cache(**arguments, slot_mapping=slots)
    slots[tokens - 1] = tokens * (apart + 5)
    with pytest.raises(InvalidArgument, match=f"for token {tokens - 1}; kv_cache has"):
        kernelhub.write_mla_cache(**arguments, slot_mapping=slots)


@pytest.mark.parametrize("tokens", [3, 64, 65, 300])
def test_tokens_may_all_be_without_a_slot(tokens: int) -> None:
    cache = torch.ones(2, 4, 3)
    arguments = {"kv_c": z(tokens, 2), "k_rope": z(tokens, 1), "kv_cache": cache}
    kernelhub.write_mla_cache(**arguments, slot_mapping=torch.full((tokens,), -1))
    assert bool((cache == 1).all())
