"""A FlashInfer of torch on a CPU, with the library's conventions, its checks, and its habits that bite.

Scores that are masked are -5e4 before they are multiplied, an LSE is to base 2, rows that see no key hold NaN, a plan
is lost when its wrapper plans anew, and `sinks` given to a planned wrapper are dropped.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.backends import flashinfer_cascade_fake as cascade
from tests.backends import flashinfer_experts_fake as experts
from tests.backends import flashinfer_groups_fake as groups
from tests.backends import flashinfer_products_fake as products
from tests.backends import flashinfer_quantisers_fake as quantisers
from tests.backends import flashinfer_small_groups_fake as small_groups
from tests.backends import flashinfer_trtllm_fake as trtllm
from tests.backends.fake import flashinfer_comm as sums
from tests.backends.fake import flashinfer_cudnn as of_cudnn
from tests.backends.fake import flashinfer_cutlass as cutlass
from tests.backends.fake import flashinfer_exchange as exchange
from tests.backends.fake import flashinfer_trtllm as blackwell
from tests.backends.fake.addresses import check_small
from tests.backends.fake.flashinfer_attention import attend, check_out, check_rows, paged

_ADAPTERS = (
    "kernelhub.backends.flashinfer.attention.paged",
    "kernelhub.backends.flashinfer.attention.ragged",
    "kernelhub.backends.flashinfer.attention.xqa",
    "kernelhub.backends.flashinfer.trtllm.context",
    "kernelhub.backends.flashinfer.trtllm.ragged",
    "kernelhub.backends.flashinfer.trtllm.latent",
    "kernelhub.backends.flashinfer.trtllm.listed",
    "kernelhub.backends.flashinfer.cutlass.ragged",
    "kernelhub.backends.flashinfer.cutlass.latent",
    "kernelhub.backends.flashinfer.attention.sinks",
    "kernelhub.backends.flashinfer.cudnn.library",
    "kernelhub.backends.flashinfer.cudnn.packed",
    "kernelhub.backends.flashinfer.cudnn.paged",
    "kernelhub.backends.flashinfer.cudnn.ragged",
    "kernelhub.backends.flashinfer.cascade.merge",
    "kernelhub.backends.flashinfer.comm.adapter",
    "kernelhub.backends.flashinfer.comm.experts.workspace",
    "kernelhub.backends.flashinfer.comm.experts.adapter",
    "kernelhub.backends.flashinfer.mla.paged",
    "kernelhub.backends.flashinfer.mla.concat",
    "kernelhub.backends.flashinfer.gemm.blocks",
    "kernelhub.backends.flashinfer.gemm.fp4",
    "kernelhub.backends.flashinfer.gemm.mx",
    "kernelhub.backends.flashinfer.gemm.tensorwise",
    "kernelhub.backends.flashinfer.grouped.groupwise",
    "kernelhub.backends.flashinfer.grouped.masked",
    "kernelhub.backends.flashinfer.grouped.segments",
    "kernelhub.backends.flashinfer.moe.experts",
    "kernelhub.backends.flashinfer.quant.nvfp4_kv",
    "kernelhub.backends.flashinfer.quant.fp4",
    "kernelhub.backends.flashinfer.quant.fp8",
)
WRAPPERS: list[Any] = []
SMALL_SCRATCH = 0  # scratch below which a plan fails


@contextmanager
def installed() -> Iterator[None]:
    """The fake in the place of the library, adapters imported against it."""
    fake = {"flashinfer": types.ModuleType("flashinfer")}
    for name, values in (
        ("decode", (BatchDecodeWithPagedKVCacheWrapper, *_FUNCTIONS)),
        ("prefill", (*_PREFILL, *blackwell.PREFILL, *cutlass.PREFILL)),
        ("attention", (BatchAttentionWithAttentionSinkWrapper,)),
        ("cudnn", ()),
        ("cudnn.decode", (of_cudnn.cudnn_batch_decode_with_kv_cache,)),
        ("cudnn.prefill", (of_cudnn.cudnn_batch_prefill_with_kv_cache,)),
        ("mla", (BatchMLAPagedAttentionWrapper, *blackwell.LATENT)),
        ("cascade", cascade.FUNCTIONS),
        ("comm", ()),
        ("comm.trtllm_ar", sums.FUNCTIONS),
        ("comm.trtllm_moe_alltoall", exchange.FUNCTIONS),
        ("comm.dlpack_utils", (exchange.pack_strided_memory,)),
        ("mla._core", cutlass.LATENT),
        ("concat_ops", (concat_mla_k,)),
        ("gemm", ()),
        ("gemm.gemm_base", (*products.FUNCTIONS, *groups.FUNCTIONS, *small_groups.FUNCTIONS)),
        ("gemm.kernels", ()),
        ("gemm.kernels.grouped_gemm_masked_wrapper", small_groups.MASKED),
        ("quantization", ()),
        ("quantization.fp4_quantization", quantisers.FP4_FUNCTIONS),
        ("quantization.fp8_quantization", quantisers.FP8_FUNCTIONS),
        ("fused_moe", ()),
        ("fused_moe.core", (*experts.FUNCTIONS, *trtllm.FUNCTIONS)),
    ):
        module = fake[f"flashinfer.{name}"] = types.ModuleType(f"flashinfer.{name}")
        for value in values:
            setattr(module, value.__name__, value)
    for name in ("decode", "prefill"):
        fake[f"flashinfer.cudnn.{name}"].CUDNN_AVAILABLE = of_cudnn.CUDNN_AVAILABLE
    fake["cudnn"] = types.ModuleType("cudnn")
    fake["cudnn"].backend_version = of_cudnn.backend_version
    before = {name: sys.modules.pop(name, None) for name in (*fake, *_ADAPTERS)}
    sys.modules.update(fake)
    WRAPPERS.clear()
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        for name in _ADAPTERS:  # the attribute of the package that an import leaves
            parent, _, child = name.rpartition(".")
            if name not in sys.modules and hasattr(importlib.import_module(parent), child):
                delattr(importlib.import_module(parent), child)


class Wrapper:
    """What the planned wrappers share."""

    def __init__(self, float_workspace_buffer: Tensor) -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        self._scratch = float_workspace_buffer
        self.plans = 0
        WRAPPERS.append(self)

    def planned(self, *offsets: Tensor) -> None:
        for tensor in offsets:
            assert tensor.device.type == "cpu"
            assert tensor.dtype is torch.int32
        if self._scratch.numel() < SMALL_SCRATCH:
            raise RuntimeError("Failed to allocate memory in AlignedAllocator. Increase the workspace buffer size.")
        self.plans += 1

    def finish(self, parts: list[tuple[Tensor, Tensor]], out: Tensor, return_lse: bool) -> Any:
        """Results of the sequences into `out`."""
        out.copy_(torch.cat([part for part, _ in parts]))
        return (out, torch.cat([lse for _, lse in parts])) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer)
        assert backend in ("fa2", "fa3"), "a concrete backend"
        self._kv_layout = kv_layout
        self._sink: Tensor | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        self.planned(qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert paged_kv_indices.dtype is torch.int32
        assert max_token_per_sequence is None or max_token_per_sequence == int(qo_indptr.diff().max())
        self._plan = (qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices, paged_kv_last_page_len.tolist())
        self._dtypes, self._page_size = (q_data_type, kv_data_type, o_data_type), page_size
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._scores = (sm_scale, causal, window_left, logits_soft_cap)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        out: Tensor,
        return_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> Any:
        k, v = paged_kv_cache
        check_small(sinks)
        starts, page_starts, indices, last = self._plan
        check_rows(q, k, v)
        assert k.stride() == v.stride(), "read by one set of strides"
        assert (q.dtype, k.dtype, out.dtype) == self._dtypes
        assert q.shape == (starts[-1], self._heads[0], self._heads[2])
        check_out(out, (*q.shape[:2], v.shape[-1]), out.dtype)
        assert k.shape[2 if self._kv_layout == "HND" else 1] == self._page_size
        parts = []
        for i in range(len(last)):
            pages = indices[page_starts[i] : page_starts[i + 1]]
            length = (len(pages) - 1) * self._page_size + last[i] if len(pages) else 0
            keys, values = (paged(cache, pages, length, self._kv_layout) for cache in (k, v))
            parts.append(attend(q[starts[i] : starts[i + 1]], keys, values, *self._scores, self._sink))
        return self.finish(parts, out, return_lse)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The variant for one dtype, width and kind of window, which takes sinks and the factor of scores when it runs."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        backend: str = "auto",
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend=backend)
        self._made_for = ((q_data_type, kv_data_type, q_data_type), head_dim_qk, head_dim_vo, window_left >= 0)

    def run(self, q: Tensor, paged_kv_cache: Any, sink: Tensor, sm_scale: float, *, out: Tensor) -> Any:  # type: ignore[override]
        planned_scale, _, window_left, softcap = self._scores
        assert (self._dtypes, self._heads[2], out.shape[-1], window_left >= 0) == self._made_for
        assert not softcap
        assert planned_scale == sm_scale
        assert sink.dtype is torch.float32
        assert sink.shape == (self._heads[0],)
        check_small(sink)
        self._sink = sink
        return super().run(q, paged_kv_cache, out)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer)
        assert backend == "fa2", "a concrete backend"
        self._inner = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, backend=backend)
        WRAPPERS.remove(self._inner)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **kwargs: Any,
    ) -> None:
        self.planned(indptr, last_page_len)
        assert kwargs.keys() <= {
            *("window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type", "sm_scale")
        }
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._inner.plan(starts, indptr, indices, last_page_len, *sizes, causal=False, **kwargs)

    def run(self, q: Tensor, paged_kv_cache: Any, out: Tensor, return_lse: bool = False, sinks: Any = None) -> Any:
        return self._inner.run(q, paged_kv_cache, out, return_lse)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer)
        assert backend in ("fa2", "fa3"), "a concrete backend"
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
    ) -> None:
        self.planned(qo_indptr, kv_indptr)
        self._plan = (qo_indptr.tolist(), kv_indptr.tolist())
        self._dtypes = (q_data_type, kv_data_type, o_data_type)
        self._widths = (head_dim_qk, head_dim_vo)
        self._scores = (sm_scale, causal, window_left, logits_soft_cap)

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, return_lse: bool = False) -> Any:
        starts, key_starts = self._plan
        check_rows(q, k, v)
        assert key_starts[-1] == k.shape[0] or k.shape[0] == 1, "what follows would be read, and may be NaN"
        assert (q.dtype, k.dtype, out.dtype) == self._dtypes
        assert (k.shape[2], v.shape[2]) == self._widths
        assert q.shape[0] == starts[-1]
        check_out(out, (*q.shape[:2], v.shape[-1]), out.dtype)
        parts = []
        for i in range(len(starts) - 1):
            keys = slice(key_starts[i], key_starts[i + 1])
            parts.append(attend(q[starts[i] : starts[i + 1]], k[keys], v[keys], *self._scores))
        return self.finish(parts, out, return_lse)


class BatchMLAPagedAttentionWrapper(Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer)
        assert backend in ("fa2", "fa3"), "a concrete backend"

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self.planned(qo_indptr, kv_indptr, kv_len_arr)
        self._plan = (qo_indptr.tolist(), kv_indptr.tolist(), kv_indices, kv_len_arr.tolist())
        self._shape = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self._scores, self._dtypes = (sm_scale, causal), (q_data_type, kv_data_type)

    def run(
        self,
        *,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor,
        return_lse: bool = False,
    ) -> Any:
        check_rows(q_nope, q_pe, ckv_cache, kpe_cache)
        starts, page_starts, indices, lengths = self._plan
        heads, ckv, kpe, page_size = self._shape
        assert q_nope.shape == (starts[-1], heads, ckv)
        assert q_pe.shape == (starts[-1], heads, kpe)
        assert ckv_cache.shape[1:] == (page_size, ckv)
        assert kpe_cache.shape[1:] == (page_size, kpe)
        assert (q_nope.dtype, ckv_cache.dtype) == self._dtypes
        check_out(out, q_nope.shape, q_nope.dtype)
        parts = []
        for i, length in enumerate(lengths):
            pages = indices[page_starts[i] : page_starts[i + 1]].long()
            assert len(pages) == -(-length // page_size)
            latent, rotary = (cache[pages].flatten(0, 1)[:length, None] for cache in (ckv_cache, kpe_cache))
            rows = slice(starts[i], starts[i + 1])
            q = torch.cat([q_nope[rows], q_pe[rows]], 2)
            parts.append(attend(q, torch.cat([latent, rotary], 2), latent, *self._scores))
        return self.finish(parts, out, return_lse)


def in_heads(cache: Tensor) -> Tensor:
    """A cache as XQA reads it: what its strides have beyond whole heads is dropped."""
    width = cache.shape[-1]
    return cache.as_strided(cache.shape, [*(stride // width * width for stride in cache.stride()[:-1]), 1])


def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "NHD",
    q_len_per_req: int = 1,
    strides_in_heads: bool = True,
) -> Tensor:
    k, v = (in_heads(cache) for cache in kv_cache) if strides_in_heads else kv_cache
    check_rows(query, k, v)
    assert out is not None
    check_out(out, query.shape, query.dtype)
    assert kv_cache[0].stride() == kv_cache[1].stride(), "read by one set of strides"
    assert query.is_contiguous()
    assert block_tables.is_contiguous()
    assert block_tables.dtype is seq_lens.dtype is torch.int32
    assert sinks is None or sinks.dtype is torch.float32
    check_small(sinks, block_tables, seq_lens)
    assert not workspace_buffer[: 8 << 20].any(), "semaphores are zero"
    workspace_buffer[8 << 20 : (8 << 20) + 64] = 77
    page_size = k.shape[2 if kv_layout == "HND" else 1]
    assert max_seq_len == page_size * block_tables.shape[1]
    for i, length in enumerate(seq_lens.tolist()):
        if length == 0:
            out[i] = torch.nan
            continue
        pages = block_tables[i, : -(-length // page_size)]
        keys, values = (paged(cache, pages, length, kv_layout) for cache in (k, v))
        out[i] = attend(query[i : i + 1], keys, values, bmm1_scale, True, window_left, 0.0, sinks)[0][0] * bmm2_scale
    return out


def trtllm_batch_decode_with_kv_cache(*args: Any, backend: str = "auto", kv_layout: str = "HND", **more: Any) -> Tensor:
    assert backend == "trtllm-gen"
    return xqa_batch_decode_with_kv_cache(*args, kv_layout=kv_layout, strides_in_heads=False, **more)


def concat_mla_k(k: Tensor, k_nope: Tensor, k_rope: Tensor) -> None:
    check_rows(k, k_nope, k_rope)
    assert k.shape[1:] == (128, 192)
    assert k_rope.shape == (k.shape[0], 1, 64)
    k[..., :128] = k_nope.clone()
    k[..., 128:] = k_rope


_PREFILL = (BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper)
_FUNCTIONS = (xqa_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache)
