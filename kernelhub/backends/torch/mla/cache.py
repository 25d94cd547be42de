"""New rows into the pages of a latent cache, by one indexed store."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, to_e4m3
from kernelhub.ops.mla.cache.adapter import MlaCacheAdapter
from kernelhub.ops.precision import without_autocast


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
        size = self.problem.page_size
        if slot_mapping.device.type == "cpu":  # where looking at a value waits for nothing
            word = _word(rows, kv_cache) or bits
            rows, cache, slot = rows.view(word), kv_cache.view(word), slot_mapping
            if int(slot.min()) < 0:
                rows, slot = rows[slot >= 0], slot[slot >= 0]
            if cache.stride(0) == size * cache.stride(1):
                cache.flatten(0, 1)[slot] = rows
            else:
                cache[slot // size, slot % size] = rows
            return
        rows, cache = rows.view(bits), kv_cache.view(bits)
        written = (slot_mapping >= 0) & (slot_mapping < len(cache) * size)  # none has looked at them
        token = torch.arange(len(rows), device=rows.device)
        token = torch.where(written, token, written.int().argmax())
        slot = torch.where(written, slot_mapping, 0)[token]
        page, place = slot // size, slot % size
        cache[page, place] = torch.where(written[token][:, None], rows[token], cache[page, place])


def _word(rows: Tensor, cache: Tensor) -> torch.dtype | None:
    """The largest element that both can be read as: a CPU stores as many elements a second of any size.

    torch has none larger than 16 bytes, and copies those as they are, also where they are no complex numbers.
    """
    if cache.stride(-1) != 1:
        return None
    sizes = (rows.shape[1], cache.storage_offset(), *cache.stride()[:-1])
    for word in (torch.complex128, torch.int64):
        each = word.itemsize // rows.itemsize
        if not (cache.data_ptr() % word.itemsize or any(size % each for size in sizes)):
            return word
    return None


def _divisor(kv_scale: float | Tensor | None, device: torch.device) -> Tensor:
    """The scale on the device: by a number, CUDA would multiply with its reciprocal instead of dividing."""
    if isinstance(kv_scale, Tensor):
        return kv_scale.reshape(())
    return torch.full((), 1.0 if kv_scale is None else kv_scale, dtype=torch.float32, device=device)
