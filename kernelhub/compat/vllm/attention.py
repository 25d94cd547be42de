"""kernelhub as an attention backend of vLLM (V1, 0.20 to 0.33): `paged_attention` over vLLM's cache.

vLLM imports this module once the backend is selected; the module imports vLLM. kernelhub's selection on the
configuration decides what the backend supports, so that vLLM's message contains kernelhub's reasons.

vLLM's cache is ``[B, H, N, 2 * D]``, a block's keys beside its values, and before 0.26 ``[B, 2, N, H, D]``, in either
memory order. Keys and values are views of it, without a copy. `write_kv_cache` writes it; vLLM's own kernel does with
KERNELHUB_VLLM_WRITE_KV_CACHE=0, and where no kernel of kernelhub that a CUDA graph can capture supports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm._custom_ops import reshape_and_cache_flash
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

from kernelhub.compat.start import DECODE, MIXED, SPECULATIVE, Rows
from kernelhub.compat.vllm.layers import Remembered, Remembering, Scales
from kernelhub.compat.vllm.refusal import refused
from kernelhub.compat.vllm.start import ENGINE, Parts, capture_safe, follow, graphs_of, queries_of
from kernelhub.compat.vllm.supports import FP8, FP8_CACHES, Configured, Supports
from kernelhub.dispatch.explain import explain
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import NotWarmed
from kernelhub.ops.attention.paged_attention import paged_attention, repeats_of
from kernelhub.ops.attention.problem import ANY, FEW_TOKENS, ONE
from kernelhub.ops.kv_cache.op import write_kv_cache, writes_like

_BLOCKS = 2  # of a cache that is written while an engine starts
_MOST_WRITTEN = 512  # tokens of a step whose writes are remembered: decode has few sizes, prompts have any


@dataclass
class KernelhubMetadata:
    """Metadata that the layers of one step share.

    Attributes:
        num_actual_tokens: query tokens; rows of q past them are padding.
        max_query_len: most queries of one sequence.
        query_start_loc: int32 ``[num_seqs + 1]``, offset of the first query of each sequence.
        seq_lens: int32 ``[num_seqs]``, KV tokens of each sequence.
        block_table: int32 ``[num_seqs, max_blocks]``.
        slot_mapping: slot of each token's keys and values.
        queries: queries of every sequence in a step of decode or speculative decode; 0 if sequences have different
            numbers, or more.
        causal: queries attend to no later keys.
        starts, longest: `query_start_loc` and `max_query_len` of a step whose sequences differ; else None.
        form: what a call depends on beside its layer and its tensors; None for a step whose sequences differ.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    queries: int
    causal: bool
    starts: Tensor | None = field(init=False)
    longest: int | None = field(init=False)
    form: tuple[int, int, bool] | None = field(init=False)

    def __post_init__(self) -> None:
        equal = self.queries > 0
        self.starts, self.longest = (None, None) if equal else (self.query_start_loc, self.max_query_len)
        self.form = (self.num_actual_tokens, self.queries, self.causal) if equal else None


class KernelhubMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Passes on a step's metadata from vLLM, without planning on the host."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        queries = queries_of(vllm_config)
        self._most_equal = queries if queries <= FEW_TOKENS else 1
        follow(PARTS)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """CUDA graphs of decode steps, speculative ones too, if the kernels selected for them are capture-safe."""
        model, queries = vllm_config.model_config, queries_of(vllm_config)
        heads = model.get_num_attention_heads(vllm_config.parallel_config), kv_cache_spec.num_kv_heads

        def captured(q_len: str) -> bool:
            dtypes = model.dtype, kv_cache_spec.dtype
            sizes = kv_cache_spec.head_size, kv_cache_spec.block_size
            return capture_safe(_selection(*dtypes, *sizes, heads=heads, q_len=q_len))

        return graphs_of(AttentionCGSupport, captured, queries)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> KernelhubMetadata:
        """The step's metadata."""
        step = common_attn_metadata
        if not isinstance(step.causal, bool):
            raise refused("steps in which some sequences are causal and others are not")
        longest = step.max_query_len
        equal = longest <= self._most_equal and step.num_actual_tokens == step.num_reqs * longest
        return KernelhubMetadata(
            num_actual_tokens=step.num_actual_tokens,
            max_query_len=longest,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_table=step.block_table_tensor,
            slot_mapping=step.slot_mapping,
            queries=longest if equal else 0,
            causal=step.causal,
        )


