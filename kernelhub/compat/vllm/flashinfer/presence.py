"""Whether FlashInfer is installed, and whether its kernels are available: as cubins, or by compilation here."""

from __future__ import annotations

import logging
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import torch
from packaging.version import InvalidVersion, Version

from kernelhub.compat.env import flag
from kernelhub.compat.vllm.answer import answer, first_bad
from kernelhub.compat.vllm.here import capability
from kernelhub.dispatch.hub import HUB
from kernelhub.probes.distributions import version_of
from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import package

_INSTALL = 'pip install "kernelhub[flashinfer]"'
_CUBINS = "pip install flashinfer-cubin in the version of flashinfer-python"
_TOOLKIT = "set CUDA_HOME to a CUDA toolkit and put ninja on PATH"
_DEFAULT_TOOLKIT = "/usr/local/cuda"
_FIRST_JIT_CACHE_CUDA = Version("12.9")

# FlashInfer's default address for downloads of cubins.
FLASHINFER_CUBINS_REPOSITORY = os.environ.get(
    "FLASHINFER_CUBINS_REPOSITORY",
    "https://edge.urm.nvidia.com/artifactory/sw-kernelinferencelibrary-public-generic-local/",
)

logger = logging.getLogger("kernelhub.compat")
_warned: set[str] = set()
_reached: dict[str, bool] = {}


@answer
def has_flashinfer_cubin() -> Finding:
    """FlashInfer's cubins are installed in its version, or VLLM_HAS_FLASHINFER_CUBIN states that they are available."""
    if flag("VLLM_HAS_FLASHINFER_CUBIN", False):
        return found("flashinfer_cubin", None, "VLLM_HAS_FLASHINFER_CUBIN states that cubins are available")
    return HUB.machine.ask("flashinfer_cubin", _cubins)


@answer
def has_flashinfer() -> Finding:
    """FlashInfer is installed, and its kernels are available: as cubins, or with nvcc and ninja."""
    here = HUB.machine.ask(
        "flashinfer", lambda: package("flashinfer", distribution="flashinfer-python", install=_INSTALL)
    )
    if not here.ok or has_flashinfer_cubin():
        return here
    if has_flashinfer_cubin.why().code == "package_version":  # FlashInfer refuses to import beside them
        return has_flashinfer_cubin.why()
    return first_bad(HUB.machine.ask("flashinfer's toolkit", _toolkit), here)


def has_flashinfer_jit_cache_wheels() -> bool:
    """FlashInfer publishes compiled modules for the CUDA version of this torch: 12.9 or newer."""
    return torch.version.cuda is not None and Version(torch.version.cuda) >= _FIRST_JIT_CACHE_CUDA


def warn_if_flashinfer_kernels_missing() -> None:
    """On Hopper and newer: warn once if FlashInfer will download or compile because packages are missing."""
    sm = capability()
    if sm is None or sm < (9, 0) or not has_flashinfer():
        return
    wanted = _version("flashinfer-python")
    packages = [] if flag("VLLM_HAS_FLASHINFER_CUBIN", False) else ["flashinfer-cubin"]
    packages += ["flashinfer-jit-cache"] if has_flashinfer_jit_cache_wheels() else []
    wrong = [f"{name} {_version(name) or 'is not installed'}" for name in packages if _version(name) != wanted]
    if wanted and wrong and "kernels" not in _warned:
        _warned.add("kernels")
        logger.warning(
            "flashinfer-python %s will download or compile kernels at first use, which can take minutes: %s; "
            "install these packages in its version",
            wanted,
            ", ".join(wrong),
        )


@answer
def has_nvidia_artifactory() -> Finding:
    """Cubins are available, or an earlier `check_nvidia_artifactory` reached the download address.

    vLLM accesses the network here. A query that affects selection may not: call `check_nvidia_artifactory` at start-up
    if cubins are to be downloaded.
    """
    here = has_flashinfer_cubin.why()
    if here.ok:
        return here
    folder = HUB.machine.variable("FLASHINFER_CUBIN_DIR")
    if folder and Path(folder).is_dir() and any(Path(folder).iterdir()):
        return found("cubins", folder, f"cubins are in FLASHINFER_CUBIN_DIR={folder}")
    if _reached.get(FLASHINFER_CUBINS_REPOSITORY):
        return found("cubins", None, f"{FLASHINFER_CUBINS_REPOSITORY} was reached")
    reason = f"{here.reason}, and the download address was not checked"
    return lacking("cubins", "cubins_missing", reason, f"{_CUBINS}, or call check_nvidia_artifactory() at start-up")


def check_nvidia_artifactory(timeout_s: float = 5.0) -> bool:
    """Request the page that cubins are downloaded from, once; `has_nvidia_artifactory` remembers success."""
    if os.environ.get("FLASHINFER_NO_DOWNLOAD"):
        return False
    request = urllib.request.Request(FLASHINFER_CUBINS_REPOSITORY, method="GET")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            _reached[FLASHINFER_CUBINS_REPOSITORY] = response.status == 200
    except (urllib.error.URLError, OSError, ValueError) as error:
        logger.warning("FlashInfer's cubins cannot be downloaded: %s", error)
        _reached[FLASHINFER_CUBINS_REPOSITORY] = False
    return _reached[FLASHINFER_CUBINS_REPOSITORY]


def _cubins() -> Finding:
    """The package of cubins, in FlashInfer's version unless that check is disabled."""
    here = package("flashinfer_cubin", distribution="flashinfer-cubin", install=_CUBINS)
    ours, wanted = _version("flashinfer-cubin"), _version("flashinfer-python")
    if not here.ok or not ours or not wanted or ours == wanted or os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return here
    reason = f"flashinfer-cubin {ours} does not match flashinfer-python {wanted}"
    return lacking("flashinfer_cubin", "package_version", reason, _CUBINS, ours)


def _toolkit() -> Finding:
    """nvcc at FlashInfer's path, and ninja on PATH; looked up, not run."""
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.environ.get("FLASHINFER_NVCC") or (shutil.which("nvcc") if not root else None)
    nvcc = nvcc or os.path.join(root or _DEFAULT_TOOLKIT, "bin", "nvcc")
    if shutil.which(nvcc) is None:
        reason = f"FlashInfer's cubins are not installed, and {nvcc}, which compiles them, does not exist"
        return lacking("nvcc", "toolkit_missing", reason, f"{_CUBINS}, or {_TOOLKIT}")
    if shutil.which("ninja") is None:
        reason = "FlashInfer's cubins are not installed, and ninja, which builds them, is not on PATH"
        return lacking("ninja", "toolkit_missing", reason, f"{_CUBINS}, or {_TOOLKIT}")
    return found("nvcc", nvcc, f"nvcc at {nvcc}, and ninja")


def _version(distribution: str) -> str | None:
    """Version without its local part, or None."""
    try:
        return Version(version_of(distribution) or "").public
    except InvalidVersion:
        return None
