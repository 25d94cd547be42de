"""kernelhub as a backend of latent attention (MLA) of vLLM (V1, 0.20 to 0.33): decode by `mla_attention`.

vLLM imports this module once the backend is selected for such a model; the module imports vLLM. vLLM projects, writes
the cache ``[B, N, latent + rotary]``, and runs prompts by its own prefill backend. kernelhub runs the decode part of
each step, with the absorbed projections.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from kernelhub.compat.start import DECODE, SPECULATIVE
from kernelhub.compat.vllm.layers import Remembering
from kernelhub.compat.vllm.refusal import refused
from kernelhub.compat.vllm.start import ENGINE, Parts, capture_safe, follow, graphs_of, queries_of
from kernelhub.compat.vllm.supports import FP8, FP8_CACHES, Configured, Supports
from kernelhub.dispatch.explain import explain
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import NotWarmed
from kernelhub.ops.attention.problem import ONE
from kernelhub.ops.mla.attention.op import mla_attention, repeats_of


class KernelhubMlaMetadataBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """vLLM's own metadata of latent attention.

    Its decode part consists of the sequences with one new token, with speculative decode of those with as many new
    tokens as each of them has.
    """

    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        follow(PARTS)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """CUDA graphs of decode steps, speculative ones too, if the kernels selected for them are capture-safe."""
        model = vllm_config.model_config
        heads = model.get_num_attention_heads(vllm_config.parallel_config)

        def captured(q_len: str) -> bool:
            dtypes = model.dtype, kv_cache_spec.dtype
            sizes = kv_cache_spec.head_size, kv_cache_spec.block_size
            return capture_safe(_selection(*dtypes, *sizes, heads=heads, q_len=q_len))

        return graphs_of(AttentionCGSupport, captured, queries_of(vllm_config))


class KernelhubMlaImpl(Remembering, MLACommonImpl):  # type: ignore[misc]
    """One layer."""

    can_return_lse_for_decode: bool = False
    supports_dcp: bool = False
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: Any,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        for name, value in {"ALiBi": alibi_slopes, "windows": sliding_window, "softcap": logits_soft_cap}.items():
            if value:
                raise refused(f"latent attention with {name}")
        if attn_type != AttentionType.DECODER:
            raise refused(f"latent attention of type {attn_type}", "that of decoders")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self.supports_quant_query_input = False  # queries stay in the model's dtype beside an fp8 cache
        self._quantized = kv_cache_dtype in FP8_CACHES

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the cache: q ``[T, H, latent + rotary]``, or its two parts, to ``[T, H, latent]``."""
        if not getattr(attn_metadata, "causal", True):
            raise refused("latent attention that is not causal")
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        cache, step = kv_c_and_k_pe_cache, attn_metadata.decode
        if self._quantized:
            return self._attend(q, cache if cache.dtype == FP8 else cache.view(FP8), step, layer), None
        tokens, heads, _ = q.shape
        out = q.new_empty(tokens, heads, self.kv_lora_rank)
        if not self._launch(q, out, cache, tokens, step.block_table, step.seq_lens):
            self._attend(q, cache, step, layer, out)
        return out, None

    def _attend(self, q: Tensor, cache: Tensor, step: Any, layer: Any, out: Tensor | None = None) -> Tensor:
        try:
            return self._call(q, cache, step, layer, out)
        except NotWarmed as error:
            made: Tensor = ENGINE.serve(lambda: self._call(q, cache, step, layer, out), error)
            return made

    def _call(self, given: Tensor, cache: Tensor, step: Any, layer: Any, into: Tensor | None) -> Tensor:
        sequences, q, out = step.seq_lens.shape[0], given, into
        if q.shape[0] != sequences:  # of speculative decode
            q = q.unflatten(0, (sequences, -1))
            out = None if out is None else out.unflatten(0, (sequences, -1))
        made: Tensor = mla_attention(
            q,
            cache,
            step.block_table,
            step.seq_lens,
            scale=self.scale,
            value_dim=self.kv_lora_rank,
            kv_scale=layer._k_scale if self._quantized else None,
            out=out,
        )
        if into is None:
            return made.flatten(0, 1) if made.ndim == 4 else made
        if q is given and self._is_due(cache, q.shape[0]):
            scale, width, shared = self.scale, self.kv_lora_rank, (step.block_table, step.seq_lens)
            self._learn(
                mla_attention.op,
                (scale, width),
                cache,
                (cache,),
                q.shape[0],
                (q, into),
                shared,
                lambda: repeats_of(scale, width),
                (q, cache, into, *shared),
                (into,),
            )
        return into


