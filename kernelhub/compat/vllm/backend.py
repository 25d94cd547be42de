"""The class of vLLM's backend CUSTOM: latent attention for models that use it, else dense attention.

vLLM looks the class up by name in this module while it builds a model, so the model's configuration is available. If
vLLM's interface is not the one that kernelhub was written for, the look-up is an error, which ends vLLM's start.
"""

from __future__ import annotations

import importlib
from typing import Any

from kernelhub.compat.vllm.interface import interface
from kernelhub.compat.vllm.refusal import of_release

NAME = "KernelhubBackend"


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    fits = interface()
    if not fits.ok:
        raise NotImplementedError(of_release(fits))
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
