"""From a call of `write_kv_cache` to its CUDA launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.shapes import BITS, C_TYPES, VECTOR_BYTES, blocks_for, in_vectors
from kernelhub.ops.attention.problem import FP8, QUANTISED
from kernelhub.ops.kv_cache.adapter import KvCacheAdapter, Scale
from kernelhub.ops.kv_cache.problem import KvCacheProblem

_SCALES = {None: 0, "value": 1, "tensor": 2, "head": 3}
_PACKING = "7Q" + "17q" + "2f"
_BLOCK = 256


class Write(KvCacheAdapter):
    """One thread for a vector of a key or a value."""

    def __init__(self, problem: KvCacheProblem) -> None:
        super().__init__(problem)
        size = getattr(torch, problem.dtype).itemsize
        quantises = problem.kv_dtype in QUANTISED
        heads, widths = problem.num_kv_heads, (problem.head_dim_qk, problem.head_dim_vo)
        made = library.library(
            "write_kv_cache.cu",
            {
                "ELEMENT": C_TYPES[problem.dtype] if quantises else BITS[size],
                "SIZE": size,
                "FORMAT": (1 if problem.kv_dtype == FP8 else 2) if quantises else 0,
                "SCALE": _SCALES[problem.kv_scale],
                "PAGE": problem.page_size,
                "HEADS": heads,
                "K_WIDTH": widths[0],
                "V_WIDTH": widths[1],
            },
            problem.device,
        )
        self._each = VECTOR_BYTES // size
        self._elements = made.kernel("write_elements", _PACKING)
        whole = all(width % self._each == 0 for width in widths)
        self._vectors = made.kernel("write_vectors", _PACKING) if whole else None
        self._per_token = heads * sum(widths)

    def launch(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Scale,
        v_scale: Scale,
    ) -> None:
        each, kernel = 1, self._elements
        if self._vectors is not None and all(in_vectors(part, self._each) for part in (k, v, k_cache, v_cache)):
            each, kernel = self._each, self._vectors
        tokens = k.shape[0]
        kernel(
            k.get_device(),
            blocks_for(tokens * self._per_token // each, _BLOCK),
            _BLOCK,
            k.data_ptr(),
            v.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot_mapping.data_ptr(),
            k_scale.data_ptr() if isinstance(k_scale, Tensor) else 0,
            v_scale.data_ptr() if isinstance(v_scale, Tensor) else 0,
            tokens,
            k_cache.shape[0] * self.problem.page_size,
            *k.stride(),
            *v.stride(),
            *k_cache.stride(),
            *v_cache.stride(),
            slot_mapping.stride(0),
            k_scale if isinstance(k_scale, float | int) else 1.0,
            v_scale if isinstance(v_scale, float | int) else 1.0,
        )
