"""Sequences without keys, which FlashAttention-2 over pages must not see.

Where a block of ragged queries has no keys, the library writes its LSE at the offset of a batch, which is beyond
the end of this one's, into other memory (https://github.com/Dao-AILab/flash-attention/issues/2842). So a sequence
without keys is given some, as many as it has queries, and what comes of them is overwritten. Nothing here waits for
the device, and a CUDA graph may hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.flash_attn.operands import Ends


def with_keys(ends: Ends, page_size: int, tokens: int) -> tuple[Ends, Tensor]:
    """The same sequences, those without keys with some of page 0; and which tokens have none, bool [tokens].

    Args:
        ends: ragged queries over pages.
        page_size: tokens of a page.
        tokens: of all queries; those past the last sequence are not among those without keys.
    """
    assert ends.cu_seqlens_q is not None
    assert ends.page_table is not None
    assert ends.seqused_k is not None
    empty = ends.seqused_k <= 0
    keys = ends.cu_seqlens_q.diff().clamp(1, ends.page_table.shape[1] * page_size)
    filled = ends._replace(
        seqused_k=torch.where(empty, keys, ends.seqused_k),
        page_table=ends.page_table.masked_fill(empty[:, None], 0),
    )
    places = torch.arange(tokens, dtype=torch.int32, device=empty.device)
    sequence = torch.bucketize(places, ends.cu_seqlens_q[1:], right=True)
    return filled, torch.nn.functional.pad(empty, (0, 1))[sequence]


def forget(tokens: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Zeros for tokens without keys, and an LSE of -inf.

    Args:
        tokens: bool [T].
        out: [T, H, DV].
        lse: [H, T].
    """
    out.masked_fill_(tokens[:, None, None], 0.0)
    if lse is not None:
        lse.masked_fill_(tokens, -torch.inf)
