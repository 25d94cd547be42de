"""Inputs for kernels over pages that are right only where a sequence's pages hold no NaN behind its end."""

from __future__ import annotations

from typing import Any

import torch

FILLER = 3.0  # what stands in unused ends; a kernel that sees it is off by as much


def with_finite_ends(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a number in the unused ends of pages; pages that belong to no sequence keep their NaN."""
    page_size = arguments["k_cache"].shape[1 if arguments["kv_layout"] == "NHD" else 2]
    table, lengths = arguments["block_table"], arguments["seq_lens"].tolist()
    used = torch.cat([row[: -(-length // page_size)] for row, length in zip(table, lengths, strict=True)]).long()
    filled = dict(arguments)
    for name in ("k_cache", "v_cache"):
        cache = arguments[name].clone()
        cache[used] = cache[used].float().nan_to_num(nan=FILLER).to(cache.dtype)
        filled[name] = cache
    return filled
