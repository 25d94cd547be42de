"""From a call of `write_kv_cache` to its Triton launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.kv_cache.write import write_kernel
from kernelhub.backends.triton.launch import Launcher
from kernelhub.ops.attention.problem import FP8, QUANTISED
from kernelhub.ops.kv_cache.adapter import KvCacheAdapter, Scale
from kernelhub.ops.kv_cache.problem import KvCacheProblem
from kernelhub.ops.kv_cache.rope import Rope

if triton.knobs.runtime.interpret:
    interpreter.repair()

_TILE = 2048  # elements of keys, 16 per thread with 4 warps


def format_of(problem: KvCacheProblem) -> str:
    """What the kernels call the format of the caches."""
    if problem.kv_dtype not in QUANTISED:
        return "bits"
    return "e4m3" if problem.kv_dtype == FP8 else "e5m2"


class Write(KvCacheAdapter):
    """Keys and values in one launch. Without a scale values are moved as integers of their size."""

    def __init__(self, problem: KvCacheProblem) -> None:
        super().__init__(problem)
        wide, wide_v = (triton.next_power_of_2(width) for width in (problem.head_dim_qk, problem.head_dim_vo))
        self._bits = {2: torch.int16, 4: torch.int32}[getattr(torch, problem.dtype).itemsize]
        self._quantises = problem.kv_dtype in QUANTISED
        self._block = max(1, _TILE // max(wide, wide_v))
        static = {
            "PAGE": problem.page_size,
            "HEADS": problem.num_kv_heads,
            "D": problem.head_dim_qk,
            "D_PAD": wide,
            "DV": problem.head_dim_vo,
            "DV_PAD": wide_v,
            "BLOCK": self._block,
            "FORMAT": format_of(problem),
            "KIND": problem.kv_scale or "none",
        }
        self._repeated = Repeated()
        self._launch = Launcher(write_kernel, static, num_warps=4)

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
        given = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        self._repeated.run(*identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*identified(*given))

    def _launch_anew(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Scale,
        v_scale: Scale,
    ) -> None:
        if self._quantises:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        else:
            k, v, k_cache, v_cache = (part.view(self._bits) for part in (k, v, k_cache, v_cache))
        strides = (*k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(), *slot_mapping.stride())
        aligned = not (k.data_ptr() | v.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) & 15
        rows = k.shape[0] * k.shape[1]
        with on_device_of(k_cache):
            self._launch(
                -(-rows // self._block),
                (k_cache.get_device(), strides) if aligned else None,
                k,
                v,
                k_cache,
                v_cache,
                slot_mapping,
                k_scale if isinstance(k_scale, Tensor) else None,
                v_scale if isinstance(v_scale, Tensor) else None,
                float(k_scale) if isinstance(k_scale, float | int) else 1.0,
                float(v_scale) if isinstance(v_scale, float | int) else 1.0,
                rows,
                k_cache.shape[0] * self.problem.page_size,
                *strides,
            )


def identified(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: Scale, v_scale: Scale
) -> tuple[Hashable, tuple[Tensor, ...]]:
    """The key and the tensors of a call that may be repeated."""
    if isinstance(k_scale, Tensor) and isinstance(v_scale, Tensor):
        return k.shape[0], (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return (k.shape[0], k_scale, v_scale), (k, v, k_cache, v_cache, slot_mapping)