def forget(layer: Any) -> None:
    """Drop a layer's references to its last cache."""
    layer._forget()


def call(layer: Any, cache: Tensor, arguments: dict[str, Any]) -> None:
    """Run a layer with a cache and the other arguments of a call of `mla_attention`."""
    decode = SimpleNamespace(block_table=arguments["block_table"], seq_lens=arguments["seq_lens"])
    q = arguments["q"].flatten(0, -3)
    layer.impl.forward_mqa(q, cache, SimpleNamespace(causal=True, decode=decode), layer)


def facets_of(layer: Any, dtype: torch.dtype, kv_cache: Tensor) -> dict[str, Any]:
    """Facets of a layer's problems, without those that depend on the step.

    Args:
        layer: the layer.
        dtype: dtype of its queries.
        kv_cache: vLLM's cache of the layer.
    """
    return {
        "q_dtype": dtype,
        "kv_dtype": FP8 if layer._quantized else dtype,
        "kv_scale": "tensor" if layer._quantized else None,
        "num_heads": layer.num_heads,
        "head_dim": kv_cache.shape[-1],
        "value_dim": layer.kv_lora_rank,
        "page_size": kv_cache.shape[1],
        "causal": True,
    }


PARTS = Parts(
    KernelhubMlaImpl,
    "mla_attention",
    DECODE | {"speculative decode": SPECULATIVE},
    ("kv_cache",),
    facets_of,
    call,
    forget,
)


class KernelhubMlaBackend(Supports, MLACommonBackend):  # type: ignore[misc]
    """Properties of the backend that vLLM reads before it creates a layer."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    @staticmethod
    def get_impl_cls() -> type[KernelhubMlaImpl]:
        return KernelhubMlaImpl

    @staticmethod
    def get_builder_cls() -> type[KernelhubMlaMetadataBuilder]:
        return KernelhubMlaMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Tokens of a block where the user names none. Releases that do not ask keep their own default."""
        return _preferred_block_size(default_block_size)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # `supports_combination` decides

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True

    @staticmethod
    def _without(use_mla: bool, has_sink: bool, other: bool) -> str | None:
        if not (has_sink or other):
            return None
        return "kernelhub's backend of latent attention supports dense attention without sinks"

    @staticmethod
    def _selections(of: Configured) -> Iterator[Selection[Any]]:
        yield _selection(of.dtype, of.cache, of.head_size, of.block_size or 64, of.device)


def _preferred_block_size(default: int, device: str | None = None) -> int:
    """64 where a kernel is faster that takes only such blocks, as those of Hopper; else vLLM's own default."""
    found = {size: _selection(torch.bfloat16, torch.bfloat16, 576, size, device).kernel for size in (default, 64)}
    return default if found[64] is None or found[64] == found[default] else 64


def _selection(
    dtype: torch.dtype,
    cache: torch.dtype,
    head_size: int,
    page_size: int,
    device: str | None = None,
    heads: int = 16,
    q_len: str = ONE,
) -> Selection[Any]:
    """kernelhub's selection for decode; the rotary part has 64 dimensions."""
    quantized = cache in (FP8, torch.uint8)
    return explain(
        mla_attention,
        device=device,
        q_dtype=dtype,
        kv_dtype=FP8 if quantized else dtype,
        kv_scale="tensor" if quantized else None,
        num_heads=heads,
        head_dim=head_size,
        page_size=page_size,
        causal=True,
        q_len=q_len,
    )
