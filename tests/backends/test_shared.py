"""What adapters of several backends share: operands as libraries read them, and scales in tiles."""

from __future__ import annotations

import torch

from kernelhub.backends.shared.operands import aligned, contiguous_copy, is_aligned, is_row_major, row_major
from kernelhub.backends.shared.scales import tiled, untiled


def test_operands_are_copied_only_where_a_library_could_not_read_them() -> None:
    whole = torch.randn(3, 40, 6, 64).to(torch.bfloat16)
    for good in (whole, whole.transpose(1, 2), whole[:, 1:, 2:], whole[..., 8:24], whole[:1]):
        assert is_aligned(good)
        assert aligned(good) is good
    odd = torch.randn(3, 40, 6, 65).to(torch.bfloat16)
    for bad in (
        whole[..., ::2],
        whole[..., 1:9],
        odd[..., :64],
        whole[:, :, :1].expand(3, 40, 6, 64),
        odd[:1, :1, :1, :64],
    ):
        assert not is_aligned(bad)
        assert is_aligned(aligned(bad))
        assert torch.equal(aligned(bad), bad)


def test_a_row_major_operand_has_the_strides_of_its_shape() -> None:
    whole = torch.randn(3, 40, 64).to(torch.bfloat16)
    assert row_major(whole) is whole
    for other in (whole.transpose(0, 1), whole[:, ::2], whole.flatten()[1:1281].view(2, 10, 64), whole[:, :1, 8:]):
        made = row_major(other)
        assert is_row_major(made)
        assert made.stride() == contiguous_copy(other).stride()
        assert torch.equal(made, other)
    odd = torch.randn(4, 64).as_strided((1, 4, 64), (3, 64, 1))  # contiguous: a stride of a size of 1 is free
    assert row_major(odd).stride() == (256, 64, 1)


def test_tiling_moves_every_scale_and_back() -> None:
    random = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 4), (128, 4), (129, 8), (300, 12), (96, 5)):
        scale = torch.randint(0, 127, (rows, columns), generator=random).to(torch.uint8).view(torch.float8_e4m3fn)
        made = tiled(scale)
        assert made.shape == (-(-rows // 128) * 128, -(-columns // 4) * 4)
        back = untiled(made, rows, columns)
        assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))
        assert int(made.view(torch.uint8).sum()) == int(scale.view(torch.uint8).sum())
