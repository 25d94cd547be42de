"""New tokens into the pages of a KV cache, by one indexed store for keys and one for values."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.kv_cache.adapter import KvCacheAdapter, Scale
from kernelhub.ops.kv_cache.reference import encoded
from kernelhub.ops.kv_cache.rope import Rope, has_row, rotated
from kernelhub.ops.precision import without_autocast

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # torch 2.8 cannot index float8


class Scatter(KvCacheAdapter):
    """`write_kv_cache` anywhere; nothing in it waits for the device.

    On a GPU tokens that are not to be written would have to be counted to be left out. Instead each repeats the store
    of the first one that is; where there is none, all store what the first slot already contains.
    """

    @without_autocast
    def launch(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Scale,
        v_scale: Scale,
        rope: Rope | None = None,
    ) -> None:
        if rope is not None:
            style = str(self.problem.rope)
            k = rotated(k, rope.positions, rope.cos_sin_cache, style)
            if rope.q is not None:
                bits = _BITS[rope.q.itemsize]  # a view, since torch lets no tensor of inference mode be written
                turned = rotated(rope.q, rope.positions, rope.cos_sin_cache, style)
                rope.q.view(bits).copy_(turned.view(bits))
            slot_mapping = torch.where(has_row(rope.positions, rope.cos_sin_cache), slot_mapping, -1)
        size, written = self.problem.page_size, slot_mapping >= 0
        on_cpu = written.device.type == "cpu"  # where counting waits for nothing
        if on_cpu:
            token = None if bool(written.all()) else written.nonzero().flatten()
            slot = slot_mapping if token is None else slot_mapping[token]
        else:
            written &= slot_mapping < len(k_cache) * size  # none has looked at them
            token = torch.arange(len(k), device=k.device)
            token = torch.where(written, token, written.int().argmax())
            slot = torch.where(written, slot_mapping, 0)[token]
        page, place = slot // size, slot % size
        for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            bits = _BITS[cache.itemsize]
            rows, pages = encoded(new, scale, cache.dtype).view(bits), cache.view(bits)
            if token is not None:
                rows = rows[token]
            if not on_cpu:
                rows = torch.where(written[token].view(-1, 1, 1), rows, pages[page, place])
            pages[page, place] = rows
