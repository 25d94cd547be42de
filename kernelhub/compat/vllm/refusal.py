"""What kernelhub's backend refuses in vLLM, at start-up: the release or the feature, and what to do."""

from __future__ import annotations

from kernelhub.probes.distributions import version_of
from kernelhub.probes.finding import Finding

LAST = "0.33"
RELEASES = f"0.20 to {LAST}"
REMEDY = "leave --attention-backend CUSTOM out, and vLLM selects a backend of its own"


def refused(feature: str, supported: str = "") -> NotImplementedError:
    """The error for a model or configuration with a feature that the backend does not support.

    Args:
        feature: its name.
        supported: what the backend supports in its place.
    """
    instead = f", {supported} alone" if supported else ""
    return NotImplementedError(f"kernelhub's backend does not support {feature}{instead}: {REMEDY}")


def of_cache(kv_cache_dtype: str | None, dtype: object) -> str | None:
    """The reason against a cache in 16 bits that has not the dtype of the model; None if there is none.

    Args:
        kv_cache_dtype: vLLM's word for the dtype of the cache.
        dtype: `torch.dtype` of the model.
    """
    model = str(dtype).removeprefix("torch.")
    if kv_cache_dtype not in ("float16", "bfloat16") or kv_cache_dtype == model:
        return None
    return (
        f"kernelhub's backend does not support a cache of {kv_cache_dtype} for a model of {model}: "
        "use --kv-cache-dtype auto or fp8"
    )


def of_release(fits: Finding) -> str:
    """Why kernelhub is no backend of the installed vLLM.

    Args:
        fits: what differs from the interface that kernelhub was written for.
    """
    version = version_of("vllm")
    if version is None and fits.code == "package_missing":
        return fits.reason
    return (
        f"kernelhub is not an attention backend of vLLM {version or 'of unknown version'}: {fits.reason}; it supports "
        f"vLLM {RELEASES}: install one of these, or {REMEDY}"
    )
