"""kernelhub as an attention backend of SGLang (0.5.17 to 0.5.23): `paged_attention` over SGLang's pool of slots.

SGLang imports this module once the backend is selected; the module imports SGLang. A pool ``[slots, H, D]`` is read as
a paged cache ``[slots / page_size, page_size, H, D]`` without a copy. Every page_size-th entry of a request's row in
the token table forms its row of the block table. SGLang itself writes the pool.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from kernelhub.compat.sglang.refusal import refused
from kernelhub.compat.sglang.start import ENGINE, follow
from kernelhub.dispatch.kernel import GraphLevel
from kernelhub.errors import NotWarmed
from kernelhub.ops.attention.paged_attention import paged_attention

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, *_FP8)


@dataclass
class KernelhubMetadata:
    """Metadata that the layers of one step share.

    Attributes:
        block_table: int32 ``[num_seqs, max_pages]``.
        seq_lens: int32 ``[num_seqs]``, KV tokens of each sequence.
        cu_seqlens_q: int32 ``[num_seqs + 1]``, where the queries of each sequence begin; None for decode.
        max_seqlen_q: most queries of one sequence; None for decode.
        num_tokens: query tokens; rows of q past them are padding.
        captured: the step is being captured in a CUDA graph.
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    num_tokens: int
    captured: bool = False


class _Caches(NamedTuple):
    """A layer's buffers in the pool, and the same as keys and values ``[pages, page_size, H, D]``."""

    keys: Tensor
    values: Tensor
    k_cache: Tensor
    v_cache: Tensor


class KernelhubAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Dense attention of decoder models, for decode, extend and mixed steps."""

    needs_cpu_seq_lens: bool = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        refusal = _refusal(model_runner, pool)
        if refusal is not None:
            raise refused(refusal)
        self.forward_metadata: KernelhubMetadata | None = None
        self._pool = pool
        self._page = int(model_runner.page_size)
        self._tokens = model_runner.req_to_token_pool.req_to_token
        self._captured_table: Tensor | None = None
        self._captured_lens: Tensor | None = None
        self._caches: dict[Any, _Caches] = {}
        follow(model_runner, functools.partial(self._facets, model_runner.model_config.dtype), self._run)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Set the metadata of a step outside of CUDA graphs."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        _refuse_step(forward_batch)
        table = self._block_table(forward_batch)
        lens = forward_batch.seq_lens.to(torch.int32)
        if mode.is_decode():
            self.forward_metadata = KernelhubMetadata(table, lens, None, None, lens.shape[0])
            return
        if not mode.is_extend():
            raise refused(f"does not support steps of mode {mode}")
        starts = torch.nn.functional.pad(torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32), (1, 0))
        counts = forward_batch.extend_seq_lens_cpu
        if counts is None:
            counts = forward_batch.extend_seq_lens.tolist()
        counts = [int(count) for count in counts]
        self.forward_metadata = KernelhubMetadata(table, lens, starts, max(counts, default=0), sum(counts))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Set the metadata of a captured or replayed decode step, in tensors with fixed addresses."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        _refuse_step(forward_batch)
        if not mode.is_decode():
            raise refused(
                f"supports CUDA graphs of decode, not of {mode}: do not set --cuda-graph-backend-prefill to full"
            )
        if self._captured_table is None or self._captured_lens is None:
            raise RuntimeError("init_cuda_graph_state was not called before a graph was captured")
        count = forward_batch.seq_lens.shape[0]
        table, lens = self._captured_table[:count], self._captured_lens[:count]
        pages = self._block_table(forward_batch)
        table[:, : pages.shape[1]].copy_(pages)
        lens.copy_(forward_batch.seq_lens)
        self.forward_metadata = KernelhubMetadata(table, lens, None, None, count, in_capture)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the tensors that graphs read."""
        pages = -(-self._tokens.shape[1] // self._page)
        self._captured_table = torch.zeros((max_bs, pages), dtype=torch.int32, device=self._tokens.device)
        self._captured_lens = torch.ones(max_bs, dtype=torch.int32, device=self._tokens.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """One query for each sequence: q ``[num_seqs, H * D]``."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, more)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Several queries for each sequence, its last tokens: q ``[T, H * D]``."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, more)

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: Tensor | None,
        more: dict[str, Any],
    ) -> Tensor:
        """Write the step's keys and values, then attend to the pool."""
        given = [name for name, value in more.items() if value is not None and value is not False]
        if given:
            raise refused(f"does not support {', '.join(given)}")
        caches = self._caches_of(layer)
        step = self.forward_metadata
        assert step is not None
        if k is not None and save_kv_cache:
            self._pool.set_kv_buffer(
                layer, _location(forward_batch), k, v, layer.k_scale, layer.v_scale
            )  # divides k and v in place; nothing reads them afterwards
        heads, width, tokens = layer.tp_q_head_num, layer.v_head_dim, step.num_tokens
        out = q.new_empty((q.shape[0], heads, width))
        attended = out
        if tokens < q.shape[0]:
            q, attended = q[:tokens], out[:tokens]
            out[tokens:].zero_()
        quantized = caches.k_cache.dtype in _FP8
        arguments = (
            q.reshape(tokens, heads, layer.qk_head_dim),
            caches.k_cache,
            caches.v_cache,
            step.block_table,
            step.seq_lens,
            step.cu_seqlens_q,
            step.max_seqlen_q,
            True,
            layer.sliding_window_size if layer.sliding_window_size > -1 else None,
            layer.logit_cap or None,
            sinks,
            layer.scaling,
            (1.0 if layer.k_scale is None else layer.k_scale) if quantized else None,
            (1.0 if layer.v_scale is None else layer.v_scale) if quantized else None,
        )
        if step.captured:
            _refuse_capture(arguments)
        try:
            paged_attention(*arguments, out=attended)
        except NotWarmed as error:
            ENGINE.serve(lambda: paged_attention(*arguments, out=attended), error)
        return out.view(-1, heads * width)

    def _run(self, layer: Any, sinks: Tensor | None, arguments: dict[str, Any]) -> None:
        """Run a layer over the pool with the other arguments of a call of `paged_attention`."""
        q, starts = arguments["q"], arguments.get("cu_seqlens_q")
        table = arguments["block_table"].remainder(self._caches_of(layer).k_cache.shape[0])
        most = None if starts is None else arguments["max_seqlen_q"]
        self.forward_metadata = KernelhubMetadata(table, arguments["seq_lens"], starts, most, q.shape[0])
        try:
            self._forward(q.flatten(1), None, None, layer, None, False, sinks, {})
        finally:
            self.forward_metadata = None

    def _facets(self, dtype: torch.dtype, layer: Any, sinks: Tensor | None) -> dict[str, Any]:
        """Facets of a layer's problems, without those that depend on the step; `dtype` is that of queries."""
        cache = self._caches_of(layer).k_cache
        return {
            "q_dtype": dtype,
            "kv_dtype": cache.dtype,
            "kv_scale": "tensor" if cache.dtype in _FP8 else None,
            "head_dim_qk": layer.qk_head_dim,
            "head_dim_vo": layer.v_head_dim,
            "num_q_heads": layer.tp_q_head_num,
            "num_kv_heads": cache.shape[2],
            "page_size": self._page,
            "causal": True,
            "window_left": layer.sliding_window_size > -1,
            "softcap": bool(layer.logit_cap),
            "sinks": sinks is not None,
        }

    def _caches_of(self, layer: Any) -> _Caches:
        """A layer's keys and values, checked and viewed as pages once, unless the pool has other buffers then."""
        pool, caches = self._pool, self._caches.get(layer)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        if caches is None or caches.keys is not keys or caches.values is not values:
            _refuse_layer(layer)
            paged = (buffer.unflatten(0, (-1, self._page)) for buffer in (keys, values))
            caches = self._caches[layer] = _Caches(keys, values, *paged)
        return caches

    def _block_table(self, batch: Any) -> Tensor:
        """The pages of a step's requests, up to the longest one."""
        longest: int = self._tokens.shape[1]
        if batch.seq_lens_cpu is not None and len(batch.seq_lens_cpu):
            longest = min(longest, max(1, int(batch.seq_lens_cpu.max())))
        firsts: Tensor = self._tokens[:, : longest : self._page]
        return (firsts[batch.req_pool_indices] // self._page).to(torch.int32)


def _location(forward_batch: Any) -> Any:
    """Where the pool stores a step's keys and values. Before 0.5.22 a location is made of the slots themselves."""
    if hasattr(KVWriteLoc, "for_batch"):
        return KVWriteLoc.for_batch(forward_batch)
    return KVWriteLoc(forward_batch.out_cache_loc)


def _refusal(runner: Any, pool: Any) -> str | None:
    """Why the backend does not support a model or a server configuration; empty or None if it does."""
    if runner.use_mla_backend:
        return "does not support latent attention"
    if not runner.spec_algorithm.is_none():
        return "does not support speculative decoding: its masks are trees"
    if get_parallel().dcp_enabled:
        return "does not support context parallelism of decode"
    if type(pool) is not MHATokenToKVPool:
        hint = ": --disable-hybrid-swa-memory gives every layer the same pool" if runner.is_hybrid_swa else ""
        return f"reads a pool of keys and values per slot, not {type(pool).__name__}{hint}"
    translator = getattr(runner, "kv_index_translator", None)  # since 0.5.19
    if translator is not None and translator.is_translating:
        return "reads slots of the token table, not through a table of the unified pool"
    if pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
        return f"reads a pool in layout nhd without scales of blocks, not {pool.kv_cache_layout}"
    if pool.dtype not in _DTYPES:
        return f"does not support a cache of {pool.dtype}: use --kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2"
    return None


def _refuse_step(batch: Any) -> None:
    """Raise for a step that the backend does not support, before any of it runs."""
    mode = batch.forward_mode
    if mode.is_target_verify() or mode.is_draft_extend_v2():
        raise refused("does not support speculative decoding: its masks are trees")
    if mode.is_dllm_extend():
        raise refused("does not support diffusion of tokens")
    if getattr(batch, "attn_cp_metadata", None) is not None:  # a view of a batch has fewer fields
        raise refused("does not support context parallelism")


def _refuse_layer(layer: Any) -> None:
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise refused(f"supports decoders, not attention of type {layer.attn_type}")
    if layer.use_irope or layer.xai_temperature_len > 0 or layer.pos_encoding_mode != "NONE":
        raise refused("does not support chunks, temperatures or custom positions")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise refused(f"caps scores by tanh, not by {layer.logit_capping_method}")


def _refuse_capture(arguments: tuple[Any, ...]) -> None:
    plan = paged_attention.prepare(*arguments)
    if plan.graph is GraphLevel.NONE:
        remedy = f"--disable-cuda-graph, or KERNELHUB_DISABLE={plan.kernel}"
        raise NotImplementedError(f"{plan.kernel} may not be captured in a CUDA graph: {remedy}")
