"""From a call of `mla_attention` with listed tokens to TensorRT-LLM's latent attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.flashinfer.steps import RECOMMENDED_BYTES, split_scale
from kernelhub.backends.flashinfer.trtllm.latent import run_trtllm
from kernelhub.backends.shared.operands import aligned, on_device_of
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem

_ENTRIES_AT_ONCE = 128  # of a list; the binaries need multiples of 4


class Slots(NamedTuple):
    """The slots of the cache that each query token attends to.

    Attributes:
        lists: int32 [T, 1, entries]: slots, those that are seen before all others, which repeat the first.
        counts: int32 [T], how many are seen.
        alive: bool [T], whether the token belongs to a sequence; None if all do.
    """

    lists: Tensor
    counts: Tensor
    alive: Tensor | None


class Listed(MlaAdapter):
    """Every query token by itself, as a sequence of the tokens that it lists; the cache is one row of slots."""

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda":  # one token, to load the module or to report that it is missing
            dtype, dims = self._q
            q = torch.zeros(1, 1, *dims, dtype=dtype, device="cuda")
            lists = torch.zeros(1, 1, _ENTRIES_AT_ONCE, dtype=torch.int32, device="cuda")
            count, out = lists[0, 0, :1] + 1, q.new_empty(1, 1, dims[0], problem.value_dim)
            with on_device_of(q):
                run_trtllm(problem, q, q.new_zeros(1, *self._kv[1]), lists, count, 1.0, out, _ENTRIES_AT_ONCE)

    def launch(
        self,
        q: Tensor,
        kv_cache: Tensor,
        topk_indices: Tensor | None,
        step: PagedStep,
        values: MlaValues,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        assert topk_indices is not None
        if step.num_seqs == 0:  # ragged, with tokens that belong to no sequence
            return
        tokens = q.shape[1] if q.ndim == 4 else 1
        rows = q.flatten(0, 1) if q.ndim == 4 else q
        sm_scale, factor = split_scale(values.scale)
        if factor != 1.0:
            rows = rows * factor
        slots = self._slots(topk_indices, step, tokens)
        direct = slots.alive is None and out.is_contiguous() and not out.data_ptr() & 15
        made = out.view(-1, *out.shape[-2:]) if direct else out.new_empty((*rows.shape[:-1], out.shape[-1]))
        with on_device_of(q):
            run_trtllm(
                self.problem,
                aligned(rows.contiguous()).unsqueeze(1),
                aligned(kv_cache.contiguous()),
                slots.lists,
                slots.counts.clamp(min=1),  # an empty list is not defined; what it gives is not looked at
                sm_scale,
                made.unsqueeze(1),
                slots.lists.shape[2],
            )
        made.masked_fill_((slots.counts == 0)[:, None, None], 0.0)
        if direct:
            return
        if slots.alive is not None:
            made = torch.where(slots.alive[:, None, None], made, out)
        out.copy_(made.view(out.shape))

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by the kernels of a stream, and what the lists of slots are made of."""
        return RECOMMENDED_BYTES + num_tokens * 32 * (max_kv_len + _ENTRIES_AT_ONCE)

    def _slots(self, topk_indices: Tensor, step: PagedStep, tokens: int) -> Slots:
        number, topk = topk_indices.shape
        token = torch.arange(number, device=topk_indices.device)
        alive: Tensor | None = None
        if step.cu_seqlens_q is None:
            sequence = token // tokens
            behind = tokens - 1 - token % tokens
        else:
            ends = step.cu_seqlens_q[1:].contiguous()
            sequence = torch.bucketize(token, ends, right=True)
            alive = sequence < step.num_seqs
            sequence = sequence.clamp(max=step.num_seqs - 1)
            behind = ends[sequence] - 1 - token
        page_size = self.problem.page_size
        seen_keys = step.seq_lens[sequence]
        if self.problem.causal:
            seen_keys = seen_keys - behind
        seen_keys = seen_keys.clamp(max=step.max_pages * page_size)  # whose pages the table has
        seen = (topk_indices >= 0) & (topk_indices < seen_keys[:, None])
        position = torch.where(seen, topk_indices, 0)
        page = step.block_table[sequence[:, None], position // page_size]
        slot = torch.where(seen, page * page_size + position % page_size, 0)
        # Of those that are seen, one after the other. The others add 0 to one of them. Behind the last the first is
        # repeated, which no kernel should look at, but which is no NaN.
        place = (seen.cumsum(1) - 1).clamp(min=0)
        entries = max(1, -(-topk // _ENTRIES_AT_ONCE)) * _ENTRIES_AT_ONCE
        first = torch.where(seen & (place == 0), slot, 0).sum(1, keepdim=True)
        lists = first.to(torch.int32).repeat(1, entries)
        lists.scatter_add_(1, place, torch.where(seen, slot - first, 0).to(torch.int32))
        return Slots(lists.unsqueeze(1), seen.sum(1, dtype=torch.int32), alive)
