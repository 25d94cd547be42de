"""What vLLM reads of both of kernelhub's backends, of dense and of latent attention, before it creates a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.v1.attention.backend import MultipleOf

from kernelhub.compat.vllm.refusal import REMEDY, of_cache
from kernelhub.dispatch.selection import Selection

FP8 = torch.float8_e4m3fn
FP8_CACHES = ("fp8", "fp8_e4m3")


class Configured(NamedTuple):
    """A configuration: `cache` is the dtype of the cache, `device` the architecture of the GPU if it is known."""

    dtype: torch.dtype
    cache: torch.dtype
    head_size: int
    block_size: int | None
    device: str | None
    has_sink: bool


class Supports:
    """Comes before vLLM's class of such a backend among the bases."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8_CACHES]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """A step is one batch if each sequence has as many queries on the host; adaptive verification drops some."""
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """vLLM's reasons against a configuration and kernelhub's, with the remedy."""
        reasons: list[str] = super().validate_configuration(*args, **kwargs)  # type: ignore[misc]
        return [*reasons, REMEDY] if reasons else reasons

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: Any,
        device_capability: Any = None,
    ) -> str | None:
        """Why no kernel supports the configuration, or None. Before 0.24 vLLM passes no use_mm_prefix."""
        if not isinstance(use_mm_prefix, bool):
            use_mm_prefix, device_capability = False, use_mm_prefix
        unlike = cls._without(use_mla, has_sink, use_sparse or use_mm_prefix) or of_cache(kv_cache_dtype, dtype)
        if unlike is not None:
            return unlike
        device = None if device_capability is None else f"sm_{device_capability.major}{device_capability.minor}"
        cache = FP8 if kv_cache_dtype in FP8_CACHES else dtype
        selections = cls._selections(Configured(dtype, cache, head_size, block_size, device, has_sink))
        failed = next((selection for selection in selections if selection.kernel is None), None)
        return None if failed is None else f"no kernel of kernelhub can run it: {failed}"

    @staticmethod
    def _without(use_mla: bool, has_sink: bool, other: bool) -> str | None:
        """Why the backend does not support these features, or None."""
        raise NotImplementedError

    @staticmethod
    def _selections(of: Configured) -> Iterator[Selection[Any]]:
        """kernelhub's selection for each kind of call that the backend makes."""
        raise NotImplementedError
