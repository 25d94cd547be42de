"""From a call of `merge_attention_states` with two states to its CUDA launch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.shapes import C_TYPES, VECTOR_BYTES, WARP, block_of, blocks_for, in_vectors
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.merge.adapter import MergeAdapter
from kernelhub.ops.merge.problem import MergeProblem

_PACKING = "7P" + "23q" + "f"
_NO_BATCH = (0,)


class Merge(MergeAdapter):
    """Lanes of a warp share a head of a token."""

    def __init__(self, problem: MergeProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated()
        size, width = getattr(torch, problem.dtype).itemsize, problem.head_dim
        self._each = VECTOR_BYTES // size
        constants = {"ELEMENT": C_TYPES[problem.dtype], "SIZE": size, "WIDTH": width, "HEADS": problem.num_heads}
        constants |= {"HAS_LSE": int(problem.lse), "SCALE": {"value": 1, "tensor": 2}.get(problem.out_scale or "", 0)}
        self._elements = library.library("merge_attention_states.cu", constants | {"LANES": WARP}, problem.device)
        self._kernels = {1: (self._elements.kernel("merge_elements", _PACKING), WARP)}
        if width % self._each == 0:
            lanes = min(WARP, 1 << (width // self._each - 1).bit_length())
            made = library.library("merge_attention_states.cu", constants | {"LANES": lanes}, problem.device)
            self._kernels[self._each] = made.kernel("merge_vectors", _PACKING), lanes

    def launch(
        self,
        outs: Sequence[Tensor] | Tensor,
        lses: Sequence[Tensor] | Tensor,
        out: Tensor,
        lse: Tensor | None,
        out_scale: float | Tensor | None = None,
    ) -> None:
        given = (outs, lses, out, lse, out_scale)
        self._repeated.run(*_identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*_identified(*given))

    def _launch_anew(
        self,
        outs: Sequence[Tensor] | Tensor,
        lses: Sequence[Tensor] | Tensor,
        out: Tensor,
        lse: Tensor | None,
        out_scale: float | Tensor | None,
    ) -> None:
        (a, b), (lse_a, lse_b) = outs, lses
        each = 1
        if self._each in self._kernels and all(in_vectors(part, self._each) for part in (a, b, out)):
            each = self._each
        kernel, lanes = self._kernels[each]
        *batch, tokens, heads, _ = out.shape
        rows = tokens * heads * (batch[0] if batch else 1)
        no_batch = () if batch else _NO_BATCH
        threads = block_of(rows * lanes, self.problem.device.num_sms)
        kernel(
            out.get_device(),
            blocks_for(rows * lanes, threads),
            threads,
            a,
            b,
            out,
            lse_a,
            lse_b,
            0 if lse is None else lse,
            out_scale if isinstance(out_scale, Tensor) else 0,
            rows,
            tokens,
            *(*no_batch, *a.stride()),
            *(*no_batch, *b.stride()),
            *(*no_batch, *out.stride()),
            *(*no_batch, *lse_a.stride()),
            *(*no_batch, *lse_b.stride()),
            *((0, 0, 0) if lse is None else (*no_batch, *lse.stride())),
            float(out_scale) if isinstance(out_scale, float | int) else 1.0,
        )


def _identified(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    out: Tensor,
    lse: Tensor | None,
    out_scale: float | Tensor | None = None,
) -> tuple[Hashable, list[Tensor]]:
    """The key and the tensors of a call that may be repeated."""
    on_host = None if isinstance(out_scale, Tensor) else out_scale
    of_parts = [*([outs] if isinstance(outs, Tensor) else outs), *([lses] if isinstance(lses, Tensor) else lses)]
    more = [one for one in (lse, out_scale) if isinstance(one, Tensor)]
    return (out.shape, isinstance(outs, Tensor), isinstance(lses, Tensor), lse is None, on_host), [
        out,
        *of_parts,
        *more,
    ]
