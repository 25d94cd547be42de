"""What kernelhub's backend refuses in SGLang, at start-up: the release or the feature, and what to do."""

from __future__ import annotations

from kernelhub.probes.distributions import version_of
from kernelhub.probes.finding import Finding

RELEASES = "0.5.17 to 0.5.23"
REMEDY = "leave --attention-backend kernelhub out, and SGLang selects a backend of its own"


def refused(what: str) -> NotImplementedError:
    """The error for a model or configuration that the backend does not support.

    Args:
        what: what the backend does not do, after its name; perhaps with a reason or a remedy of its own.
    """
    return NotImplementedError(f"kernelhub's backend {what}; {REMEDY}")


def of_release(fits: Finding) -> str:
    """Why kernelhub is no backend of the installed SGLang.

    Args:
        fits: what differs from the interface that kernelhub was written for.
    """
    version = version_of("sglang")
    if version is None and fits.code == "package_missing":
        return fits.reason
    return (
        f"kernelhub is not an attention backend of SGLang {version or 'of unknown version'}: {fits.reason}; it "
        f"supports SGLang {RELEASES}: install one of these, or {REMEDY}"
    )
