"""From a call of `mla_attention` to CUTLASS's latent attention for Blackwell, as FlashInfer has it.

Its factor of scores is fixed, so the ratio to a call's factor is moved into q. And it multiplies all rows of a tile of
128, those behind the last token by zero, so that NaN there would reach the result; so the cache is given to it in pages
of one token, and entries past the last of a sequence repeat the first.
"""

from __future__ import annotations

import math

import torch
from flashinfer.mla._core import get_mla_module
from torch import Tensor

from kernelhub.backends.flashinfer.steps import RECOMMENDED_BYTES, stream_of, workspace
from kernelhub.backends.shared.operands import aligned
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem

_ROWS_AT_ONCE = 128  # of the cache
_SCALE = (128 + 64) ** -0.5
_TOO_LITTLE = 2.0**-22  # to be looked at: it moves a score of 2^5 by 2^-17, as sums in float32 do


class Latent(MlaAdapter):
    """One query of each sequence, 128 heads, keys split among blocks.

    Scratch belongs to a stream: two graphs captured on one stream may not be replayed at once on two. Of it, 128 heads
    of 512 + 1 floats are used for each pair of blocks, whose number is at most that of multiprocessors: 42 MB of 160.
    The library does not look at its size.
    """

    def __init__(self, problem: MlaProblem) -> None:
        super().__init__(problem)
        self._run = get_mla_module().cutlass_mla_paged_attention
        if problem.device.type == "cuda":  # one token, to load the kernel or to report that it is missing
            dtype, dims = self._q
            q = torch.zeros(1, *dims, dtype=dtype, device="cuda")
            step = PagedStep(torch.zeros(1, 1, dtype=torch.int32, device="cuda"), q.new_ones(1, dtype=torch.int32))
            out = q.new_empty(1, dims[0], problem.value_dim)
            self.launch(q, q.new_zeros(1, *self._kv[1]), None, step, MlaValues(_SCALE), out, None)

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
        if q.ndim == 4:
            q, out = q.squeeze(1), out.squeeze(1)
        if 0 in (kv_cache.shape[0], step.max_pages):
            out.zero_()
            return
        factor = factor_of_q(values.scale)
        if factor != 1.0:
            q = q * factor  # in float32, and rounded once
        rows, page_rows = _rows_of(kv_cache)
        direct = out.is_contiguous() and not out.data_ptr() & 15
        made = out if direct else out.new_empty(out.shape)
        self._run(
            workspace("cutlass_mla_paged_attention", q.device, stream_of(q.device)),
            made,
            q.new_empty(0, dtype=torch.float32),  # an LSE, which is not written
            aligned(q.contiguous()),
            rows,
            # The library divides by the tiles of a sequence, and reads as many slots as there are tokens.
            step.seq_lens.clamp(1, step.max_pages * self.problem.page_size),
            self._slots(step, page_rows),
            1.0,
        )
        made.masked_fill_((step.seq_lens == 0)[:, None, None], 0.0)
        if not direct:
            out.copy_(made)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Scratch, shared by the kernels of a stream, and a table of tokens with what it is made of."""
        return RECOMMENDED_BYTES + num_seqs * (max_kv_len + _ROWS_AT_ONCE) * 16

    def _slots(self, step: PagedStep, page_rows: int) -> Tensor:
        """The row of the cache of each token, int32 [num_seqs, a multiple of 128]; the first row past a sequence."""
        page_size, device = self.problem.page_size, step.block_table.device
        token = torch.arange(page_size, dtype=torch.int32, device=device)
        slots = torch.add(token, step.block_table.unsqueeze(2), alpha=page_rows).flatten(1)
        lengths = step.seq_lens.unsqueeze(1)
        first = torch.where(lengths > 0, slots[:, :1], 0)
        position = torch.arange(slots.shape[1], dtype=torch.int32, device=device)
        slots = torch.where(position < lengths, slots, first)
        missing = -slots.shape[1] % _ROWS_AT_ONCE
        return (torch.cat([slots, first.expand(-1, missing)], 1) if missing else slots).contiguous()


def factor_of_q(scale: float) -> float:
    """What q is to be multiplied by where scores have another factor than the library's: a power of two, if it may."""
    factor = scale / _SCALE
    mantissa, exponent = math.frexp(factor)
    for exact in (0.5, 1.0):
        if abs(abs(mantissa) - exact) < exact * _TOO_LITTLE:
            return math.copysign(math.ldexp(exact, exponent), factor)
    return factor


def _rows_of(kv_cache: Tensor) -> tuple[Tensor, int]:
    """The cache as pages of one token, [rows, 1, D] without gaps, and how many of them a page takes.

    Pages may have gaps of whole rows. Where they do not, or rows are not aligned, the cache is copied as a whole,
    which costs more than the attention.
    """
    pages, page_size, width = kv_cache.shape
    page_rows, rest = divmod(kv_cache.stride(0), width)
    if kv_cache.stride()[1:] != (width, 1) or rest or page_rows < page_size or kv_cache.data_ptr() & 15:
        kv_cache, page_rows = kv_cache.clone(memory_format=torch.contiguous_format), page_size
    rows = (pages - 1) * page_rows + page_size
    return kv_cache.as_strided((rows, 1, width), (width, width, 1)), page_rows
