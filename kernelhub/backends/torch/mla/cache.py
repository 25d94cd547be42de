"""New rows into the pages of a latent cache, by one indexed store."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, to_e4m3
from kernelhub.ops.mla.cache.adapter import MlaCacheAdapter
from kernelhub.ops.precision import without_autocast

_FEW = 32  # tokens that are stored sooner than their layout is checked


class Scatter(MlaCacheAdapter):
    """`write_mla_cache` anywhere; nothing in it waits for the device.

    On a GPU tokens that are not to be written would have to be counted to be left out. Instead each repeats the store
    of the first one that is; where there is none, all store what the first row already contains.
    """

    @without_autocast
    def launch(
        self, kv_c: Tensor, k_rope: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float | Tensor | None
    ) -> None:
        rows = torch.cat([kv_c, k_rope], 1)
        if kv_cache.dtype is E4M3:
            rows = to_e4m3(rows.float() / _divisor(kv_scale, rows.device))
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[rows.itemsize]  # torch 2.8 cannot index float8
        rows, cache = rows.view(bits), kv_cache.view(bits)
        size = self.problem.page_size
        written = slot_mapping >= 0
        if written.device.type == "cpu":  # where counting waits for nothing
            rows, slot = (rows, slot_mapping) if bool(written.all()) else (rows[written], slot_mapping[written])
            if len(rows) > _FEW:
                rows, cache = _in_words(rows, cache)
            if cache.stride(0) == size * cache.stride(1):
                cache.flatten(0, 1)[slot] = rows
            else:
                cache[slot // size, slot % size] = rows
            return
        written &= slot_mapping < len(cache) * size  # none has looked at them
        token = torch.arange(len(rows), device=rows.device)
        token = torch.where(written, token, written.int().argmax())
        slot = torch.where(written, slot_mapping, 0)[token]
        page, place = slot // size, slot % size
        cache[page, place] = torch.where(written[token][:, None], rows[token], cache[page, place])


def _in_words(rows: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Both as elements of 8 bytes if their layouts allow it: a CPU stores as many elements per second of any size."""
    each = 8 // rows.itemsize
    sizes = (rows.shape[1], cache.storage_offset(), *cache.stride()[:-1])
    if cache.stride(-1) != 1 or cache.data_ptr() % 8 or any(size % each for size in sizes):
        return rows, cache
    return rows.contiguous().view(torch.int64), cache.view(torch.int64)


def _divisor(kv_scale: float | Tensor | None, device: torch.device) -> Tensor:
    """The scale on the device: by a number, CUDA would multiply with its reciprocal instead of dividing."""
    if isinstance(kv_scale, Tensor):
        return kv_scale.reshape(())
    return torch.full((), 1.0 if kv_scale is None else kv_scale, dtype=torch.float32, device=device)
