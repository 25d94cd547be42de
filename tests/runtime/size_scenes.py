"""What a rank of a group of any size does: every collective, every format of experts, against exact results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

import kernelhub
from kernelhub.ops.comm.experts.cases import by_expert
from kernelhub.ops.comm.experts.problem import FORMATS, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched
from tests.runtime.expert_scenes import same, tokens_of, wanted_by_expert

EXPERTS = 16  # tokens name the first 12, so that of eight ranks two get none
MOST = 9


def rows_of(rank: int, rows: int) -> Tensor:
    """Small integers, whose sums are exact."""
    return torch.randint(-4, 5, (rows, 6), generator=torch.Generator().manual_seed(rank)).float()


def collectives(rank: int, size: int) -> list[str]:
    """The collectives that are wrong, by plans and by direct calls."""
    group, wrong = dist.group.WORLD, []
    whole = [rows_of(other, 2 * size) for other in range(size)]
    total = torch.stack(whole).sum(0)
    lengths = [other % 3 for other in range(size)]
    parts = [rows_of(other, length) for other, length in enumerate(lengths)]
    residual, weight = rows_of(99, 2 * size), torch.ones(6)
    found: dict[str, tuple[Any, Tensor]] = {
        "all_reduce": (kernelhub.all_reduce.prepare(whole[rank], group).run(whole[rank]), total),
        "direct all_reduce": (kernelhub.all_reduce(whole[rank].half(), group).float(), total),
        "all_reduce_rms_norm": (
            kernelhub.all_reduce_rms_norm(whole[rank], residual, weight, 1e-5, group)[1],
            total + residual,
        ),
        "reduce_scatter": (kernelhub.reduce_scatter(whole[rank], group), total[2 * rank : 2 * rank + 2]),
        "all_gather": (kernelhub.all_gather(parts[rank], group, rows=lengths), torch.cat(parts)),
    }
    wrong += [name for name, (got, want) in found.items() if not torch.equal(got, want)]
    return wrong


def exchanges(rank: int, size: int) -> list[str]:
    """Dispatches and combines that are wrong, in each format, exact or with a capacity; experts return tokens."""
    group, wrong = dist.group.WORLD, []
    for most, format in zip((None, MOST, None), FORMATS, strict=True):
        parts = [tokens_of(other, "random", 3, torch.float32, 16) for other in range(size)]
        given = parts[rank]
        sent = kernelhub.moe_dispatch(**given, group=group, num_experts=EXPERTS, format=format, max_tokens=most)
        got, want = by_expert(sent), wanted_by_expert(rank, size, format, parts, EXPERTS)
        got["rows"] = got["rows"].view(torch.uint8)
        wrong += [f"{format}: {name}" for name in want if not same(got[name].contiguous(), want[name])]
        out = kernelhub.moe_combine(given_back(sent), sent.handle, group)
        if not torch.equal(out, given["x"] * given["topk_weights"].sum(1, keepdim=True)):
            wrong.append(f"{format}: combine")
    return wrong


def given_back(sent: Dispatched) -> Tensor:
    """Results of experts that return their tokens, NaN in rows of no expert."""
    if sent.format == TOKENS:
        assert sent.topk_weights is not None
        assert sent.topk_ids is not None
        named = (sent.topk_ids >= 0).any(1, keepdim=True)
        return torch.where(named, sent.x * sent.topk_weights.sum(1, keepdim=True), torch.nan)
    count = sent.counts.sum() if sent.offsets is not None else sent.counts[:, None]
    filled = torch.arange(sent.x.shape[-2]) < count
    return torch.where(filled[..., None], sent.x, torch.nan)


def act(rank: int, size: int) -> dict[str, list[str]]:
    return {"collectives": collectives(rank, size), "exchanges": exchanges(rank, size)}
