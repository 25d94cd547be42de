"""What a call looks like, written down: read back it is the same form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelhub.dispatch.forms import made, written

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int32)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Views of some memory: shapes, strides, offsets."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    memory = torch.zeros(draw(st.integers(0, 20)) + 4**4 * 8, dtype=torch.uint8).repeat(4).view(dtype)
    stride = [draw(st.integers(1, 5)) for _ in shape]
    return memory.as_strided(shape, stride, draw(st.integers(0, 17)))


@settings(max_examples=200, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=3))
def test_read_back_a_form_is_the_same(values: list[torch.Tensor]) -> None:
    forms = written({"values": values, "scale": 0.5, "layout": "NHD", "none": None}, CPU)
    again = made(forms, CPU)
    assert written(again, CPU) == forms
    assert [item.dtype for item in again["values"]] == [item.dtype for item in values]
    for mine, theirs in zip(again["values"], values, strict=True):
        assert mine.shape == theirs.shape
        assert (mine.data_ptr() - theirs.data_ptr()) % 16 == 0


@pytest.mark.parametrize(
    ("tensor", "form"),
    [
        (torch.zeros(3, 4), "float32[3, 4]"),
        (torch.zeros(3, 4).t(), "float32[4, 3]/(1, 4)"),
        (torch.zeros(9, dtype=torch.bfloat16)[1:], "bfloat16[8]@1"),
        (torch.zeros(()), "float32[]"),
        (torch.zeros(0, 8), "float32[0, 8]"),
        (torch.tensor([0, 3, 9], dtype=torch.int32), "int32[3]=0,3,9"),
        (torch.zeros(2, 2, dtype=torch.float8_e4m3fn), "float8_e4m3fn[2, 2]"),
    ],
    ids=str,
)
def test_a_tensor_is_written_as_documented(tensor: torch.Tensor, form: str) -> None:
    assert written({"x": tensor}, CPU) == {"x": form}
    assert written(made({"x": form}, CPU), CPU) == {"x": form}


def test_values_of_few_integers_come_back() -> None:
    offsets = torch.tensor([0, 5, 7], dtype=torch.int32)
    assert made(written({"x": offsets}, CPU), CPU)["x"].tolist() == [0, 5, 7]


def test_tensors_that_overlap_do_so_again() -> None:
    fused = torch.zeros(4, 3, 8)
    q, k = fused[:, 0], fused[:, 1]
    again = made(written({"q": q, "k": k, "apart": torch.zeros(4)}, CPU), CPU)
    assert again["k"].data_ptr() - again["q"].data_ptr() == k.data_ptr() - q.data_ptr()
    assert "#" not in written({"q": q, "apart": torch.zeros(4)}, CPU)["apart"]


def test_neighbours_in_one_memory_are_written_apart() -> None:
    weights = torch.zeros(1 << 16)
    forms = written({"a": weights[:4], "b": weights[-4:]}, CPU)
    assert forms == {"a": "float32[4]", "b": "float32[4]"}


def test_a_device_of_its_own_is_said() -> None:
    assert written({"lengths": torch.zeros(4)}, torch.device("cuda", 0)) == {"lengths": "cpu float32[4]"}
    assert made({"lengths": "cpu float32[4]"}, CPU)["lengths"].is_cpu


def test_words_that_are_no_form_stay() -> None:
    words = {"layout": "NHD", "model": "a[3]", "act": "silu"}
    assert made(words, CPU) == words
