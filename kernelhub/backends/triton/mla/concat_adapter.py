"""From a call of `concat_mla_k` to its Triton launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.mla.concat import concat_kernel
from kernelhub.ops.mla.concat.adapter import ConcatAdapter
from kernelhub.ops.mla.concat.problem import ConcatProblem

if triton.knobs.runtime.interpret:
    interpreter.repair()

_TILE = 2048  # elements of a head's own part, 16 per thread with 4 warps


class Concat(ConcatAdapter):
    """Both parts in one launch. Values are moved as integers of their size."""

    def __init__(self, problem: ConcatProblem) -> None:
        super().__init__(problem)
        nope, rope = triton.next_power_of_2(problem.nope_dim), triton.next_power_of_2(problem.rope_dim)
        self._block = max(1, _TILE // max(nope, rope))
        self._bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[getattr(torch, problem.dtype).itemsize]
        static = {
            "HEADS": problem.num_heads,
            "NOPE": problem.nope_dim,
            "NOPE_PAD": nope,
            "ROPE": problem.rope_dim,
            "ROPE_PAD": rope,
            "BLOCK": self._block,
        }
        self._repeated = Repeated()
        self._launch = [Launcher(concat_kernel, {**static, "COPIES": copies}, num_warps=4) for copies in (False, True)]

    def launch(self, k_nope: Tensor | None, k_rope: Tensor, out: Tensor) -> None:
        self._repeated.run(*_identified(k_nope, k_rope, out), self._launch_anew, k_nope, k_rope, out)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*_identified(*given))

    def _launch_anew(self, k_nope: Tensor | None, k_rope: Tensor, out: Tensor) -> None:
        copies = k_nope is not None
        k_nope, k_rope, out = (
            (out if k_nope is None else k_nope).view(self._bits),
            k_rope.view(self._bits),
            out.view(self._bits),
        )
        strides = (*k_nope.stride(), *k_rope.stride(), *out.stride())
        aligned = not (k_nope.data_ptr() | k_rope.data_ptr() | out.data_ptr()) & 15
        tokens = out.shape[0]
        with on_device_of(out):
            self._launch[copies](
                -(-tokens // self._block) * self.problem.num_heads,
                (out.get_device(), strides) if aligned else None,
                k_nope,
                k_rope,
                out,
                tokens,
                *strides,
            )


def _identified(k_nope: Tensor | None, k_rope: Tensor, out: Tensor) -> tuple[Hashable, tuple[Tensor, ...]]:
    """The key and the tensors of a call that may be repeated."""
    return (out.shape[0], k_nope is None), (k_rope, out) if k_nope is None else (k_rope, out, k_nope)