class KernelhubImpl(Remembering, AttentionImpl):  # type: ignore[misc]
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: Any = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise refused("ALiBi")
        if attn_type != AttentionType.DECODER:
            raise refused(f"attention of type {attn_type}", "that of decoders")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sinks = sinks
        self._window = None if sliding_window is None else sliding_window - 1
        self._softcap = logits_soft_cap or None
        self._quantized = kv_cache_dtype in FP8_CACHES
        self._dtype = torch.get_default_dtype()  # the model's, while vLLM makes its layers
        self._writes: bool | None = None  # whether kernelhub writes the cache; a first one decides
        self._cache: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._scales = Scales()
        self._written, self._written_scales = Remembered(), Scales()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KernelhubMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the cache: query ``[T, H, D]`` into output, ``[T, H, D]`` or ``[T, H * D]``."""
        if output_scale is not None or output_block_scale is not None:
            raise refused("quantised output of attention")
        if attn_metadata is None:  # vLLM profiles memory
            return output.zero_()
        if (not self._quantized or self._scales.are_of(layer)) and self._launch(
            query, output, kv_cache, attn_metadata.form, attn_metadata.block_table, attn_metadata.seq_lens
        ):
            return output
        return self._attend(layer, query, kv_cache, attn_metadata, output)

    def _attend(self, layer: Any, query: Tensor, kv_cache: Tensor, step: KernelhubMetadata, output: Tensor) -> Tensor:
        try:
            self._call(layer, query, kv_cache, step, output)
        except NotWarmed as error:
            ENGINE.serve(lambda: self._call(layer, query, kv_cache, step, output), error)
        return output

    def _call(self, layer: Any, query: Tensor, kv_cache: Tensor, step: KernelhubMetadata, output: Tensor) -> None:
        tokens, given = step.num_actual_tokens, (query, output)
        _, _, k_cache, v_cache = self._parts if kv_cache is self._cache else self._parts_of(kv_cache)
        out = output if output.ndim == 3 else output.view(-1, self.num_heads, self.head_size)
        if query.shape[0] != tokens:
            query = query[:tokens]
        if out.shape[0] != tokens:
            out = out[:tokens]
        queries = step.queries
        if queries > 1:
            query, out = query.unflatten(0, (-1, queries)), out.unflatten(0, (-1, queries))
        paged_attention(
            query,
            k_cache,
            v_cache,
            step.block_table,
            step.seq_lens,
            step.starts,
            step.longest,
            step.causal,
            self._window,
            self._softcap,
            self.sinks,
            self.scale,
            layer._k_scale if self._quantized else None,
            layer._v_scale if self._quantized else None,
            out=out,
        )
        if step.form is None or not (
            self._is_due(kv_cache, step.form) or (self._quantized and not self._scales.are_of(layer))
        ):
            return
        scales = self._scales.take(layer) if self._quantized else (None, None)
        more = [one for one in (self.sinks, *scales) if one is not None]
        features = self.scale, self._window, self._softcap, self._quantized, self.sinks is None
        shared = step.block_table, step.seq_lens
        self._learn(
            paged_attention.op,
            (self.num_heads, self.head_size, *features),
            kv_cache,
            (k_cache, v_cache, *more),
            step.form,
            given,
            shared,
            lambda: repeats_of(query, step.causal, self._window, self._softcap, self.sinks, self.scale, *scales),
            (*more, query, k_cache, v_cache, out, *shared),
            (out,),
        )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write a step's keys and values, by vLLM's kernel or by `write_kv_cache`; both skip negative slots."""
        if (
            self._writes
            and (not self._quantized or self._written_scales.are_of(layer))
            and self._written._launch(key, value, kv_cache, slot_mapping.numel(), slot_mapping)
        ):
            return
        k_cache, v_cache, _, _ = self._parts if kv_cache is self._cache else self._parts_of(kv_cache)
        if not self._writes:
            scales = layer._k_scale, layer._v_scale
            reshape_and_cache_flash(key, value, k_cache, v_cache, slot_mapping, self.kv_cache_dtype, *scales)
            return
        try:
            self._write(layer, key, value, kv_cache, slot_mapping)
        except NotWarmed as error:
            ENGINE.serve(lambda: self._write(layer, key, value, kv_cache, slot_mapping), error)

    def _write(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        tokens, given = slots.shape[0], (key, value)
        _, _, k_cache, v_cache = self._parts
        if key.shape[0] != tokens:  # rows of padding
            key, value = key[:tokens], value[:tokens]
        k_scale, v_scale = scales = (layer._k_scale, layer._v_scale) if self._quantized else (None, None)
        write_kv_cache(key, value, k_cache, v_cache, slots, k_scale, v_scale)
        if tokens > _MOST_WRITTEN or not (
            self._written._is_due(kv_cache, tokens) or (self._quantized and not self._written_scales.are_of(layer))
        ):
            return
        if self._quantized:
            self._written_scales.take(layer)
        more = [scale for scale in scales if scale is not None]
        self._written._learn(
            write_kv_cache.op,
            (self.num_kv_heads, self.head_size, self._quantized),
            kv_cache,
            (k_cache, v_cache, *more),
            tokens,
            given,
            (slots,),
            lambda: writes_like(key, value, k_cache, v_cache, k_scale, v_scale),
            (key, value, k_cache, v_cache, slots, *more),
            (k_cache, v_cache),
        )

    def _parts_of(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Keys and values ``[B, N, H, D]``, as vLLM stores them and in their dtype.

        The views of the last cache are stored, because a layer has one cache while it serves.
        """
        if kv_cache is not self._cache:
            self._cache, self._parts = kv_cache, _parts_of(kv_cache, self.head_size, quantized=self._quantized)
            if self._writes is None:
                self._writes = _writes(self, kv_cache.dtype, self._parts[0].shape[1])
        return self._parts


def _parts_of(kv_cache: Tensor, head_size: int, *, quantized: bool) -> tuple[Tensor, ...]:
    """Keys and values of a cache, twice: in vLLM's dtype and in theirs."""
    if kv_cache.ndim == 5:
        stored = kv_cache.unbind(1)
    else:
        stored = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    if quantized and kv_cache.dtype != FP8:
        return (*stored, *(part.view(FP8) for part in stored))
    return (*stored, *stored)


def _writes(layer: KernelhubImpl, cache: torch.dtype, page_size: int) -> bool:
    """Whether kernelhub writes a layer's cache. If not, vLLM does, so its graphs never depend on kernelhub's writes."""
    if not HUB.settings["KERNELHUB_VLLM_WRITE_KV_CACHE"]:
        return False
    quantized = layer._quantized
    return capture_safe(
        explain(
            write_kv_cache,
            dtype=layer._dtype if quantized else cache,
            kv_dtype=FP8 if quantized else cache,
            kv_scale="tensor" if quantized else None,
            num_kv_heads=layer.num_kv_heads,
            head_dim_qk=layer.head_size,
            head_dim_vo=layer.head_size,
            page_size=page_size,
        )
    )


def forget(layer: KernelhubImpl) -> None:
    """Drop a layer's references to its last cache."""
    layer._cache, layer._parts = None, ()
    layer._forget()
    layer._written._forget()
    layer._scales, layer._written_scales = Scales(), Scales()


def call(layer: Any, cache: Tensor, arguments: dict[str, Any]) -> None:
    """Run a layer with a cache and the other arguments of a call of `paged_attention`."""
    q, starts = arguments["q"], arguments.get("cu_seqlens_q")
    queries = 0 if starts is not None else q.shape[1] if q.ndim == 4 else 1
    if q.ndim == 4:
        q = q.flatten(0, 1)
    tokens = q.shape[0]
    if starts is None:
        starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=q.device)
    step = KernelhubMetadata(
        num_actual_tokens=tokens,
        max_query_len=queries or arguments["max_seqlen_q"],
        query_start_loc=starts,
        seq_lens=arguments["seq_lens"],
        block_table=arguments["block_table"],
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=q.device),
        queries=queries,
        causal=True,
    )
    layer.impl.forward(layer, q, None, None, cache, step, torch.empty_like(q))


