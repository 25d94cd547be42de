"""The class of vLLM's backend CUSTOM: latent attention for models that use it, else dense attention.

vLLM looks the class up by name in this module while it builds a model, so the model's configuration is available.
"""

from __future__ import annotations

import importlib
from typing import Any

NAME = "KernelhubBackend"


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _latent():
        from kernelhub.compat.vllm.mla import KernelhubMlaBackend

        return KernelhubMlaBackend
    from kernelhub.compat.vllm.attention import KernelhubBackend

    return KernelhubBackend


def _latent() -> bool:
    """Whether the model that vLLM builds has latent attention."""
    config = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    return bool(model is not None and model.use_mla)
