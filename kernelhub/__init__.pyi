# ruff: noqa
# fmt: off
# mypy: disable-error-code="override"
"""The public names for type checkers; made by scripts/generate_stub.py."""
import collections.abc
import typing

import torch

import kernelhub.dispatch.op
from kernelhub import errors as errors
from kernelhub import testing as testing
from kernelhub.dispatch.api import configure as configure
from kernelhub.dispatch.api import register_backend as register_backend
from kernelhub.dispatch.api import reload as reload
from kernelhub.dispatch.api import report as report
from kernelhub.dispatch.api import strict as strict
from kernelhub.dispatch.api import use as use
from kernelhub.dispatch.explain import explain as explain
from kernelhub.dispatch.machine import SimulatedMachine as SimulatedMachine
from kernelhub.dispatch.selection import Selection as Selection
from kernelhub.evidence.tuning.tune import tune as tune
from kernelhub.evidence.verify import verify as verify
from kernelhub.ops.comm.all_gather import all_gather as all_gather
from kernelhub.ops.comm.all_reduce import all_reduce as all_reduce
from kernelhub.ops.comm.all_reduce_rms_norm import all_reduce_rms_norm as all_reduce_rms_norm
from kernelhub.ops.comm.experts.combine import moe_combine as moe_combine
from kernelhub.ops.comm.experts.dispatch import moe_dispatch as moe_dispatch
from kernelhub.ops.comm.reduce_scatter import reduce_scatter as reduce_scatter
from kernelhub.ops.fused_quant.activation import silu_and_mul_quant as silu_and_mul_quant
from kernelhub.ops.fused_quant.norm import rms_norm_quant as rms_norm_quant
from kernelhub.ops.gemm.fp4.op import fp4_gemm as fp4_gemm
from kernelhub.ops.gemm.fp8.batched.op import bmm_fp8 as bmm_fp8
from kernelhub.ops.gemm.fp8.op import fp8_gemm as fp8_gemm
from kernelhub.ops.gemm.grouped.op import grouped_gemm as grouped_gemm
from kernelhub.ops.indexer.mqa_logits import mqa_logits as mqa_logits
from kernelhub.ops.indexer.paged_mqa_logits import paged_mqa_logits as paged_mqa_logits
from kernelhub.ops.indexer.topk_indices import topk_indices as topk_indices
from kernelhub.ops.kv_cache.op import write_kv_cache as write_kv_cache
from kernelhub.ops.linear_attention.op import linear_attention as linear_attention
from kernelhub.ops.mla.cache.op import write_mla_cache as write_mla_cache
from kernelhub.ops.mla.concat.op import concat_mla_k as concat_mla_k
from kernelhub.ops.models.problems import problems_of as problems_of
from kernelhub.ops.moe.experts.op import fused_moe as fused_moe
from kernelhub.ops.moe.parallel.op import expert_parallel_moe as expert_parallel_moe
from kernelhub.ops.moe.routing.op import route_experts as route_experts
from kernelhub.ops.packed import PackedWeight as PackedWeight
from kernelhub.ops.quant.fp8 import dequantize_fp8 as dequantize_fp8
from kernelhub.ops.quant.fp8 import quantize_fp8 as quantize_fp8
from kernelhub.ops.quant.mx import dequantize_mxfp4 as dequantize_mxfp4
from kernelhub.ops.quant.mx import dequantize_mxfp8 as dequantize_mxfp8
from kernelhub.ops.quant.mx import quantize_mxfp4 as quantize_mxfp4
from kernelhub.ops.quant.mx import quantize_mxfp8 as quantize_mxfp8
from kernelhub.ops.quant.nvfp4 import dequantize_nvfp4 as dequantize_nvfp4
from kernelhub.ops.quant.nvfp4 import quantize_nvfp4 as quantize_nvfp4
from kernelhub.probes.device import DeviceFacts as DeviceFacts
from kernelhub.runtime.caches.notices import cache_notices as cache_notices
from kernelhub.runtime.caches.variables import set_cache_variables as set_cache_variables
from kernelhub.runtime.health import health as health
from kernelhub.runtime.ranks.agree import agree as agree
from kernelhub.runtime.seal import seal as seal
from kernelhub.runtime.seal import unseal as unseal
from kernelhub.runtime.warm import warm as warm
from kernelhub.warming.warmup import warmup as warmup

