"""Whether xformers can be imported beside the flash_attn that is here.

Where it finds a package of that name it imports FlashAttention-2's module of it, and refuses versions that it was not
written for, so that it cannot be imported beside FlashAttention-4 alone, which has the name but not the module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import folders, package
from kernelhub.probes.reading import read_source

IGNORED = "XFORMERS_IGNORE_FLASH_VERSION_CHECK"
_SUBJECT = "xformers beside flash_attn"
_REMEDY = 'remove flash_attn from this environment, or pip install --no-build-isolation "flash-attn{versions}"'
_BOUNDS = r'^\s*FLASH_VER_(MIN|LAST) = parse_version\("([0-9.]+)"\)'


@dataclass(frozen=True)
class FlashAttnBeside:
    """Either flash_attn is not installed, or xformers can import it."""

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        any_version = machine.variable(IGNORED) == "1"
        return machine.ask((_SUBJECT, any_version), lambda: beside(any_version)).rejection


def beside(any_version: bool) -> Finding:
    """Look at the files of both.

    Args:
        any_version: xformers is configured to ignore the version.
    """
    own = folders("flash_attn")
    if not own:
        return found(_SUBJECT, None, "there is no flash_attn")
    versions = "" if any_version else versions_of_flash_attn()
    if not any((folder / "flash_attn_interface.py").is_file() for folder in own):
        reason = f"xformers imports flash_attn.flash_attn_interface, which the flash_attn at {own[0]} lacks"
        return lacking(_SUBJECT, "package_broken", reason, _REMEDY.format(versions=versions))
    finding = package("flash_attn", versions, distribution="flash-attn")
    if finding.ok or not versions:
        return found(_SUBJECT, finding.value, finding.reason)
    reason = f"xformers cannot be imported beside this flash_attn: {finding.reason}"
    return lacking(_SUBJECT, finding.code, reason, _REMEDY.format(versions=versions), finding.value)


def versions_of_flash_attn() -> str:
    """The versions of flash_attn that this xformers accepts; empty if its source does not state them."""
    for folder in folders("xformers"):
        file = folder / "ops" / "fmha" / "flash.py"
        if file.is_file():
            bounds = dict(re.findall(_BOUNDS, read_source(file), re.MULTILINE))
            if len(bounds) == 2:
                return f">={bounds['MIN']},<={bounds['LAST']}"
    return ""
