"""From a call of `write_mla_cache` to its Triton launch."""

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
from kernelhub.backends.triton.mla.cache import write_cache_kernel
from kernelhub.ops.attention.problem import FP8
from kernelhub.ops.mla.cache.adapter import MlaCacheAdapter
from kernelhub.ops.mla.cache.problem import MlaCacheProblem

if triton.knobs.runtime.interpret:
    interpreter.repair()

_TILE = 2048  # elements of latents, 16 per thread with 4 warps


class Write(MlaCacheAdapter):
    """Both parts in one launch. Without a scale values are moved as integers of their size."""

    def __init__(self, problem: MlaCacheProblem) -> None:
        super().__init__(problem)
        width = triton.next_power_of_2(problem.latent_dim)
        self._fp8 = problem.kv_dtype == FP8
        self._bits = {2: torch.int16, 4: torch.int32}[getattr(torch, problem.dtype).itemsize]
        self._block = max(1, _TILE // width)
        static = {
            "PAGE": problem.page_size,
            "V": problem.latent_dim,
            "V_PAD": width,
            "R": problem.rope_dim,
            "R_PAD": triton.next_power_of_2(max(1, problem.rope_dim)),
            "BLOCK": self._block,
            "FP8": self._fp8,
            "SCALE_ON_DEVICE": problem.kv_scale == "tensor",
        }
        self._repeated = Repeated()
        self._launch = Launcher(write_cache_kernel, static, num_warps=4)

    def launch(
        self, kv_c: Tensor, k_rope: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float | Tensor | None
    ) -> None:
        given = (kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
        self._repeated.run(*_identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*_identified(*given))

    def _launch_anew(
        self, kv_c: Tensor, k_rope: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float | Tensor | None
    ) -> None:
        if self._fp8:
            kv_cache = kv_cache.view(torch.uint8)
        else:
            kv_c, k_rope, kv_cache = kv_c.view(self._bits), k_rope.view(self._bits), kv_cache.view(self._bits)
        strides = (*kv_c.stride(), *k_rope.stride(), *kv_cache.stride(), *slot_mapping.stride())
        aligned = not (kv_c.data_ptr() | k_rope.data_ptr() | kv_cache.data_ptr()) & 15
        tokens = kv_c.shape[0]
        with on_device_of(kv_cache):
            self._launch(
                -(-tokens // self._block),
                (kv_cache.get_device(), strides) if aligned else None,
                kv_c,
                k_rope,
                kv_cache,
                slot_mapping,
                kv_scale if isinstance(kv_scale, Tensor) else None,
                float(kv_scale) if isinstance(kv_scale, float | int) else 1.0,
                tokens,
                kv_cache.shape[0] * self.problem.page_size,
                *strides,
            )


def _identified(
    kv_c: Tensor, k_rope: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float | Tensor | None
) -> tuple[Hashable, tuple[Tensor, ...]]:
    """The key and the tensors of a call that may be repeated."""
    if isinstance(kv_scale, Tensor):
        return kv_c.shape[0], (kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
    return (kv_c.shape[0], kv_scale), (kv_c, k_rope, kv_cache, slot_mapping)
