"""The context of vLLM's queries: the device, disabled backends, and vLLM's own settings if it runs."""

from __future__ import annotations

import sys
from typing import Any

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.probes.device import facts
from kernelhub.probes.finding import Finding, found, lacking


def capability() -> tuple[int, int] | None:
    """Compute capability of the current NVIDIA device; None without one.

    Until CUDA is in use, it comes from vLLM's platform if vLLM runs here, which does not initialise CUDA.
    """
    if torch.version.hip:
        return None
    if not torch.cuda.is_initialized():
        platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
        if platform is not None:
            answer = platform.get_device_capability()
            return None if answer is None or not platform.is_cuda() else (answer.major, answer.minor)
    if not torch.cuda.is_available():
        return None
    return facts(torch.device("cuda", torch.cuda.current_device())).capability


def on_device(subject: str, *, exactly: tuple[tuple[int, int], ...] = (), families: tuple[int, ...] = ()) -> Finding:
    """Whether the current device has one of these capabilities, or one of these major versions."""
    sm = capability()
    wanted = " or ".join([*(f"sm_{major}{minor}" for major, minor in exactly), *(f"sm_{major}x" for major in families)])
    if sm is None:
        return lacking(subject, "vendor", f"needs an NVIDIA GPU, {wanted}; there is none", "")
    name = f"sm_{sm[0]}{sm[1]}"
    if sm in exactly or sm[0] in families:
        return found(subject, name, f"this is {name}")
    return lacking(subject, "capability", f"needs {wanted}; this is {name}", "", name)


def allowed(backend: str, op: str) -> Finding:
    """Whether no variable, config file or `configure` disables the backend for the op."""
    for override in HUB.policy(op).disables:
        if override.concerns(op) and backend in override.names and not override.where:
            return lacking(
                backend,
                "disabled",
                f"disabled by {override.origin}",
                override.undo or f"remove it from {override.origin}",
            )
    return found(backend, None, f"{backend} is not disabled")


def vllm_config() -> Any:
    """The configuration of the vLLM that runs in this process, or None."""
    module = sys.modules.get("vllm.config")
    current = getattr(module, "get_current_vllm_config_or_none", None)
    return None if current is None else current()
