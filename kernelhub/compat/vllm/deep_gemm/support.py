"""Whether DeepGEMM is installed and runs on this device, and the format of its scales."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import torch

from kernelhub.backends.deep_gemm.copies import INSTALL, REPLACE, Copy
from kernelhub.compat.env import flag
from kernelhub.compat.vllm.answer import answer, first_bad
from kernelhub.compat.vllm.here import allowed, capability, on_device
from kernelhub.dispatch.hub import HUB
from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import folders, package
from kernelhub.probes.source import defines

INSTALLED, BUNDLED = "deep_gemm", "vllm.third_party.deep_gemm"
_MULTIPLE_OF_N, _MULTIPLE_OF_K = 64, 128
# A function that was added in 2.8, the first release for sm_120.
_SINCE_SM120 = "fp8_fp4_sparse_mqa_logits"

# vLLM's results on whole models: type in their configuration -> major versions of devices on which DeepGEMM is less
# accurate (qwen3_5) or slower (kolibri1).
_EXCLUDED_MODELS = {"qwen3_5_text": (10, 12), "qwen3_5_moe_text": (10, 12), "kolibri1": (12,)}


def copy() -> Finding:
    """The copy that is used, its module as value: the installed package, else the one in vLLM's wheel."""
    return HUB.machine.ask("vllm's deep_gemm", _copy)


@answer
def has_deep_gemm() -> Finding:
    """DeepGEMM is installed, or vLLM's wheel contains it."""
    return copy()


@answer
def is_deep_gemm_supported() -> Finding:
    """DeepGEMM is installed, has kernels for this device, and is not disabled."""
    if not flag("VLLM_USE_DEEP_GEMM", True):
        return lacking("DeepGEMM", "disabled", "disabled by VLLM_USE_DEEP_GEMM", "unset VLLM_USE_DEEP_GEMM")
    first = first_bad(allowed("deep_gemm", "fp8_gemm"), on_device("DeepGEMM", exactly=((9, 0),), families=(10, 12)))
    if not first.ok or not copy().ok:
        return first if not first.ok else copy()
    if (capability() or (0, 0))[0] == 12 and not has(_SINCE_SM120).ok:
        return lacking("DeepGEMM", "package_version", "this DeepGEMM is older than 2.8, the first for sm_120", INSTALL)
    return first


@answer
def is_deep_gemm_e8m0_used() -> Finding:
    """DeepGEMM runs and rounds scales to powers of two: VLLM_USE_DEEP_GEMM_E8M0, on unless set to 0."""
    supported = is_deep_gemm_supported.why()
    if not supported.ok:
        return supported
    if not flag("VLLM_USE_DEEP_GEMM_E8M0", True):
        name = "VLLM_USE_DEEP_GEMM_E8M0"
        return lacking("UE8M0 scales", "disabled", f"disabled by {name}", f"unset {name}")
    return has("fp8_gemm_nt")


def should_auto_disable_deep_gemm(model_type: str | None) -> bool:
    """vLLM found DeepGEMM less accurate or slower for models of this type on such a device."""
    sm = capability()
    return sm is not None and sm[0] in _EXCLUDED_MODELS.get(model_type or "", ())


def should_use_deepgemm_for_fp8_linear(
    output_dtype: torch.dtype, weight_shape: tuple[int, int], supports_deep_gemm: bool | None = None
) -> bool:
    """DeepGEMM supports this product: a bf16 result, N a multiple of 64 and K of 128."""
    n, k = weight_shape
    supported = is_deep_gemm_supported() if supports_deep_gemm is None else supports_deep_gemm
    return supported and output_dtype == torch.bfloat16 and n % _MULTIPLE_OF_N == 0 and k % _MULTIPLE_OF_K == 0


class DeepGemmQuantScaleFMT(Enum):
    """How activations' scales are stored for DeepGEMM.

    Attributes:
        FLOAT32: float32, any value.
        FLOAT32_CEIL_UE8M0: float32, rounded up to powers of two.
        UE8M0: exponents of powers of two, four in an int32.
    """

    FLOAT32 = 0
    FLOAT32_CEIL_UE8M0 = 1
    UE8M0 = 2

    @classmethod
    def from_oracle(cls) -> DeepGemmQuantScaleFMT:
        """The format for this device and these settings."""
        if not is_deep_gemm_e8m0_used():
            return cls.FLOAT32
        sm = capability()
        return cls.UE8M0 if sm is not None and sm[0] in (10, 12) else cls.FLOAT32_CEIL_UE8M0


def has(function: str) -> Finding:
    """The copy in use has this function."""
    here = copy()
    if not here.ok or here.value is None:
        return here
    module, root = here.value, _root(here.value)
    return HUB.machine.ask(
        ("defines", module, function), lambda: defines(f"deep_gemm:{function}", root=root, remedy=INSTALL)
    )


def _copy() -> Finding:
    """The first complete copy: deep-gemm 1.0.0 of the package index imports, but none of its kernels compiles."""
    installed = package("deep_gemm", distribution="deep-gemm", install=INSTALL)
    defect = _defect(INSTALLED) if installed.ok else None
    if installed.ok and defect is None:
        return found("DeepGEMM", INSTALLED, "DeepGEMM is installed")
    if (installed.code == "package_missing" or defect) and _root(BUNDLED) is not None and not _defect(BUNDLED):
        return found("DeepGEMM", BUNDLED, "DeepGEMM is in vLLM's wheel")
    return installed if defect is None else lacking("DeepGEMM", "package_broken", defect, REPLACE)


def _defect(module: str) -> str | None:
    """Why no kernel of a copy can run, by its files."""
    root = _root(module)
    return None if root is None else Copy(module, root).defect


def _root(module: str) -> Path | None:
    """Folder of a copy; its parent packages are looked up and not imported."""
    top, *rest = module.split(".")
    for folder in folders(top):
        root = folder.joinpath(*rest)
        if (root / "__init__.py").is_file():
            return root
    return None
