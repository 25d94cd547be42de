"""Imports FlashMLA, once one of its kernels is selected."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

from kernelhub.backends.flash_mla.requirements import INSTALL, LEGACY, generation

# Compiled copies register these with torch, and a second one that does so ends the process.
_NAMESPACES = ("flash_mla::", "flash_mla_legacy::")


class Unusable(ImportError):
    """A copy that is here and cannot be used."""


def library(kernel: str) -> tuple[ModuleType, str]:
    """The module of FlashMLA's functions, and which generation they are of.

    Raises:
        Unusable: the copy lacks what the kernel needs, with what to do.
    """
    finding = generation(kernel)
    if finding.value is None:
        raise Unusable(f"{finding.reason}; {finding.remedy}")
    if "flash_mla" not in sys.modules:
        taken = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(_NAMESPACES)]
        if taken:
            raise Unusable(
                f"another copy has already registered {taken[0]}, and a second one would terminate the process"
            )
    module = importlib.import_module("flash_mla.flash_mla_interface")
    if finding.value == LEGACY and not importlib.import_module("flash_mla").has_legacy():
        raise Unusable(f"this flash_mla was built without its legacy kernels; {INSTALL}")
    return module, finding.value
