"""From a call of `write_kv_cache` with a rotary embedding to its Triton launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.kv_cache.adapter import format_of, identified
from kernelhub.backends.triton.kv_cache.rope import rope_write_kernel
from kernelhub.backends.triton.launch import Launcher
from kernelhub.ops.attention.problem import QUANTISED
from kernelhub.ops.kv_cache.adapter import KvCacheAdapter, Scale
from kernelhub.ops.kv_cache.problem import NEOX, KvCacheProblem
from kernelhub.ops.kv_cache.rope import Rope

if triton.knobs.runtime.interpret:
    interpreter.repair()

_TILE = 2048  # elements of heads, 16 per thread with 4 warps


class RopeWrite(KvCacheAdapter):
    """Queries, keys and values in one launch."""

    def __init__(self, problem: KvCacheProblem) -> None:
        super().__init__(problem)
        half, rest = problem.rotary_dim // 2, problem.head_dim_qk - problem.rotary_dim
        sizes = (half, max(rest, 1), problem.head_dim_vo)
        wide, wide_rest, wide_v = (triton.next_power_of_2(size) for size in sizes)
        self._block = max(1, _TILE // max(2 * wide, wide_rest, wide_v))
        static = {
            "PAGE": problem.page_size,
            "HEADS": problem.num_kv_heads,
            "HALF": half,
            "HALF_PAD": wide,
            "REST": rest,
            "REST_PAD": wide_rest,
            "DV": problem.head_dim_vo,
            "DV_PAD": wide_v,
            "BLOCK": self._block,
            "FORMAT": format_of(problem),
            "KIND": problem.kv_scale or "none",
            "NEOX": problem.rope == NEOX,
            "HAS_Q": problem.q,
        }
        self._repeated = Repeated()
        self._launch = Launcher(rope_write_kernel, static, num_warps=4, enable_fp_fusion=False)

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
        given = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, rope)
        self._repeated.run(*_identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*_identified(*given))

    def _launch_anew(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Scale,
        v_scale: Scale,
        rope: Rope | None,
    ) -> None:
        assert rope is not None  # as the record says
        if self.problem.kv_dtype in QUANTISED:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        positions, cos_sin_cache, q = rope
        q_heads, of_q = (0, (0, 0, 0)) if q is None else (q.shape[1], q.stride())
        of_tokens = (*k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(), *slot_mapping.stride())
        strides = (*of_tokens, *of_q, *positions.stride(), *cos_sin_cache.stride())
        moved = (k, v, k_cache, v_cache) if q is None else (k, v, k_cache, v_cache, q)
        aligned = not any(part.data_ptr() & 15 for part in moved)
        rows = k.shape[0] * (k.shape[1] + q_heads)
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
                q,
                positions,
                cos_sin_cache,
                float(k_scale) if isinstance(k_scale, float | int) else 1.0,
                float(v_scale) if isinstance(v_scale, float | int) else 1.0,
                rows,
                k_cache.shape[0] * self.problem.page_size,
                q_heads,
                cos_sin_cache.shape[0],
                *strides,
            )


def _identified(*given: Any) -> tuple[Hashable, tuple[Tensor, ...]]:
    """The key and the tensors of a call that may be repeated: those of one without rope, and rope's."""
    *written, rope = given
    key, tensors = identified(*written)
    return key, (*tensors, *(part for part in rope if part is not None))
