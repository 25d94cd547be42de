"""Inputs of the indexer with the shapes of real models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3_MAX, to_e4m3
from kernelhub.ops.indexer.layout import fuse_cache
from kernelhub.ops.models.shapes import INDEXERS, IndexerModel


def logits_inputs(
    model: IndexerModel | str = "deepseek-v3.2",
    *,
    tokens: int = 64,
    keys: int = 256,
    dtype: torch.dtype = torch.float8_e4m3fn,
    k_scale: bool = True,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `mqa_logits`: the last `tokens` queries of a sequence of `keys`, causally.

    The first keys are those of another sequence: every query's range starts after an eighth of them.
    """
    model = INDEXERS[model] if isinstance(model, str) else model
    random = torch.Generator(device="cpu").manual_seed(seed)
    q = torch.randn(tokens, model.num_heads, model.head_dim, generator=random, dtype=torch.float32, device="cpu")
    k = torch.randn(keys, model.head_dim, generator=random, dtype=torch.float32, device="cpu")
    q, q_scale = _quantised(q, dtype)
    k, scale = _quantised(k, dtype)
    if dtype.itemsize > 1:
        scale = 0.5 + torch.rand(keys, generator=random, dtype=torch.float32, device="cpu")
    weights = (
        torch.randn(tokens, model.num_heads, generator=random, dtype=torch.float32, device="cpu")
        * model.num_heads**-0.5
        * q_scale
    )
    starts = torch.full((tokens,), keys // 8, dtype=torch.int32, device="cpu")
    ends = (torch.arange(keys - tokens, keys, device="cpu") + 1).clamp(min=0).int()
    return {
        "q": q.to(device),
        "k": k.to(device),
        "k_scale": scale.to(device) if k_scale else None,
        "weights": weights.to(device),
        "cu_seqlen_ks": starts.to(device),
        "cu_seqlen_ke": ends.to(device),
    }


def paged_logits_inputs(
    model: IndexerModel | str = "deepseek-v3.2",
    *,
    seq_lens: Sequence[int] = (200, 61),
    next_n: int = 1,
    page_size: int = 64,
    max_seq_len: int | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    k_scale: bool = True,
    fused: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `paged_mqa_logits`: pages in random order, more of them than are used, all of them finite.

    Args:
        model: the indexer, or its name.
        seq_lens: keys of each sequence, including the tokens of q.
        next_n: tokens per sequence.
        page_size: tokens per page.
        max_seq_len: columns of the result; as many as the longest sequence by default.
        dtype: of q and the cache.
        k_scale: scales per key.
        fused: values and scales of a page together.
        device: where the tensors are made.
        seed: of the random numbers, which are the same for every device.
    """
    model = INDEXERS[model] if isinstance(model, str) else model
    random = torch.Generator(device="cpu").manual_seed(seed)
    longest = max(seq_lens, default=0)
    columns = longest if max_seq_len is None else max_seq_len
    counts = [-(-length // page_size) for length in seq_lens]
    order = torch.randperm(sum(counts) + 3, generator=random, device="cpu").int()
    table = torch.full((len(counts), max([*counts, -(-columns // page_size)])), -1, dtype=torch.int32, device="cpu")
    for sequence, count in enumerate(counts):
        table[sequence, :count] = order[sum(counts[:sequence]) :][:count]
    q = torch.randn(
        len(counts), next_n, model.num_heads, model.head_dim, generator=random, dtype=torch.float32, device="cpu"
    )
    k = torch.randn(len(order), page_size, model.head_dim, generator=random, dtype=torch.float32, device="cpu")
    q, q_scale = _quantised(q, dtype)
    k, scale = _quantised(k, dtype)
    if dtype.itemsize > 1:
        scale = 0.5 + torch.rand(len(order), page_size, generator=random, dtype=torch.float32, device="cpu")
    weights = (
        torch.randn(len(counts) * next_n, model.num_heads, generator=random, dtype=torch.float32, device="cpu")
        * model.num_heads**-0.5
    )
    weights = weights * q_scale.reshape(weights.shape)
    return {
        "q": q.to(device),
        "k_cache": (fuse_cache(k, scale) if fused else k).to(device),
        "k_scale_cache": scale.to(device) if k_scale and not fused else None,
        "weights": weights.to(device),
        "block_table": table.to(device),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device="cpu").to(device),
        "max_seq_len": columns,
    }


def topk_inputs(
    *,
    tokens: int = 4,
    keys: int = 5000,
    k: int = 2048,
    ranges: bool = True,
    levels: int | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `topk_indices`.

    Args:
        tokens: rows.
        keys: columns.
        k: indices per row.
        ranges: rows have ends and starts of their own, some of them fewer than `k` columns apart.
        levels: how many values there are; None for as many as there are columns. Few make many ties.
        device: where the tensors are made.
        seed: of the random numbers, which are the same for every device.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)
    logits = torch.randn(tokens, keys, generator=random, dtype=torch.float32, device="cpu") * 3.0
    if levels is not None:
        logits = (logits * levels / 12.0).round()
    arguments: dict[str, Any] = {"logits": logits.to(device), "k": k}
    if ranges:
        starts = torch.randint(0, keys // 4 + 1, (tokens,), generator=random, dtype=torch.int32, device="cpu")
        lengths = torch.randint(0, keys - keys // 4 + 1, (tokens,), generator=random, dtype=torch.int32, device="cpu")
        lengths[::2] = keys - keys // 4
        arguments["row_starts"] = starts.to(device)
        arguments["row_ends"] = (starts + lengths).to(device)
    return arguments


def _quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values in `dtype`, and factors per row with which they are x: of float8, 1 of all others."""
    if dtype.itemsize > 1:
        return x.to(dtype), torch.ones(x.shape[:-1], dtype=torch.float32, device="cpu")
    scale = x.abs().amax(-1) / E4M3_MAX
    return to_e4m3(x / scale[..., None]), scale