def facets_of(layer: KernelhubImpl, dtype: torch.dtype, kv_cache: Tensor) -> dict[str, Any]:
    """Facets of a layer's problems, without those that depend on the step.

    Args:
        layer: the layer.
        dtype: dtype of its queries.
        kv_cache: vLLM's cache of the layer.
    """
    _, _, k_cache, _ = layer._parts_of(kv_cache)
    return {
        "q_dtype": dtype,
        "kv_dtype": k_cache.dtype,
        "kv_scale": "tensor" if layer._quantized else None,
        "head_dim_qk": layer.head_size,
        "head_dim_vo": layer.head_size,
        "num_q_heads": layer.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "page_size": k_cache.shape[1],
        "causal": True,
        "window_left": layer._window is not None,
        "softcap": layer._softcap is not None,
        "sinks": layer.sinks is not None,
    }


def writes_of(names: list[str], layer: Any, dtype: torch.dtype, kv_cache: Tensor) -> Rows | None:
    """The calls by which layers like one write their caches; None if vLLM writes them.

    Args:
        names: of the layers.
        layer: one of them.
        dtype: dtype of its keys and values.
        kv_cache: its cache. The calls write to others with its strides.
    """
    impl = layer.impl
    impl._parts_of(kv_cache)  # decides who writes
    if not impl._writes:
        return None
    shape, stride, form = (_BLOCKS, *kv_cache.shape[1:]), kv_cache.stride(), kv_cache.dtype
    scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if impl._quantized else {}

    def arguments(tokens: int) -> dict[str, Any]:
        cache = torch.empty_strided(shape, stride, dtype=form, device=kv_cache.device)
        _, _, k_cache, v_cache = _parts_of(cache, impl.head_size, quantized=impl._quantized)
        keys, values = torch.zeros(
            tokens, 2, impl.num_kv_heads, impl.head_size, dtype=dtype, device=kv_cache.device
        ).unbind(1)
        slots = torch.arange(tokens, dtype=torch.int64, device=kv_cache.device)
        slots[_BLOCKS * k_cache.shape[1] :] = -1
        return {"k": keys, "v": values, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots, **scales}

    return Rows(write_kv_cache, [f"{name}, writing its cache" for name in names], arguments)


