"""`moe_dispatch` and `moe_combine` in plain torch: every rank gets everything, and takes its part in loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernelhub.ops.comm.experts.problem import ALL, CONTIGUOUS, FIXED, FORMATS, KEPT, NEEDED, ROWS, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched, Handle, Header, handle_of, header_of
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.precision import at_own_precision, without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@without_autocast
def moe_dispatch_reference(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    group: ProcessGroup | str,
    num_experts: int,
    scales: Tensor | None = None,
    format: str = TOKENS,
    max_tokens: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Dispatched:
    """The op with exact shapes and all tokens of all ranks; nothing is computed, so `dtype` has no meaning."""
    pg = resolved("moe_dispatch", group)
    rank, size = pg.rank(), pg.size()
    local = num_experts // size
    xs, ids, weights = (gathered_rows(pg, part) for part in (x, topk_ids, topk_weights))
    all_x, all_ids, all_weights = torch.cat(xs), torch.cat(ids) - rank * local, torch.cat(weights)
    all_scales = None if scales is None else torch.cat(gathered_rows(pg, scales))
    here = (all_ids >= 0) & (all_ids < local) & (torch.cat(ids) < num_experts)
    all_ids = torch.where(here, all_ids, -1)
    splits = torch.tensor([len(part) for part in ids], dtype=torch.int64, device="cpu")
    rows_of_expert: list[list[int]] = [[] for _ in range(local)]
    once, summed = torch.full_like(all_ids, -1), torch.zeros_like(all_weights)
    for row, choices in enumerate(all_ids.tolist()):
        for choice, expert in enumerate(choices):
            if expert >= 0:
                first = choices.index(expert)
                summed[row, first] += all_weights[row, choice]
                if first == choice:
                    once[row, choice] = len(rows_of_expert[expert])
                    rows_of_expert[expert].append(row)
    counts = torch.tensor([len(rows) for rows in rows_of_expert], dtype=torch.int32, device=x.device)
    sent = torch.empty(0, dtype=torch.int64, device=x.device)
    number, begins = FORMATS.index(format), counts.cumsum(0, dtype=torch.int32) - counts
    if format == TOKENS:
        shown = torch.where(here, all_weights, 0.0)
        header = Header(number, ROWS.index(ALL), size, num_experts, len(x), 0, len(all_x))
        handle = handle_of(header, topk_ids, all_ids, shown, splits, sent)
        every = torch.zeros(local + 1, dtype=torch.int32, device=x.device)
        every.scatter_add_(0, torch.where(here, all_ids, local).flatten().long(), torch.ones_like(all_ids).flatten())
        return Dispatched(all_x, all_scales, all_ids, shown, every[:local], None, handle)
    if format == CONTIGUOUS:
        order = torch.tensor([row for rows in rows_of_expert for row in rows], dtype=torch.int64, device=x.device)
        slots = torch.where(once >= 0, begins[all_ids.clamp(min=0)] + once, -1).int()
        form: tuple[int, ...] = (len(order),)
    else:
        most = max(map(len, rows_of_expert), default=0)
        padded = [rows + [0] * (most - len(rows)) for rows in rows_of_expert]
        order = torch.tensor(padded, dtype=torch.int64, device=x.device).flatten()
        slots = torch.where(once >= 0, all_ids * most + once, -1).int()
        form = (local, most)
    header = Header(number, ROWS.index(ALL), size, num_experts, len(x), 0, len(order))
    handle = handle_of(header, topk_ids, slots, summed, splits, sent)
    ends = counts.cumsum(0, dtype=torch.int32) if format == CONTIGUOUS else None
    shown_scales = None if all_scales is None else all_scales[order].view(*form, all_scales.shape[1])
    rows = all_x.view(torch.uint8)[order].view(x.dtype).view(*form, x.shape[1])
    return Dispatched(rows, shown_scales, None, None, counts, ends, handle)


@at_own_precision
def moe_combine_reference(
    y: Tensor,
    handle: Sequence[Tensor],
    group: ProcessGroup | str,
    out: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The sum in the order of ranks and choices, computed in `dtype` and returned in it; `out` is ignored."""
    pg = resolved("moe_combine", group)
    header, given = header_of(handle), Handle(*handle)
    rank, rows = pg.rank(), ROWS[header.rows]
    flat = y.reshape(-1, y.shape[-1]).to(dtype)
    weights = given.weights.to(dtype)
    partial = torch.zeros((len(given.slots), y.shape[-1]), dtype=dtype, device=y.device)
    for row, slots in enumerate(given.slots.tolist()):
        named = [(choice, slot) for choice, slot in enumerate(slots) if slot >= 0]
        if FORMATS[header.format] == TOKENS:
            partial[row] = flat[row] if named else 0.0
        else:
            for choice, slot in named:
                partial[row] += weights[row, choice] * flat[slot]
    parts = gathered_rows(pg, partial)
    places = [part.tolist() for part in gathered_rows(pg, given.splits.to(y.device))]
    total = torch.zeros((header.tokens, y.shape[-1]), dtype=dtype, device=y.device)
    for other, part in enumerate(parts):
        if rows == FIXED:
            begin = rank * header.max_tokens
            total += part[begin : begin + header.tokens]
        elif rows == ALL:
            begin = sum(places[other][:rank])
            total += part[begin : begin + header.tokens]
        else:
            assert rows in (NEEDED, KEPT), rows
            assert header.max_tokens == 0, "where rows came from is in the state of the library alone"
            to_each, from_each = places[rank][: pg.size()], places[other][pg.size() :]
            begin, first = sum(from_each[:rank]), sum(to_each[:other])
            count = to_each[other]
            total.index_add_(0, given.sent[first : first + count], part[begin : begin + count])
    return total


def gathered_rows(pg: ProcessGroup, rows: Tensor) -> list[Tensor]:
    """The tensors of all ranks, which may differ in their first dimension."""
    own = torch.tensor([len(rows)], dtype=torch.int64, device=rows.device)
    lengths = [torch.empty_like(own) for _ in range(pg.size())]
    pg.allgather([lengths], [own]).wait()
    columns = math.prod(rows.shape[1:])
    raw = rows.clone(memory_format=torch.contiguous_format).view(len(rows), columns).view(torch.uint8)
    width = rows.itemsize * columns
    wide = torch.zeros((max(int(length) for length in lengths), width), dtype=torch.uint8, device=rows.device)
    wide[: len(rows)] = raw
    parts = [torch.empty_like(wide) for _ in lengths]
    if wide.numel():
        pg.allgather([parts], [wide]).wait()
    return [
        part[: int(length)].contiguous().view(rows.dtype).view(int(length), *rows.shape[1:])
        for part, length in zip(parts, lengths, strict=True)
    ]