__version__: str
__all__ = ['__version__', 'errors', 'testing', 'attention', 'paged_attention', 'merge_attention_states', 'write_kv_cache', 'mla_attention', 'write_mla_cache', 'concat_mla_k', 'mqa_logits', 'paged_mqa_logits', 'topk_indices', 'linear_attention', 'all_reduce', 'all_reduce_rms_norm', 'moe_dispatch', 'moe_combine', 'reduce_scatter', 'all_gather', 'quantize_fp8', 'dequantize_fp8', 'quantize_mxfp4', 'dequantize_mxfp4', 'quantize_mxfp8', 'dequantize_mxfp8', 'quantize_nvfp4', 'dequantize_nvfp4', 'rms_norm_quant', 'silu_and_mul_quant', 'fp4_gemm', 'bmm_fp8', 'fp8_gemm', 'grouped_gemm', 'fused_moe', 'expert_parallel_moe', 'route_experts', 'explain', 'report', 'use', 'strict', 'configure', 'reload', 'register_backend', 'verify', 'tune', 'PackedWeight', 'Selection', 'DeviceFacts', 'SimulatedMachine', 'cache_notices', 'set_cache_variables', 'health', 'seal', 'unseal', 'warm', 'warmup', 'problems_of', 'agree']

_R = typing.TypeVar("_R")
import kernelhub.ops.attention.attention

class _AttentionStep(kernelhub.ops.attention.attention.AttentionStep, typing.Generic[_R]):
    run: typing.Callable[..., _R]

class _AttentionPlan(kernelhub.ops.attention.attention.AttentionPlan, typing.Generic[_R]):
    run: typing.Callable[..., _R]
    def begin(self, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, *, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, cu_seqlens_q_cpu: collections.abc.Sequence[int] | torch.Tensor | None = None, cu_seqlens_k_cpu: collections.abc.Sequence[int] | torch.Tensor | None = None) -> _AttentionStep[_R]: ...

