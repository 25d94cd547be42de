"""What every op asks of a tensor: its layout, its memory, and that a destination is apart from what is read."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from kernelhub.errors import InvalidArgument
from kernelhub.ops.operands import (
    check_count,
    check_destination,
    check_flag,
    check_operand,
    overlaps_itself,
    share_memory,
)

STRIDES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 48)


def addresses(tensor: Tensor) -> list[int]:
    """Every byte of every element."""
    width, start = tensor.element_size(), tensor.data_ptr()
    places = itertools.product(*(range(size) for size in tensor.shape))
    firsts = [sum(i * s for i, s in zip(place, tensor.stride(), strict=True)) for place in places]
    return [start + first * width + byte for first in firsts for byte in range(width)]


def views(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of views of one buffer."""
    make, buffer = random.Random(seed), torch.zeros(1024)

    def view() -> Tensor:
        rank = make.randint(1, 3)
        sizes, strides = [make.randint(0, 4) for _ in range(rank)], [make.choice(STRIDES) for _ in range(rank)]
        return buffer.as_strided(sizes, strides, make.randint(0, 60))

    return [(view(), view()) for _ in range(count)]


def test_shared_memory_is_always_seen() -> None:
    for one, other in views(0, 2000):
        first, second = addresses(one), addresses(other)
        if set(first) & set(second):
            assert share_memory(one, other), (one.shape, one.stride(), other.shape, other.stride())
        if len(set(first)) < len(first):
            assert overlaps_itself(one), (one.shape, one.stride())


def test_parts_of_one_buffer_that_lie_apart_share_nothing() -> None:
    qkv = torch.zeros(5, 3, 4, 16)
    q, k, v = qkv.unbind(1)
    for one, other in itertools.permutations((q, k, v), 2):
        assert not share_memory(one, other)
        assert not share_memory(one[..., :8], one[..., 8:])
        assert not share_memory(one[:2], one[2:])
    assert not overlaps_itself(q)
    assert share_memory(q, qkv)


MADE = {
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)]), "nested"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8), "dtype qint8"),
    "meta": (lambda: torch.zeros(3, device="meta"), "on meta"),
    "negative": (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, "negative bit"),
    "conjugate": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "conjugate bit"),
    "a list": (lambda: [1.0], "is list"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MADE)
def test_what_is_no_plain_tensor_is_refused_by_name(kind: str) -> None:
    make, told = MADE[kind]
    with pytest.raises(InvalidArgument, match=f"k .*{told}"):
        check_operand("attention", "k", make())


def test_what_torch_transforms_is_refused_by_name() -> None:
    def call(x: Tensor) -> Tensor:
        check_operand("attention", "k", x)
        return x

    x = torch.zeros(3, 4)
    with pytest.raises(InvalidArgument, match=r"k .*torch\.func"):
        torch.vmap(call)(x)
    with pytest.raises(InvalidArgument, match=r"k .*torch\.func"):
        torch.func.jvp(call, (x,), (x,))
    with pytest.raises(InvalidArgument, match=r"k .*torch\.jit\.trace"):
        torch.jit.trace(call, (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(InvalidArgument, match=r"k .*forward gradient"):
        call(torch.autograd.forward_ad.make_dual(x, x))


def test_a_destination_is_refused_by_name() -> None:
    q = torch.zeros(4, 8)
    buffer = torch.zeros(64)
    wrong = {
        "is list": [q],
        "shape": torch.zeros(4, 9),
        "dtype": torch.zeros(4, 8, dtype=torch.float16),
        "meta": torch.zeros(4, 8, device="meta"),
        "requires grad": torch.zeros(4, 8, requires_grad=True),
        "overlaps itself": buffer[:8].expand(4, 8),
        "overlaps q in memory": q,
    }
    for told, out in wrong.items():
        with pytest.raises(InvalidArgument, match=f"out .*{told}"):
            check_destination("attention", "out", out, (4, 8), torch.float32, q.device, {"q": q, "sinks": None})
    strided = torch.zeros(8, 4).t()
    check_destination("attention", "out", strided, (4, 8), torch.float32, q.device, {"q": q})


@pytest.mark.parametrize("given", ["yes", 2, None, 1.0])
def test_a_flag_that_is_no_bool_is_refused_by_name(given: object) -> None:
    with pytest.raises(InvalidArgument, match="causal is"):
        check_flag("attention", "causal", given)


@pytest.mark.parametrize("given", [-1, "3", 1.5, True, None, 2**40])
def test_a_count_that_is_none_is_refused_by_name(given: object) -> None:
    with pytest.raises(InvalidArgument, match="max_seqlen_q is"):
        check_count("attention", "max_seqlen_q", given)
