"""From a call of `concat_mla_k` to its CUDA launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.shapes import BITS, VECTOR_BYTES, blocks_for, in_vectors, times_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.ops.mla.concat.adapter import ConcatAdapter
from kernelhub.ops.mla.concat.problem import ConcatProblem

_PACKING = "3P" + "9q"
_BLOCK = 256
_TIMES = {1: "vectors", 2: "twice"}  # vectors of a thread


class Concat(ConcatAdapter):
    """One thread for a vector of the result. Where it already contains the own parts, the others alone are written."""

    def __init__(self, problem: ConcatProblem) -> None:
        super().__init__(problem)
        self._repeated = Repeated()
        size = getattr(torch, problem.dtype).itemsize
        self._each = VECTOR_BYTES // size
        whole = problem.nope_dim % self._each == 0 and problem.rope_dim % self._each == 0
        self._kernels = []
        for copies in (0, 1):
            constants = {"ELEMENT": BITS[size], "SIZE": size, "HEADS": problem.num_heads, "COPIES": copies}
            constants |= {"NOPE": problem.nope_dim, "ROPE": problem.rope_dim}
            made = library.library("concat_mla_k.cu", constants, problem.device)
            vectors = {n: made.kernel(f"concat_{name}", _PACKING) for n, name in _TIMES.items()} if whole else {}
            self._kernels.append((made.kernel("concat_elements", _PACKING), vectors))

    def launch(self, k_nope: Tensor | None, k_rope: Tensor, out: Tensor) -> None:
        self._repeated.run(*_identified(k_nope, k_rope, out), self._launch_anew, k_nope, k_rope, out)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*_identified(*given))

    def _launch_anew(self, k_nope: Tensor | None, k_rope: Tensor, out: Tensor) -> None:
        problem, own = self.problem, out if k_nope is None else k_nope
        each, (kernel, vectors) = 1, self._kernels[k_nope is not None]
        tokens = out.shape[0]
        written = problem.rope_dim + (0 if k_nope is None else problem.nope_dim)
        if vectors and all(in_vectors(part, self._each) for part in (own, k_rope, out)):
            threads = tokens * problem.num_heads * written // self._each
            times = times_of(threads, problem.device.num_sms)
            each, kernel = self._each * times, vectors[times]
        kernel(
            out.get_device(),
            blocks_for(blocks_for(tokens * problem.num_heads * written, each), _BLOCK),
            _BLOCK,
            own,
            k_rope,
            out,
            tokens,
            *own.stride(),
            *k_rope.stride(),
            *out.stride(),
        )


def _identified(k_nope: Tensor | None, k_rope: Tensor, out: Tensor) -> tuple[Hashable, tuple[Tensor, ...]]:
    """The key and the tensors of a call that may be repeated."""
    return (out.shape[0], k_nope is None), (k_rope, out) if k_nope is None else (k_rope, out, k_nope)