class _Attention(kernelhub.dispatch.op.OpFunction[..., typing.Any, _AttentionPlan[typing.Any]], typing.Protocol):
    @typing.overload
    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: bool = False, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, return_lse: typing.Literal[False] = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> torch.Tensor: ...
    @typing.overload
    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: bool = False, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, *, return_lse: typing.Literal[True], out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @typing.overload
    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: bool = False, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, return_lse: bool = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @typing.overload
    def prepare(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: bool = False, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, return_lse: typing.Literal[False] = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _AttentionPlan[torch.Tensor]: ...
    @typing.overload
    def prepare(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: bool = False, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, *, return_lse: typing.Literal[True], out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _AttentionPlan[tuple[torch.Tensor, torch.Tensor]]: ...
    @typing.overload
    def prepare(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: bool = False, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, return_lse: bool = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _AttentionPlan[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]: ...

attention: _Attention

import kernelhub.ops.merge.op

class _MergeAttentionStatesPlan(kernelhub.ops.merge.op.MergePlan, typing.Generic[_R]):
    run: typing.Callable[..., _R]

class _MergeAttentionStates(kernelhub.dispatch.op.OpFunction[..., typing.Any, _MergeAttentionStatesPlan[typing.Any]], typing.Protocol):
    @typing.overload
    def __call__(self, outs: collections.abc.Sequence[torch.Tensor] | torch.Tensor, lses: collections.abc.Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor | None = None, out_lse: None = None, return_lse: typing.Literal[False] = False, out_scale: float | torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> torch.Tensor: ...
    @typing.overload
    def __call__(self, outs: collections.abc.Sequence[torch.Tensor] | torch.Tensor, lses: collections.abc.Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor | None = None, out_lse: torch.Tensor | None = None, *, return_lse: typing.Literal[True], out_scale: float | torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @typing.overload
    def __call__(self, outs: collections.abc.Sequence[torch.Tensor] | torch.Tensor, lses: collections.abc.Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor | None = None, *, out_lse: torch.Tensor, return_lse: bool = False, out_scale: float | torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @typing.overload
    def __call__(self, outs: collections.abc.Sequence[torch.Tensor] | torch.Tensor, lses: collections.abc.Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor | None = None, out_lse: torch.Tensor | None = None, return_lse: bool = False, out_scale: float | torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @typing.overload
    def prepare(self, outs: collections.abc.Sequence[torch.Tensor] | torch.Tensor, lses: collections.abc.Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor | None = None, out_lse: None = None, return_lse: typing.Literal[False] = False, out_scale: float | torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _MergeAttentionStatesPlan[torch.Tensor]: ...
    @typing.overload
    def prepare(self, outs: collections.abc.Sequence[torch.Tensor] | torch.Tensor, lses: collections.abc.Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor | None = None, out_lse: torch.Tensor | None = None, *, return_lse: typing.Literal[True], out_scale: float | torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _MergeAttentionStatesPlan[tuple[torch.Tensor, torch.Tensor]]: ...
    @typing.overload
    def prepare(self, outs: collections.abc.Sequence[torch.Tensor] | torch.Tensor, lses: collections.abc.Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor | None = None, *, out_lse: torch.Tensor, return_lse: bool = False, out_scale: float | torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _MergeAttentionStatesPlan[tuple[torch.Tensor, torch.Tensor]]: ...
    @typing.overload
    def prepare(self, outs: collections.abc.Sequence[torch.Tensor] | torch.Tensor, lses: collections.abc.Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor | None = None, out_lse: torch.Tensor | None = None, return_lse: bool = False, out_scale: float | torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _MergeAttentionStatesPlan[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]: ...

merge_attention_states: _MergeAttentionStates

import kernelhub.ops.attention.paged_plan
import kernelhub.ops.mla.attention.op

class _MlaAttentionStep(kernelhub.ops.attention.paged_plan.EngineStep, typing.Generic[_R]):
    run: typing.Callable[..., _R]

class _MlaAttentionPlan(kernelhub.ops.mla.attention.op.MlaAttentionPlan, typing.Generic[_R]):
    run: typing.Callable[..., _R]
    def begin(self, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, *, max_seqlen_q: int | None = None, seq_lens_cpu: collections.abc.Sequence[int] | torch.Tensor | None = None, cu_seqlens_q_cpu: collections.abc.Sequence[int] | torch.Tensor | None = None) -> _MlaAttentionStep[_R]: ...

class _MlaAttention(kernelhub.dispatch.op.OpFunction[..., typing.Any, _MlaAttentionPlan[typing.Any]], typing.Protocol):
    @typing.overload
    def __call__(self, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, *, scale: float, value_dim: int = 512, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, topk_indices: torch.Tensor | None = None, sinks: torch.Tensor | None = None, kv_scale: float | torch.Tensor | None = None, return_lse: typing.Literal[False] = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> torch.Tensor: ...
    @typing.overload
    def __call__(self, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, *, scale: float, value_dim: int = 512, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, topk_indices: torch.Tensor | None = None, sinks: torch.Tensor | None = None, kv_scale: float | torch.Tensor | None = None, return_lse: typing.Literal[True], out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @typing.overload
    def __call__(self, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, *, scale: float, value_dim: int = 512, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, topk_indices: torch.Tensor | None = None, sinks: torch.Tensor | None = None, kv_scale: float | torch.Tensor | None = None, return_lse: bool = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @typing.overload
    def prepare(self, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, *, scale: float, value_dim: int = 512, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, topk_indices: torch.Tensor | None = None, sinks: torch.Tensor | None = None, kv_scale: float | torch.Tensor | None = None, return_lse: typing.Literal[False] = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _MlaAttentionPlan[torch.Tensor]: ...
    @typing.overload
    def prepare(self, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, *, scale: float, value_dim: int = 512, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, topk_indices: torch.Tensor | None = None, sinks: torch.Tensor | None = None, kv_scale: float | torch.Tensor | None = None, return_lse: typing.Literal[True], out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _MlaAttentionPlan[tuple[torch.Tensor, torch.Tensor]]: ...
    @typing.overload
    def prepare(self, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, *, scale: float, value_dim: int = 512, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, topk_indices: torch.Tensor | None = None, sinks: torch.Tensor | None = None, kv_scale: float | torch.Tensor | None = None, return_lse: bool = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _MlaAttentionPlan[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]: ...

mla_attention: _MlaAttention

import kernelhub.ops.attention.paged_attention
import kernelhub.ops.attention.paged_plan

class _PagedAttentionStep(kernelhub.ops.attention.paged_plan.EngineStep, typing.Generic[_R]):
    run: typing.Callable[..., _R]

class _PagedAttentionPlan(kernelhub.ops.attention.paged_attention.PagedAttentionPlan, typing.Generic[_R]):
    run: typing.Callable[..., _R]
    def begin(self, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, *, max_seqlen_q: int | None = None, seq_lens_cpu: collections.abc.Sequence[int] | torch.Tensor | None = None, cu_seqlens_q_cpu: collections.abc.Sequence[int] | torch.Tensor | None = None) -> _PagedAttentionStep[_R]: ...

class _PagedAttention(kernelhub.dispatch.op.OpFunction[..., typing.Any, _PagedAttentionPlan[typing.Any]], typing.Protocol):
    @typing.overload
    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, kv_layout: str = 'NHD', return_lse: typing.Literal[False] = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> torch.Tensor: ...
    @typing.overload
    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, kv_layout: str = 'NHD', *, return_lse: typing.Literal[True], out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @typing.overload
    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, kv_layout: str = 'NHD', return_lse: bool = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
    @typing.overload
    def prepare(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, kv_layout: str = 'NHD', return_lse: typing.Literal[False] = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _PagedAttentionPlan[torch.Tensor]: ...
    @typing.overload
    def prepare(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, kv_layout: str = 'NHD', *, return_lse: typing.Literal[True], out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _PagedAttentionPlan[tuple[torch.Tensor, torch.Tensor]]: ...
    @typing.overload
    def prepare(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True, window: int | tuple[int, int] | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, kv_layout: str = 'NHD', return_lse: bool = False, out: torch.Tensor | None = None, backend: str | tuple[str, ...] | list[str] | None = None) -> _PagedAttentionPlan[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]: ...

paged_attention: _PagedAttention
