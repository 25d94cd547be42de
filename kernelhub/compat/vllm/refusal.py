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
