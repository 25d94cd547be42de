"""The ops under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.operators import define, names_of

_Names = list[str] | None


def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.mqa_logits` through its operator."""
    operands = (q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, names_of(backend))
    if out is None:
        made: Tensor = torch.ops.kernelhub.mqa_logits.default(*operands)
        return made
    torch.ops.kernelhub.mqa_logits_out.default(*operands, out)
    return out


def paged_mqa_logits(
    q: Tensor,
    k_cache: Tensor,
    k_scale_cache: Tensor | None,
    weights: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.paged_mqa_logits` through its operator."""
    operands = (q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, names_of(backend))
    if out is None:
        made: Tensor = torch.ops.kernelhub.paged_mqa_logits.default(*operands)
        return made
    torch.ops.kernelhub.paged_mqa_logits_out.default(*operands, out)
    return out


def topk_indices(
    logits: Tensor,
    k: int,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """`kernelhub.topk_indices` through its operator."""
    operands = (logits, k, row_starts, row_ends, names_of(backend))
    if out is None:
        made: Tensor = torch.ops.kernelhub.topk_indices.default(*operands)
        return made
    torch.ops.kernelhub.topk_indices_out.default(*operands, out)
    return out


def _logits(
    q: Tensor, k: Tensor, k_scale: Tensor | None, weights: Tensor, ks: Tensor, ke: Tensor, backend: _Names
) -> Tensor:
    from kernelhub.ops.indexer.mqa_logits import mqa_logits as eager

    return eager(plain(q), k, k_scale, weights, ks, ke, backend=backend)


def _logits_out(
    q: Tensor, k: Tensor, k_scale: Tensor | None, weights: Tensor, ks: Tensor, ke: Tensor, backend: _Names, out: Tensor
) -> None:
    from kernelhub.ops.indexer.mqa_logits import mqa_logits as eager

    eager(plain(q), k, k_scale, weights, ks, ke, out, backend)


def _logits_fake(
    q: Tensor, k: Tensor, k_scale: Tensor | None, weights: Tensor, ks: Tensor, ke: Tensor, backend: _Names
) -> Tensor:
    return weights.new_empty((q.shape[0], k.shape[0]), dtype=torch.float32)


def _paged(
    q: Tensor,
    k_cache: Tensor,
    k_scale_cache: Tensor | None,
    weights: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    backend: _Names,
) -> Tensor:
    from kernelhub.ops.indexer.paged_mqa_logits import paged_mqa_logits as eager

    return eager(plain(q), k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, backend=backend)


def _paged_out(
    q: Tensor,
    k_cache: Tensor,
    k_scale_cache: Tensor | None,
    weights: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    backend: _Names,
    out: Tensor,
) -> None:
    from kernelhub.ops.indexer.paged_mqa_logits import paged_mqa_logits as eager

    eager(plain(q), k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out, backend)


def _paged_fake(
    q: Tensor,
    k_cache: Tensor,
    k_scale_cache: Tensor | None,
    weights: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    backend: _Names,
) -> Tensor:
    return weights.new_empty((q.shape[0] * q.shape[1], max_seq_len), dtype=torch.float32)


def _topk(logits: Tensor, k: int, row_starts: Tensor | None, row_ends: Tensor | None, backend: _Names) -> Tensor:
    from kernelhub.ops.indexer.topk_indices import topk_indices as eager

    return eager(plain(logits), k, row_starts, row_ends, backend=backend)


def _topk_out(
    logits: Tensor, k: int, row_starts: Tensor | None, row_ends: Tensor | None, backend: _Names, out: Tensor
) -> None:
    from kernelhub.ops.indexer.topk_indices import topk_indices as eager

    eager(plain(logits), k, row_starts, row_ends, out, backend)


def _topk_fake(logits: Tensor, k: int, row_starts: Tensor | None, row_ends: Tensor | None, backend: _Names) -> Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


_LOGITS = (
    "Tensor q, Tensor k, Tensor? k_scale, Tensor weights, Tensor cu_seqlen_ks, Tensor cu_seqlen_ke, str[]? backend"
)
_PAGED = (
    "Tensor q, Tensor k_cache, Tensor? k_scale_cache, Tensor weights, Tensor block_table, Tensor seq_lens,"
    " SymInt max_seq_len, str[]? backend"
)
_TOPK = "Tensor logits, SymInt k, Tensor? row_starts, Tensor? row_ends, str[]? backend"
define(f"mqa_logits({_LOGITS}) -> Tensor", _logits, _logits_fake)
define(f"mqa_logits_out({_LOGITS}, Tensor(a!) out) -> ()", _logits_out)
define(f"paged_mqa_logits({_PAGED}) -> Tensor", _paged, _paged_fake)
define(f"paged_mqa_logits_out({_PAGED}, Tensor(a!) out) -> ()", _paged_out)
define(f"topk_indices({_TOPK}) -> Tensor", _topk, _topk_fake)
define(f"topk_indices_out({_TOPK}, Tensor(a!) out) -> ()", _topk_out)