PARTS = Parts(
    KernelhubImpl,
    "paged_attention",
    DECODE | {"speculative decode": SPECULATIVE} | MIXED,
    ("k_cache", "v_cache"),
    facets_of,
    call,
    forget,
    writes_of,
)


class KernelhubBackend(Supports, AttentionBackend):  # type: ignore[misc]
    """Properties of the backend that vLLM reads before it creates a layer."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_impl_cls() -> type[KernelhubImpl]:
        return KernelhubImpl

    @staticmethod
    def get_builder_cls() -> type[KernelhubMetadataBuilder]:
        return KernelhubMetadataBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @staticmethod
    def _without(use_mla: bool, has_sink: bool, other: bool) -> str | None:
        return "kernelhub's backend supports dense attention only" if use_mla or other else None

    @staticmethod
    def _selections(of: Configured) -> Iterator[Selection[Any]]:
        for ragged in (False, True):
            page_size, sinks = of.block_size or 16, of.has_sink
            yield _selection(of.dtype, of.cache, of.head_size, page_size, of.device, ragged=ragged, sinks=sinks)


def _state_form(backend: type[Any]) -> None:
    """Give a backend the methods that state the form of its cache: those of vLLM's Triton backend.

    Raises:
        NotImplementedError: this module does not read that form.
    """
    theirs = importlib.import_module("vllm.v1.attention.backends.triton_attn").TritonAttentionBackend
    blocks, size, heads, width = 3, 16, 5, 32
    shape = tuple(theirs.get_kv_cache_shape(blocks, size, heads, width))
    if shape not in ((blocks, 2, size, heads, width), (blocks, heads, size, 2 * width)):
        raise NotImplementedError(
            f"the cache of this vLLM has the shape {shape} for {blocks} blocks of {size} tokens and {heads} heads of "
            f"{width}; kernelhub reads [B, 2, N, H, D] and [B, H, N, 2 * D]: select another attention backend"
        )
    for name in ("get_kv_cache_shape", "get_kv_cache_stride_order"):
        setattr(backend, name, staticmethod(getattr(theirs, name)))


if hasattr(AttentionBackend, "get_kv_cache_shape"):  # up to 0.28
    _state_form(KernelhubBackend)


def _selection(
    dtype: torch.dtype,
    cache: torch.dtype,
    head_size: int,
    page_size: int,
    device: str | None = None,
    *,
    heads: tuple[int, int] = (8, 1),
    ragged: bool = False,
    sinks: bool = False,
    q_len: str = ONE,
) -> Selection[Any]:
    """kernelhub's selection for decode, or for steps that mix prefill and decode."""
    quantized = cache in (FP8, torch.uint8)
    return explain(
        paged_attention,
        device=device,
        q_dtype=dtype,
        kv_dtype=FP8 if quantized else dtype,
        kv_scale="tensor" if quantized else None,
        head_dim_qk=head_size,
        head_dim_vo=head_size,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        page_size=page_size,
        causal=True,
        sinks=sinks,
        ragged=ragged,
        q_len=ANY if ragged else q_len,
    )
